"""Which requests run while some are in quarantine."""

from __future__ import annotations

import pytest

from npuserve.service.engine.crash_tracker import CLEAR_TOKENS
from npuserve.service.scheduling.quarantine import MAX_QUARANTINE_STEPS, QUARANTINE_TOKENS, Quarantine
from npuserve.service.scheduling.sequence import State
from tests.service.scheduling.stepwise import SchedulerHarness


def test_quarantine_without_requests_lets_all_run() -> None:
    quarantine = Quarantine()
    assert not quarantine
    assert quarantine.may_run(7)
    quarantine.count_tokens(7, 1)
    quarantine.release(7)


def test_quarantine_runs_most_crashes_first_and_one_at_a_time() -> None:
    quarantine = Quarantine()
    for number, deaths in enumerate([1, 2, 1]):
        quarantine.add(number, deaths, QUARANTINE_TOKENS)
    for number in (1, 0, 2):
        for _ in range(QUARANTINE_TOKENS):
            assert [n for n in range(4) if quarantine.may_run(n)] == [number]
            quarantine.count_tokens(number, 1)
    assert not quarantine
    assert quarantine.may_run(3)


@pytest.mark.parametrize(("count", "tokens", "size"), [
    (128, QUARANTINE_TOKENS, 1), (129, QUARANTINE_TOKENS, 2), (33, 104, 9), (9, 104, 3),
    (2, CLEAR_TOKENS + QUARANTINE_TOKENS, 1), (33, CLEAR_TOKENS + QUARANTINE_TOKENS, 17)])
def test_quarantine_group_size_bounds_the_total_steps(count: int, tokens: int, size: int) -> None:
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


def test_quarantined_request_runs_alone_and_blocks_no_other_while_it_is_paused() -> None:
    harness = SchedulerHarness()
    suspect, other = harness.add([1, 2], 9), harness.add([3, 4], 9)
    harness.scheduler.isolate(suspect, 1, QUARANTINE_TOKENS)
    for _ in range(QUARANTINE_TOKENS - 1):
        assert [row.request_id for row in harness.tick().rows] == [suspect.id]
    harness.pause(suspect)
    assert not harness.scheduler.quarantine
    while other.id in harness.live:
        assert [row.request_id for row in harness.tick().rows] == [other.id]
    harness.unpause(suspect)
    harness.finish()
    for sequence in (suspect, other):
        harness.check_answer(sequence)


def test_quarantined_request_waits_for_steps_of_others_and_ends_after_its_tokens() -> None:
    harness = SchedulerHarness(depth=2)
    other = harness.add([3, 4], 9)
    harness.plan()
    suspect = harness.add([1, 2], 9)
    harness.scheduler.isolate(suspect, 1, QUARANTINE_TOKENS)
    assert harness.plan().rows == []
    harness.collect()
    while harness.scheduler.quarantine:
        assert [row.request_id for row in harness.tick().rows] == [suspect.id]
    assert suspect.num_generated_tokens == QUARANTINE_TOKENS
    while other.num_generated_tokens < 2:
        harness.tick()
    assert suspect.id in harness.live
    harness.finish()


def test_quarantined_group_is_admitted_one_request_a_step() -> None:
    harness = SchedulerHarness()
    sequences = [harness.add([number], 9) for number in range(4)]
    for sequence in sequences:
        harness.scheduler.isolate(sequence, 1, MAX_QUARANTINE_STEPS)
    assert [len(harness.tick().rows) for _ in range(3)] == [1, 2, 2]
    harness.finish()


def test_quarantined_request_has_no_drafts() -> None:
    harness = SchedulerHarness(drafts="right")
    suspect = harness.add([1, 2], 3 * QUARANTINE_TOKENS)
    harness.scheduler.isolate(suspect, 1, 2 * QUARANTINE_TOKENS)
    while harness.scheduler.quarantine:
        assert all(row.samples == 1 for row in harness.tick().rows)
    harness.finish()
    assert suspect.num_drafted
