"""Positions of checkpoints in a prompt."""

from __future__ import annotations

import pytest

from npuserve.service.scheduling.checkpoints import Spacing, checkpoint_positions
from npuserve.service.structured_output.constraint import Constraint
from tests.service.scheduling.stepwise import SchedulerHarness

END = 9


def positions(
    length: int, ends: tuple[int, ...] = (), start: int = 0, parting: int = 0, middle: int = 1000
) -> list[int]:
    """Return the positions with blocks of 4 tokens. ends: numbers of tokens after which a message ends."""
    prompt = [1] * length
    for end in ends:
        prompt[end - 1] = END
    return checkpoint_positions(prompt, start, parting, 4, Spacing(8, middle), frozenset([END]))


@pytest.mark.parametrize(("length", "expected"), [(1, []), (8, []), (9, [8]), (12, [8]), (13, [12]), (103, [100])])
def test_prompt_without_messages_has_one_at_its_last_block_boundary(length: int, expected: list[int]) -> None:
    assert positions(length) == expected


def test_first_and_last_message_have_one_at_the_block_boundary_before_their_end() -> None:
    assert positions(103, (22, 40, 59, 80)) == [20, 80, 100]


def test_end_of_the_prompt_shortly_after_the_last_message_is_left_out() -> None:
    assert positions(103, (22, 97)) == [20, 96]


def test_messages_in_the_middle_have_one_for_each_distance() -> None:
    assert positions(103, (22, 40, 59, 80), middle=20) == [20, 40, 80, 100]
    assert positions(103, (22, 40, 59, 80), middle=18) == [20, 40, 80, 100]
    assert positions(103, (22, 41, 61, 80), middle=20) == [20, 40, 60, 80, 100]


def test_parting_of_an_earlier_prompt_has_one() -> None:
    assert positions(103, parting=48) == [48, 100]
    assert positions(103, parting=96) == [96]


def test_computed_tokens_have_none() -> None:
    assert positions(103, (22, 40, 59, 80), start=40, parting=40) == [56, 80, 100]
    assert positions(103, start=100, parting=100) == []


def test_prompt_that_ends_with_its_last_message_leaves_a_token_to_compute() -> None:
    assert positions(100, (100,)) == [96]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("min_forced", [0, 2])
@pytest.mark.parametrize("constraint", [None, Constraint("regex", "1 30"), Constraint("regex", "forced 3 30")])
def test_next_turn_continues_the_state_within_the_answer(
    depth: int, min_forced: int, constraint: Constraint | None
) -> None:
    harness = SchedulerHarness(depth=depth, num_slots=12, spacing=Spacing(1, 100), min_forced=min_forced)
    first = harness.add([1, 2, 3], 30, constraint=constraint)
    while harness.live or harness.pipeline:
        harness.tick()
    harness.check_answer(first)
    boundary = (len(first.token_ids) - 1) // harness.block_size * harness.block_size
    second = harness.add([*first.token_ids, 5, 6])
    while harness.live or harness.pipeline:
        harness.tick()
    harness.check_answer(second)
    assert boundary > len(first.request.prompt_ids)
    assert second.cached_tokens >= boundary - (0 if constraint is None else harness.block_size)
