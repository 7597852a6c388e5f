"""The engine's loop with two steps in flight compared with one: equal answers, each ended once, nothing leaked. The
socket is scripted, so that the test controls each iteration of the loop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams, Step, StepResult
from npuserve.service.engine import loop
from npuserve.service.engine.loop import LATE_SECONDS, Engine
from npuserve.service.ipc import messages as m
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Progress
from npuserve.service.speculation.speculator import Speculator
from tests.service.engine.test_loop import MODEL
from tests.support.counting_runner import FakeRunner

FRONTEND = b"1"
BLOCK_SIZE = 4


@dataclass
class Script:
    """messages: iteration of the loop -> its messages. The engine stops when all were received and it is idle."""

    messages: dict[int, list[m.ToEngine]]
    turn: int = 0
    last: int = 0
    outputs: dict[int, list[m.Output]] = field(default_factory=dict)
    engine: Engine | None = None

    def receive(self, timeout: float) -> list[tuple[bytes, m.ToEngine]]:
        assert self.engine
        found = self.messages.pop(self.turn, [])
        self.turn += 1
        if timeout:
            assert not self.engine._pipeline, "the engine sleeps with a step in flight"
            if not self.messages and not found:
                self.engine.stop()
        assert self.turn < 5000, "the loop never ends"
        return [(FRONTEND, message) for message in found]

    def wake(self) -> None:
        """Nothing: no constraint is compiled."""

    def has_input(self) -> bool:
        return self.turn in self.messages

    def send(self, frontend: bytes, message: m.ToFrontend) -> bool:
        if isinstance(message, m.Outputs):
            for output in message.outputs:
                made = self.outputs.setdefault(output.key, [])
                assert not made or not (made[-1].finish or made[-1].error), "an output after the last"
                made.append(output)
        return True


def answers(script: Script) -> dict[int, tuple[list[int], list[int], str | None]]:
    """Return key -> (tokens, tokens of the logprobs, reason of the end or name of the error)."""
    found = {}
    for key, outputs in script.outputs.items():
        end = outputs[-1]
        how = end.finish.reason if end.finish else end.error[0] if end.error else None
        found[key] = ([token for output in outputs for token in output.token_ids],
                      [report.token_id for output in outputs for report in output.logprobs or []], how)
    return found


def serve(messages: dict[int, list[m.ToEngine]], double_buffering: bool, pool: int, seats: int, budget: int) -> Script:
    blocks = BlockManager(pool, BLOCK_SIZE)
    scheduler = Scheduler(
        blocks, max_num_seqs=seats, max_num_batched_tokens=budget, max_queue=2, aging_seconds=1.0)
    script = Script({turn: list(said) for turn, said in messages.items()})
    runner = FakeRunner(vocabulary=60, block_size=BLOCK_SIZE)
    engine = script.engine = Engine(
        scheduler, runner, script, MODEL, 7, double_buffering)  # type: ignore[arg-type]
    engine.run()
    assert not engine.registry.live
    engine.registry.check_integrity()
    assert not engine._pipeline
    assert blocks.counts.used == 0, "blocks leaked"
    scheduler.check_integrity()
    return script


@st.composite
def scripts(draw: st.DrawFn) -> dict[int, list[m.ToEngine]]:
    messages: dict[int, list[m.ToEngine]] = {0: [m.Hello()]}
    for key in range(draw(st.integers(1, 9))):
        turn = draw(st.integers(0, 25))
        start, length = draw(st.integers(0, 59)), draw(st.integers(1, 14))
        sampling = SamplingParams(
            min_tokens=draw(st.sampled_from([0, 0, 5])), logprobs=draw(st.sampled_from([None, 0])))
        request = m.Request(
            f"r{key}", [(start + i) % 60 for i in range(length)], draw(st.sampled_from([1, 2, 9, 20])), float(key),
            sampling, priority=draw(st.sampled_from([0, 0, -3])),
            eos_token_ids=frozenset(draw(st.lists(st.integers(0, 59), max_size=5))))
        messages.setdefault(turn, []).append(m.Submit(key, request))
        end = draw(st.sampled_from([None] * 5 + ["cancel", "stop", "abort"]))
        if end:
            message = {
                "cancel": m.Cancel(key, sent=time.monotonic()), "stop": m.Cancel(key, keep=1, sent=time.monotonic()),
                "abort": m.Abort(key, f"r{key}")}[end]
            messages.setdefault(turn + draw(st.integers(0, 12)), []).append(message)
    return messages


@given(messages=scripts(), pool=st.sampled_from([9, 12, 64]), seats=st.sampled_from([8, 3, 1]),
       budget=st.sampled_from([64, 8, 3]))
def test_answers_are_equal_with_one_step_in_flight_and_with_two(
    messages: dict[int, list[m.ToEngine]], pool: int, seats: int, budget: int
) -> None:
    plain, overlapped = (answers(serve(messages, on, pool, seats, budget)) for on in (False, True))
    ended_by_client = {said.key for turn in messages.values() for said in turn if isinstance(said, m.Cancel)} | {
        said.call for turn in messages.values() for said in turn if isinstance(said, m.Abort)}
    for key in plain.keys() | overlapped.keys():
        one, other = plain.get(key, ([], [], None)), overlapped.get(key, ([], [], None))
        if key in ended_by_client or "QueueFull" in (one[2], other[2]):  # the moment of the end may differ
            for mine, its in zip(one[:2], other[:2], strict=True):
                both = min(len(mine), len(its))
                assert mine[:both] == its[:both]
        else:
            assert one == other
            assert one[2]


class Recorder(FakeRunner):
    """seen: (what, steps launched and not collected) in order."""

    def __init__(self) -> None:
        super().__init__(block_size=BLOCK_SIZE)
        self.seen: list[tuple[str, int]] = []

    def launch(self, step: Step) -> tuple[StepResult, float]:
        self.seen.append(("launch", len(self._flying)))
        return super().launch(step)

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        self.seen.append(("collect", len(self._flying)))
        return super().collect(handle)


def scheduler_of(drafting: Drafting | None = None) -> Scheduler:
    return Scheduler(BlockManager(64, BLOCK_SIZE), max_num_seqs=4, max_num_batched_tokens=64, max_queue=2,
                     aging_seconds=1.0, drafting=drafting)


def calls_of(double_buffering: bool) -> list[tuple[str, int]]:
    scheduler = scheduler_of()
    script = Script({0: [m.Submit(1, m.Request("r", [1, 2], 4, 0.0))]})
    runner = Recorder()
    script.engine = Engine(scheduler, runner, script, MODEL, 7, double_buffering)  # type: ignore[arg-type]
    script.engine.run()
    return runner.seen


def test_double_buffering_launches_before_it_collects() -> None:
    assert calls_of(True) == [("launch", 0), *[("launch", 1), ("collect", 2)] * 3, ("collect", 1)]


def test_no_double_buffering_has_one_step_in_flight() -> None:
    assert calls_of(False) == [("launch", 0), ("collect", 1)] * 4


class DraftingRecorder(Recorder):
    """Runner that drafts right tokens."""

    def launch(self, step: Step) -> tuple[StepResult, float]:
        launched = super().launch(step)
        for row in step.rows:
            last = self._known[row.request_id].tokens[-1]
            launched[0].drafts[row.request_id] = [last + 1 + number for number in range(row.predicts)]
        return launched


@dataclass
class Recorded(Script):
    """Script that records what is sent among the calls of the runner."""

    runner: DraftingRecorder = field(default_factory=DraftingRecorder)

    def send(self, frontend: bytes, message: m.ToFrontend) -> bool:
        if isinstance(message, m.Outputs) and (tokens := sum(len(output.token_ids) for output in message.outputs)):
            self.runner.seen.append(("send", tokens))
        return super().send(frontend, message)


def recorded(
    messages: dict[int, list[m.ToEngine]], *, drafts: bool, double_buffering: bool
) -> list[tuple[str, int]]:
    """Return the calls of the runner and what is sent."""
    drafting = Drafting(Speculator("mtp", recomputes=False, depth=1), 8) if drafts else None
    script = Recorded(messages)
    script.engine = Engine(
        scheduler_of(drafting), script.runner, script, MODEL, 7, double_buffering)  # type: ignore[arg-type]
    script.engine.run()
    return script.runner.seen


FIRST_STEPS = {False: [("launch", 0)], True: [("launch", 0), ("launch", 1), ("collect", 2), ("send", 1)]}
"""Calls before those of a step that was planned with none in flight, without drafts and with drafts: these follow the
first token."""


@pytest.mark.parametrize(("drafts", "sent"), [(False, [1, 1, 1, 1]), (True, [1, 2, 2, 2, 1])])
def test_step_is_launched_before_the_output_of_the_one_it_waits_for(drafts: bool, sent: list[int]) -> None:
    """The device would wait for the messages."""
    count = 9 if drafts else 4
    expected = list(FIRST_STEPS[drafts])
    for tokens in sent[:-1]:
        expected += [("collect", 1), ("launch", 0), ("send", tokens)]
    messages: dict[int, list[m.ToEngine]] = {0: [m.Submit(1, m.Request("r", [1, 2], count, 0.0))]}
    seen = recorded(messages, drafts=drafts, double_buffering=drafts)
    assert seen == [*expected, ("collect", 1), ("send", sent[-1])]


@pytest.mark.parametrize(("drafts", "turn", "tokens"), [(False, 1, 2), (True, 3, 3)])
def test_messages_that_arrived_during_a_step_are_read_before_the_next(drafts: bool, turn: int, tokens: int) -> None:
    """The prompt of the new request is in the next step, and the output does not wait for its launch."""
    messages: dict[int, list[m.ToEngine]] = {
        at: [m.Submit(at, m.Request(f"r{at}", [1, 2], 9, 0.0))] for at in (0, turn)}
    seen = recorded(messages, drafts=drafts, double_buffering=drafts)
    first = [*FIRST_STEPS[drafts], ("collect", 1), ("send", 1), ("launch", 0), ("collect", 1), ("launch", 0)]
    assert seen[: len(first) + 1] == [*first, ("send", tokens)]


def test_output_is_sent_before_the_next_launch_while_another_step_is_in_flight() -> None:
    messages: dict[int, list[m.ToEngine]] = {0: [m.Submit(1, m.Request("r", [1, 2], 4, 0.0))]}
    seen = recorded(messages, drafts=False, double_buffering=True)
    assert seen == [("launch", 0), *[("launch", 1), ("collect", 2), ("send", 1)] * 3, ("collect", 1), ("send", 1)]


def test_outputs_are_sent_before_masks_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = SimpleNamespace(matcher=None)
    engine = object.__new__(Engine)
    for name, made in {"_pipeline": [], "_is_stopping": False, "_socket": Script({})}.items():
        monkeypatch.setattr(engine, name, made, raising=False)
    assert engine._launches_before_output([Progress(sequence, [5])])  # type: ignore[arg-type]
    sequence.matcher = object()
    assert not engine._launches_before_output([Progress(sequence, [5])])  # type: ignore[arg-type]


def test_stop_applies_the_steps_in_flight() -> None:
    scheduler = scheduler_of()
    script = Script({0: [m.Submit(1, m.Request("r", [1, 2], 40, 0.0))]})
    runner = Recorder()
    engine = script.engine = Engine(scheduler, runner, script, MODEL, 7)  # type: ignore[arg-type]
    launch = runner.launch

    def stopping(step: Step) -> tuple[StepResult, float]:
        if len(runner.seen) > 6:
            engine.stop()
        return launch(step)

    runner.launch = stopping  # type: ignore[method-assign]
    engine.run()
    assert not runner._flying
    sequence = next(iter(engine.registry.live.values()))
    assert sequence.num_steps_in_flight == sequence.num_pending_tokens == 0


@pytest.mark.parametrize(("expected", "needs_tokens", "end"), [
    (0.008, True, 0.006), (0.1, True, 0.095), (0.1, False, 0.1 + LATE_SECONDS), (0.0, True, LATE_SECONDS),
    (0.003, True, 0.0)])
def test_loop_stops_reading_before_the_end_of_a_step_whose_tokens_the_next_one_needs(
    monkeypatch: pytest.MonkeyPatch, expected: float, needs_tokens: bool, end: float
) -> None:
    """The step never ends. expected: its expected seconds. end: when the engine waits for it without reading."""
    now = 0.0

    def receive(timeout: float) -> None:
        nonlocal now
        assert timeout > 0
        now += timeout

    scheduler = SimpleNamespace(
        expected_seconds=expected, loads=SimpleNamespace(has_loads=False, poll=lambda: None))
    engine = object.__new__(Engine)
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    monkeypatch.setattr(engine, "receive", receive)
    for name, made in {
        "_scheduler": scheduler, "_outbox": SimpleNamespace(flush=lambda: None),
        "_runner": SimpleNamespace(ready=lambda handle: False),
        "_pipeline": SimpleNamespace(oldest=SimpleNamespace(handle=None), oldest_began=0.0, needs_tokens=needs_tokens),
    }.items():
        monkeypatch.setattr(engine, name, made, raising=False)
    engine._receive_during_step()
    assert end <= now <= end + max(expected / 8, 0.02 if end > 1 else 0.001)


def test_loop_polls_loads_from_host_memory_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step takes 100 ms, and loads advance every millisecond."""
    now = 0.0
    polls = 0

    def receive(timeout: float) -> None:
        nonlocal now
        now += timeout

    def poll_loads() -> None:
        nonlocal polls
        polls += 1

    engine = object.__new__(Engine)
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    monkeypatch.setattr(engine, "receive", receive)
    for name, made in {
        "_scheduler": SimpleNamespace(
            expected_seconds=0.1, loads=SimpleNamespace(has_loads=True, poll=poll_loads)),
        "_outbox": SimpleNamespace(flush=lambda: None), "_runner": SimpleNamespace(ready=lambda handle: now >= 0.1),
        "_pipeline": SimpleNamespace(oldest=SimpleNamespace(handle=None), oldest_began=0.0, needs_tokens=False),
    }.items():
        monkeypatch.setattr(engine, name, made, raising=False)
    engine._receive_during_step()
    assert 90 <= polls <= 110
