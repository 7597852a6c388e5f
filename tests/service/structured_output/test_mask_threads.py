"""Preparation of masks: order, limit of the wait, use of the lexers, and in which thread."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import pytest

from npuserve.service.structured_output import mask_threads
from npuserve.service.structured_output.mask_threads import DECAY, FAST_SECONDS, MAX_THREADS, Lexer, MaskThreads


class Waiting:
    """Answer whose preparation lasts until `release`."""

    def __init__(self, lexer: Lexer, made: list[Waiting], is_held: bool = False):
        self.lexer, self._made, self.is_prepared = lexer, made, False
        self.begun, self.release = threading.Event(), threading.Event()
        if not is_held:
            self.release.set()

    def prepare(self, size: int) -> bool:
        assert size == 77
        self.thread = threading.get_ident()
        self.begun.set()
        assert self.release.wait(60)
        self._made.append(self)
        self.is_prepared = True
        return False


def test_answers_are_prepared_in_their_order_and_once() -> None:
    made: list[Waiting] = []
    thread, lexer = MaskThreads(77), Lexer()
    answers = [Waiting(lexer, made) for _ in range(5)]
    for answer in answers:
        thread.prepare([answer], math.inf)
    thread.prepare(answers, math.inf)
    assert made == answers
    assert not lexer.in_use


def test_wait_is_limited_and_late_answers_come_first() -> None:
    made: list[Waiting] = []
    late = threading.Event()
    threads, held = MaskThreads(77, late.set), Lexer()
    slow, next_one = Waiting(held, made, is_held=True), Waiting(held, made)
    began = time.perf_counter()
    threads.prepare([slow], 0.02)
    assert 0.02 <= time.perf_counter() - began < 5
    assert (slow.is_prepared, held.in_use, bool(threads._unfinished)) == (False, True, True)
    threads.prepare([next_one, slow], 0.0)
    assert (next_one.is_prepared, late.is_set()) == (False, False)
    slow.release.set()
    assert late.wait(60)
    threads.wait()
    assert made == [slow, next_one]
    assert (held.in_use, bool(threads._unfinished)) == (False, False)


@pytest.mark.parametrize("num_slow", [1, 3])
def test_slow_lexer_holds_up_no_other(num_slow: int) -> None:
    made: list[Waiting] = []
    threads, held, free = MaskThreads(77), Lexer(), Lexer()
    slow = [Waiting(held, made, is_held=True) for _ in range(num_slow)]
    threads.prepare(slow, 0.0)
    assert slow[0].begun.wait(60)
    for _ in range(20):
        threads.prepare([answer := Waiting(free, made)], 10)
        assert made[-1:] == [answer]
    assert (held.in_use, free.in_use) == (True, False)
    for answer in slow:
        answer.release.set()
    threads.wait()
    assert made[20:] == slow


def test_threads_start_when_none_is_idle_up_to_the_maximum() -> None:
    made: list[Waiting] = []
    threads = MaskThreads(77)
    for _ in range(3):
        threads.prepare([Waiting(Lexer(), made)], math.inf)
    assert threads._num_threads == 1
    held = [Waiting(Lexer(), made, is_held=True) for _ in range(MAX_THREADS + 1)]
    for answer in held:
        threads.prepare([answer], 0.0)
    assert threads._num_threads == MAX_THREADS
    for answer in held:
        answer.release.set()
    threads.wait()
    assert len(made) == 3 + len(held)


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["fast", "slow"])
def test_answer_that_a_thread_has_just_prepared_is_not_prepared_again(seconds: float) -> None:
    class Late(Waiting):
        checks = iter([False])
        is_prepared = property(lambda self: next(self.checks, True), lambda self, value: None)

    threads, lexer, made = MaskThreads(77), Lexer(), []
    lexer.seconds = seconds
    threads.prepare([Late(lexer, made)], math.inf)
    assert (made, lexer.in_use, threads._unfinished) == ([], False, set())


@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_prepared_answers_need_no_thread(seconds: float) -> None:
    threads, answer = MaskThreads(77), Waiting(Lexer(), [])
    answer.is_prepared = True
    threads.prepare([answer], seconds)
    assert not threads._num_threads


class Slow(Waiting):
    """Answer whose preparation takes long on the clock of `MaskThreads`."""

    now = 0.0

    def prepare(self, size: int) -> bool:
        Slow.now += 8 * FAST_SECONDS
        return super().prepare(size)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time pass only while a slow answer is prepared."""
    monkeypatch.setattr(mask_threads, "time", SimpleNamespace(perf_counter=lambda: Slow.now))


@pytest.mark.usefixtures("clock")
def test_grammar_that_was_fast_is_for_the_caller_and_a_slow_one_for_the_threads() -> None:
    made: list[Waiting] = []
    threads, lexer = MaskThreads(77), Lexer()

    def is_here(kind: type[Waiting], seconds: float = math.inf) -> bool:
        threads.prepare([answer := kind(lexer, made)], seconds)
        threads.wait()
        return answer.thread == threading.get_ident()

    assert not is_here(Waiting)  # new
    assert is_here(Waiting)
    assert not is_here(Waiting, 0.0)  # the caller has no time
    assert is_here(Slow)
    assert not is_here(Slow)
    assert not is_here(Waiting)
    while not is_here(Waiting):  # fast again
        pass
    assert len(made) > 6


@pytest.mark.usefixtures("clock")
def test_answers_of_a_grammar_that_becomes_slow_follow_in_the_threads() -> None:
    made: list[Waiting] = []
    threads, lexer = MaskThreads(77), Lexer()
    threads.prepare([Waiting(lexer, made)], math.inf)
    answers = [Waiting(lexer, made), Slow(lexer, made), Waiting(lexer, made), Waiting(lexer, made)]
    threads.prepare(answers, math.inf)
    assert made[1:] == answers
    assert [answer.thread == threading.get_ident() for answer in answers] == [True, True, False, False]


def test_answers_without_a_further_thread_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the caller without any thread, else by the threads that run. Later ones start again."""
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made: list[Waiting] = []
    threads, held = MaskThreads(77), Lexer()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        threads.prepare([answer := Waiting(held, made)], 0.0)
    assert (made, answer.thread, held.in_use) == ([answer], threading.get_ident(), False)
    threads.prepare([slow := Waiting(held, made, is_held=True)], 0.0)
    assert slow.begun.wait(60)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        threads.prepare([queued := Waiting(Lexer(), made)], 0.0)
    assert (queued.is_prepared, threads._num_threads) == (False, 1)
    threads.prepare([queued], math.inf)
    assert (queued.is_prepared, threads._num_threads) == (True, 2)
    slow.release.set()
    threads.wait()


class Partial(Waiting):
    """Answer that is prepared in parts, each with another lexer."""

    def __init__(self, made: list[Waiting], lexers: list[Lexer]):
        super().__init__(lexers[0], made)
        self.lexers, self.parts = lexers[1:], list[bool]()

    def prepare(self, size: int) -> bool:
        self.parts.append(self.lexer.in_use)
        if not self.lexers:
            return super().prepare(size)
        self.lexer = self.lexers.pop(0)
        return True


@pytest.mark.parametrize("seconds", [0.0, FAST_SECONDS / DECAY], ids=["fast", "slow"])
def test_answer_prepared_in_parts_has_its_lexer_in_use_in_each(seconds: float) -> None:
    made: list[Waiting] = []
    threads, lexers = MaskThreads(77), [Lexer() for _ in range(3)]
    lexers[0].seconds = seconds
    answer = Partial(made, lexers.copy())
    threads.prepare([answer], math.inf)
    assert (made, answer.parts[1:]) == ([answer], [True, True])
    assert answer.lexer is lexers[2]
    assert not any(lexer.in_use for lexer in lexers)


def test_others_are_prepared_between_the_parts_of_an_answer() -> None:
    class Endless(Waiting):
        def prepare(self, size: int) -> bool:
            return not self.release.is_set()

    made: list[Waiting] = []
    threads = MaskThreads(77)
    endless = [Endless(Lexer(), made, is_held=True) for _ in range(2 * MAX_THREADS)]
    threads.prepare(endless, 0.0)
    for _ in range(20):
        threads.prepare([answer := Waiting(Lexer(), made)], math.inf)
        assert made[-1] is answer
    for waiting in endless:
        waiting.release.set()
    threads.wait()
    assert not any(waiting.lexer.in_use for waiting in endless)


def test_answer_in_parts_without_a_thread_is_prepared_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    made: list[Waiting] = []
    answer = Partial(made, [Lexer() for _ in range(3)])
    MaskThreads(77).prepare([answer], math.inf)
    assert made == [answer]
