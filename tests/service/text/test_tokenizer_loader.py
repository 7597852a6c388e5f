from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from tokenizers import pre_tokenizers

from npuserve.service.config import ConfigError
from npuserve.service.text.tokenizer_loader import load_tokenizer
from tests.support.real_models import BUILT_IN, model_folder, published
from tests.support.tokenizers import (
    CORPUS,
    SPECIAL,
    added_tokens_decoder,
    load,
    save,
    texts,
    train,
    train_byte_fallback,
    transformers_tokenizer,
)

TEXTS = [
    *CORPUS.splitlines(keepends=True), "", " ", "  a", "\n", "<|im_start|>user\nHi<|im_end|>", "<s> a</s>", "你好👩‍👧",
]
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None, "pad_token": SPECIAL[0]}


def check_equal(folder: Path) -> None:
    """Compare encoding, decoding and the names of tokens with transformers for the same folder."""
    ours, theirs = load(folder), transformers_tokenizer(folder)
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
    {**LLAMA, "add_bos_token": False},  # the post-processor of tokenizer.json takes precedence
    {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"__type": "AddedToken", "content": "</s>"}},
    {**LLAMA, "additional_special_tokens": ["<extra>"], "pad_token": "</s>"},
    {**LLAMA, "tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True},
    {**LLAMA, "image_token": "<image>", "extra_special_tokens": {"audio_token": "<audio>"}},
])
def test_load_byte_fallback_equals_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    check_equal(save(tmp_path, train_byte_fallback(), config))


@pytest.mark.parametrize("config", [
    QWEN,
    {**QWEN, "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
    {**QWEN, "extra_special_tokens": ["<think>"]},  # special in the configuration only
    {**QWEN, "tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": ["<think>", "<new>"]},
    {**QWEN, "tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<think>"]},
    {**QWEN, "tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": {"think_token": "<think>"}},
    {**QWEN, "add_prefix_space": True},
    {**QWEN, "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True},
])
@pytest.mark.parametrize("decoder", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_load_byte_level_equals_transformers(
    tmp_path: Path, config: dict[str, Any], decoder: bool, model_type: str
) -> None:
    trained = train()
    added = {"added_tokens_decoder": added_tokens_decoder(trained)} if decoder else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    check_equal(save(tmp_path, trained, {**config, **added}))


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("config", [{"add_prefix_space": True}, {"add_prefix_space": False}, {}])
def test_load_gpt2_prefix_space_is_that_of_the_configuration(
    tmp_path: Path, config: dict[str, Any], saved: bool
) -> None:
    trained = train("GPT2Tokenizer")
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=saved)
    folder = save(tmp_path, trained, {**QWEN, "tokenizer_class": "GPT2TokenizerFast", **config})
    check_equal(folder)
    ours = load(folder)
    assert (ours.encode("time", False) == ours.encode(" time", False)) == bool(config.get("add_prefix_space"))


def test_load_added_tokens_decoder_overrides_tokenizer_json(tmp_path: Path) -> None:
    trained = train()
    added = added_tokens_decoder(trained)
    added[str(trained.token_to_id("<think>"))].update(rstrip=True, special=True)
    folder = save(tmp_path, trained, {**QWEN, "added_tokens_decoder": added})
    check_equal(folder)
    assert load(folder).encode("<think>  a", False) == [trained.token_to_id("<think>"), *trained.encode("a").ids]


def test_load_without_added_tokens_decoder_reads_special_tokens_map(tmp_path: Path) -> None:
    folder = save(tmp_path, train(), {"tokenizer_class": "PreTrainedTokenizerFast"})
    named = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<pad>", "additional_special_tokens": [SPECIAL[1]]}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    ours = load(folder)
    assert ours.named_tokens == {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    assert ours.id_of("<pad>") == train().get_vocab_size() in ours.special_ids


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer"])
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("more", [{}, {"add_prefix_space": True}, {"extra_special_tokens": ["<think>"]}])
def test_load_vocab_and_merges_equals_transformers(
    tmp_path: Path, name: str, legacy: bool, more: dict[str, Any]
) -> None:
    trained = train(name)
    config = {**QWEN, "tokenizer_class": name, "bos_token": SPECIAL[1], "unk_token": SPECIAL[0], **more}
    if name == "GPT2Tokenizer":
        config["add_bos_token"] = True
    if not legacy:
        config["added_tokens_decoder"] = added_tokens_decoder(trained)
    folder = save(tmp_path, trained, config, "vocab")
    if legacy:
        ids = {token.content: i for i, token in trained.get_added_tokens_decoder().items()}
        (folder / "added_tokens.json").write_text(json.dumps(ids))
    check_equal(folder)
    assert load(folder).token_text(trained.token_to_id("Ġtime")) == " time"


def test_load_vocab_and_merges_uses_the_named_tokens_of_the_class(tmp_path: Path) -> None:
    """For names that tokenizer_config.json leaves out, if the vocabulary has the tokens."""
    trained = train()
    folder = save(tmp_path, trained, {"tokenizer_class": "Qwen2TokenizerFast"}, "vocab")
    assert load(folder).eos_id is None
    (folder / "added_tokens.json").write_text(json.dumps({SPECIAL[0]: trained.get_vocab_size()}))
    ours = load(folder)
    assert ours.eos_id == trained.get_vocab_size()
    assert ours.special_ids == {ours.eos_id}


@pytest.mark.parametrize(("config", "message"), [
    ({}, "tokenizer_class None .* must be one of Qwen2Tokenizer, Qwen2TokenizerFast, GPT2Tokenizer"),
    ({"tokenizer_class": "BloomTokenizer"}, "tokenizer_class 'BloomTokenizer'"),
    ({**QWEN, "split_special_tokens": True}, "split_special_tokens is not supported for Qwen2Tokenizer"),
    ({**QWEN, "added_tokens_decoder": {"5": {"content": "<x>"}}}, "an id has two tokens"),
    ({**QWEN, "added_tokens_decoder": {"5": {}}}, "malformed: KeyError: 'content'"),
])
def test_load_vocab_and_merges_with_a_bad_config_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(save(tmp_path, train(), config, "vocab"))


def test_load_without_tokenizer_files_returns_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(("name", "content", "message"), [
    ("tokenizer.json", "{", r"tokenizer\.json: "),
    ("tokenizer.json", "{}", r"tokenizer\.json: "),
    ("tokenizer_config.json", "[]", r"tokenizer_config\.json: must be an object"),
    ("tokenizer_config.json", "{", r"tokenizer_config\.json: "),
    ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', r"tokenizer_config\.json: KeyError: "),
    ("chat_template.json", "[" * 100_000, r"chat_template\.json: RecursionError: "),
    ("chat_template.jinja", b"\xff", r"chat_template\.jinja: 'utf-8' codec"),
])
def test_load_of_a_malformed_file_names_it(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    save(tmp_path, train_byte_fallback())
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


def test_load_of_files_for_transformers_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"install npuserve\[transformers\]"):
        load_tokenizer(tmp_path)


def test_load_of_files_for_transformers_equals_transformers(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "on", "##ce", "time", "there", "was", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ sep_token ~ messages[0].content }}"}')
    check_equal(tmp_path)
    ours = load(tmp_path)
    assert ours.named_tokens["sep_token"] == "[SEP]"
    assert ours.chat
    assert ours.chat.render([{"role": "user", "content": "a time"}]) == "[SEP]a time"


def test_load_of_a_malformed_file_for_transformers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(ConfigError, match="transformers cannot load it: "):
        load_tokenizer(tmp_path)


def test_load_without_a_pre_tokenizer(tmp_path: Path) -> None:
    trained = train()
    trained.pre_tokenizer = None
    assert load(save(tmp_path, trained, QWEN)).encode("a") == trained.encode("a").ids


def test_load_ignores_truncation_and_padding(tmp_path: Path) -> None:
    trained = train()
    trained.enable_truncation(3)
    trained.enable_padding(length=8)
    assert len(load(save(tmp_path, trained)).encode("one two three four five " * 3)) > 8
    assert len(load(tmp_path).encode("a")) == 1


@pytest.mark.parametrize("name", [
    BUILT_IN,
    *published("stories260K", "stories15M", "stories260K-qwen3", "minimind2-small", "../tokenizers/qwen3"),
])
def test_load_real_tokenizers_equals_transformers(name: str) -> None:
    folder = model_folder(name)
    check_equal(folder)
    ours, theirs = load(folder), transformers_tokenizer(folder)

    @given(text=texts)
    def equal(text: str) -> None:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            expected = theirs.decode(ids[1::2], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids[1::2], skip) == expected

    equal()


@pytest.mark.model
def test_load_real_qwen3_from_vocab_and_merges(tmp_path: Path) -> None:
    real = model_folder("../tokenizers/qwen3")
    save(tmp_path, tokenizers.Tokenizer.from_file(str(real / "tokenizer.json")), None, "vocab")
    shutil.copy(real / "tokenizer_config.json", tmp_path)
    ours, theirs = load(tmp_path), load(real)
    assert ours.named_tokens == theirs.named_tokens
    assert ours.special_ids == theirs.special_ids
    assert (ours.id_of("<|im_end|>"), ours.id_of("<think>"), ours.vocabulary_size) == (151645, 151667, 151669)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
