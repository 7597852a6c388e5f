"""Threads that prepare the masks of constrained answers, so that a slow grammar does not hold up the engine's loop.

    loop      apply step i ─ prepare ──wait at most `seconds`──┐ sample the rows whose masks are there │ next step
    threads                  fill mask a │ fill mask c │ fill mask d ..................................
                             fill mask b .............................................

The library releases the GIL while it computes a mask. All matchers of one compiled grammar share its lexer, which has a
lock. So the loop uses no matcher of a lexer `in_use`: it would wait for the lock. Only one of the threads uses a lexer
at a time, so a slow grammar holds up its own answers. The answers of one lexer are prepared in the order in which they
were given, so that none waits for a later one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

MAX_THREADS = 2
"""More would take processors from the CPU's kernels."""


class Lexer:
    """Lexer of a compiled grammar, which all its matchers share. jobs: answers that wait or are being prepared."""

    __slots__ = ("jobs",)

    def __init__(self) -> None:
        self.jobs = 0

    @property
    def in_use(self) -> bool:
        """Whether the thread uses the lexer or is about to, so that no other thread may."""
        return self.jobs > 0


class Answer(Protocol):
    """Constrained answer. prepare: computes what follows it, for a vocabulary of `size` ids. Raises nothing."""

    @property
    def lexer(self) -> Lexer: ...

    @property
    def is_prepared(self) -> bool: ...

    def prepare(self, size: int) -> None: ...


class MaskThreads:
    """Threads that prepare answers. They start when they are needed.

    size: number of token ids.
    on_late: called in a thread when an answer is prepared for which `prepare` did not wait; None for nothing.
    """

    def __init__(self, size: int, on_late: Callable[[], None] | None = None):
        self._size = size
        self._on_late = on_late
        lock = threading.Lock()
        self._submitted, self._prepared = threading.Condition(lock), threading.Condition(lock)
        self._queue: list[Answer] = []
        self._active: set[Lexer] = set()
        self._unfinished: set[Answer] = set()
        self._awaited: set[Answer] = set()
        self._num_threads = 0

    @property
    def is_busy(self) -> bool:
        """Whether an answer is not yet prepared."""
        return bool(self._unfinished)

    def prepare(self, answers: Iterable[Answer], seconds: float) -> None:
        """Prepare answers, after the ones of earlier calls. Return when all are prepared, at most after `seconds`."""
        awaited = dict.fromkeys(answer for answer in answers if not answer.is_prepared)
        if not awaited:
            return
        with self._submitted:
            for answer in awaited:
                if answer not in self._unfinished:
                    answer.lexer.jobs += 1
                    self._unfinished.add(answer)
                    self._queue.append(answer)
            idle = self._num_threads - len(self._active)
            if idle < len(self._queue) and self._num_threads < MAX_THREADS:
                self._num_threads += 1
                threading.Thread(target=self._run, name=f"masks-{self._num_threads}", daemon=True).start()
            self._submitted.notify(len(self._queue))
            self._awaited = set(awaited)
            self._prepared.wait_for(lambda: not self._awaited, None if math.isinf(seconds) else seconds)
            self._awaited = set()

    def wait(self) -> None:
        """Wait until all answers are prepared."""
        self.prepare(list(self._unfinished), math.inf)

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
            answer.prepare(self._size)
            with self._submitted:
                self._active.discard(answer.lexer)
                answer.lexer.jobs -= 1
                self._unfinished.discard(answer)
                is_late = answer not in self._awaited
                self._awaited.discard(answer)
                if not self._awaited:
                    self._prepared.notify()
            if is_late and self._on_late:
                self._on_late()
