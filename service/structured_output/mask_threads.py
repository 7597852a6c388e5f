"""Preparation of the masks of constrained answers, so that a slow grammar does not hold up the engine's loop.

    loop      apply step i ─ fill masks e, f ─wait at most `seconds`─┐ sample rows whose masks are there │ step i + 1
    threads                  fill mask a │ fill mask c │ fill mask d ............................................
                             fill mask b .............................................

The loop itself fills the masks of grammars that were fast so far: to hand one over takes about as long as to fill it. A
grammar that was slow, or is new, is for the threads. The library releases the GIL while it computes a mask.

All matchers of one compiled grammar share its lexer, which has a lock. So the loop uses no matcher of a lexer `in_use`:
it would wait for the lock. Only the loop gives answers to the threads, so a lexer that it finds not in use stays so.
Only one of the threads uses a lexer at a time, so a slow grammar holds up its own answers.
The answers of one lexer are prepared in the order in which they were given, so that none waits for a later one. An
answer that needs long, since it replays its tokens, is prepared in parts between which other answers are.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

MAX_THREADS = 2
"""More would take processors from the CPU's kernels."""
FAST_SECONDS = 0.001
"""Largest time of a mask that the loop fills itself. Usual ones take 0.1 ms, or longer if the loop loses its core."""
DECAY = 0.5
"""Share of a lexer's longest time that counts at its next answer."""
STACK_BYTES = 64 << 20
"""Stack of a thread that compiles. It is larger than a child's, which compiled the same constraint before."""


class Lexer:
    """Lexer of a compiled grammar, which all its matchers share.

    jobs: answers that wait for the threads or are being prepared there.
    seconds: largest time of an answer so far. It decays with each answer by DECAY, so that one fast answer makes a new
        grammar a fast one.
    """

    __slots__ = ("jobs", "seconds")

    def __init__(self) -> None:
        self.jobs = 0
        self.seconds = FAST_SECONDS / DECAY

    @property
    def is_fast(self) -> bool:
        """Whether the loop may prepare its answers."""
        return self.jobs == 0 and self.seconds <= FAST_SECONDS

    @property
    def in_use(self) -> bool:
        """Whether one of the threads uses the lexer or is about to, so that no other may."""
        return self.jobs > 0


class Answer(Protocol):
    """Constrained answer.

    prepare: computes what follows it, for a vocabulary of `size` ids. Returns True if it must be called again, with the
        lexer that the answer then has. Raises nothing.
    """

    @property
    def lexer(self) -> Lexer: ...

    @property
    def is_prepared(self) -> bool: ...

    def prepare(self, size: int) -> bool: ...


class MaskThreads:
    """Preparation of answers, with threads that start when they are needed.

    size: number of token ids.
    on_late: called in a thread when an answer is prepared for which `prepare` did not wait; None for nothing.
    """

    def __init__(self, size: int, on_late: Callable[[], None] | None = None):
        self._size = size
        self._on_late = on_late
        lock = threading.Lock()
        self._submitted = threading.Condition(lock)
        self._prepared = threading.Condition(lock)
        # The lock guards these, and the changes of Lexer.jobs.
        self._queue: list[Answer] = []  # given to the threads, and not taken yet
        self._active: set[Lexer] = set()  # of the answers that the threads have taken
        self._unfinished: set[Answer] = set()  # in the queue or taken
        self._awaited: set[Answer] = set()  # the unfinished ones for which `prepare` waits
        self._num_threads = 0

    def prepare(self, answers: Iterable[Answer], seconds: float) -> None:
        """Prepare answers, after the ones of earlier calls. Return when all are prepared, at most after `seconds`."""
        end = time.perf_counter() + seconds
        awaited = dict.fromkeys(answer for answer in answers if not answer.is_prepared)
        fast = [answer for answer in awaited if answer.lexer.is_fast]
        slow = [answer for answer in awaited if not answer.lexer.is_fast]
        if slow:
            self._submit(slow)
        for place, answer in enumerate(fast):
            if not answer.lexer.is_fast or time.perf_counter() >= end:
                slow += fast[place:]
                self._submit(fast[place:])
                break
            if self._prepare(answer):
                slow.append(answer)
                self._submit([answer])
        if slow:
            self._wait(slow, end)

    def wait(self) -> None:
        """Wait until all answers are prepared."""
        self.prepare(list(self._unfinished), math.inf)

    def _submit(self, answers: list[Answer]) -> None:
        """Give answers to the threads, after the ones of earlier calls. Prepare them here if there is no thread."""
        with self._submitted:
            new = [answer for answer in answers if answer not in self._unfinished]
            idle = self._num_threads - len(self._active)
            if idle < len(self._queue) + len(new) and self._num_threads < MAX_THREADS:
                self._start_thread()
            if self._num_threads:
                for answer in new:
                    answer.lexer.jobs += 1
                self._unfinished.update(new)
                self._queue += new
                self._submitted.notify(len(self._queue))
                return
        for answer in new:
            while self._prepare(answer):
                pass

    def _start_thread(self) -> None:
        """Start a thread, if the system has one."""
        thread = threading.Thread(target=self._run, name=f"masks-{self._num_threads + 1}", daemon=True)
        with contextlib.suppress(RuntimeError):
            start_compiling(thread)
            self._num_threads += 1

    def _wait(self, answers: list[Answer], end: float) -> None:
        """Wait until the threads have prepared answers, at most until `end`, of time.perf_counter."""
        with self._submitted:
            self._awaited = self._unfinished.intersection(answers)
            left = None if math.isinf(end) else max(0.0, end - time.perf_counter())
            self._prepared.wait_for(lambda: not self._awaited, left)
            self._awaited = set()

    def _prepare(self, answer: Answer) -> bool:
        """Prepare an answer, or a part of it. Return whether this must be called again."""
        if answer.is_prepared:  # a thread has prepared it since `prepare` checked
            return False
        lexer = answer.lexer
        began = time.perf_counter()
        is_partial = answer.prepare(self._size)
        lexer.seconds = max(time.perf_counter() - began, DECAY * lexer.seconds)
        return is_partial

    def _take(self) -> Answer | None:
        """Take the first answer from the queue whose lexer no thread uses; None if there is none."""
        for place, answer in enumerate(self._queue):
            if answer.lexer not in self._active:
                self._active.add(answer.lexer)
                return self._queue.pop(place)
        return None

    def _run(self) -> None:
        while True:
            with self._submitted:
                answer = self._submitted.wait_for(self._take)
            assert answer is not None
            lexer = answer.lexer
            is_partial = self._prepare(answer)
            with self._submitted:
                self._active.discard(lexer)
                lexer.jobs -= 1
                if is_partial:
                    answer.lexer.jobs += 1
                    self._queue.append(answer)
                    continue
                self._unfinished.discard(answer)
                is_late = answer not in self._awaited
                self._awaited.discard(answer)
                if not self._awaited:
                    self._prepared.notify()
            if is_late and self._on_late:
                self._on_late()


def start_compiling(thread: threading.Thread) -> None:
    """Start a thread that may compile constraints. Raises RuntimeError if the system has no further thread."""
    size = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(size)
