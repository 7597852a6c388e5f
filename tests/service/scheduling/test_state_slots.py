"""Slots of fixed state: owners, checkpoints, retracted rows, and random lives of requests."""

from __future__ import annotations

import random

import pytest

from npuserve.service.scheduling.block_manager import BlockManager, BlockTable, IntegrityError
from npuserve.service.scheduling.state_slots import NO_SLOT, SlotTable, StateSlots


def allocated(slots: StateSlots, checkpoint: bytes = b"", *, has_spare: bool = False) -> SlotTable:
    table = SlotTable()
    assert slots.allocate(table, checkpoint, has_spare=has_spare)
    return table


def keep(slots: StateSlots, table: SlotTable, position: int, digest: bytes, *, is_expected: bool = True) -> None:
    """Compute the tokens to a position, make the state there a checkpoint, and continue it."""
    table.plan_row(table.last_position, is_retractable=False)
    slots.take(table, position, is_expected=is_expected)
    slots.register(table, digest)
    table.plan_row(position, is_retractable=False)


def findable(slots: StateSlots, digests: list[bytes]) -> list[bytes]:
    return [digest for digest in digests if slots.has(digest)]


def test_rows_write_in_place_and_begin_without_a_state() -> None:
    table = allocated(StateSlots(2))
    assert table.plan_row(0, is_retractable=False) == (NO_SLOT, table.current)
    assert table.plan_row(5, is_retractable=False) == (NO_SLOT, table.current)


def test_retracted_row_is_computed_again_from_the_state_before_it() -> None:
    table = allocated(StateSlots(2), has_spare=True)
    table.plan_row(0, is_retractable=True)
    before = table.current
    assert table.plan_row(7, is_retractable=True) == (before, table.current)
    assert table.current != before
    assert table.retract() == 7
    assert table.current == before
    assert table.plan_row(7, is_retractable=True) == (before, table.current)


def test_spare_is_lent_once_and_taken_back() -> None:
    slots = StateSlots(2)
    table = allocated(slots)
    assert slots.lend_spare(table)
    assert slots.lend_spare(table)
    assert slots.num_available == 0
    slots.settle(table)
    assert slots.num_available == 1


def test_load_gets_no_slot_that_a_row_of_its_step_reads() -> None:
    slots = StateSlots(2)
    keep(slots, table := allocated(slots), 16, b"a")
    slots.free(table)
    assert slots.find_and_touch([b"a"]) == (1, b"a")
    table = allocated(slots, b"a")
    table.plan_row(16, is_retractable=False)
    assert slots.begin_load() is None
    table.plan_row(17, is_retractable=False)
    assert slots.begin_load() is not None
    assert not slots.has(b"a")


def test_taken_state_is_continued_in_another_slot_and_found_once_registered() -> None:
    slots = StateSlots(3)
    table = allocated(slots)
    table.plan_row(0, is_retractable=False)
    first = table.current
    slots.take(table, 16)
    assert slots.find_and_touch([b"a"]) == (0, b"")
    slots.register(table, b"a")
    assert slots.find_and_touch([b"x", b"a", b"y"]) == (2, b"a")
    assert table.plan_row(16, is_retractable=False) == (first, table.current)
    assert table.plan_row(17, is_retractable=False) == (NO_SLOT, table.current)
    slots.free(table)
    other = allocated(slots, b"a")
    assert other.plan_row(16, is_retractable=False) == (first, other.current)


def test_checkpoint_is_not_found_by_a_request_that_has_too_few_slots_to_continue_it() -> None:
    slots = StateSlots(2)
    table = allocated(slots)
    table.plan_row(0, is_retractable=False)
    slots.take(table, 16)
    slots.register(table, b"a")
    assert slots.find_and_touch([b"a"]) == (1, b"a")
    assert slots.find_and_touch([b"a"], has_spare=True) == (0, b"")


def test_states_taken_by_two_rows_in_flight_are_both_found() -> None:
    slots = StateSlots(3)
    table = allocated(slots)
    for start, end in ((0, 16), (16, 48)):
        table.plan_row(start, is_retractable=False)
        slots.take(table, end)
    slots.register(table, b"a")
    slots.register(table, b"b")
    assert slots.find_and_touch([b"a", b"x", b"b"]) == (3, b"b")
    assert slots.find_and_touch([b"a", b"x"]) == (1, b"a")


def test_state_that_another_request_has_kept_is_continued_there() -> None:
    slots = StateSlots(4)
    tables = [allocated(slots) for _ in range(2)]
    for table in tables:
        table.plan_row(0, is_retractable=False)
        slots.take(table, 16)
    first, second = (table.source for table in tables)
    slots.register(tables[0], b"a")
    slots.register(tables[1], b"a")
    assert (slots.num_used, slots.num_checkpoints) == (2, 1)
    assert [table.plan_row(16, is_retractable=False)[0] for table in tables] == [first, first]
    slots.check_integrity(tables)
    assert second in {allocated(slots).current}


def test_retracted_row_reads_the_kept_state_of_another_request() -> None:
    slots = StateSlots(6)
    one, two = allocated(slots), allocated(slots, has_spare=True)
    for table in (one, two):
        table.plan_row(0, is_retractable=False)
        slots.take(table, 16)
    kept = one.source
    two.plan_row(16, is_retractable=True)
    slots.register(one, b"a")
    slots.register(two, b"a")
    assert two.retract() == 16
    assert two.plan_row(16, is_retractable=True)[0] == kept


def test_checkpoint_that_a_row_will_read_is_not_evicted() -> None:
    slots = StateSlots(2)
    table = allocated(slots)
    table.plan_row(0, is_retractable=False)
    slots.take(table, 16)
    slots.register(table, b"a")
    assert not slots.allocate(SlotTable(), b"", has_spare=False)
    table.plan_row(16, is_retractable=False)
    assert slots.allocate(SlotTable(), b"", has_spare=False)
    assert slots.find_and_touch([b"a"]) == (0, b"")


def test_later_checkpoint_of_an_answer_replaces_the_earlier_one() -> None:
    slots = StateSlots(4)
    table = allocated(slots)
    table.plan_row(0, is_retractable=False)
    for position, digest in ((16, b"prompt"), (32, b"answer 1"), (48, b"answer 2")):
        slots.take(table, position)
        slots.register(table, digest, is_of_answer=digest != b"prompt")
        table.plan_row(position, is_retractable=False)
    assert findable(slots, [b"prompt", b"answer 1", b"answer 2"]) == [b"prompt", b"answer 2"]


def test_checkpoint_that_costs_least_to_compute_again_is_evicted_first() -> None:
    slots = StateSlots(4)
    table = allocated(slots)
    for position, digest in ((100, b"long"), (140, b"short"), (200, b"middle")):
        keep(slots, table, position, digest)
    slots.free(table)
    allocated(slots)
    allocated(slots)
    assert findable(slots, [b"long", b"short", b"middle"]) == [b"long", b"middle"]
    allocated(slots)  # `middle` costs 100 tokens now, as `long` does, and is the younger
    assert findable(slots, [b"long", b"middle"]) == [b"middle"]


def test_used_checkpoint_outlives_an_unused_one_of_equal_cost() -> None:
    slots = StateSlots(3)
    for digest in (b"used", b"unused", b"other"):
        table = allocated(slots)
        keep(slots, table, 64, digest)
        slots.free(table)
        slots.find_and_touch([b"used"])
    assert findable(slots, [b"used", b"unused", b"other"]) == [b"used", b"other"]


def test_costly_checkpoint_is_evicted_at_last() -> None:
    slots = StateSlots(3)
    table = allocated(slots)
    keep(slots, table, 1000, b"costly")
    slots.free(table)
    for index in range(30):
        assert slots.has(b"costly") == (index < 17)
        table = allocated(slots)
        keep(slots, table, 64, bytes([index]))
        slots.free(table)


def test_checkpoint_taken_on_suspicion_is_evicted_before_others_until_its_first_use() -> None:
    slots = StateSlots(4)
    table = allocated(slots)
    keep(slots, table, 1000, b"guess", is_expected=False)
    keep(slots, table, 1016, b"expected")
    slots.free(table)
    allocated(slots)
    allocated(slots)
    allocated(slots)
    assert findable(slots, [b"guess", b"expected"]) == [b"expected"]
    assert slots.num_checkpoints == 1


def test_state_worth_less_than_the_checkpoints_is_not_taken() -> None:
    slots = StateSlots(3)
    table = allocated(slots)
    keep(slots, table, 100, b"a")
    keep(slots, table, 200, b"b")
    table.plan_row(200, is_retractable=False)
    slots.take(table, 216)
    slots.take(table, 400, is_expected=False)
    assert not table.taken
    slots.take(table, 300)
    assert [state.position for state in table.taken] == [300]
    assert findable(slots, [b"a", b"b"]) == [b"b"]


def test_checkpoint_without_its_block_is_evicted_first() -> None:
    blocks = BlockManager(2, 4)
    slots = StateSlots(3, blocks)
    table = BlockTable()
    assert blocks.allocate(table, 4)
    blocks.register(table, [1, 2, 3, 4], 4)
    held = blocks.digests(table, [1, 2, 3, 4], 1)[0]
    for position, digest in ((4, held), (400, b"evicted block")):
        state = allocated(slots)
        keep(slots, state, position, digest)
        slots.free(state)
    allocated(slots)
    allocated(slots)
    assert findable(slots, [held, b"evicted block"]) == [held]


def test_state_of_a_request_that_no_other_can_find_is_not_taken() -> None:
    slots = StateSlots(3)
    table = SlotTable()
    assert slots.allocate(table, b"", has_spare=False, is_shared=False)
    table.plan_row(0, is_retractable=False)
    slots.take(table, 16)
    assert not table.taken
    assert slots.num_used == 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 8))])
def test_random_lives_keep_one_holder_for_each_slot(seed: int) -> None:
    draw = random.Random(seed)
    slots = StateSlots(draw.randint(3, 9))
    tables: list[SlotTable] = []
    content: dict[int, tuple[int, ...]] = {}  # slot -> tokens that its state has seen
    tokens: dict[int, list[int]] = {}
    for _ in range(400):
        action = draw.choice(["begin", "row", "row", "row", "retract", "end", "clear"])
        if action == "begin":
            prefix = [draw.randrange(3) for _ in range(4)]
            digests = [bytes(prefix[:count]) for count in range(1, 5)]
            count, checkpoint = slots.find_and_touch(digests)
            table = SlotTable()
            if slots.allocate(table, checkpoint, has_spare=draw.random() < 0.4):
                assert table.last_position == count
                tables.append(table)
                tokens[id(table)] = prefix[:count]
        elif action == "clear" and draw.random() < 0.1:
            slots.clear()
        elif tables and action in ("row", "retract"):
            table = draw.choice(tables)
            seen = tokens[id(table)]
            is_retractable = table.spare != NO_SLOT
            source, target = table.plan_row(len(seen), is_retractable=is_retractable)
            before = () if not seen else content[target if source == NO_SLOT else source]
            assert before == tuple(seen)
            content[target] = (*before, draw.randrange(3))
            if action == "retract" and is_retractable:
                if table.taken and draw.random() < 0.5:
                    slots.register(table, bytes(seen[: table.taken[0].position]))
                assert table.retract() == len(seen)
                continue
            seen.append(content[target][-1])
            if draw.random() < 0.4:
                slots.take(table, len(seen), is_expected=draw.random() < 0.5)
            while table.taken and draw.random() < 0.8:
                position = table.taken[0].position
                slots.register(table, bytes(seen[:position]), is_of_answer=position > 3)
        elif tables and action == "end":
            slots.free(tables.pop(draw.randrange(len(tables))))
        slots.check_integrity(tables)
    for table in tables:
        slots.free(table)
    assert slots.num_used == 0


def test_slot_of_two_holders_is_found() -> None:
    slots = StateSlots(2)
    table = allocated(slots)
    with pytest.raises(IntegrityError, match="have a holder"):
        slots.check_integrity([table, table])
