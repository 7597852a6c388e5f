"""Vocabulary of a model, as the grammar library needs it: the bytes of every token."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from npuserve.service.structured_output.errors import UnsupportedVocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npuserve.service.text.tokenizer import Tokenizer

_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{length}}}" for length in (2, 4, 7, 10, 14, 20, 30)), f"{_CHARACTER}+"]
"""Expressions for which the library computes the set of matching tokens once: contents of JSON strings. A mask takes
the largest set that still fits, and tries the other tokens one by one. With the library's own sets (`json_slices`, of
up to 10 and 30 characters) more are left to try in a string of limited length."""
MAX_TOKEN_BYTES = 1024
"""Length of a token up to which the library takes it. At a longer one it panics."""
MAX_FIRST_TOKENS = 4096
"""Texts whose first token is remembered. Answers under one schema have the same ones."""


class VocabularyData(msgspec.Struct, frozen=True, array_like=True):
    """Data of a vocabulary that a compile process needs.

    tokens: bytes of text of each id below the model's vocabulary size; b"" for an id that is never allowed.
    special: text to id of the special tokens, which are not text.
    end_ids: tokens that end an answer.
    """

    tokens: list[bytes]
    special: dict[str, int]
    end_ids: list[int]


class Vocabulary:
    """Tokens of a model. Immutable, and safe to use from several threads.

    size: vocabulary size of the model; a mask has this many bits.
    bytes: the library's vocabulary of single bytes, with the same special tokens; None for no forced tokens.
    id_of_byte, byte_of_id: the ids of `bytes`.
    """

    def __init__(self, data: VocabularyData, encode: Callable[[str], Sequence[int]] | None = None):
        """encode: text to ids, without special tokens; None for no forced tokens."""
        if not data.end_ids or not all(0 <= i < len(data.tokens) for i in data.end_ids):
            raise UnsupportedVocabulary("the model must have a token that ends an answer")
        self.data = data
        self.size = len(data.tokens)
        self.end_ids = frozenset(data.end_ids)
        self.special_ids = self.end_ids.union(data.special.values())
        self.library = build_tokenizer(data)
        ordinary = (i for i in range(self.size) if i not in self.special_ids)
        self.id_of_byte = dict(zip(range(256), ordinary, strict=False))
        self.byte_of_id = {i: byte for byte, i in self.id_of_byte.items()}
        self.bytes = self._build_bytes() if encode and len(self.id_of_byte) == 256 else None
        self.first_token = functools.lru_cache(MAX_FIRST_TOKENS)(self._first_token)
        self.other_tokens = functools.cache(self._other_tokens)
        self._first_bytes = np.array([token[0] if token else -1 for token in data.tokens], np.int16)
        self._encode = encode
        self._sorted = sorted(data.tokens) if encode else []

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, size: int, end_ids: Collection[int]) -> Vocabulary:
        """Read the vocabulary of a tokenizer.

        For 152,000 tokens it takes 0.9 s of processor time, and holds the GIL for 0.6 s of it. So call it before the
        engine serves requests.

        size: vocabulary size of the model. Ids above the tokenizer's are never allowed, and neither are tokens of more
            than MAX_TOKEN_BYTES.
        end_ids: tokens that end an answer, such as eos_token_id of generation_config.json.

        Without forced tokens if the tokenizer is isolated, since the engine must not wait for its processes.

        Raises UnsupportedVocabulary if the bytes of the tokens are unknown or there is no end token.
        """
        tokens = tokenizer.token_bytes()
        if tokens is None:
            raise UnsupportedVocabulary("the tokenizer must be byte-level BPE, or BPE with tokens of single bytes")
        tokens = [token if len(token) <= MAX_TOKEN_BYTES else b"" for token in tokens[:size]]
        tokens += [b""] * (size - len(tokens))
        special = {text: i for i in sorted(tokenizer.special_ids) if i < size and (text := tokenizer.name_of(i))}
        for i in {*special.values(), *(i for i in end_ids if i < size)}:
            tokens[i] = b""
        return cls(VocabularyData(tokens, special, sorted({i for i in end_ids if 0 <= i < size})),
                   None if tokenizer.is_isolated else lambda text: tokenizer.encode(text, add_special_tokens=False))

    def _first_token(self, text: bytes) -> int | None:
        """Return the token with which the tokenizer begins a text, whatever follows the text; None if that is unknown.

        A token that begins within the first one, and is longer than the text, may take its place with other text after
        it. The function is called as `first_token`, which remembers results.
        """
        ids = self._encode(text.decode(errors="ignore")) if self._encode else ()
        first = self.data.tokens[ids[0]] if ids and ids[0] < self.size else b""
        # A special token, one that the model does not have, or the tokenizer added or normalized something.
        if not first or not text.startswith(first):
            return None
        return None if any(self._longer_token_exists(text[i:]) for i in range(len(first))) else ids[0]

    def _other_tokens(self, byte: int) -> NDArray[np.uint32]:
        """Return the mask of the tokens that do not begin with a byte. Called as `other_tokens`, with a cache."""
        bits = np.zeros(-(-self.size // 32) * 32, np.bool_)
        np.not_equal(self._first_bytes, byte, out=bits[: self.size])
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def _build_bytes(self) -> LLTokenizer:
        tokens = [b""] * self.size
        for byte, i in self.id_of_byte.items():
            tokens[i] = bytes([byte])
        return build_tokenizer(VocabularyData(tokens, self.data.special, self.data.end_ids))

    def _longer_token_exists(self, beginning: bytes) -> bool:
        """Return whether a token begins with these bytes and is longer."""
        place = bisect.bisect_right(self._sorted, beginning)
        return place < len(self._sorted) and self._sorted[place].startswith(beginning)


def build_tokenizer(data: VocabularyData) -> LLTokenizer:
    """Return the library's vocabulary: a trie of the tokens' bytes."""
    return LLTokenizer(TokenizerWrapper(_Tokens(data)), eos_token=data.end_ids, slices=SLICES)


class _Tokens:
    """Source of tokens in the form that the library reads.

    The library marks what is not text by the byte 0xFF, which UTF-8 does not have.
    """

    bos_token_id = None

    def __init__(self, data: VocabularyData):
        named = {i: b"\xff" + text.encode(errors="replace") for text, i in data.special.items()}
        named |= {i: b"\xff[%d]" % i for i in data.end_ids if i not in named}
        self.tokens = [named.get(i, token) for i, token in enumerate(data.tokens)]
        self.special_token_ids = sorted(named)
        self.eos_token_id = data.end_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        return []  # called for the tokenization of forced texts, which PREAMBLE of lark.py turns off
