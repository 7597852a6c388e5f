"""KV-cache blocks in host memory: copies to and from the device, and checksums.

The scheduler decides which block is saved or loaded, and to which slot (service/scheduling/host_tier.py). A step
carries the copies. They run beside the steps (`SideCopies`), and `take_loaded` reports the ends of loads.

    save    D2H before the step's rows ──► checksum in a thread
    load    compare the checksums in a thread ──► H2D beside the steps ──► LoadedBlocks

A slot holds the bytes of one block, tensor after tensor. No number is converted, so a block that comes back has the
same bits.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from npuserve.npu.backends.base import Backend, Event
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

    checks: whether the slots have the checksums of their saves; [] before these are known.
    num_intact: number of the first slots that have; None before this is known.
    num_copied: number of blocks whose copies are queued.
    copies: ends of these copies.
    """

    load: BlockLoad
    checks: list[Future[bool]] = field(default_factory=list)
    num_intact: int | None = None
    num_copied: int = 0
    copies: list[Event] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.num_copied == self.num_intact and all(copy.done() for copy in self.copies)


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
        self.block_bytes = sum(self._sizes)
        self._slots: list[Tensor] = []
        for size in chunk_sizes(memory, self.block_bytes):
            count = size // self.block_bytes
            buffer = backend.host_buffer(size, dtype=torch.uint8)
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
        self._loads.extend(map(_Load, loads))
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
                ended.append(LoadedBlocks(load.load.id, load.num_copied))
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
        max_blocks = max(1, MAX_COPIES // len(self._tensors))
        for load in self._loads:
            self._check(load)
            if load.num_intact is None:
                continue
            copies = load.load.copies[load.num_copied : min(load.num_intact, load.num_copied + max_blocks)]
            if copies:
                load.copies.append(self._backend.enqueue(partial(self._load, copies)).wait())
                load.num_copied += len(copies)
                max_blocks -= len(copies)

    def _check(self, load: _Load) -> None:
        """Begin to compare the checksums of a load once its slots are saved, and take in the result."""
        slots = [copy.slot for copy in load.load.copies]
        if not load.checks and not any(slot in self._unsaved for slot in slots):
            load.checks = [self._threads.submit(self._is_intact, slot, self._checksums[slot]) for slot in slots]
        elif load.checks and load.num_intact is None and all(check.done() for check in load.checks):
            flags = [*(check.result() for check in load.checks), False]
            load.num_intact = flags.index(False)

    def _load(self, copies: Sequence[BlockCopy]) -> Event:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for copy in copies:
            targets += [tensor[copy.block] for tensor in self._tensors]
            sources += self._slots[copy.slot].split(self._sizes)
        return self._copies.load(targets, sources)

    def _checksum(self, slot: int) -> int:
        return zlib.crc32(self._slots[slot].numpy().data)

    def _is_intact(self, slot: int, saved: Future[int]) -> bool:
        """Return whether a slot has the checksum of its save, which was submitted to these threads before."""
        return self._checksum(slot) == saved.result()
