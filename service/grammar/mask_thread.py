"""Thread that prepares the masks of constrained answers, so that a slow grammar does not hold up the engine's loop.

    loop      apply step i ─ prepare ──wait at most `seconds`──┐ sample the rows whose masks are there │ next step
    thread                   fill mask a │ fill mask b │ fill mask c ...............................

The library releases the GIL while it computes a mask. All matchers of one compiled grammar share its lexer, which has a
lock. So the loop uses no matcher of a lexer `in_use`: it would wait for the lock. The thread prepares answers in the
order in which they were given to it, so that none waits for a later one.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol


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


class MaskThread:
    """Thread that prepares answers. It starts with the first one.

    size: number of token ids.
    on_late: called in the thread when an answer is prepared for which `prepare` did not wait; None for nothing.
    """

    def __init__(self, size: int, on_late: Callable[[], None] | None = None):
        self._size = size
        self._on_late = on_late
        lock = threading.Lock()
        self._submitted, self._prepared = threading.Condition(lock), threading.Condition(lock)
        self._queue: deque[Answer] = deque()
        self._unfinished: set[Answer] = set()
        self._awaited: set[Answer] = set()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an answer is not yet prepared."""
        return bool(self._unfinished)

    def prepare(self, answers: Iterable[Answer], seconds: float) -> None:
        """Prepare answers, after the ones of earlier calls. Return when all are prepared, at most after `seconds`."""
        awaited = {answer for answer in answers if not answer.is_prepared}
        if not awaited:
            return
        with self._submitted:
            for answer in awaited - self._unfinished:
                answer.lexer.jobs += 1
                self._unfinished.add(answer)
                self._queue.append(answer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
                self._thread.start()
            self._submitted.notify()
            self._awaited = awaited
            self._prepared.wait_for(lambda: not self._awaited, None if math.isinf(seconds) else seconds)
            self._awaited = set()

    def wait(self) -> None:
        """Wait until all answers are prepared."""
        self.prepare(set(self._unfinished), math.inf)

    def _run(self) -> None:
        while True:
            with self._submitted:
                self._submitted.wait_for(lambda: self._queue)
                answer = self._queue.popleft()
                lexer = answer.lexer
            answer.prepare(self._size)
            with self._submitted:
                lexer.jobs -= 1
                self._unfinished.discard(answer)
                is_late = answer not in self._awaited
                self._awaited.discard(answer)
                if not self._awaited:
                    self._prepared.notify()
            if is_late and self._on_late:
                self._on_late()
