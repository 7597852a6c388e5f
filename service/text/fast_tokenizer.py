"""Tokenizers of the library `tokenizers`: one in this process, one with other texts of the special tokens, and one that
encodes in other processes.

    python -m npuserve.service.text.fast_tokenizer      started by `IsolatedTokenizer`, reads stdin

The library's expressions backtrack, and normalizers may lengthen a text exponentially. Nothing can interrupt the
library in a thread. So a tokenizer encodes in this process only if its expressions are known and its normalizers do not
lengthen a text much (`is_bounded`). Any other one encodes in sandboxes (processes/sandbox.py). A text beyond their
limits is refused. Requests and replies are JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import tokenizers

from npuserve.service.errors import TokenizerLimit, Unavailable
from npuserve.service.processes import sandbox

os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The library's threads would share the texts of a batch, which is one text here. If the system has no thread at the
# first batch, the library never makes its threads again, and each batch panics.

KNOWN_EXPRESSIONS = frozenset({
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    *(rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{others}]+[\r\n]*|\s*[\r\n]+"
      r"|\s+(?!\S)|\s+"
      for letters, others in ((r"\p{L}", r"\p{L}\p{N}"), (r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}"))
      for digits in (r"\p{N}", r"\p{N}{1,3}"))})
"""Expressions of GPT-2, Qwen and Llama 3, whose time is bounded by the length of the text."""
PLAIN_STEPS = frozenset({
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "Nmt", "Prepend", "BertNormalizer", "ByteLevel",
    "Metaspace", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation", "BertPreTokenizer",
    "UnicodeScripts", "CharDelimiterSplit", "FixedLength"})
"""Normalizers and pre-tokenizers without expressions of their own."""
MAX_GROWTH = 4
"""Factor by which all replacements of a tokenizer may lengthen a text in this process."""
MAX_SECONDS = 2.0
SECONDS_PER_CHARACTER = 2e-5
"""Processor time for a text in another process. A usual tokenizer needs 1e-6 s a character."""
MAX_WALL_RATIO = 10
"""Real time for a text, as a multiple of its processor time."""
MAX_ENCODE_BYTES = 2 << 30
"""Memory for a text in another process, above its memory before. A token takes some 150 bytes."""
COMMAND = (sys.executable, "-m", "npuserve.service.text.fast_tokenizer")


class Encoder(Protocol):
    """Function from text to token ids."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


class FastTokenizer:
    """Adapter of a `tokenizers.Tokenizer`, without truncation and padding. Safe to use from several threads.

    decoder: the `decoder` of tokenizer.json; {} if there is none.
    special_ids: ids of the special tokens.
    special_texts: texts of the special tokens, as a text has them before it is normalized. The library's name of such a
        token may be normalized.
    vocabulary_size: every id is below it.
    normalizes_special_tokens: the text is normalized before special tokens are found in it, so that other texts may be
        read as a special token.
    is_isolated: whether `encode` blocks on another process. It raises TokenizerLimit and Unavailable then.
    """

    is_isolated = False

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary_size: int | None = None):
        """vocabulary_size: None to take the number of tokens, or more if an added token has a larger id."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.decoder: Mapping[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = [token.content for _, token in sorted(added.items()) if token.special]
        if vocabulary_size is None:
            vocabulary_size = max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.vocabulary_size = vocabulary_size
        self.normalizes_special_tokens = tokenizer.normalizer is not None and any(
            token.special and token.normalized for token in added.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The library releases the GIL for batches only. A long text would stop the front end otherwise.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids: unknown ids have no text, invalid UTF-8 becomes U+FFFD."""
        if skip_special_tokens:  # the library does not skip a special token with a normalized name
            ids = [i for i in ids if i not in self.special_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's name of a token, None for an unknown id."""
        return self._tokenizer.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary, None for an unknown one."""
        return self._tokenizer.token_to_id(token)

    def renamed(self, names: Mapping[str, str]) -> Encoder | None:
        """Return a tokenizer that reads names[token] as the special token `token`, and the text of `token` as plain
        text. Return None if this tokenizer finds no special tokens in texts."""
        return None if self._tokenizer.encode_special_tokens else RenamedTokenizer(self._tokenizer, names)


class RenamedTokenizer(FastTokenizer):
    """Tokenizer that shares the model and the ids of another one, but finds special tokens by other texts.

    names: text of each special token of the other tokenizer to its text here.
    """

    def __init__(self, other: tokenizers.Tokenizer, names: Mapping[str, str]):
        added = other.get_added_tokens_decoder()
        texts = {i: names[token.content] if token.special else token.content for i, token in sorted(added.items())}
        tokens: list[str | tokenizers.AddedToken] = [
            tokenizers.AddedToken(
                text, single_word=added[i].single_word, lstrip=added[i].lstrip, rstrip=added[i].rstrip,
                normalized=added[i].normalized, special=False)
            for i, text in texts.items()]
        renamed = _copy(other, tokens)
        if _has_ambiguous_ids(renamed, other, texts):
            # The library numbers new tokens from the size of the vocabulary on. That may be the id of another token: of
            # the vocabulary, if its ids have gaps, or of an added token, which the post-processor adds by its id.
            # Unused tokens raise the first number.
            size = renamed.get_vocab_size(with_added_tokens=False)
            ids = other.get_vocab(with_added_tokens=True).values()
            renamed = _copy(other, [secrets.token_hex(16) for _ in range(size, max(ids) + 1)] + tokens)
        super().__init__(renamed)
        self._original_ids = {renamed.token_to_id(text): i for i, text in texts.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [self._original_ids.get(i, i) for i in super().encode(text, add_special_tokens)]


class IsolatedTokenizer(FastTokenizer):
    """Tokenizer that encodes in other processes, as many as texts are encoded at the same time."""

    is_isolated = True

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary_size: int | None = None):
        super().__init__(tokenizer, vocabulary_size)
        self._idle: deque[sandbox.Sandbox] = deque()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.encode_renamed(text, add_special_tokens, None)

    def renamed(self, names: Mapping[str, str]) -> Encoder | None:
        return None if self._tokenizer.encode_special_tokens else _IsolatedRenamedTokenizer(self, names)

    def encode_renamed(self, text: str, add_special_tokens: bool, names: Mapping[str, str] | None) -> list[int]:
        """Return the ids of a text, as `encode` of `FastTokenizer` or of the `RenamedTokenizer` with these names."""
        process = self._idle_process()
        request = json.dumps([text, add_special_tokens, names]).encode()
        reply = process.call(request, MAX_WALL_RATIO * _max_seconds(text))
        if reply is None:
            process.end()
            if not process.has_exceeded_limits:
                raise Unavailable("the process of the tokenizer was killed")
            limits = f"{_max_seconds(text):.3g} seconds of processor time and {MAX_ENCODE_BYTES >> 20} MiB of memory"
            raise TokenizerLimit(f"the model's tokenizer must take at most {limits} for it")
        self._idle.append(process)
        ids: list[int] | None = json.loads(reply)
        if ids is None:
            raise TokenizerLimit("the model's tokenizer fails on it")
        return ids

    def _idle_process(self) -> sandbox.Sandbox:
        """Remove and return an idle process that is alive, or start one. Raises Unavailable."""
        while self._idle:
            try:
                process = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if process.is_alive:
                return process
            process.end()
        try:
            process = sandbox.Sandbox(COMMAND)
        except OSError as error:
            raise Unavailable(f"the process of the tokenizer cannot start: {error.strerror}") from error
        if process.call(self._start, sandbox.MAX_START_SECONDS) is None:
            process.end()
            raise Unavailable("the process of the tokenizer cannot start")
        return process

    @cached_property
    def _start(self) -> bytes:
        start = {
            "tokenizer": self._tokenizer.to_str(),
            "encode_special_tokens": self._tokenizer.encode_special_tokens,
        }
        return json.dumps(start).encode()


class _IsolatedRenamedTokenizer:
    def __init__(self, tokenizer: IsolatedTokenizer, names: Mapping[str, str]):
        self._tokenizer = tokenizer
        self._names = dict(names)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode_renamed(text, add_special_tokens, self._names)


def open_tokenizer(tokenizer: tokenizers.Tokenizer, vocabulary_size: int | None = None) -> FastTokenizer:
    """Return the adapter of a tokenizer: in this process if the tokenizer is bounded, else isolated."""
    kind = FastTokenizer if is_bounded(tokenizer) else IsolatedTokenizer
    return kind(tokenizer, vocabulary_size)


def is_bounded(tokenizer: tokenizers.Tokenizer) -> bool:
    """Return whether the time and memory of `encode` are known to be bounded by the length of the text."""
    growth = 1.0
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        for step in _steps(json.loads(part.__getstate__())) if part is not None else ():
            if step["type"] in PLAIN_STEPS:
                continue
            pattern = step.get("pattern", {})
            if step["type"] not in ("Replace", "Split") or not pattern.get("String", pattern.get("Regex")):
                return False
            if "Regex" in pattern and pattern["Regex"] not in KNOWN_EXPRESSIONS:
                return False
            if step["type"] == "Replace":
                growth *= max(1.0, len(step["content"]) / len(pattern.get("String", " ")))
    return growth <= MAX_GROWTH


def _steps(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or a pre-tokenizer, without sequences."""
    if state["type"] != "Sequence":
        yield state
        return
    for inner in state.get("normalizers", state.get("pretokenizers", ())):
        yield from _steps(inner)


def _max_seconds(text: str) -> float:
    return MAX_SECONDS + SECONDS_PER_CHARACTER * len(text)


def _copy(other: tokenizers.Tokenizer, tokens: Sequence[str | tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    """Return a tokenizer with the model of another one, but with `tokens` as its added tokens."""
    copied = tokenizers.Tokenizer(other.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(other, part)) is not None:
            setattr(copied, part, value)
    copied.add_tokens(list(tokens))
    return copied


def _has_ambiguous_ids(
    tokenizer: tokenizers.Tokenizer, other: tokenizers.Tokenizer, texts: Mapping[int, str]
) -> bool:
    """Return whether the tokenizer gives one of the added tokens `texts` the id of another token of `other`."""
    ids = ((i, tokenizer.token_to_id(text)) for i, text in texts.items())
    return any(given not in (None, i) and other.id_to_token(given) is not None for i, given in ids)


def main() -> int:
    messages = sandbox.messages()
    start = json.loads(next(messages))
    tokenizer = tokenizers.Tokenizer.from_str(start["tokenizer"])
    tokenizer.encode_special_tokens = start["encode_special_tokens"]
    plain = FastTokenizer(tokenizer)
    renamed: dict[str, Encoder | None] = {}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes its panics there, which clients can cause
    sandbox.limit_growth(MAX_ENCODE_BYTES)
    sandbox.reply(b"")
    for message in messages:
        text, add_special_tokens, names = json.loads(message)
        sandbox.limit_time(_max_seconds(text))
        ids: list[int] | None = None
        try:
            encoder: Encoder | None = plain
            if names is not None:
                key = json.dumps(names)
                encoder = renamed[key] = renamed.get(key) or plain.renamed(names)
            assert encoder
            ids = encoder.encode(text, add_special_tokens)
        except MemoryError:
            return 1
        except BaseException:  # a panic of the library is no Exception
            pass
        sandbox.reply(json.dumps(ids).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
