"""Constrained requests in the engine: acceptance after the compilation, equal tokens in every order of work, errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from npuserve.npu.step import SamplingParams
from npuserve.service import metrics
from npuserve.service.engine import loop
from npuserve.service.engine.loop import Engine
from npuserve.service.ipc import messages as m
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.streams.records import Records
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.errors import UnsupportedVocabulary
from npuserve.service.structured_output.manager import BuiltCompiler
from npuserve.service.structured_output.mask_threads import Lexer
from tests.service.engine.test_loop import MODEL, Peer, Running, until
from tests.support.fake_grammar import FakeCompiler, FakeMatcher, first_allowed

VOCABULARY = MODEL.vocabulary_size
END_IDS = frozenset([999])
RULE = Constraint("regex", "3 9")
FORCING = Constraint("regex", "forced 5 9")


class Constrained(Running):
    def __init__(self, tmp_path: Path, compiler: FakeCompiler | None, delay: float, blocks: int, overlap: bool):
        self.compiler = compiler
        self._overlap = overlap
        super().__init__(tmp_path, delay, 64, blocks)

    def make(self) -> Engine:
        def build(on_done: Callable[[], None]) -> BuiltCompiler:
            if self.compiler is None:
                raise UnsupportedVocabulary("no bytes")
            self.compiler.on_done = on_done
            return BuiltCompiler(self.compiler, END_IDS)

        return Engine(self.scheduler, self.runner, EngineSocket(self.address), MODEL, 7, self._overlap,
                      records=Records(60.0), build_compiler=build)

    def stop(self) -> None:
        super().stop()
        self.engine.structured_output.close()
        assert self.compiler is None or self.compiler.is_closed


@contextmanager
def running(
    tmp_path: Path, *, is_slow: bool = False, delay: float = 0.0, blocks: int = 64, overlap: bool = True,
    is_usable: bool = True,
) -> Iterator[Constrained]:
    compiler = FakeCompiler(VOCABULARY, END_IDS, is_slow) if is_usable else None
    engine = Constrained(tmp_path, compiler, delay, blocks, overlap)
    yield engine
    engine.stop()


def failures() -> list[float]:
    """Return the number of constrained requests that failed at their compilation and later, and of refused sizes."""
    kinds = [metrics.grammar_errors_total.labels(when) for when in ("compile", "answer")]
    return [kind._value.get() for kind in (*kinds, metrics.queue_rejections_total.labels("too_large"))]


def expected(prompt: list[int], max_tokens: int, rule: Constraint = RULE) -> list[int]:
    """Return the answer of the counting model under a constraint."""
    matcher, tokens = FakeMatcher(rule.text, VOCABULARY, END_IDS), list(prompt)
    mask = np.zeros(-(-VOCABULARY // 32), np.int32)
    while len(tokens) - len(prompt) < max_tokens and tokens[-1] not in END_IDS:
        matcher.fill(mask)
        sampled = first_allowed((tokens[-1] + 1) % VOCABULARY, VOCABULARY, mask)
        tokens.append((*matcher.forced(), sampled)[0])
        assert matcher.advance(tokens[-1])
    return tokens[len(prompt):]


class Reader(Peer):
    def __init__(self, address: str):
        self.accepted: list[int] = []
        super().__init__(address)

    def receive(self) -> m.ToFrontend:
        message = super().receive()
        if isinstance(message, m.Outputs):
            self.accepted += message.accepted
        return message


def test_acceptance_waits_for_the_compilation(tmp_path: Path) -> None:
    with running(tmp_path, is_slow=True) as engine:
        peer = Reader(engine.address)
        peer.submit(1, [5, 6], 5, constraint=RULE)
        peer.submit(2, [5, 6], 5)
        assert peer.until_end(2)[2].finish
        assert peer.accepted == [2]
        assert engine.scheduler.num_waiting == 1
        assert engine.compiler
        until(lambda: bool(engine.compiler and engine.compiler.submitted))
        engine.compiler.finish()
        finish = peer.until_end(1)[1].finish
        assert peer.accepted == [2, 1]
        assert peer.tokens(1) == expected([5, 6], 5)
        assert finish
        assert (finish.reason, finish.grammar_completed) == ("length", False)


def test_idle_engine_sleeps_until_the_compiler_wakes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 3600.0)
    with running(tmp_path, is_slow=True) as engine:
        peer = Reader(engine.address)
        peer.submit(1, [5, 6], 5, constraint=RULE)
        assert engine.compiler
        until(lambda: bool(engine.compiler and engine.compiler.submitted))
        engine.compiler.finish()
        assert peer.until_end(1)[1].finish
        assert peer.tokens(1) == expected([5, 6], 5)
        engine.engine.stop()
        engine.engine.structured_output._notify()  # ends the sleep


def test_refused_constraint_names_its_field_and_is_not_accepted(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer, before = Reader(engine.address), failures()
        peer.submit(1, [5, 6], 5, constraint=Constraint("json_schema", "bad"))
        assert peer.until_end(1)[1].error == ("InvalidField", "json_schema: bad", 0.0)
        assert peer.accepted == []
        assert failures() == [before[0] + 1, *before[1:]]


def test_constraint_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, is_usable=False) as engine:
        peer = Reader(engine.address)
        peer.submit(1, [5, 6], 5, constraint=RULE)
        assert peer.until_end(1)[1].error == ("NoTokenizer", "regex: no bytes", 0.0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("blocks", [64, 16])
def test_tokens_are_those_of_a_request_alone(tmp_path: Path, overlap: bool, blocks: int) -> None:
    with running(tmp_path, overlap=overlap, blocks=blocks) as engine:
        peer = Reader(engine.address)
        rules = [Constraint("regex", f"{'forced ' * (key > 2)}{key} {6 + key}") if key % 3 else None
                 for key in range(6)]
        for key, rule in enumerate(rules):
            peer.submit(key, [key, key + 1, key + 2], 14, constraint=rule)
        ends = peer.until_end(*range(6))
        for key, rule in enumerate(rules):
            prompt = [key, key + 1, key + 2]
            answer = expected(prompt, 14, rule) if rule else [key + 3 + i for i in range(14)]
            assert peer.tokens(key) == answer
            finish = ends[key].finish
            assert finish
            assert finish.grammar_completed == (rule is not None)
        assert engine.scheduler.forced_tokens


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("blocks", [64, 16])
def test_tokens_do_not_depend_on_deferred_rows(
    tmp_path: Path, overlap: bool, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MASK_WAIT_SECONDS", 0.0)
    test_tokens_are_those_of_a_request_alone(tmp_path, overlap, blocks)


@pytest.mark.parametrize("overlap", [True, False])
def test_slow_mask_holds_up_no_other_stream(tmp_path: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mask is not there until all other streams have ended. The engine then sleeps, and is woken by the mask."""
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 3600.0)
    monkeypatch.setattr(Lexer, "is_fast", False)
    go_on, fill = threading.Event(), FakeMatcher.fill

    def fill_late(self: FakeMatcher, bits: npt.NDArray[np.int32]) -> None:
        assert self._key != 3 or len(self.tokens) != 2 or go_on.wait(60)
        fill(self, bits)

    monkeypatch.setattr(FakeMatcher, "fill", fill_late)
    with running(tmp_path, overlap=overlap) as engine:
        peer = Reader(engine.address)
        peer.submit(1, [5, 6], 9, constraint=RULE)
        peer.until_tokens(1, 2)
        for key in (2, 3):
            peer.submit(key, [key, key], 40)
        ends = peer.until_end(2, 3)
        assert all(end.finish for end in ends.values())
        assert len(peer.tokens(1)) == 2
        peer.submit(4, [5, 7], 9, constraint=RULE)  # its masks wait for the late one of the same grammar
        peer.submit(5, [5, 7], 9, constraint=RULE)
        peer.send(m.Cancel(5))
        peer.submit(6, [6, 6], 9, constraint=FORCING)  # of another grammar
        assert peer.until_end(6)[6].finish
        assert peer.tokens(6) == expected([6, 6], 9, FORCING)
        until(lambda: engine.engine._is_idle)
        go_on.set()
        peer.until_end(1, 4)
        assert peer.tokens(1) == expected([5, 6], 9)
        assert peer.tokens(4) == expected([5, 7], 9)
        engine.engine.stop()
        engine.engine.structured_output._notify()  # ends the sleep


@pytest.mark.parametrize("how", ["cancel", "abort", "deadline"])
def test_end_while_compiling(tmp_path: Path, how: str) -> None:
    with running(tmp_path, is_slow=True) as engine:
        peer, admin = Reader(engine.address), Peer(engine.address)
        deadline = time.monotonic() + 0.3 if how == "deadline" else None
        peer.submit(1, [5, 6], 5, constraint=RULE, deadline=deadline)
        until(lambda: engine.scheduler.num_waiting == 1 or how == "deadline")
        if how == "cancel":
            peer.send(m.Cancel(1))
        elif how == "abort":
            admin.send(m.Abort(1, "r1"))
            assert admin.reply(1) == 1
            finish = peer.until_end(1)[1].finish
            assert finish
            assert (finish.reason, peer.accepted) == ("aborted", [1])
        else:
            error = peer.until_end(1)[1].error
            assert error
            assert error[0] == "DeadlineExceeded"
        until(lambda: not engine.engine.registry.live)
        until(lambda: not engine.engine.structured_output)


@pytest.mark.parametrize("mask_seconds", [0.0, 0.01])
@pytest.mark.parametrize("rule", [RULE, FORCING])
def test_restored_request_continues_under_its_constraint(
    tmp_path: Path, rule: Constraint, mask_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MASK_WAIT_SECONDS", mask_seconds)
    with running(tmp_path) as engine:
        peer = Reader(engine.address)
        answer = expected([5, 6], 9, rule)
        record = m.Record(m.Request("r1", [5, 6], 9, time.monotonic(), constraint=rule))
        record.add(m.Output(1, answer[:2]))
        peer.send(m.Restore([(1, record)], []))
        finish = peer.until_end(1)[1].finish
        assert peer.tokens(1) == answer[2:]
        assert peer.accepted == [1]
        assert finish
        assert bool(engine.scheduler.forced_tokens) == (rule is FORCING) or not mask_seconds


@pytest.mark.parametrize("rule", [RULE, FORCING])
def test_resumed_stream_continues_under_its_constraint(tmp_path: Path, rule: Constraint) -> None:
    with running(tmp_path, delay=0.005) as engine:
        peer = Reader(engine.address)
        answer = expected([5, 6], 9, rule)
        assert len(answer) > 4
        peer.submit(1, [5, 6], 9, constraint=rule, resume_token="t", owner="me")
        peer.until_tokens(1, 2)
        peer.send(m.Cancel(1))
        peer.send(m.Resume(2, "t", 2, "me", None))
        while not isinstance(message := peer.receive(), m.Resumed):
            peer.keep(message)
        finish = message.record.finish or peer.until_end(2)[2].finish
        assert finish
        assert message.record.token_ids + peer.tokens(2) == answer


def test_samples_share_one_compilation(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer, arrival = Reader(engine.address), time.monotonic()
        for index in range(3):
            peer.send(m.Submit(index, m.Request(
                "call", [5, 6, 7], 9, arrival, SamplingParams(seed=index), index=index, samples=3, constraint=RULE)))
        peer.until_end(0, 1, 2)
        assert [peer.tokens(key) for key in range(3)] == [expected([5, 6, 7], 9)] * 3
        assert engine.compiler
        assert len(engine.compiler.compilations) == 1


def test_matcher_beyond_its_limits_ends_its_request(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer, before = Reader(engine.address), failures()
        peer.submit(1, [5, 6], 9, constraint=Constraint("grammar", "heavy 3"))
        peer.submit(2, [5, 6], 9, constraint=RULE)
        ends = peer.until_end(1, 2)
        assert ends[1].error
        assert ends[1].error[:2] == ("QueueFull", "grammar: cannot be followed within limits: too many items")
        assert peer.tokens(2) == expected([5, 6], 9)
        assert failures() == [before[0], before[1] + 1, before[2]]


def test_panic_of_the_library_ends_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of a library in Rust is a BaseException. The thread of the masks survives it."""
    fill = FakeMatcher.fill

    def fill_or_panic(self: FakeMatcher, bits: npt.NDArray[np.int32]) -> None:
        if len(self.tokens) == 2 and self._longest == 8:
            raise BaseException("index out of bounds")
        fill(self, bits)

    monkeypatch.setattr(FakeMatcher, "fill", fill_or_panic)
    with running(tmp_path) as engine:
        peer = Reader(engine.address)
        peer.submit(1, [5, 6], 9, constraint=Constraint("regex", "3 8"))
        error = peer.until_end(1)[1].error
        assert error
        assert error[:2] == ("InternalError", "regex: the matcher failed")
        peer.submit(2, [5, 6], 9, constraint=RULE)
        assert peer.until_end(2)[2].finish
        assert peer.tokens(2) == expected([5, 6], 9)
