"""The thread of the masks: order, limit of the wait, use of the lexers."""

from __future__ import annotations

import math
import threading
import time

import pytest

from npuserve.service.grammar.mask_thread import Lexer, MaskThread


class Waiting:
    """Answer whose preparation lasts until `release`."""

    def __init__(self, lexer: Lexer, made: list[Waiting], is_held: bool = False):
        self.lexer, self._made, self.is_prepared = lexer, made, False
        self.release = threading.Event()
        if not is_held:
            self.release.set()

    def prepare(self, size: int) -> None:
        assert size == 77
        assert self.release.wait(20)
        self._made.append(self)
        self.is_prepared = True


def test_answers_are_prepared_in_their_order_and_once() -> None:
    made: list[Waiting] = []
    thread, lexer = MaskThread(77), Lexer()
    answers = [Waiting(lexer, made) for _ in range(5)]
    for answer in answers:
        thread.prepare([answer], math.inf)
    thread.prepare(answers, math.inf)
    assert made == answers
    assert not lexer.in_use


def test_wait_is_limited_and_late_answers_come_first() -> None:
    made: list[Waiting] = []
    late = threading.Event()
    thread, held, free = MaskThread(77, late.set), Lexer(), Lexer()
    slow, fast = Waiting(held, made, is_held=True), Waiting(free, made)
    began = time.perf_counter()
    thread.prepare([slow], 0.02)
    assert 0.02 <= time.perf_counter() - began < 5
    assert (slow.is_prepared, held.in_use, free.in_use, thread.is_busy) == (False, True, False, True)
    thread.prepare([slow, fast], 0.0)
    assert (fast.is_prepared, free.in_use, late.is_set()) == (False, True, False)
    slow.release.set()
    assert late.wait(20)
    thread.wait()
    assert made == [slow, fast]
    assert (held.in_use, free.in_use, thread.is_busy) == (False, False, False)


@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_prepared_answers_need_no_thread(seconds: float) -> None:
    thread, answer = MaskThread(77), Waiting(Lexer(), [])
    answer.is_prepared = True
    thread.prepare([answer], seconds)
    assert thread._thread is None
