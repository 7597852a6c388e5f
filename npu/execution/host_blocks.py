"""KV-cache blocks in host memory: copies to and from the device, and checksums.

The scheduler decides which block is saved or loaded, and to which slot (service/scheduling/host_tier.py). A step
carries the copies. They run beside the steps (`SideCopies`), and `take_loaded` reports the ends of loads.

    save    D2H before the step's rows ──► checksum in a thread
    load    compare the checksums in a thread ──► H2D beside the steps ──► LoadedBlocks

A load is in parts of MAX_COPIES copies. While one is copied, threads compare the checksums of the next ones.

A slot holds the bytes of one block, tensor after tensor. No number is converted, so a block that comes back has the
same bits.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from npuserve.npu.backends.base import Backend, BackendError, Event
from npuserve.npu.step import BlockCopy, BlockLoad, LoadedBlocks

MAX_CHUNK_BYTES = 1 << 30
CHECKSUM_THREADS = 4
MAX_COPIES = 1024
"""Copies of a tensor's part of a block that loads queue at a time, in a few milliseconds of the engine's loop. The next
step's plan and launch queue the next ones."""


MAX_SAVE_COPIES = 8192
"""Copies of a tensor's part of a block that the saves of one step queue, in about 50 ms of the engine's loop."""


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


@dataclass(slots=True)
class _Load:
    """Load in progress.

    checks: of each part, the number of its first slots that have the checksums of their saves; [] until all slots are
        saved.
    copies: ends of the copies of each part that is queued.
    num_copied: number of blocks of these parts.
    is_queued: all parts are queued, or those before the first block whose checksum differs.
    """

    id: int
    parts: list[list[BlockCopy]]
    checks: list[Future[int]] = field(default_factory=list)
    copies: list[Event] = field(default_factory=list)
    num_copied: int = 0
    is_queued: bool = False

    @property
    def has_ended(self) -> bool:
        return self.is_queued and all(copy.done() for copy in self.copies)

    @property
    def slots(self) -> Iterator[int]:
        return (copy.slot for part in self.parts for copy in part)


class HostBlocks:
    """Slots of blocks in pinned host memory. Not thread-safe: the runner and the engine's loop call it.

    backend: has `Capabilities.offloads`.
    tensors: [blocks, ...] each; the bytes of one block are tensor[block] of all of them.
    memory: most bytes of host memory.
    """

    def __init__(self, backend: Backend, tensors: Sequence[Tensor], memory: int):
        self._backend = backend
        self._copies = backend.side_copies()
        self._tensors = [tensor.flatten(1).view(torch.uint8) for tensor in tensors]
        self._sizes = [tensor.shape[1] for tensor in self._tensors]
        self._part_blocks = max(1, MAX_COPIES // len(tensors))
        self.block_bytes = sum(self._sizes)
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
        self._loads: deque[_Load] = deque()

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def max_saves(self) -> int:
        """Maximum number of saves in a step."""
        return max(1, MAX_SAVE_COPIES // len(self._tensors))

    def launch(self, saves: Sequence[BlockCopy], loads: Sequence[BlockLoad]) -> None:
        """Queue the saves of a step before its rows, and begin its loads."""
        if saves:
            self._backend.enqueue(partial(self._save, saves))
        for load in loads:
            starts = range(0, len(load.copies), self._part_blocks)
            self._loads.append(_Load(load.id, [load.copies[start : start + self._part_blocks] for start in starts]))
        self._advance()

    def take_loaded(self) -> list[LoadedBlocks]:
        """Return the loads that have ended since the last call."""
        self._advance()
        ended: list[LoadedBlocks] = []
        for load in list(self._loads):
            if load.has_ended:
                for copy in load.copies:
                    copy.wait()
                self._loads.remove(load)
                ended.append(LoadedBlocks(load.id, load.num_copied))
        return ended

    def _save(self, saves: Sequence[BlockCopy]) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for copy in saves:
            targets += self._slots[copy.slot].split(self._sizes)
            sources += [tensor[copy.block] for tensor in self._tensors]
        saved = self._copies.save(targets, sources)
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
        max_blocks = self._part_blocks
        for load in self._loads:
            if not load.checks and not any(slot in self._unsaved for slot in load.slots):
                load.checks = [self._begin_check(part) for part in load.parts]
            while not load.is_queued and load.checks and load.checks[len(load.copies)].done():
                part = load.parts[len(load.copies)]
                if len(part) > max_blocks:
                    return
                max_blocks -= len(part)
                self._queue_part(load, part, load.checks[len(load.copies)].result())

    def _queue_part(self, load: _Load, part: Sequence[BlockCopy], num_intact: int) -> None:
        """Queue the copies of the next part of a load, of whose first `num_intact` blocks the checksums are right."""
        if num_intact:
            work = partial(self._load, part[:num_intact], is_first=not load.copies)
            load.copies.append(self._backend.enqueue(work).wait())
            load.num_copied += num_intact
        load.is_queued = num_intact < len(part) or len(load.copies) == len(load.parts)

    def _begin_check(self, part: Sequence[BlockCopy]) -> Future[int]:
        saved = [self._checksums[copy.slot] for copy in part]
        return self._threads.submit(self._count_intact, [copy.slot for copy in part], saved)

    def _load(self, copies: Sequence[BlockCopy], is_first: bool) -> Event:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for copy in copies:
            targets += [tensor[copy.block] for tensor in self._tensors]
            sources += self._slots[copy.slot].split(self._sizes)
        return self._copies.load(targets, sources, is_first)

    def _checksum(self, slot: int) -> int:
        return zlib.crc32(self._slots[slot].numpy().data)

    def _count_intact(self, slots: Sequence[int], saved: Sequence[Future[int]]) -> int:
        """Return the number of the first slots that have the checksums of their saves, which were submitted to these
        threads before."""
        for count, (slot, checksum) in enumerate(zip(slots, saved, strict=True)):
            if self._checksum(slot) != checksum.result():
                return count
        return len(slots)
