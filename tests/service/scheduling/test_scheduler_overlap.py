"""Steps that are planned while another is in flight."""

from __future__ import annotations

import pytest

from npuserve.npu.step import PENDING
from tests.service.scheduling.stepwise import SchedulerHarness


def test_preemption_waits_for_steps_in_flight() -> None:
    harness = SchedulerHarness(num_blocks=12, block_size=1, budget=2, depth=2)
    first = harness.add([1, 1], 8)
    harness.plan()
    harness.collect()
    second = harness.add([2] * 8, 4)

    def plan() -> list[tuple[int, int]]:
        return [(row.request_id, len(row.token_ids)) for row in harness.plan().rows]

    assert plan() == [(0, 1), (1, 1)]  # the second has blocks for its whole prompt
    assert plan() == [(0, 1), (1, 1)]
    assert harness.blocks.counts.free == 0
    harness.collect()
    assert plan() == []  # the first needs a block: the second gets no further row, and is still in flight
    assert second.num_steps_in_flight
    harness.collect()
    assert harness.scheduler.preemptions == 0
    assert plan() == [(0, 1)]
    assert harness.scheduler.preemptions == 1
    assert not second.holds_blocks
    harness.finish()
    harness.check_answer(first)
    harness.check_answer(second)


def test_victim_in_flight_gets_no_further_row() -> None:
    """The first needs a block while the last one's blocks suffice for some more steps."""
    harness = SchedulerHarness(num_blocks=4, block_size=8, depth=2, prefix_cache=False)
    first, last = harness.add([1] * 8, 20), harness.add([2] * 4, 20)
    rows = []
    while not harness.scheduler.preemptions:
        rows.append([row.request_id for row in harness.tick().rows])
    assert len(last.token_ids) < 16
    assert rows == [[first.id, last.id]] * 9 + [[], [first.id]]
    harness.finish()
    harness.check_answer(first)
    harness.check_answer(last)


def test_token_in_flight_is_computed_as_pending() -> None:
    harness = SchedulerHarness(depth=2)
    sequence = harness.add([1, 2, 3], 4)
    steps = [harness.plan(), harness.plan()]
    assert [(r.token_ids, r.start, r.samples) for s in steps for r in s.rows] == [
        ([1, 2, 3], 0, True), ([PENDING], 3, True)]
    harness.collect()
    assert harness.tokens[sequence.id] == sequence.token_ids[3:]
    assert harness.plan().rows[0].token_ids == [PENDING]
    harness.finish()
    harness.check_answer(sequence)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_no_step_passes_max_tokens(max_tokens: int) -> None:
    harness = SchedulerHarness(depth=2)
    sequence = harness.add([1, 2, 3], max_tokens)
    steps = []
    while harness.live:
        steps.append(harness.tick())
    assert sum(len(step.rows) for step in steps) == max_tokens
    harness.check_answer(sequence)


def test_row_after_the_end_of_a_request_is_discarded() -> None:
    harness = SchedulerHarness(depth=2)
    first = harness.add([1, 2, 3], 9)
    harness.finish()
    ending = harness.tokens[first.id][2]
    again = harness.add([1, 2, 3], 9, eos_token_ids=frozenset([ending]))
    other = harness.add([4, 4], 9)
    while again.id in harness.live:
        harness.tick()
    assert harness.pipeline
    assert again.id in [row.request_id for row in harness.pipeline.oldest.step.rows]
    assert again.block_ids == []  # already freed
    harness.finish()
    harness.check_answer(again)
    harness.check_answer(other)


def test_blocks_of_a_request_in_flight_are_reused_at_once() -> None:
    """The row in flight writes before the new owner's row, so the new owner's values remain."""
    harness = SchedulerHarness(num_blocks=4, block_size=2, depth=2, prefix_cache=False)
    gone = harness.add([1, 2, 3], 5)
    harness.plan()
    harness.collect()
    step = harness.plan()
    held = set(step.rows[0].block_ids)
    harness.cancel(gone)
    heir = harness.add([4, 5, 6, 0, 1], 4)
    step = harness.plan()
    assert held & set(step.rows[0].block_ids)
    assert step.ended == [gone.id]
    harness.finish()
    harness.check_answer(heir)


def test_block_is_shared_after_the_step_that_filled_it_is_applied() -> None:
    harness = SchedulerHarness(block_size=2, depth=2)
    harness.add([1, 2, 3, 4, 5], 9)
    harness.plan()
    second = harness.add([1, 2, 3, 4, 6], 9)
    third = harness.add([1, 2, 3, 4, 6], 9)
    assert [row.start for row in harness.plan().rows] == [5, 0, 0]
    harness.collect()
    fourth = harness.add([1, 2, 3, 4, 6], 9)
    assert [row.start for row in harness.plan().rows][-1] == 4
    harness.collect()
    harness.finish()
    for sequence in (second, third, fourth):
        harness.check_answer(sequence)
