"""Search for requests that crash the engine: it finds the killers, and no other request fails."""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from npuserve.service.engine import crash_tracker
from npuserve.service.engine.crash_tracker import (
    CLEAR_TOKENS,
    MIN_CRASHES,
    NEAR_TOKENS,
    CrashRecord,
    CrashTracker,
    StepLog,
    request_hash,
)
from npuserve.service.engine.pipeline import StepPipeline
from npuserve.service.engine.request_registry import RequestRegistry
from npuserve.service.errors import EngineKiller
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.quarantine import QUARANTINE_TOKENS
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.streams.records import Records
from npuserve.service.structured_output.manager import StructuredOutputManager
from tests.service.scheduling.reference import FakeDevice

ANSWER = 24


class Crashes:
    """Successive engines with two steps in flight each, over requests of which some crash the engine.

    killers: number of the request -> (where, tokens). "prefill" crashes in the prompt, "decode" in a decode row after
        `tokens` tokens of the answer, "life" after `tokens` tokens of each life of the engine.
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
        """Run one engine until it crashes or has answered all requests."""
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
                scheduler.isolate(sequence, record.crashes, record.quarantine_tokens)
            salts[sequence.id] = ""
            numbers[sequence.id] = n
        tracker.save()
        pipeline = StepPipeline(scheduler, device, 2, itertools.count(1.0).__next__)
        for _ in range(4000):
            step = pipeline.plan().step
            scheduler.check_integrity()
            if step.rows:
                tracker.before_launch(step, scheduler.sequence, not pipeline)
                if any(self.kills(numbers[row.request_id], row, began[numbers[row.request_id]]) for row in step.rows):
                    return
                pipeline.launch(step)
            elif not pipeline:
                tracker.mark_idle()
                return
            if pipeline.must_collect:
                for progress in pipeline.collect().progress:
                    self.made[numbers[progress.sequence.id]] += progress.token_ids
        pytest.fail("the engine never becomes idle")


@pytest.mark.slow
@given(count=st.integers(1, 40), killers=st.integers(0, 2), seed=st.integers(0, 1 << 20),
       budget=st.sampled_from([8, 24, 256]), seats=st.sampled_from([1, 5, 64]))
def test_crash_tracker_fails_killers_only_each_after_three_crashes(
    count: int, killers: int, seed: int, budget: int, seats: int
) -> None:
    dice = random.Random(seed)
    faults = [("prefill", 0), ("decode", dice.randint(0, 20)), ("life", dice.randint(0, 2))]
    killer_faults = {n: dice.choice(faults) for n in dice.sample(range(count), min(killers, count))}
    with tempfile.TemporaryDirectory() as folder:
        crashes = Crashes(folder, count, killer_faults, budget, seats)
        while crashes.left:
            crashes.live()
            assert crashes.lives < 20
    assert crashes.failed == killer_faults.keys()
    assert crashes.found == len(killer_faults)
    assert all(len(made) == ANSWER for n, made in crashes.made.items() if n not in killer_faults)
    assert crashes.lives <= 1 + 3 * len(killer_faults)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [5, 30, 60])
def test_crash_tracker_finds_a_killer_after_some_tokens_of_each_life(tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        crashes = Crashes(folder, 6, {4: ("life", tokens)}, 256, 64, answer=400)
        while crashes.left:
            crashes.live()
            assert crashes.lives < 8
    assert crashes.failed == {4}
    assert all(len(made) == 400 for n, made in crashes.made.items() if n != 4)


def crash(path: str, made: int, request: Request, tokens: int, others: int = 0) -> None:
    """Run one life in which the request makes `made` of its `tokens` tokens and is then in a fatal step.

    others: number of further requests in that step.
    """
    tracker = CrashTracker(path, 8, 8)
    tracker.assess(request, tokens - made)
    tracker.save()
    rows = [Row(n, [1], 1, [], True) for n in range(others + 1)]
    requests = [request, *(Request(f"other {n}", [1], 9, 0.0) for n in range(others))]
    new = [NewRequest(row.request_id, [1], [], SamplingParams()) for row in rows]
    tracker.before_launch(Step(rows, new), lambda n: SimpleNamespace(request=requests[n]), True)  # type: ignore[arg-type, return-value]


def test_crash_tracker_crashes_at_random_places_fail_no_request(tmp_path: object) -> None:
    """One request runs alone, and the engine is killed from outside."""
    path, request, tokens = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0), 0
    for made in (40, 90, 92, 55, 130, 133, 20):
        crash(path, made, request, tokens := tokens + made)
    record = CrashTracker(path, 8, 8).assess(request, tokens)
    assert record
    assert record.crashes == 7


def test_crash_tracker_forgets_crashes_after_clear_tokens(tmp_path: object) -> None:
    path, request = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0)
    crash(path, 5, request, 5)
    crash(path, 2, request, 7)
    crash(path, CLEAR_TOKENS, request, 7 + CLEAR_TOKENS)
    record = CrashTracker(path, 8, 8).assess(request, 7 + CLEAR_TOKENS)
    assert record
    assert record.crashes == 1


def test_crash_tracker_crashes_beside_others_make_no_killer(tmp_path: object) -> None:
    path, request = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0)
    for _ in range(5):
        crash(path, 0, request, 3, others=1)
    assert CrashTracker(path, 8, 8).assess(request, 3)
    for _ in range(2):
        crash(path, 0, request, 3)
    with pytest.raises(EngineKiller, match="died 7 times"):
        CrashTracker(path, 8, 8).assess(request, 3)


def test_crash_tracker_crash_while_idle_counts_for_no_request(tmp_path: object) -> None:
    path, request = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0)
    crash(path, 0, request, 3)
    CrashTracker(path, 8, 8).mark_idle()
    assert CrashTracker(path, 8, 8).assess(request, 3) is None


def test_crash_tracker_counts_a_second_restore_once(tmp_path: object) -> None:
    path, request = f"{tmp_path}/steps", Request("r", [1], 9999, 0.0)
    crash(path, 0, request, 3)
    tracker = CrashTracker(path, 8, 8)
    for _ in range(4):
        record = tracker.assess(request, 3)
        assert record
        assert record.crashes == 1


def test_crash_tracker_counts_need_no_disk_space_after_the_start(tmp_path: Path) -> None:
    path, counts, request = f"{tmp_path}/steps", tmp_path / "steps.counts", Request("r", [1], 9999, 0.0)
    crash(path, 0, request, 3)
    tracker, state = CrashTracker(path, 8, 8), counts.stat()
    assert state.st_blocks * 512 >= state.st_size
    assert tracker.assess(request, 3)
    tracker.save()
    assert CrashTracker(path, 8, 8)._records == tracker._records != {}
    assert (counts.stat().st_ino, counts.stat().st_size) == (state.st_ino, state.st_size)
    assert {file.name for file in tmp_path.iterdir()} == {"steps", "steps.counts"}


def test_crash_tracker_counts_of_many_requests_fit_their_file(tmp_path: Path) -> None:
    most = 2**32 - 1
    tracker = CrashTracker(f"{tmp_path}/steps", 8, 8)
    record = CrashRecord(most, most, most, most, True, True, most, True)
    tracker._records = {2**64 - number: record for number in range(1, crash_tracker.MAX_RECORDS + 2)}
    tracker._is_changed = True
    tracker.save()
    assert len(CrashTracker(f"{tmp_path}/steps", 8, 8)._records) == crash_tracker.MAX_RECORDS


@pytest.mark.parametrize("damage", [b"\xff" * 16, b"\x08" + bytes(7) + b"\x82" * 8])
def test_crash_tracker_broken_counts_are_dropped(damage: bytes, tmp_path: Path) -> None:
    CrashTracker(f"{tmp_path}/steps", 8, 8)
    with (tmp_path / "steps.counts").open("r+b") as file:
        file.write(damage)
    assert CrashTracker(f"{tmp_path}/steps", 8, 8)._records == {}


def test_step_log_of_the_last_life_is_cleared_before_the_first_step(tmp_path: object) -> None:
    """Sequence ids restart in each life, and must not find the last life's hashes."""
    path, first, second = f"{tmp_path}/steps", Request("a", [1], 9, 0.0), Request("b", [1], 9, 0.0)
    crash(path, 0, first, 3, others=2)
    log = StepLog(path, 8, 8)
    assert request_hash(first) in log.read()
    assert len(log.read()) == 3
    log.clear()
    assert log.read() == frozenset()
    crash(path, 0, second, 3)
    assert StepLog(path, 8, 8).read() == {request_hash(second)}


def test_step_log_holds_only_the_steps_in_flight(tmp_path: object) -> None:
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
    for n in range(4, 12):  # places are reused
        assert step(n, new=(n,), ended=(n - 1,)) == [f"r{n}"]


def test_step_log_with_another_size_or_without_a_file_is_empty(tmp_path: object) -> None:
    crash(f"{tmp_path}/steps", 0, Request("a", [1], 9, 0.0), 3)
    assert StepLog(f"{tmp_path}/steps", 9, 8).read() == frozenset()
    log = StepLog("", 0, 0)
    log.write(Step([Row(1, [1], 1, [], True)]), lambda n: pytest.fail("called"), True)
    log.clear()
    assert log.read() == frozenset()


def test_request_hash_differs_between_samples_of_a_call() -> None:
    first = Request("r", [1], 3, 5.0, samples=2)
    second = msgspec.structs.replace(first, index=1)
    assert request_hash(first) != request_hash(second)
    assert request_hash(second) == request_hash(msgspec.structs.replace(second, output_ids=[1]))


def test_submitted_request_of_a_fatal_step_is_in_quarantine() -> None:
    """Its front end lost the acceptance, and so submits it again."""
    scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=8, max_queue=4, aging_seconds=10)
    tracker, request = CrashTracker(), Request("killer", [1, 2], 3, 0.0)
    tracker._fatal = frozenset({request_hash(request)})
    registry = RequestRegistry(scheduler, Records(10.0), tracker, StructuredOutputManager())
    registry.add(Request("other", [1, 2], 3, 0.0), (b"f", 1), 1.0)
    assert not scheduler.quarantine
    registry.add(request, (b"f", 2), 1.0)
    assert [record.crashes for record in tracker._records.values()] == [1]
    assert scheduler.quarantine


@pytest.mark.parametrize(("has_passed", "made", "quarantine_tokens", "passed"), [
    (False, 20, QUARANTINE_TOKENS, True), (True, 20, 20 + QUARANTINE_TOKENS, True),
    (True, 2, QUARANTINE_TOKENS, True), (False, 2, QUARANTINE_TOKENS, False),
])
def test_quarantine_is_longer_after_the_second_run_that_passed_it(
    has_passed: bool, made: int, quarantine_tokens: int, passed: bool
) -> None:
    before = CrashRecord(1, QUARANTINE_TOKENS, 10, 10, has_passed=has_passed)
    after = CrashTracker()._after_crash(before, 10 + made)
    assert (after.quarantine_tokens, after.has_passed, after.generated_tokens) == (quarantine_tokens, passed, made)


@pytest.mark.parametrize(("repeats", "made", "is_killer"), [
    (0, NEAR_TOKENS, True), (0, NEAR_TOKENS + 1, False), (1, 50 - QUARANTINE_TOKENS, True),
    (0, 50 - QUARANTINE_TOKENS, False), (1, 51 + QUARANTINE_TOKENS, False),
])
def test_killer_crashes_twice_at_the_same_token_or_three_times_after_as_many(
    repeats: int, made: int, is_killer: bool
) -> None:
    tracker = CrashTracker()
    tracker._fatal = frozenset([7])
    before = CrashRecord(MIN_CRASHES - 1, QUARANTINE_TOKENS, 100, 50, is_alone=True, repeats=repeats)
    assert tracker._after_crash(before, 100 + made).is_killer == is_killer
    assert not tracker._after_crash(msgspec.structs.replace(before, crashes=1), 100 + made).is_killer


def test_oldest_crash_records_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_tracker, "MAX_RECORDS", 2)
    tracker = CrashTracker(f"{tmp_path}/steps", 1, 1)
    tracker._records = {key: CrashRecord(1, QUARANTINE_TOKENS, 0, 0) for key in (3, 1, 2)}
    tracker._is_changed = True
    tracker.save()
    assert list(CrashTracker(f"{tmp_path}/steps", 1, 1)._records) == [1, 2]
