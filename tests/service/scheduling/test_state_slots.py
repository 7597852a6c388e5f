"""Slots of fixed state: owners, checkpoints, retracted rows, and random lives of requests."""

from __future__ import annotations

import random

import pytest

from npuserve.service.scheduling.block_manager import IntegrityError
from npuserve.service.scheduling.state_slots import NO_SLOT, SlotTable, StateSlots


def allocated(slots: StateSlots, source: int = NO_SLOT, *, has_spare: bool = False) -> SlotTable:
    table = SlotTable()
    assert slots.allocate(table, source, has_spare=has_spare)
    return table


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


def test_taken_state_is_continued_in_another_slot_and_found_once_registered() -> None:
    slots = StateSlots(3)
    table = allocated(slots)
    table.plan_row(0, is_retractable=False)
    first = table.current
    slots.take(table, 16)
    assert slots.longest([b"a"]) == (0, NO_SLOT)
    slots.register(table, b"a")
    assert slots.longest([b"x", b"a", b"y"]) == (2, first)
    assert table.plan_row(16, is_retractable=False) == (first, table.current)
    assert table.plan_row(17, is_retractable=False) == (NO_SLOT, table.current)
    slots.free(table)
    other = allocated(slots, first)
    assert other.plan_row(16, is_retractable=False) == (first, other.current)


def test_checkpoint_that_a_row_will_read_is_not_evicted() -> None:
    slots = StateSlots(2)
    table = allocated(slots)
    table.plan_row(0, is_retractable=False)
    slots.take(table, 16)
    slots.register(table, b"a")
    assert not slots.allocate(SlotTable(), NO_SLOT, has_spare=False)
    table.plan_row(16, is_retractable=False)
    assert slots.allocate(SlotTable(), NO_SLOT, has_spare=False)
    assert slots.longest([b"a"]) == (0, NO_SLOT)


def test_later_checkpoint_of_an_answer_makes_the_earlier_one_the_next_to_be_evicted() -> None:
    slots = StateSlots(4)
    slots_of = {}
    table = allocated(slots)
    table.plan_row(0, is_retractable=False)
    for position, digest in ((16, b"old"), (32, b"answer 1"), (48, b"answer 2")):
        slots.take(table, position)
        slots.register(table, digest, is_of_answer=digest != b"old")
        slots_of[digest] = slots.longest([digest])[1]
        table.plan_row(position, is_retractable=False)
    assert slots.num_checkpoints == 3
    allocated(slots)
    assert [digest for digest in slots_of if slots.has(digest)] == [b"old", b"answer 2"]


@pytest.mark.parametrize("seed", range(8))
def test_random_lives_keep_one_holder_for_each_slot(seed: int) -> None:
    draw = random.Random(seed)
    slots = StateSlots(draw.randint(3, 9))
    tables: list[SlotTable] = []
    content: dict[int, tuple[int, ...]] = {}  # slot -> tokens that its state has seen
    tokens: dict[int, list[int]] = {}
    digests: dict[bytes, tuple[int, ...]] = {}
    for _ in range(400):
        action = draw.choice(["begin", "row", "row", "row", "retract", "end", "clear"])
        if action == "begin":
            digest, slot = draw.choice([*digests] or [b"-"]), NO_SLOT
            if slots.has(digest):
                _, slot = slots.longest([digest])
            table = SlotTable()
            if slots.allocate(table, slot, has_spare=draw.random() < 0.4):
                tables.append(table)
                tokens[id(table)] = list(digests[digest]) if slot != NO_SLOT else []
        elif action == "clear" and draw.random() < 0.1:
            slots.clear()
        elif tables and action in ("row", "retract"):
            table = draw.choice(tables)
            seen = tokens[id(table)]
            is_retractable = table.spare != NO_SLOT
            source, target = table.plan_row(len(seen), is_retractable=is_retractable)
            before = () if not seen else content[target if source == NO_SLOT else source]
            assert before == tuple(seen)
            content[target] = (*before, draw.randrange(9))
            if action == "retract" and is_retractable:
                assert table.retract() == len(seen)
                continue
            seen.append(content[target][-1])
            if draw.random() < 0.3:
                slots.take(table, len(seen))
                if table.taken is not None and table.taken[0] == len(seen) and draw.random() < 0.8:
                    slots.register(table, bytes(seen))
                    digests[bytes(seen)] = tuple(seen)
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
