"""KV-cache blocks and fixed states in host memory: copies to and from the device, and checksums.

The scheduler decides what is saved or loaded, and to which slots (service/scheduling/host_tier.py). A step carries the
copies. They run beside the steps (`SideCopies`), and `take_ended_loads` reports the ends of loads.

    save    D2H before the step's rows ──► checksum in a thread
    load    compare the checksums in a thread ──► H2D beside the steps ──► EndedLoad

A load is queued in batches of MAX_LOAD_COPIES copies. While one is copied, threads compare the checksums of the next.

A slot holds the bytes of one block, tensor after tensor, or a part of the bytes of a fixed state. No number is
converted, so what comes back has the same bits.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from npuserve.npu.backends.base import Backend, BackendError, Event
from npuserve.npu.step import EndedLoad, HostCopy, HostLoad, HostSlots

MAX_CHUNK_BYTES = 1 << 30
CHECKSUM_THREADS = 4
MAX_LOAD_COPIES = 1024
"""Copies of a tensor's part of a block that loads queue at a time, in a few milliseconds of the engine's loop. The next
step's plan and launch queue the next ones."""
MAX_SAVE_COPIES = 8192
"""Copies of a tensor's part of a block that the saves of one step queue, in about 50 ms of the engine's loop."""
MAX_EARLY_COPIES = 512
"""Copies of a tensor's part of a block that one step queues for blocks before their eviction, in about 3 ms."""


def chunk_sizes(memory: int, block: int) -> list[int]:
    """Return the sizes of the buffers that hold slots of `block` bytes in at most `memory` bytes, the largest first.

    Sizes are powers of two, to which torch rounds pinned memory up. A slot lies in one buffer.
    """
    sizes: list[int] = []
    left = memory
    while left >= block:
        size = 1 << (left.bit_length() - 1)
        if block <= MAX_CHUNK_BYTES:
            size = min(size, MAX_CHUNK_BYTES)
        if size < block:
            break
        sizes.append(size)
        left -= size
    return sizes


def num_state_parts(state: int, block: int) -> int:
    """Return the number of slots of `block` bytes that hold a fixed state of `state` bytes."""
    return -(-state // block)


class _Span(NamedTuple):
    """Bytes [begin, end) of a tensor of fixed state."""

    tensor: int
    begin: int
    end: int


def _state_parts(sizes: Sequence[int], part_bytes: int) -> list[list[_Span]]:
    """Divide a fixed state into parts of part_bytes bytes; the last one is smaller. sizes: bytes of its tensors."""
    parts: list[list[_Span]] = []
    space = 0  # bytes that the last part lacks
    for tensor, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if not space:
                parts.append([])
                space = part_bytes
            end = min(size, begin + space)
            parts[-1].append(_Span(tensor, begin, end))
            space -= end - begin
            begin = end
    return parts


@dataclass(slots=True)
class _QueuedLoad:
    """Load in progress.

    checks: of each batch, the number of its first slots that have the checksums of their saves; [] until all slots are
        saved.
    ends: of the copies of each batch that is queued.
    num_copied: number of slots of these batches.
    is_queued: all batches are queued, or those before the first slot whose checksum differs.
    """

    id: int
    batches: list[list[HostCopy]]
    checks: list[Future[int]] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)
    num_copied: int = 0
    is_queued: bool = False

    @property
    def has_ended(self) -> bool:
        return self.is_queued and all(end.done() for end in self.ends)

    @property
    def slots(self) -> Iterator[int]:
        return (copy.slot for batch in self.batches for copy in batch)


class HostBlocks:
    """Slots in pinned host memory, of the size of a block. Not thread-safe: the runner and the engine's loop call it.

    backend: has `Capabilities.offloads`.
    paged: tensors [blocks, ...]; the bytes of one block are tensor[block] of all of them.
    memory: most bytes of host memory.
    fixed: tensors [slots, ...] of fixed state; the bytes of one state are tensor[slot] of all of them.
    num_early: see `HostSlots`; the blocks of the longest prompt, which may evict as many in one plan.

    layout: text that is equal for equal layouts of the bytes of a block and of the parts of a fixed state.
    """

    def __init__(
        self, backend: Backend, paged: Sequence[Tensor], memory: int, fixed: Sequence[Tensor] = (), num_early: int = 0
    ):
        self._backend = backend
        self._num_early = num_early
        self._copies = backend.side_copies()
        self._paged = [tensor.flatten(1).view(torch.uint8) for tensor in paged]
        self._fixed = [tensor.flatten(1).view(torch.uint8) for tensor in fixed]
        self.layout = repr([
            [(str(tensor.dtype), tuple(tensor.shape[1:])) for tensor in tensors] for tensors in (paged, fixed)])
        self._sizes = [tensor.shape[1] for tensor in self._paged]
        self.block_bytes = sum(self._sizes)
        self._parts = _state_parts([tensor.shape[1] for tensor in self._fixed], self.block_bytes)
        self._slots: list[Tensor] = []
        for size in chunk_sizes(memory, self.block_bytes):
            count = size // self.block_bytes
            try:
                buffer = backend.host_buffer(size, dtype=torch.uint8)
            except (RuntimeError, MemoryError) as error:
                raise BackendError(
                    f"kv_offload_memory: the host has no further {size >> 20} MiB of pinned memory: {error}") from error
            self._slots += buffer[: count * self.block_bytes].view(count, self.block_bytes)
        self._threads = ThreadPoolExecutor(CHECKSUM_THREADS, thread_name_prefix="checksums")
        self._checksums: dict[int, Future[int]] = {}  # by slot
        self._saving: deque[tuple[Event, list[int]]] = deque()  # copies in progress, with their slots
        self._unsaved: dict[int, Event] = {}  # slot -> the last copy to it in progress
        self._loads: deque[_QueuedLoad] = deque()

    def describe(self) -> HostSlots:
        """Return the slots and their bounds for the scheduler."""
        state_parts = len(self._parts)
        return HostSlots(
            len(self._slots), self.block_bytes, state_parts, max(1, state_parts, MAX_SAVE_COPIES // len(self._paged)),
            self._num_early, max(1, MAX_EARLY_COPIES // len(self._paged)))

    def is_saved(self, slot: int) -> bool:
        """Return whether the last copy to a slot is complete, and its checksum known."""
        return slot not in self._unsaved and (checksum := self._checksums.get(slot)) is not None and checksum.done()

    def is_copying(self, slot: int) -> bool:
        """Return whether a copy to a slot is in progress, which may overwrite it at any time."""
        return slot in self._unsaved

    def read(self, slot: int) -> memoryview | None:
        """Return the bytes of a saved slot, for any thread; None if they do not have the checksum of the save."""
        view = self.view(slot)
        return view if zlib.crc32(view) == self._checksums[slot].result() else None

    def view(self, slot: int) -> memoryview:
        """Return the bytes of a slot, for any thread. After writing to them, call `received`."""
        return self._slots[slot].numpy().data

    def received(self, slots: Sequence[int]) -> None:
        """Take the checksums of slots that were written through `view`."""
        for slot in slots:
            self._checksums[slot] = self._threads.submit(self._checksum, slot)

    def launch(self, saves: Sequence[HostCopy], loads: Sequence[HostLoad]) -> None:
        """Queue the saves of a step before its rows, and begin its loads."""
        if saves:
            self._backend.enqueue(partial(self._queue_saves, saves))
        for load in loads:
            self._loads.append(_QueuedLoad(load.id, self._batches(load.copies)))
        self._advance()

    def _batches(self, copies: Sequence[HostCopy]) -> list[list[HostCopy]]:
        """Divide the copies of a load into batches of at most MAX_LOAD_COPIES copies of a tensor's part."""
        batches: list[list[HostCopy]] = []
        space = 0
        for copy in copies:
            count = self._count_copies(copy)
            if count > space:
                batches.append([])
                space = max(count, MAX_LOAD_COPIES)
            batches[-1].append(copy)
            space -= count
        return batches

    def _count_copies(self, copy: HostCopy) -> int:
        """Return the number of copies of a tensor's part."""
        return len(self._paged) if copy.is_block else len(self._parts[copy.part])

    def take_ended_loads(self) -> list[EndedLoad]:
        """Return the loads that have ended since the last call."""
        self._advance()
        ended: list[EndedLoad] = []
        for load in list(self._loads):
            if load.has_ended:
                for end in load.ends:
                    end.wait()
                self._loads.remove(load)
                ended.append(EndedLoad(load.id, load.num_copied))
        return ended

    def _views(self, copies: Sequence[HostCopy]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the bytes of copies on the device, and those in host memory."""
        on_device: list[Tensor] = []
        on_host: list[Tensor] = []
        for copy in copies:
            slot = self._slots[copy.slot]
            if copy.is_block:
                on_device += [tensor[copy.device_index] for tensor in self._paged]
                on_host += slot.split(self._sizes)
                continue
            spans = self._parts[copy.part]
            sizes = [span.end - span.begin for span in spans]
            on_device += [self._fixed[span.tensor][copy.device_index, span.begin : span.end] for span in spans]
            on_host += slot[: sum(sizes)].split(sizes)
        return on_device, on_host

    def _queue_saves(self, saves: Sequence[HostCopy]) -> None:
        on_device, on_host = self._views(saves)
        saved = self._copies.to_host(on_host, on_device)
        slots = [copy.slot for copy in saves]
        self._saving.append((saved, slots))
        self._unsaved.update(dict.fromkeys(slots, saved))

    def _advance(self) -> None:
        """Begin what waited for a copy or a checksum that is complete now."""
        while self._saving and self._saving[0][0].done():
            saved, slots = self._saving.popleft()
            saved.wait()
            for slot in slots:
                if self._unsaved.get(slot) is saved:  # else it is saved again since
                    del self._unsaved[slot]
                    self._checksums[slot] = self._threads.submit(self._checksum, slot)
        left = MAX_LOAD_COPIES
        for load in self._loads:
            if not load.checks and not any(slot in self._unsaved for slot in load.slots):
                load.checks = [self._begin_check(batch) for batch in load.batches]
            while not load.is_queued and load.checks and load.checks[len(load.ends)].done():
                batch = load.batches[len(load.ends)]
                count = sum(map(self._count_copies, batch))
                if left < MAX_LOAD_COPIES and count > left:
                    return
                left -= count
                self._queue_batch(load, batch, load.checks[len(load.ends)].result())

    def _queue_batch(self, load: _QueuedLoad, batch: Sequence[HostCopy], num_intact: int) -> None:
        """Queue the next batch of a load, of whose first `num_intact` slots the checksums are right."""
        if num_intact:
            work = partial(self._copy_to_device, batch[:num_intact], is_first=not load.ends)
            load.ends.append(self._backend.enqueue(work).wait())
            load.num_copied += num_intact
        load.is_queued = num_intact < len(batch) or len(load.ends) == len(load.batches)

    def _begin_check(self, batch: Sequence[HostCopy]) -> Future[int]:
        saved = [self._checksums[copy.slot] for copy in batch]
        return self._threads.submit(self._count_intact, [copy.slot for copy in batch], saved)

    def _copy_to_device(self, copies: Sequence[HostCopy], is_first: bool) -> Event:
        return self._copies.to_device(*self._views(copies), is_first)

    def _checksum(self, slot: int) -> int:
        return zlib.crc32(self.view(slot))

    def _count_intact(self, slots: Sequence[int], saved: Sequence[Future[int]]) -> int:
        """Return the number of the first slots that have the checksums of their saves, which were submitted to these
        threads before."""
        for count, (slot, checksum) in enumerate(zip(slots, saved, strict=True)):
            if self._checksum(slot) != checksum.result():
                return count
        return len(slots)
