"""Tokens of a text in one array, in which the end of a text is searched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_MATCH = 32
"""Most tokens that a search compares. A longer match is not a better one."""
_MIN_CAPACITY = 256

Ids = npt.NDArray[np.int32]


class Match(NamedTuple):
    """Occurrence of the end of a text.

    position: index of the token after it.
    length: number of equal tokens before `position`.
    """

    position: int
    length: int


class TokenHistory:
    """Tokens that grow at their end."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._length = len(token_ids)
        self._buffer: Ids = np.empty(max(_MIN_CAPACITY, 2 * self._length), np.int32)
        self._buffer[: self._length] = token_ids

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> Ids:
        """All tokens. Valid until the next `extend`."""
        return self._buffer[: self._length]

    def extend(self, token_ids: Sequence[int]) -> None:
        end = self._length + len(token_ids)
        if end > len(self._buffer):
            buffer: Ids = np.empty(2 * end, np.int32)
            buffer[: self._length] = self.ids
            self._buffer = buffer
        self._buffer[self._length : end] = token_ids
        self._length = end

    def token(self, position: int) -> int | None:
        """Return the token at a position; None at the end."""
        return int(self._buffer[position]) if position < self._length else None

    def find(self, end_of_text: npt.NDArray[Any]) -> Match | None:
        """Return the latest of the longest occurrences of the end of a text; None if its last token does not occur.

        The occurrence at the end of this history does not count, since no token follows it.
        """
        ids = self._buffer[: self._length]
        candidates = np.flatnonzero(ids[:-1] == end_of_text[-1])
        if not len(candidates):
            return None
        length = 1
        for token in end_of_text[-2 : -MAX_MATCH - 1 : -1].tolist():
            longer = candidates[ids[candidates - length] == token]  # a negative index wraps and is removed below
            if len(longer) and longer[0] < length:
                longer = longer[longer >= length]
            if not len(longer):
                break
            candidates = longer
            length += 1
        return Match(int(candidates[-1]) + 1, length)

    def following(self, position: int, count: int, *, repeats: bool) -> list[int]:
        """Return `count` tokens from a position on, or fewer at the end.

        repeats: continue at `position` after the end, as a text that repeats itself does.
        """
        tokens: list[int] = self._buffer[position : min(position + count, self._length)].tolist()
        if repeats and tokens:
            while len(tokens) < count:
                tokens += tokens[: count - len(tokens)]
        return tokens
