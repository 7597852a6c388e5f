"""Blocks in host memory, with copies that are complete at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from npuserve.npu.backends.base import BackendError
from npuserve.npu.execution import host_blocks
from npuserve.npu.execution.host_blocks import HostBlocks
from npuserve.npu.step import EndedLoad, HostCopy, HostLoad
from npuserve.service.scheduling.block_manager import BlockManager, BlockTable
from npuserve.service.scheduling.host_tier import HostTier


class Done:
    """Work that is complete."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result

    def done(self) -> bool:
        return True


class DirectCopies:
    """Backend and copies without queues.

    first_loads: `is_first` of the calls of `to_device`.
    """

    def __init__(self) -> None:
        self.first_loads: list[bool] = []

    def side_copies(self) -> DirectCopies:
        return self

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def enqueue(self, work: Callable[[], Any]) -> Done:
        return Done(work())

    def to_host(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Done:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return Done()

    def to_device(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], is_first: bool) -> Done:
        self.first_loads.append(is_first)
        return self.to_host(targets, sources)


def host_of(num_slots: int) -> tuple[HostBlocks, list[torch.Tensor]]:
    tensors = [torch.arange(64, dtype=torch.uint8).view(8, 8), torch.arange(100, 116, dtype=torch.uint8).view(8, 2)]
    return HostBlocks(DirectCopies(), tensors, 16 * num_slots), tensors  # type: ignore[arg-type]


def test_host_memory_that_cannot_be_pinned_names_the_setting() -> None:
    class Full(DirectCopies):
        def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
            raise RuntimeError("out of memory")

    with pytest.raises(BackendError, match=r"kv_offload_memory: .* of pinned memory: out of memory"):
        HostBlocks(Full(), [torch.zeros(8, 8)], 1 << 20)  # type: ignore[arg-type]


def wait_for_load(host: HostBlocks) -> EndedLoad:
    while not (loaded := host.take_ended_loads()):
        time.sleep(0.001)
    return loaded[0]


@pytest.mark.parametrize(("corrupt", "num_intact", "first_loads"), [
    (None, 6, [True, False, False]), (5, 5, [True, False, False]), (4, 4, [True, False]), (0, 0, [])])
def test_load_in_parts_ends_before_the_corrupt_block(
    monkeypatch: pytest.MonkeyPatch, corrupt: int | None, num_intact: int, first_loads: list[bool]
) -> None:
    """Parts of two blocks: one check and one copy each. The first copy of a load alone waits for the steps."""
    monkeypatch.setattr(host_blocks, "MAX_LOAD_COPIES", 4)
    host, _ = host_of(6)
    host.launch([HostCopy(block, block) for block in range(6)], [])
    host.take_ended_loads()
    if corrupt is not None:
        host._checksums[corrupt].result()
        host._slots[corrupt][3] ^= 1
    host.launch([], [HostLoad(0, [HostCopy(7 - slot % 2, slot) for slot in range(6)])])
    assert len(host._loads[0].checks) == 3
    assert wait_for_load(host) == EndedLoad(0, num_intact)
    assert host._copies.first_loads == first_loads  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_slots", [1, 2])
def test_blocks_evicted_in_one_plan_are_more_than_the_slots(num_slots: int) -> None:
    host, tensors = host_of(num_slots)
    assert len(host._slots) == num_slots * 16 // host.block_bytes
    tier = HostTier(host.describe(), host.take_ended_loads)
    blocks = BlockManager(8, 2, evicted=tier)
    table = BlockTable()
    token_ids = list(range(16))
    assert blocks.allocate(table, 16)
    blocks.register(table, token_ids, 16)
    block_ids = list(table.block_ids)
    blocks.free(table)
    assert blocks.allocate(table, 16)
    saves, _ = tier.take_copies(blocks)
    expected = [[tensor[block].clone() for tensor in tensors] for block in block_ids]
    host.launch(saves, [])
    assert host.take_ended_loads() == []
    for tensor in tensors:
        tensor.zero_()
    digests = blocks.digests(table, token_ids, 8)
    kept = [index for index in range(8) if tier.find([digests[index]])]
    assert len(kept) == len(host._slots)
    blocks.free(table)
    for load_id, index in enumerate(kept):
        host.launch([], [HostLoad(load_id, [HostCopy(3, *tier._slots[digests[index]])])])
        assert wait_for_load(host) == EndedLoad(load_id, 1)
        assert all(torch.equal(tensor[3], part) for tensor, part in zip(tensors, expected[index], strict=True))


def test_slots_are_read_after_their_save_and_written_for_a_load() -> None:
    host, tensors = host_of(3)
    assert not host.is_saved(0)
    host.launch([HostCopy(2, 0)], [])
    while not host.is_saved(0):
        host.take_ended_loads()
    expected = bytes(tensors[0][2].tolist() + tensors[1][2].tolist())
    read = host.read(0)
    assert read is not None
    assert bytes(read) == expected
    host.view(1)[:] = expected
    host.received([1])
    host.launch([], [HostLoad(0, [HostCopy(5, 1)])])
    assert wait_for_load(host) == EndedLoad(0, 1)
    assert torch.equal(tensors[0][5], tensors[0][2])
    assert torch.equal(tensors[1][5], tensors[1][2])
    host.view(0)[3] ^= 1
    assert host.read(0) is None


def test_fixed_state_of_several_parts_comes_back() -> None:
    state = torch.arange(1, 88, dtype=torch.uint8).view(3, 29)
    fixed = [state[:, :20].clone().view(3, 4, 5), state[:, 20:].clone()]
    host = HostBlocks(DirectCopies(), [torch.zeros(8, 10, dtype=torch.uint8)], 40, fixed)  # type: ignore[arg-type]
    assert host.describe().state_parts == 3
    host.launch([HostCopy(2, slot, slot) for slot in range(3)], [])
    while not all(map(host.is_saved, range(3))):
        host.take_ended_loads()
    host.launch([], [HostLoad(0, [HostCopy(0, slot, slot) for slot in range(3)])])
    assert wait_for_load(host) == EndedLoad(0, 3)
    for tensor in fixed:
        assert torch.equal(tensor[0], tensor[2])


def test_slot_is_copying_until_its_save_is_complete() -> None:
    class Copy(Done):
        is_done = False

        def done(self) -> bool:
            return self.is_done

    class SlowCopies(DirectCopies):
        copy = Copy()

        def to_host(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Done:
            return self.copy

    backend = SlowCopies()
    host = HostBlocks(backend, [torch.zeros(8, 8)], 1 << 10)  # type: ignore[arg-type]
    host.launch([HostCopy(2, 0)], [])
    host.take_ended_loads()
    assert [host.is_copying(slot) for slot in range(2)] == [True, False]
    backend.copy.is_done = True
    host.take_ended_loads()
    assert not host.is_copying(0)


def test_layout_differs_with_shape_and_type() -> None:
    host, tensors = host_of(1)
    others = [[tensors[0]], [tensors[1], tensors[0]], [tensors[0].view(torch.int8), tensors[1]],
              [tensors[0].view(8, 4, 2), tensors[1]]]
    layouts = {HostBlocks(DirectCopies(), other, 64).layout for other in others}  # type: ignore[arg-type]
    assert len(layouts) == 4
    states = torch.zeros(2, 4, 2)
    all_states = [[states], [states, states], [states.to(torch.bfloat16)], [states.view(2, 2, 4)], [states[:, :2]]]
    layouts |= {HostBlocks(DirectCopies(), tensors, 64, fixed).layout for fixed in all_states}  # type: ignore[arg-type]
    assert len(layouts) == 9
    assert host.layout not in layouts
