"""Steps that are planned before the one before is applied."""

from __future__ import annotations

import pytest

from npuserve.npu.step import PENDING
from tests.service.scheduling.stepwise import House


def test_preemption_waits_for_steps_in_flight() -> None:
    house = House(num_blocks=12, block_size=1, budget=2, depth=2)
    first = house.add([1, 1], 8)
    house.plan()
    house.collect()
    second = house.add([2] * 8, 4)

    def plan() -> list[tuple[int, int]]:
        return [(row.request_id, len(row.token_ids)) for row in house.plan().rows]

    assert plan() == [(0, 1), (1, 1)]  # second has blocks for its whole prompt
    assert plan() == [(0, 1), (1, 1)]
    assert house.blocks.counts.free == 0
    house.collect()
    assert plan() == []  # the first asks for a block: the second gets no further row, and is in flight yet
    assert second.in_flight
    house.collect()
    assert house.scheduler.preemptions == 0
    assert plan() == [(0, 1)]
    assert house.scheduler.preemptions == 1
    assert second.waits
    house.finish()
    house.check_answer(first)
    house.check_answer(second)


def test_a_victim_in_flight_gets_no_further_row() -> None:
    """The first needs a block while the last has room in its own for some steps more."""
    house = House(num_blocks=4, block_size=8, depth=2, prefix_cache=False)
    first, last = house.add([1] * 8, 20), house.add([2] * 4, 20)
    rows = []
    while not house.scheduler.preemptions:
        rows.append([row.request_id for row in house.tick().rows])
    assert len(last.token_ids) < 16
    assert rows == [[first.id, last.id]] * 9 + [[], [first.id]]
    house.finish()
    house.check_answer(first)
    house.check_answer(last)


def test_a_token_in_flight_is_computed_as_pending() -> None:
    house = House(depth=2)
    sequence = house.add([1, 2, 3], 4)
    steps = [house.plan(), house.plan()]
    assert [(r.token_ids, r.start, r.samples) for s in steps for r in s.rows] == [
        ([1, 2, 3], 0, True), ([PENDING], 3, True)]
    house.collect()
    assert house.tokens[sequence.id] == sequence.token_ids[3:]
    assert house.plan().rows[0].token_ids == [PENDING]
    house.finish()
    house.check_answer(sequence)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_no_step_passes_max_tokens(max_tokens: int) -> None:
    house = House(depth=2)
    sequence = house.add([1, 2, 3], max_tokens)
    steps = []
    while house.live:
        steps.append(house.tick())
    assert sum(len(step.rows) for step in steps) == max_tokens
    house.check_answer(sequence)


def test_an_end_is_known_one_step_late_and_its_row_is_dropped() -> None:
    house = House(depth=2)
    first = house.add([1, 2, 3], 9)
    house.finish()
    ending = house.tokens[first.id][2]
    again = house.add([1, 2, 3], 9, eos_token_ids=frozenset([ending]))
    other = house.add([4, 4], 9)
    while again.id in house.live:
        house.tick()
    assert house.flying
    assert again.id in [row.request_id for row in house.flying[0][0].rows]
    assert again.block_ids == []  # already given back
    house.finish()
    house.check_answer(again)
    house.check_answer(other)


def test_blocks_of_a_request_in_flight_go_to_the_next_at_once() -> None:
    """Its row in flight writes before the new owner's, which therefore stands."""
    house = House(num_blocks=4, block_size=2, depth=2, prefix_cache=False)
    gone = house.add([1, 2, 3], 5)
    house.plan()
    house.collect()
    step = house.plan()
    held = set(step.rows[0].block_ids)
    house.cancel(gone)
    heir = house.add([4, 5, 6, 0, 1], 4)
    step = house.plan()
    assert held & set(step.rows[0].block_ids)
    assert step.ended == [gone.id]
    house.finish()
    house.check_answer(heir)


def test_others_share_a_block_when_the_step_that_filled_it_is_applied() -> None:
    house = House(block_size=2, depth=2)
    house.add([1, 2, 3, 4, 5], 9)
    house.plan()
    second = house.add([1, 2, 3, 4, 6], 9)
    third = house.add([1, 2, 3, 4, 6], 9)
    assert [row.start for row in house.plan().rows] == [5, 0, 0]
    house.collect()
    fourth = house.add([1, 2, 3, 4, 6], 9)
    assert [row.start for row in house.plan().rows][-1] == 4
    house.collect()
    house.finish()
    for sequence in (second, third, fourth):
        house.check_answer(sequence)
