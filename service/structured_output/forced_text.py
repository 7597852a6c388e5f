"""Text that must follow in an answer, found byte by byte.

The library can return the whole text that is forced (`compute_ff_bytes`), but holds the GIL until it has walked to its
end, which may take long or exceed the limits: "a{900000}" forces 900,000 bytes. So a second matcher, over a vocabulary
of single bytes, walks as far as its caller needs: one byte is forced where its mask has one bit. It releases the GIL
for each mask.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher

from npuserve.service.structured_output.errors import LexerExhausted

if TYPE_CHECKING:
    from npuserve.service.structured_output.vocabulary import Vocabulary

MAX_BEHIND = 256
"""Bytes that the matcher consumes at once. The library holds the GIL meanwhile: 1 ms."""


class ForcedText:
    """Forced text after the tokens so far. Without such text after the matcher has exceeded its limits.

    `advance` and `next` raise LexerExhausted if those of the lexer were exceeded, maybe by another answer.

    library: matcher of the grammar over `vocabulary.bytes`, at the beginning of the answer.
    """

    def __init__(self, vocabulary: Vocabulary, library: LLMatcher):
        self._tokens = vocabulary.data.tokens
        self._special = vocabulary.special_ids
        self._id_of_byte = vocabulary.id_of_byte
        self._byte_of_id = vocabulary.byte_of_id
        self.library = library
        self._bits = np.zeros(-(-vocabulary.size // 32), np.uint32)
        self._mask = self._bits.ctypes.data, self._bits.nbytes
        self._behind: list[int] = []  # ids of the byte vocabulary that the matcher has not consumed yet
        self._ahead = b""  # bytes that follow the tokens so far, and were consumed
        self._is_whole = False  # nothing is forced after `_ahead`

    def copy(self) -> ForcedText:
        """Return the forced text of the same answer so far."""
        copied = copy.copy(self)
        copied.library = self.library.deep_copy()
        copied._behind = list(self._behind)
        copied._bits = self._bits.copy()
        copied._mask = copied._bits.ctypes.data, copied._bits.nbytes
        return copied

    def advance(self, token_id: int) -> None:
        """Append an allowed token."""
        text = self._tokens[token_id]
        if text and self._ahead.startswith(text):
            self._ahead = self._ahead[len(text):]
            return
        rest = text[len(self._ahead):]
        self._behind += [token_id] if token_id in self._special else map(self._id_of_byte.__getitem__, rest)
        self._ahead = b""
        self._is_whole = False
        if len(self._behind) >= MAX_BEHIND:
            self._catch_up()

    def next(self, max_bytes: int) -> bytes:
        """Return the text that is forced now, at most its first `max_bytes` bytes."""
        self._catch_up()
        forced = bytearray()
        while len(self._ahead) + len(forced) < max_bytes and not self._is_whole:
            token_id = self._only_byte()
            if token_id is None or not self._consume([token_id]):
                self._is_whole = True
            else:
                forced.append(self._byte_of_id[token_id])
        self._ahead += forced
        return self._ahead[:max_bytes]

    def _catch_up(self) -> None:
        """Consume what is behind. A mask before it begins a new step, whose work the library limits."""
        if self._behind:
            if not self.library.is_stopped():
                self.library.unsafe_compute_mask_ptr(*self._mask)
            self._consume(self._behind)
            self._behind = []

    def _only_byte(self) -> int | None:
        """Return the id of the only byte that may follow; None if several may, or a special token, or the end."""
        if self.library.is_stopped() or self.library.is_accepting():
            return None
        self.library.unsafe_compute_mask_ptr(*self._mask)
        self._check()
        if np.count_nonzero(self._bits) != 1:
            return None
        place = int(self._bits.argmax())
        word = int(self._bits[place])
        token_id = 32 * place + word.bit_length() - 1
        return token_id if word & word - 1 == 0 and token_id in self._byte_of_id else None

    def _consume(self, ids: list[int]) -> bool:
        is_consumed = self.library.try_consume_tokens(ids) == len(ids)
        self._check()
        return is_consumed

    def _check(self) -> None:
        if is_lexer_exhausted(self.library):
            raise LexerExhausted("the constraint exceeds its limits: lexer of the forced text")


def is_lexer_exhausted(library: LLMatcher) -> bool:
    """Return whether a matcher has failed since a step exceeded the limits of its lexer."""
    return library.is_error() and library.get_error().startswith("lexer error")
