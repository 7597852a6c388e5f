"""Lexer of a compiled grammar, whose states the answers build, and its memory.

The library builds a state where an answer or a mask reaches it, and frees none. In a string of limited length each
character has states of its own: masks take 2.6 kB a character, the text alone 0.2 to 0.5 kB. So a lexer that has become
large is worn. Each of its answers moves to a new one and replays its tokens there, which builds the states of the text
alone. Masks and forced tokens depend on the text, so they stay the same.

All answers of a grammar share its first lexer. After it is worn, each client has its own (`Compilation.lexer_for`): a
usual grammar never wears one, and a client that does cannot slow the answers of others.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from llguidance import LLMatcher

from npuserve.service.structured_output.errors import MatcherError
from npuserve.service.structured_output.mask_threads import Lexer
from npuserve.service.structured_output.matcher import Matcher
from npuserve.service.structured_output.vocabulary import Vocabulary

MAX_LEXER_BYTES = 16 << 20
"""Estimated memory with which a lexer is worn, if a replay would free most of it. The loop fills no masks of a larger
one, since it sometimes takes 10 ms or more to grow a table."""
MAX_REPLAYED_RATIO = 3
"""Memory with which a lexer is worn, as a multiple of the memory that replays have built. So the replays of an answer
take less time than its masks."""
BYTES_PER_FUEL = 32
"""Memory of a lexer by the work that built its states, in the library's unit. 12 to 28 were measured."""
MIN_UNMEASURED_SECONDS = 0.003
MAX_UNMEASURED_SECONDS = 0.02
"""Processor time of masks between two measurements. States of an estimated 1 MB take at least 3 ms to build."""
MEASURE_RATIO = 5
"""The same, within these bounds, as a multiple of the time of a measurement: 0.2 ms, or 4 ms after 50,000 tokens."""
MAX_FREE_BYTES = 2 << 20
"""Estimated memory of a lexer that never waits for memory."""
MAX_REPLAYED_SHARE = 0.8
"""Share of all memory that the states of one answer alone may need, so that its masks have memory too."""
_LEXER_COST = re.compile(r'"lexer_cost": (\d+)')

Matchers = tuple[LLMatcher, LLMatcher | None]
"""Matcher of a grammar over the vocabulary, and one over its bytes; None for no forced tokens."""


class LexerAnswer(Protocol):
    """Answer that uses a lexer.

    arrival: of its request.
    release: frees its matcher, which it builds again when it is prepared.
    """

    @property
    def arrival(self) -> float: ...

    def release(self) -> None: ...


class GrammarLexer(Lexer):
    """Lexer of a grammar. Only the thread that may use it (mask_threads.py) calls the methods, except `add`.

    num_bytes: estimated memory.
    replayed_bytes: the part that the grammar itself and replays have built, and that another lexer would need too.
    expected_bytes: memory that it will need at least, from the lexer before it.
    is_full: a new lexer must take its place, since it is too large.
    is_worn: its answers must use another one.
    """

    __slots__ = ("__weakref__", "_answers", "_build", "_lock", "_matchers", "_measure_seconds", "_on_growth",
                 "_unmeasured_seconds", "_vocabulary", "expected_bytes", "is_full", "is_worn", "num_bytes",
                 "replayed_bytes")

    def __init__(
        self, vocabulary: Vocabulary, build: Callable[[], Matchers],
        on_growth: Callable[[GrammarLexer], None] = lambda lexer: None, expected_bytes: int = 0,
    ):
        """build: compiles the grammar. on_growth: called with the lexer when num_bytes has grown."""
        super().__init__()
        self._vocabulary = vocabulary
        self._build = build
        self._on_growth = on_growth
        self._matchers: Matchers | None = None  # at the beginning of an answer
        self._answers: weakref.WeakSet[LexerAnswer] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards `_answers`
        self._unmeasured_seconds = 0.0  # of masks since the last measurement
        self._measure_seconds = 0.0  # of the last measurement
        self.num_bytes = 0
        self.replayed_bytes = 0
        self.expected_bytes = expected_bytes
        self.is_full = False
        self.is_worn = False

    @property
    def is_fast(self) -> bool:
        """Whether the loop may prepare its answers: the grammar is compiled, the lexer small, and none must move."""
        return self.is_built and not self.is_full and self.num_bytes <= MAX_LEXER_BYTES and super().is_fast

    @property
    def is_built(self) -> bool:
        """Whether `matcher` takes microseconds."""
        return self._matchers is not None

    @property
    def is_compactable(self) -> bool:
        """Whether a new lexer would need less than half of the memory."""
        return self.num_bytes > 2 * self.replayed_bytes

    @property
    def since(self) -> float | None:
        """Arrival of the oldest answer that uses the lexer; None for no answer. In any thread."""
        with self._lock:
            return min((answer.arrival for answer in self._answers), default=None)

    def add(self, answer: LexerAnswer) -> None:
        """Add an answer that uses the lexer from now on. In any thread."""
        with self._lock:
            self._answers.add(answer)

    def remove(self, answer: LexerAnswer) -> None:
        with self._lock:
            self._answers.discard(answer)

    def matcher(self) -> Matcher:
        """Return a new matcher at the beginning of an answer. Compile the grammar if that was not done.

        Raises ConstraintError if the grammar cannot be compiled.
        """
        if self._matchers is None:
            self._matchers = self._build()
            self._measure([library for library in self._matchers if library], is_replay=True)
        library, by_byte = self._matchers
        return Matcher(self._vocabulary, library.deep_copy(), by_byte.deep_copy() if by_byte else None, self)

    def wear(self) -> None:
        """Free the memory, and the matchers of all answers. These must move."""
        self.is_worn = True
        self._matchers = None
        self.num_bytes = 0
        with self._lock:
            answers = list(self._answers)
        for answer in answers:
            answer.release()

    def free_idle(self) -> bool:
        """Free the memory if no answer uses the lexer. The next one compiles the grammar. In any thread."""
        with self._lock:
            if self._answers:
                return False
            self._matchers = None
            self.num_bytes = self.replayed_bytes = 0
            return True

    def add_mask(self, seconds: float, libraries: Sequence[LLMatcher]) -> None:
        """Count the processor time of a mask, which may have built states. Measure the memory from time to time.

        libraries: matchers that use the lexer.
        """
        self._unmeasured_seconds += seconds
        due = min(MEASURE_RATIO * self._measure_seconds, MAX_UNMEASURED_SECONDS)
        if self._unmeasured_seconds > max(MIN_UNMEASURED_SECONDS, due):
            self._measure(libraries)

    def add_replay(self, libraries: Sequence[LLMatcher]) -> None:
        """Measure the memory after a replay, as memory that another lexer would need too."""
        self._measure(libraries, is_replay=True)

    def _measure(self, libraries: Sequence[LLMatcher], *, is_replay: bool = False) -> None:
        """Measure the memory. is_replay: a replay has built what the lexer has grown by."""
        began = time.thread_time()
        num_bytes = BYTES_PER_FUEL * sum(map(_lexer_fuel, libraries))
        self._unmeasured_seconds = 0.0
        self._measure_seconds = time.thread_time() - began
        grown = num_bytes - self.num_bytes
        if grown <= 0:
            return
        self.num_bytes = num_bytes
        if is_replay:
            self.replayed_bytes += grown
        if num_bytes > max(MAX_LEXER_BYTES, MAX_REPLAYED_RATIO * self.replayed_bytes):
            self.is_full = True
        self._on_growth(self)


def _lexer_fuel(library: LLMatcher) -> int:
    """Return the work that built the states of a matcher's lexer, as of its last mask; 0 if the lexer is exhausted.

    The library reports it in the message of an error alone.
    """
    copy = library.deep_copy()
    copy.rollback(1 << 30)  # an error: there are not so many tokens
    cost = _LEXER_COST.search(copy.get_error())
    return int(cost[1]) if cost else 0


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
