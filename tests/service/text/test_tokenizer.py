from __future__ import annotations

import json
import logging
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from tokenizers import models, pre_tokenizers, processors

from npuserve.service.config import ConfigError
from npuserve.service.text import tokenizer
from npuserve.service.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.real_models import BUILT_IN, model_folder, published
from tests.support.tokenizers import (
    CORPUS,
    SPECIAL,
    added_tokens_decoder,
    save,
    texts,
    train,
    train_byte_fallback,
)

TEXTS = [
    *CORPUS.splitlines(keepends=True), "", " ", "  a", "\n", "<|im_start|>user\nHi<|im_end|>", "<s> a</s>", "你好👩‍👧",
]
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None, "pad_token": SPECIAL[0]}


def load(folder: Path) -> Tokenizer:
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


def oracle(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def check_equal(folder: Path) -> None:
    """Encodes, decodes, and names tokens as transformers does for the same folder."""
    ours, theirs = load(folder), oracle(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids, text
        for part in (ids, ids[1:], ids[::2], ids[::-1]):
            for skip in (True, False):
                expected = theirs.decode(part, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(part, skip) == expected
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.named_tokens == theirs.special_tokens_map
    assert ours.eos_id == theirs.eos_token_id
    assert ours.vocabulary_size == len(theirs)


@pytest.mark.parametrize("config", [
    LLAMA,
    {**LLAMA, "add_bos_token": False},  # tokenizer.json's own post-processor wins
    {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"__type": "AddedToken", "content": "</s>"}},
    {**LLAMA, "additional_special_tokens": ["<extra>"], "pad_token": "</s>"},
    {**LLAMA, "tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True},
    {**LLAMA, "image_token": "<image>", "extra_special_tokens": {"audio_token": "<audio>"}},
])
def test_byte_fallback_equals_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    check_equal(save(tmp_path, train_byte_fallback(), config))


@pytest.mark.parametrize("config", [
    QWEN,
    {**QWEN, "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
    {**QWEN, "extra_special_tokens": ["<think>"]},  # special by the configuration only
])
@pytest.mark.parametrize("decoder", [True, False])
def test_byte_level_equals_transformers(tmp_path: Path, config: dict[str, Any], decoder: bool) -> None:
    made = train()
    added = {"added_tokens_decoder": added_tokens_decoder(made)} if decoder else {}
    check_equal(save(tmp_path, made, {**config, **added}))


def test_added_tokens_decoder_wins_over_tokenizer_json(tmp_path: Path) -> None:
    made = train()
    added = added_tokens_decoder(made)
    added[str(made.token_to_id("<think>"))].update(rstrip=True, special=True)
    folder = save(tmp_path, made, {**QWEN, "added_tokens_decoder": added})
    check_equal(folder)
    assert load(folder).encode("<think>  a", False) == [made.token_to_id("<think>"), *made.encode("a").ids]


def test_special_tokens_map_without_added_tokens_decoder(tmp_path: Path) -> None:
    folder = save(tmp_path, train(), {"tokenizer_class": "PreTrainedTokenizerFast"})
    named = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<pad>", "additional_special_tokens": [SPECIAL[1]]}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    ours = load(folder)
    assert ours.named_tokens == {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    assert ours.id_of("<pad>") == train().get_vocab_size() in ours.special_ids


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer"])
@pytest.mark.parametrize("legacy", [True, False])
def test_vocab_and_merges_equal_transformers(tmp_path: Path, name: str, legacy: bool) -> None:
    made = train(name)
    config = {**QWEN, "tokenizer_class": name, "bos_token": SPECIAL[1], "unk_token": SPECIAL[0]}
    if name == "GPT2Tokenizer":
        config["add_bos_token"] = True
    if not legacy:
        config["added_tokens_decoder"] = added_tokens_decoder(made)
    folder = save(tmp_path, made, config, "vocab")
    if legacy:
        ids = {token.content: i for i, token in made.get_added_tokens_decoder().items()}
        (folder / "added_tokens.json").write_text(json.dumps(ids))
    check_equal(folder)
    assert load(folder).token_text(made.token_to_id("Ġtime")) == " time"


def test_vocab_and_merges_defaults_of_the_class(tmp_path: Path) -> None:
    """Named tokens that tokenizer_config.json does not speak of are the class's, where the vocabulary has them."""
    made = train()
    folder = save(tmp_path, made, {"tokenizer_class": "Qwen2TokenizerFast"}, "vocab")
    assert load(folder).eos_id is None
    (folder / "added_tokens.json").write_text(json.dumps({SPECIAL[0]: made.get_vocab_size()}))
    ours = load(folder)
    assert ours.eos_id == made.get_vocab_size()
    assert ours.special_ids == {ours.eos_id}


@pytest.mark.parametrize(("config", "says"), [
    ({}, "tokenizer_class None .* must be one of Qwen2Tokenizer, Qwen2TokenizerFast, GPT2Tokenizer"),
    ({"tokenizer_class": "BloomTokenizer"}, "tokenizer_class 'BloomTokenizer'"),
    ({**QWEN, "add_prefix_space": True}, "add_prefix_space is not supported for Qwen2Tokenizer"),
    ({**QWEN, "added_tokens_decoder": {"5": {"content": "<x>"}}}, "an id has two tokens"),
    ({**QWEN, "added_tokens_decoder": {"5": {}}}, "malformed: KeyError: 'content'"),
])
def test_vocab_and_merges_refused(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_tokenizer(save(tmp_path, train(), config, "vocab"))


def test_no_tokenizer_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(("name", "content", "says"), [
    ("tokenizer.json", "{", r"tokenizer\.json: "),
    ("tokenizer.json", "{}", r"tokenizer\.json: "),
    ("tokenizer_config.json", "[]", r"tokenizer_config\.json: must be an object"),
    ("tokenizer_config.json", "{", r"tokenizer_config\.json: "),
    ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template: "),
])
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, says: str) -> None:
    save(tmp_path, train_byte_fallback())
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says):
        load_tokenizer(tmp_path)


def test_names_the_extra_where_only_transformers_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"install npuserve\[transformers\]"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    made = train()
    made.enable_truncation(3)
    made.enable_padding(length=8)
    assert len(load(save(tmp_path, made)).encode("one two three four five " * 3)) > 8
    assert len(load(tmp_path).encode("a")) == 1


def test_token_text(tmp_path: Path) -> None:
    llama = load(save(tmp_path / "llama", train_byte_fallback(), LLAMA))
    assert llama.token_text(llama.encode("time", False)[0]).startswith(" ")
    assert llama.token_text(llama.id_of("<0x41>") or 0) == "A"
    assert llama.token_text(llama.id_of("<0xE4>") or 0) == "\ufffd"
    assert llama.token_text(1) == "<s>"
    qwen = load(save(tmp_path / "qwen", train(), QWEN))
    assert [qwen.token_text(i) for i in qwen.encode(" girl<|im_end|>")] == [" girl", "<|im_end|>"]
    assert qwen.token_text(qwen.id_of("ä") or 0) == "\ufffd"  # the byte E4
    assert qwen.token_text(10**6) == ""
    words = tokenizers.Tokenizer(models.WordLevel({"hello": 0, "world": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert load(save(tmp_path / "words", words)).token_text(1).strip() == "world"


def test_special_text_in_a_prompt_is_the_special_token(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path, train(), QWEN))
    assert tokenizer.encode("a<|im_end|>")[-1] == tokenizer.eos_id


def test_post_processor_brings_the_beginning_of_text(tmp_path: Path) -> None:
    made = train()
    made.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", special_tokens=[("<|im_start|>", made.token_to_id("<|im_start|>"))]
    )
    tokenizer = load(save(tmp_path, made, QWEN))
    assert tokenizer.encode("a") == [made.token_to_id("<|im_start|>"), *tokenizer.encode("a", add_special_tokens=False)]


def test_import_brings_neither_torch_nor_transformers() -> None:
    code = "import sys, npuserve.service.text.tokenizer; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize("name", [
    BUILT_IN,
    *published("stories260K", "stories15M", "stories260K-qwen3", "minimind2-small", "../tokenizers/qwen3"),
])
def test_real_tokenizers_equal_transformers(name: str) -> None:
    folder = model_folder(name)
    check_equal(folder)
    ours, theirs = load(folder), oracle(folder)

    @given(text=texts)
    def equal(text: str) -> None:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            expected = theirs.decode(ids[1::2], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids[1::2], skip) == expected

    equal()


@pytest.mark.model
def test_real_qwen3_from_vocab_and_merges(tmp_path: Path) -> None:
    real = model_folder("../tokenizers/qwen3")
    save(tmp_path, tokenizers.Tokenizer.from_file(str(real / "tokenizer.json")), None, "vocab")
    shutil.copy(real / "tokenizer_config.json", tmp_path)
    ours, theirs = load(tmp_path), load(real)
    assert ours.named_tokens == theirs.named_tokens
    assert ours.special_ids == theirs.special_ids
    assert (ours.id_of("<|im_end|>"), ours.id_of("<think>"), ours.vocabulary_size) == (151645, 151667, 151669)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_a_long_text_lets_other_threads_run(tmp_path: Path) -> None:
    tokenizer, ticks, over = load(save(tmp_path / "m", train())), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    tokenizer.encode("hello world " * 50_000)
    over.set()
    thread.join()
    assert ticks > 20


def test_decode_of_many_ids_equals_that_of_the_library(tmp_path: Path) -> None:
    """Beyond LONG_IDS, where another way is taken: incomplete characters, special and unknown ids included."""
    made = train()
    save(tmp_path, made, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    loaded = load_tokenizer(tmp_path)
    assert loaded
    chance = random.Random(1)
    ids = [chance.randrange(loaded.vocabulary_size + 3) for _ in range(tokenizer.LONG_IDS + 1)]
    for skip in (False, True):
        assert loaded.decode(ids, skip) == loaded._backend.decode(ids, skip)


def test_max_token_bytes_is_that_of_the_longest_text(tmp_path: Path) -> None:
    made = train()
    save(tmp_path, made, {"tokenizer_class": "PreTrainedTokenizerFast"})
    loaded = load_tokenizer(tmp_path)
    assert loaded
    texts = [loaded._token_bytes(i) for i in range(loaded.vocabulary_size)]
    assert loaded.max_token_bytes == max(map(len, texts))
