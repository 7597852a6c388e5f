"""Tokenizers whose expressions or normalizers explode, in processes of their own."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from npuserve.npu import storyteller
from npuserve.service.errors import TokenizerLimit, Unavailable
from npuserve.service.processes.sandbox import Sandbox
from npuserve.service.text import byte_bpe, fast_tokenizer
from npuserve.service.text.fast_tokenizer import FastTokenizer, IsolatedTokenizer, is_bounded
from tests.service.text.test_tokenizer_loader import LLAMA
from tests.support.tokenizers import CORPUS, SPECIAL, load, save, train, train_byte_fallback

CUBIC = r"a*a*a*(?!\w)\d"
"""Expression that needs seconds for 350 times "a", and does not reach the library's limit for one match."""


def built(
    normalizer: normalizers.Normalizer | None = None, pre_tokenizer: pre_tokenizers.PreTokenizer | None = None
) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def split(expression: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(expression), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def doubled(times: int) -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Replace("a", "aa")] * times)


@pytest.mark.parametrize(("normalizer", "pre_tokenizer", "expected"), [
    (None, None, True),
    (normalizers.NFC(), split(byte_bpe._QWEN2_SPLIT), True),
    (normalizers.Replace(" ", "▁"), pre_tokenizers.ByteLevel(), True),
    (normalizers.Sequence([normalizers.NFKC(), normalizers.Sequence([normalizers.Replace("ab", "abc")])]), None, True),
    (None, split(CUBIC), False),
    (normalizers.Replace(Regex("a+"), "b"), None, False),
    (doubled(2), None, True),
    (doubled(3), None, False),
    (normalizers.Replace("", "a"), None, False),
])
def test_is_bounded(
    normalizer: normalizers.Normalizer | None, pre_tokenizer: pre_tokenizers.PreTokenizer | None, expected: bool
) -> None:
    assert is_bounded(built(normalizer, pre_tokenizer)) is expected


def test_usual_tokenizers_encode_in_this_process(tmp_path: Path) -> None:
    for loaded in (load(save(tmp_path / "qwen", train())), load(save(tmp_path / "gpt2", train("GPT2Tokenizer"))),
                   load(save(tmp_path / "llama", train_byte_fallback(), LLAMA)), load(storyteller.FOLDER)):
        assert not loaded.is_isolated


def test_isolated_encode_equals_encode(tmp_path: Path) -> None:
    """Also with names of the special tokens, and with special tokens that are read as text."""
    names = {text: f"<name {index}>" for index, text in enumerate(SPECIAL)}
    for trained in (train(), train_byte_fallback()):
        isolated, plain = IsolatedTokenizer(trained), FastTokenizer(trained)
        rng = random.Random(3)
        texts = ["", "".join(rng.choices([*CORPUS, *SPECIAL, *names.values()], k=2000)), "\U000f0000 <|im_end|>\0"]
        for text in texts:
            for special in (True, False):
                assert isolated.encode(text, special) == plain.encode(text, special)
        assert len(isolated._idle) == 1
    isolated, plain = IsolatedTokenizer(train()), FastTokenizer(train())
    renamed, expected = isolated.renamed(names), plain.renamed(names)
    assert renamed
    assert expected
    assert renamed.encode(texts[1], True) == expected.encode(texts[1], True)
    trained.encode_special_tokens = True
    assert IsolatedTokenizer(trained).renamed(names) is None
    assert IsolatedTokenizer(trained).encode("<s>a", True) == FastTokenizer(trained).encode("<s>a", True)


@pytest.mark.parametrize(("tokenizer", "text", "message"), [
    pytest.param(built(None, split(CUBIC)), "a" * 350, r"at most 2.01 seconds of processor time", id="cubic",
                 marks=pytest.mark.slow),
    pytest.param(built(None, split("(a+)+$")), "a" * 40 + "b", "fails on it", id="panic"),
    pytest.param(built(doubled(40)), "a", r"at most 2 seconds of processor time and 2048 MiB", id="growth",
                 marks=pytest.mark.slow),
])
def test_isolated_encode_of_a_text_that_explodes_is_refused(
    tokenizer: tokenizers.Tokenizer, text: str, message: str
) -> None:
    isolated = IsolatedTokenizer(tokenizer)
    with pytest.raises(TokenizerLimit, match=message):
        isolated.encode(text, False)
    assert len(isolated.encode("bcd", False)) == 3


@pytest.mark.slow
def test_isolated_encode_of_a_long_text_is_not_refused() -> None:
    """A million characters: the limit grows with the text."""
    isolated = IsolatedTokenizer(built(None, split(r"\w+|\W+")))
    assert len(isolated.encode("hello wor" * 111_112, False)) == 9 * 111_112


def test_isolated_encode_without_a_process_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(sandbox: Sandbox, command: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    isolated = IsolatedTokenizer(built())
    with monkeypatch.context() as limited:
        limited.setattr(Sandbox, "__init__", start)
        with pytest.raises(Unavailable, match="cannot start: Too many open files"):
            isolated.encode("a", False)
    with monkeypatch.context() as limited:
        limited.setattr(fast_tokenizer, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read(1); exit(1)"))
        with pytest.raises(Unavailable, match="cannot start"):
            isolated.encode("a", False)
    assert len(isolated.encode("a", False)) == 1


def test_isolated_encode_in_a_process_that_is_killed_is_unavailable() -> None:
    isolated = IsolatedTokenizer(built())
    isolated.encode("a", False)
    process = isolated._idle[0]
    os.kill(process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.2, lambda: os.kill(process.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(Unavailable, match="was killed"):
        isolated.encode("a", False)
    assert len(isolated.encode("a", False)) == 1


def test_isolated_tokenizers_process_ends_with_its_owner() -> None:
    isolated = IsolatedTokenizer(built())
    isolated.encode("a", False)
    process = isolated._idle[0]._process
    del isolated
    deadline = time.monotonic() + 60
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_load_of_an_unusual_tokenizer_is_isolated(tmp_path: Path) -> None:
    folder = save(tmp_path, train())
    state = json.loads((folder / "tokenizer.json").read_text())
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = CUBIC
    (folder / "tokenizer.json").write_text(json.dumps(state))
    assert load(folder).is_isolated
