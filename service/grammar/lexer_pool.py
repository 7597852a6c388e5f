"""Memory of all lexers, also of the ones whose grammar is not cached any more."""

from __future__ import annotations

import threading
import weakref

from npuserve.service.grammar.errors import MatcherError
from npuserve.service.grammar.lexer import GrammarLexer

MAX_FREE_BYTES = 2 << 20
"""Estimated memory of a lexer that never waits for memory."""
MAX_REPLAYED_SHARE = 0.8
"""Share of all memory that the states of one answer alone may need, so that its masks have memory too."""


class LexerPool:
    """Bound of the memory of lexers. Safe to use from several threads.

    Lexers grow while all of them need at most `max_bytes`. Above it, idle lexers are freed, then lexers are replaced by
    new ones where that frees memory, the largest first. Where that is not enough the lexer of the oldest answer
    grows, and the others wait without memory until theirs fits. Lexers of at most MAX_FREE_BYTES, which usual grammars
    have, never wait.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._lexers: weakref.WeakSet[GrammarLexer] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards `_lexers`
        self._is_scarce = False

    @property
    def num_bytes(self) -> int:
        """Return the estimated memory of all lexers."""
        return sum(lexer.num_bytes for lexer in self._all())

    def add_growth(self, lexer: GrammarLexer) -> None:
        """Count the growth of a lexer."""
        with self._lock:
            self._lexers.add(lexer)
        num_bytes = self.num_bytes
        self._is_scarce = num_bytes > self._max_bytes // 2
        if num_bytes <= self._max_bytes:
            return
        lexers = sorted(self._all(), key=lambda other: other.num_bytes, reverse=True)
        for other in lexers:
            freed = other.num_bytes
            if num_bytes > self._max_bytes and other is not lexer and other.free_idle():
                num_bytes -= freed
        for other in lexers:
            if num_bytes > self._max_bytes and other.is_compactable:
                other.is_full = True
                num_bytes -= other.num_bytes - other.replayed_bytes

    def may_grow(self, lexer: GrammarLexer) -> bool:
        """Return whether answers may use a lexer now. Raises MatcherError if it alone needs more than all memory."""
        if not self._is_scarce or _is_free(lexer):
            return True
        if lexer.num_bytes > self._max_bytes:
            if lexer.replayed_bytes > MAX_REPLAYED_SHARE * self._max_bytes:
                raise MatcherError(f"the states of its expressions need more than {self._max_bytes >> 20} MiB")
            lexer.is_full = True
            return True
        lexers = {*self._all(), lexer}
        num_bytes = sum(other.num_bytes for other in lexers if other is not lexer)
        self._is_scarce = num_bytes + lexer.num_bytes > self._max_bytes // 2
        if num_bytes + max(lexer.num_bytes, lexer.expected_bytes) <= self._max_bytes:
            return True
        large = [other for other in lexers if not _is_free(other)]
        arrivals = [since for other in large if (since := other.since) is not None]
        return lexer.since == min(arrivals, default=None)

    def _all(self) -> list[GrammarLexer]:
        with self._lock:
            return list(self._lexers)


def _is_free(lexer: GrammarLexer) -> bool:
    return max(lexer.num_bytes, lexer.expected_bytes) <= MAX_FREE_BYTES
