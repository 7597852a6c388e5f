from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from npuserve.service.text import tokenizer
from tests.service.text.test_tokenizer_loader import LLAMA, QWEN
from tests.support.tokenizers import load, save, train, train_byte_fallback


def test_token_text_keeps_the_leading_space(tmp_path: Path) -> None:
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


def test_encode_reads_the_text_of_a_special_token_as_the_token(tmp_path: Path) -> None:
    loaded = load(save(tmp_path, train(), QWEN))
    assert loaded.encode("a<|im_end|>")[-1] == loaded.eos_id


def test_encode_adds_the_beginning_of_text_of_the_post_processor(tmp_path: Path) -> None:
    trained = train()
    trained.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", special_tokens=[("<|im_start|>", trained.token_to_id("<|im_start|>"))]
    )
    loaded = load(save(tmp_path, trained, QWEN))
    assert loaded.encode("a") == [
        trained.token_to_id("<|im_start|>"), *loaded.encode("a", add_special_tokens=False)]


def test_import_loads_neither_torch_nor_transformers() -> None:
    code = ("import sys, npuserve.service.text.tokenizer, npuserve.service.text.tokenizer_loader; "
            "print({'torch', 'transformers', 'numpy'} & set(sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.slow
def test_encode_starts_no_thread(tmp_path: Path) -> None:
    """The library never makes its threads again after the system had none for them."""
    save(tmp_path, train(), QWEN)
    code = ("import os, pathlib, sys; from tests.support.tokenizers import load;"
            "made = load(pathlib.Path(sys.argv[1]));"
            "before = os.listdir('/proc/self/task'); made.encode('a girl');"
            "assert os.listdir('/proc/self/task') == before")
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)


def test_encode_of_a_long_text_lets_other_threads_run(tmp_path: Path) -> None:
    loaded, ticks, done = load(save(tmp_path / "m", train())), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    loaded.encode("hello world " * 50_000)
    done.set()
    thread.join()
    assert ticks > 20


def test_decode_of_many_ids_equals_tokenizers(tmp_path: Path) -> None:
    """The ids include incomplete characters, special tokens and unknown ids."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    loaded = load(save(tmp_path, train(), config))
    draw = random.Random(1)
    ids = [draw.randrange(loaded.vocabulary_size + 3) for _ in range(tokenizer.MAX_FAST_DECODE_IDS + 1)]
    for skip in (False, True):
        assert loaded.decode(ids, skip) == loaded._fast.decode(ids, skip)


def test_max_token_bytes_is_the_length_of_the_longest_token(tmp_path: Path) -> None:
    loaded = load(save(tmp_path, train(), {"tokenizer_class": "PreTrainedTokenizerFast"}))
    texts = [loaded._token_bytes(i) for i in range(loaded.vocabulary_size)]
    assert loaded.max_token_bytes == max(map(len, texts))
