"""Choice of the blocks and states that are saved before their eviction."""

from __future__ import annotations

import time

import pytest

from npuserve.npu.step import HostSlots
from npuserve.service.scheduling.block_manager import BlockManager, BlockTable
from npuserve.service.scheduling.early_saves import NewSaves
from npuserve.service.scheduling.state_slots import SlotTable, StateSlots, state_key

PARTS = 3


class Index:
    """Host memory that keeps what it is given, or nothing. kept: keys with the index on the device and the parts."""

    num_slots = 100

    def __init__(self) -> None:
        self.kept: dict[bytes, tuple[int, int]] = {}
        self.is_full = False

    def has(self, key: bytes) -> bool:
        return key in self.kept

    def keep(self, key: bytes, index: int, num_parts: int = 0) -> bool:
        if not self.is_full:
            self.kept[key] = index, num_parts
        return not self.is_full


class Device:
    """4 cached blocks of 2 tokens with a state after the second and the last one, and what the saves of steps chose."""

    def __init__(self, max_saves: int = 50, max_early_saves: int = 50) -> None:
        self.index = Index()
        self.blocks = BlockManager(8, 2)
        self.states = StateSlots(4, self.blocks)
        table, slots = BlockTable(), SlotTable()
        tokens = list(range(8))
        assert self.blocks.allocate(table, 8)
        assert self.states.allocate(slots, b"", has_spare=False)
        self.digests = self.blocks.digests(table, tokens, 4)
        self.blocks.register(table, tokens, 8)
        self.state_slots: dict[bytes, int] = {}
        for start, end in ((0, 4), (4, 8)):
            slots.plan_row(start, is_retractable=False)
            self.states.take(slots, end)
            digest = self.digests[end // 2 - 1]
            self.state_slots[digest] = slots.taken[0].slot
            self.states.register(slots, digest)
            slots.source = -1
        self.blocks.free(table)
        self.states.free(slots)
        self.new = NewSaves(HostSlots(100, 8, PARTS, max_early_saves=max_early_saves), max_saves)
        for digest in self.digests:
            self.new.add_block(digest)
            if digest in self.state_slots:
                self.new.add_state(state_key(digest), digest)

    def plan(self, num_free: int = 50, num_wanted: int = 50) -> list[bytes]:
        """Return the keys that a step saves."""
        before = len(self.index.kept)
        self.new.plan(self.index, self.blocks, self.states, num_free, num_wanted)
        return [*self.index.kept][before:]


def test_states_are_saved_with_their_blocks() -> None:
    device = Device()
    first, second, third, last = device.digests
    assert device.plan() == [first, second, state_key(second), third, last, state_key(last)]
    assert device.index.kept[state_key(second)] == (device.state_slots[second], PARTS)
    assert not device.new.has_waiting
    assert device.plan() == []


def test_step_saves_until_it_has_saved_enough() -> None:
    """A state exceeds the bound."""
    device = Device(max_early_saves=2)
    first, second, third, last = device.digests
    assert device.plan() == [first, second]
    assert device.new.has_waiting
    assert device.plan(num_wanted=1) == [state_key(second)]
    assert device.plan(num_wanted=0) == []
    assert device.new.has_waiting
    assert device.plan() == [third, last]
    assert device.plan() == [state_key(last)]
    assert not device.new.has_waiting


def test_parts_of_a_state_count() -> None:
    device = Device(max_early_saves=4)
    first, second, third, last = device.digests
    assert device.plan() == [first, second, state_key(second)]
    assert device.plan() == [third, last, state_key(last)]


def test_state_waits_for_a_step_with_space_for_all_parts() -> None:
    device = Device()
    first, second, third, last = device.digests
    assert device.plan(num_free=PARTS + 1) == [first, second]
    assert device.new.has_waiting
    assert device.plan(num_free=PARTS - 1) == []
    assert device.plan(num_free=PARTS) == [state_key(second)]
    assert device.plan(num_free=PARTS + 1) == [third, last]


@pytest.mark.parametrize(("max_saves", "is_saved"), [(PARTS, True), (PARTS - 1, False)])
def test_state_of_more_parts_than_a_step_saves_hinders_no_block(max_saves: int, is_saved: bool) -> None:
    device = Device(max_saves)
    keys = device.plan()
    assert {*keys} >= {*device.digests}
    assert (len(keys) == 6) == is_saved


def test_what_is_evicted_or_saved_already_is_not_saved() -> None:
    device = Device()
    first, second, third, last = device.digests
    device.index.kept[second] = 0, 0
    device.new.discard(third)
    device.states.clear()
    assert device.plan() == [first, last]
    assert device.index.kept[second] == (0, 0)
    assert not device.new.has_waiting


def test_full_host_memory_is_no_reason_to_poll() -> None:
    device = Device()
    device.index.is_full = True
    assert device.plan() == []
    assert not device.new.has_waiting
    device.index.is_full = False
    assert len(device.plan()) == 6


def test_queue_of_many_evicted_blocks_is_emptied_in_linear_time() -> None:
    """As after a flush of a large prefix cache while the store was slow."""
    device = Device()
    for number in range(100_000):
        device.new.add_block(number.to_bytes(16, "big"))
    began = time.thread_time()
    assert len(device.plan()) == 6
    assert device.plan() == []
    assert not device.new.has_waiting
    assert time.thread_time() - began < 2
