"""Requests that are paused because their readers are slow."""

from __future__ import annotations

import pytest

from npuserve.service.errors import QueueFull
from npuserve.service.scheduling.latency_estimator import MIN_MARGIN_SECONDS
from npuserve.service.scheduling.sequence import State
from tests.service.scheduling.stepwise import TICK, SchedulerHarness, crowded


def test_paused_request_gets_no_row_and_continues_later() -> None:
    harness = SchedulerHarness()
    slow, other = harness.add([1, 2, 3], 20), harness.add([4, 5, 6], 20)
    for _ in range(3):
        harness.tick()
    harness.pause(slow)
    made = len(slow.token_ids)
    for _ in range(5):
        assert [row.request_id for row in harness.tick().rows] == [other.id]
    assert (len(slow.token_ids), not slow.holds_blocks, harness.scheduler.num_paused) == (made, False, 1)
    assert slow.block_ids
    harness.unpause(slow)
    assert [row.start for row in harness.tick().rows] == [made - 1, other.num_computed_tokens - 1]
    harness.finish()
    harness.check_answer(slow)
    harness.check_answer(other)
    assert harness.scheduler.preemptions == 0


def test_paused_requests_count_in_the_queue_limit() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_queue=1)
    slow = harness.add([1, 2, 3], 5)
    harness.tick()
    harness.pause(slow)
    harness.add([1], 5)
    with pytest.raises(QueueFull):
        harness.add([2], 5)
    harness.unpause(slow)
    harness.finish()


def test_repeated_pauses_and_unpauses_change_nothing() -> None:
    harness = SchedulerHarness(max_num_seqs=1)
    slow = harness.add([1, 2, 3], 9)
    harness.tick()
    for _ in range(2):
        harness.pause(slow)
    assert (slow.state, harness.scheduler.num_paused) == (State.PAUSED, 1)
    for _ in range(2):
        harness.unpause(slow)
    assert (slow.state, harness.scheduler.num_paused) == (State.UNPAUSED, 1)
    harness.pause(slow)
    assert slow.state is State.PAUSED
    harness.unpause(slow)
    harness.finish()
    harness.check_answer(slow)
    assert harness.scheduler.preemptions == 0


def test_paused_requests_do_not_count_as_running() -> None:
    harness = SchedulerHarness(max_num_seqs=2)
    slow = [harness.add([1, 2, 3], 20), harness.add([1, 2], 20)]
    harness.tick()
    for sequence in slow:
        harness.pause(sequence)
    others = [harness.add([4, 5], 30) for _ in range(3)]
    assert [row.request_id for row in harness.tick().rows] == [others[0].id, others[1].id]
    harness.unpause(slow[0])  # max_num_seqs requests run: it is preempted, and admitted next
    harness.tick()
    assert not slow[0].holds_blocks
    assert not others[2].holds_blocks
    harness.unpause(slow[1])
    harness.finish()
    assert harness.started[others[2].id] > 0
    for sequence in (*slow, *others):
        harness.check_answer(sequence)


def test_paused_requests_are_preempted_first_whatever_their_age() -> None:
    harness = crowded(prefix_cache=False)
    first, second = harness.add([1, 1, 1], 8), harness.add([2, 2, 2], 8)
    harness.tick()
    harness.pause(first)
    while first.holds_blocks:
        assert harness.scheduler.preemptions == 0
        harness.tick()
        if second.id not in harness.live:
            second = harness.add([2, 2, 2], 8)
    assert not harness.scheduler.num_waiting
    harness.unpause(first)
    assert harness.scheduler.num_waiting == 1
    harness.finish()
    harness.check_answer(first)


def test_admission_preempts_paused_requests() -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=4, prefix_cache=False)
    slow = [harness.add([n] * 9, 4) for n in (1, 2)]
    harness.tick()
    for sequence in slow:
        harness.pause(sequence)
    big = harness.add([3] * 20, 4)
    assert [row.request_id for row in harness.tick().rows] == [big.id]
    assert [sequence.holds_blocks for sequence in slow] == [True, False]  # the youngest, and no more than needed
    for sequence in slow:
        harness.unpause(sequence)
    harness.finish()
    for sequence in (*slow, big):
        harness.check_answer(sequence)


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_cancel_ends_a_paused_request(when: str) -> None:
    harness = crowded(prefix_cache=False)
    other, slow = harness.add([1, 1, 1], 8), harness.add([2, 2, 2], 8)
    if when != "waiting":
        harness.tick()
    harness.pause(slow)
    while when == "preempted" and slow.holds_blocks:
        harness.tick()
    harness.cancel(slow)
    harness.scheduler.check_integrity()
    harness.unpause(slow)
    harness.pause(slow)
    harness.finish()
    harness.check_answer(other)


def test_pause_counts_as_queue_time() -> None:
    harness = SchedulerHarness()
    slow = harness.add([1, 2, 3], 6)
    for _ in range(3):
        harness.tick()
    harness.pause(slow)
    harness.now += 50
    harness.unpause(slow)
    harness.finish()
    harness.check_answer(slow)
    assert slow.timer.timing.queue >= 50
    assert harness.scheduler._estimator.answer_seconds < 1
    assert harness.scheduler._estimator.token_gap < 1


def test_admission_that_preempts_a_paused_request_with_duplicates_shares_the_other_blocks() -> None:
    """Two requests compute the same prompt at once. The first one's blocks are shared until it is preempted."""
    harness = SchedulerHarness(num_blocks=8, block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1]
    first, second = harness.add([*prompt, 2], 12), harness.add([*prompt, 3], 12)
    harness.tick()
    harness.tick()
    harness.pause(first)
    harness.tick()
    harness.tick()
    third = harness.add([*prompt, 4], 2)
    harness.tick()
    assert third.block_ids[:2] == second.block_ids[:2]
    harness.unpause(first)
    harness.finish()


def test_paused_request_expires() -> None:
    harness = SchedulerHarness()
    slow = harness.add([1, 2, 3], 60, deadline=harness.now + 0.5)
    for _ in range(3):
        harness.tick()
    harness.pause(slow)
    next_moment = harness.scheduler.deadlines.next(harness.now)
    assert next_moment == pytest.approx(slow.deadline - MIN_MARGIN_SECONDS, abs=TICK)
    harness.now += 0.5
    harness.tick()
    harness.tick()
    assert harness.dropped == {slow.id: None}
    harness.finish()
