"""Trials of requests that may have killed the engine: who runs beside whom, and that killers alone are found."""

from __future__ import annotations

import os
import random
import tempfile
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from npuserve.service.engine.crash_tracker import CLEAR_TOKENS, CrashTracker
from npuserve.service.engine.step_log import StepLog, request_hash
from npuserve.service.errors import EngineKiller
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.quarantine import MAX_QUARANTINE_STEPS, QUARANTINE_TOKENS, Quarantine
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import State
from tests.service.scheduling.reference import FakeDevice
from tests.service.scheduling.stepwise import SchedulerHarness

ANSWER = 24


def test_quarantine_without_trials_admits_all() -> None:
    quarantine = Quarantine()
    assert not quarantine
    assert quarantine.may_run(7)
    quarantine.count_token(7)
    quarantine.release(7)


def test_quarantine_most_deaths_are_tried_first_and_one_at_a_time() -> None:
    quarantine = Quarantine()
    for number, deaths in enumerate([1, 2, 1]):
        quarantine.add(number, deaths, QUARANTINE_TOKENS)
    for number in (1, 0, 2):
        for _ in range(QUARANTINE_TOKENS):
            assert [n for n in range(4) if quarantine.may_run(n)] == [number]
            quarantine.count_token(number)
    assert not quarantine
    assert quarantine.may_run(3)


@pytest.mark.parametrize(("count", "tokens", "size"), [
    (128, QUARANTINE_TOKENS, 1), (129, QUARANTINE_TOKENS, 2), (33, 104, 9), (9, 104, 3),
    (2, CLEAR_TOKENS + QUARANTINE_TOKENS, 1), (33, CLEAR_TOKENS + QUARANTINE_TOKENS, 17)])
def test_quarantine_groups_keep_the_steps_of_all_trials_bounded(count: int, tokens: int, size: int) -> None:
    quarantine = Quarantine()
    for number in range(count):
        quarantine.add(number, 1, tokens)
    assert sum(quarantine.may_run(number) for number in range(count)) == size
    assert -(-count // size) * tokens <= max(MAX_QUARANTINE_STEPS, 2 * tokens)


def test_quarantine_of_a_preempted_request_gives_it_no_row() -> None:
    """Two requests of one group run, and the older preempts the younger for a block."""
    harness = SchedulerHarness(num_blocks=6, block_size=2, prefix_cache=False)
    sequences = [harness.add([number] * 3, 8) for number in range(4)]
    for sequence in sequences:
        harness.scheduler.quarantine.add(sequence.id, 1, MAX_QUARANTINE_STEPS)
    while not harness.scheduler.preemptions:
        harness.tick()
    assert sequences[1].state is State.PREEMPTED
    harness.finish()
    for sequence in sequences:
        harness.check_answer(sequence)


class Hunt:
    """Engines, one after the other, each with two steps in flight, over requests of which some kill.

    killers: number -> (where, tokens): "prefill" dies of the prompt, "decode" of a decode row after so many tokens of
    the answer, "life" after so many tokens of each life.
    """

    def __init__(self, folder: str, count: int, killers: dict[int, tuple[str, int]], budget: int, seats: int,
                 answer: int = ANSWER):
        self.answer = answer
        self.path, self.killers, self.budget, self.seats = f"{folder}/steps", killers, budget, seats
        self.made: dict[int, list[int]] = {number: [] for number in range(count)}
        self.failed: set[int] = set()
        self.found = self.lives = 0

    @property
    def left(self) -> list[int]:
        return [n for n, made in self.made.items() if len(made) < self.answer and n not in self.failed]

    def kills(self, number: int, row: object, began: int) -> bool:
        where, tokens = self.killers.get(number, ("", 0))
        made = row.start - 3  # type: ignore[attr-defined]
        if where == "prefill":
            return made < 0
        return bool(where) and row.is_decode and made - (began if where == "life" else 0) >= tokens  # type: ignore[attr-defined]

    def live(self) -> None:
        """One engine, until it dies or there is nothing more to do."""
        def found() -> None:
            self.found += 1

        self.lives += 1
        tracker = CrashTracker(self.path, self.seats, 100, found)
        scheduler = Scheduler(BlockManager(2048, 4), max_num_seqs=self.seats, max_num_batched_tokens=self.budget,
                              max_queue=100, aging_seconds=10)
        device = FakeDevice(2048, 4, salts := {})
        numbers: dict[int, int] = {}
        began = {n: len(made) for n, made in self.made.items()}
        for n in self.left:
            request = Request(f"r{n}", [n % 7, n // 7, 3], self.answer, float(n), output_ids=list(self.made[n]))
            try:
                record = tracker.assess(request, len(request.output_ids))
            except EngineKiller:
                self.failed.add(n)
                continue
            sequence, _ = scheduler.add(request, (b"", n), 0.0)
            if record:
                scheduler.quarantine.add(sequence.id, record.crashes, record.quarantine_tokens)
            salts[sequence.id] = ""
            numbers[sequence.id] = n
        tracker.save()
        flying: deque[tuple[object, object]] = deque()
        for now in range(1, 4000):
            step, _ = scheduler.schedule(float(now))
            scheduler.check_integrity()
            if step.rows:
                tracker.before_launch(step, scheduler.sequence, not flying)
                if any(self.kills(numbers[row.request_id], row, began[numbers[row.request_id]]) for row in step.rows):
                    return
                flying.append((step, device.run(step)))
            elif not flying:
                tracker.mark_idle()
                return
            if len(flying) == 2 or not step.rows:
                for progress in scheduler.apply(*flying.popleft(), float(now)):  # type: ignore[arg-type]
                    self.made[numbers[progress.sequence.id]] += progress.token_ids
        pytest.fail("an engine that never comes to rest")


@given(count=st.integers(1, 40), killers=st.integers(0, 2), seed=st.integers(0, 1 << 20),
       budget=st.sampled_from([8, 24, 256]), seats=st.sampled_from([1, 5, 64]))
def test_killers_alone_are_failed_and_each_after_three_deaths(
    count: int, killers: int, seed: int, budget: int, seats: int
) -> None:
    chance = random.Random(seed)
    faults = [("prefill", 0), ("decode", chance.randint(0, 20)), ("life", chance.randint(0, 2))]
    guilty = {n: chance.choice(faults) for n in chance.sample(range(count), min(killers, count))}
    with tempfile.TemporaryDirectory() as folder:
        hunt = Hunt(folder, count, guilty, budget, seats)
        while hunt.left:
            hunt.live()
            assert hunt.lives < 20
    assert hunt.failed == guilty.keys()
    assert hunt.found == len(guilty)
    assert all(len(made) == ANSWER for n, made in hunt.made.items() if n not in guilty)
    assert hunt.lives <= 1 + 3 * len(guilty)


@pytest.mark.parametrize("tokens", [5, 30, 60])
def test_killer_after_some_tokens_of_each_life_is_found(tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hunt = Hunt(folder, 6, {4: ("life", tokens)}, 256, 64, answer=400)
        while hunt.left:
            hunt.live()
            assert hunt.lives < 8
    assert hunt.failed == {4}
    assert all(len(made) == 400 for n, made in hunt.made.items() if n != 4)


def killed(path: str, among: int, request: Request, tokens: int, others: int = 0) -> None:
    """One life in which the request makes `tokens` and is then in a fatal step with others."""
    tracker = CrashTracker(path, 8, 8)
    tracker.assess(request, tokens - among)
    tracker.save()
    rows = [Row(n, [1], 1, [], True) for n in range(others + 1)]
    requests = [request, *(Request(f"other {n}", [1], 9, 0.0) for n in range(others))]
    new = [NewRequest(row.request_id, [1], [], SamplingParams()) for row in rows]
    tracker.before_launch(Step(rows, new), lambda n: SimpleNamespace(request=requests[n]), True)  # type: ignore[arg-type, return-value]


def test_deaths_at_random_places_blame_nobody(tmp_path: object) -> None:
    """One request alone, and an engine that is killed from outside."""
    path, request, tokens = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0), 0
    for made in (40, 90, 55, 130, 20, 77):
        killed(path, made, request, tokens := tokens + made)
    record = CrashTracker(path, 8, 8).assess(request, tokens)
    assert record
    assert record.crashes == 6


def test_tokens_clear_deaths(tmp_path: object) -> None:
    path, request = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0)
    killed(path, 5, request, 5)
    killed(path, 2, request, 7)
    killed(path, CLEAR_TOKENS, request, 7 + CLEAR_TOKENS)
    record = CrashTracker(path, 8, 8).assess(request, 7 + CLEAR_TOKENS)
    assert record
    assert record.crashes == 1


def test_two_lives_in_a_step_of_several_make_no_killer(tmp_path: object) -> None:
    path, request = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0)
    for _ in range(5):
        killed(path, 0, request, 3, others=1)
    assert CrashTracker(path, 8, 8).assess(request, 3)
    for _ in range(2):
        killed(path, 0, request, 3)
    with pytest.raises(EngineKiller, match="died 7 times"):
        CrashTracker(path, 8, 8).assess(request, 3)


def test_a_death_while_idle_blames_nobody(tmp_path: object) -> None:
    path, request = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0)
    killed(path, 0, request, 3)
    CrashTracker(path, 8, 8).mark_idle()
    assert CrashTracker(path, 8, 8).assess(request, 3) is None


def test_a_second_restore_in_one_life_counts_once(tmp_path: object) -> None:
    path, request = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0)
    killed(path, 0, request, 3)
    tracker = CrashTracker(path, 8, 8)
    for _ in range(4):
        record = tracker.assess(request, 3)
        assert record
        assert record.crashes == 1


def test_a_full_disk_is_logged_and_the_engine_starts(tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    path, request = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0)
    killed(path, 0, request, 3)
    tracker = CrashTracker(path, 8, 8)
    tracker.assess(request, 3)
    os.mkdir(f"{path}.new")  # in the way of the new file
    tracker.save()
    assert "cannot be noted" in caplog.text


def test_step_log_of_the_last_life_is_gone_with_the_first_step_or_pause(tmp_path: object) -> None:
    """Sequence ids begin anew in each life, and must not lead to names of the last one."""
    path, first, second = f"{tmp_path}/steps", Request("a", [1], 9, 0.0), Request("b", [1], 9, 0.0)
    killed(path, 0, first, 3, others=2)
    log = StepLog(path, 8, 8)
    assert request_hash(first) in log.read()
    assert len(log.read()) == 3
    log.clear()
    assert log.read() == frozenset()
    killed(path, 0, second, 3)
    assert StepLog(path, 8, 8).read() == {request_hash(second)}


def test_step_log_holds_the_steps_in_flight_alone(tmp_path: object) -> None:
    log, requests = StepLog(f"{tmp_path}/steps", 8, 4), [Request(f"r{n}", [1], 9, 0.0) for n in range(12)]

    def step(*ids: int, new: tuple[int, ...] = (), ended: tuple[int, ...] = (), is_first: bool = False) -> list[str]:
        rows = [Row(n, [1], 1, [], True) for n in ids]
        begun = [NewRequest(n, [1], [], SamplingParams()) for n in new]
        log.write(Step(rows, begun, list(ended)), lambda n: SimpleNamespace(request=requests[n]), is_first)  # type: ignore[arg-type, return-value]
        names = {request_hash(request): request.request_id for request in requests}
        return sorted(names[name] for name in StepLog(f"{tmp_path}/steps", 8, 4).read())

    assert step(0, 1, new=(0, 1), is_first=True) == ["r0", "r1"]
    assert step(0, 2, new=(2,)) == ["r0", "r1", "r2"]
    assert step(0, 2, ended=(1,)) == ["r0", "r2"]
    assert step(2) == ["r0", "r2"]
    assert step(2) == ["r2"]
    assert step(3, new=(3,), is_first=True) == ["r3"]
    for n in range(4, 12):  # places are given again
        assert step(n, new=(n,), ended=(n - 1,)) == [f"r{n}"]


def test_step_log_of_another_size_or_without_a_file(tmp_path: object) -> None:
    killed(f"{tmp_path}/steps", 0, Request("a", [1], 9, 0.0), 3)
    assert StepLog(f"{tmp_path}/steps", 9, 8).read() == frozenset()
    log = StepLog("", 0, 0)
    log.write(Step([Row(1, [1], 1, [], True)]), lambda n: pytest.fail("not asked"), True)
    log.clear()
    assert log.read() == frozenset()
