"""Blocks that the KV cache evicted, in host memory: their index, and the copies that steps carry.

    evict    BlockManager ──save──► slot of host memory, copied before the block is given away (`Step.saves`)
    admit    the next request's blocks that only host memory has ──load──► blocks of the device (`Step.loads`)

A request whose prefix continues in host memory is LOADING before its admission, while others run. Its load holds a
block table of its own. When the load ends, the blocks enter the prefix cache, and the request is admitted with them as
with any cached prefix. The blocks of a load are therefore used until its end, whatever happens to the request. Each
block is in one load at a time: further requests that need it wait for the same load.

Blocks are found by the digests of the prefix cache (block_manager.py), which depend on salt, tokens and position. A
block that comes back stays in host memory, so that it is not copied again at its next eviction. If slots run out, the
least recently used block is forgotten. A block whose checksum differs is forgotten too, and computed again. A step
carries at most `max_saves` saves. Blocks that are evicted beyond them are lost, the first ones first: a prefix is
evicted from its end, and is of no use without its beginning.

The interface to block manager and scheduler is that of a connector: `save`, `find`, `load`, and `finish` for what has
ended. The index ends with the engine's process, as the memory does.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from npuserve.npu.step import BlockCopy, BlockLoad, LoadedBlocks
from npuserve.service.scheduling.block_manager import BlockManager, BlockTable, IntegrityError


class HostEvents(Protocol):
    """Receiver of the changes of the tier: engine/kv_event_log.py."""

    def saved(self, digest: bytes) -> None: ...
    def forgotten(self, digest: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class _Load:
    """Load in progress.

    table: the cached prefix, and the blocks that are loaded after it.
    token_ids: tokens of all these blocks.
    num_prefix: number of blocks of the prefix.
    digests, slots: of the blocks that are loaded.
    """

    table: BlockTable
    token_ids: Sequence[int]
    num_prefix: int
    digests: list[bytes]
    slots: list[int]


class HostTier:
    """Owner of `num_slots` slots of host memory, one for a block each.

    block_bytes: bytes of a block.
    take_loaded: returns the loads that have ended since the last call.
    events: receiver of the changes; None for none.
    max_saves: maximum number of saves in a step; None for no limit.

    num_saved, num_loaded, num_corrupt: blocks that were saved, that came back, and whose checksums differed, since the
        start.
    num_dropped: evicted blocks that were not saved, for want of a slot or because of `max_saves`, since the start.
    queries, hits: prompt tokens that the device's cache lacked at the first admission, and those of them that were
        loaded.
    """

    def __init__(
        self, num_slots: int, block_bytes: int, take_loaded: Callable[[], Iterable[LoadedBlocks]],
        events: HostEvents | None = None, max_saves: int | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.num_saved = 0
        self.num_loaded = 0
        self.num_corrupt = 0
        self.num_dropped = 0
        self.queries = 0
        self.hits = 0
        self._take_loaded = take_loaded
        self._events = events
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by digest, the least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._reading: Counter[int] = Counter()  # slots that loads read, which no save may overwrite
        self._max_saves = num_slots if max_saves is None else max_saves
        self._loads: dict[int, _Load] = {}  # in progress, the oldest first
        self._load_of: dict[bytes, int] = {}  # digest -> the load in progress that contains its block
        self._ids = itertools.count()
        self._ended: list[LoadedBlocks] = []  # loads that have ended, for the next `finish`
        self._new_saves: dict[bytes, BlockCopy] = {}  # by digest, the saves that no step carries yet
        self._new_loads: list[BlockLoad] = []

    @property
    def num_used(self) -> int:
        """Number of slots that hold blocks."""
        return self.num_slots - len(self._free)

    @property
    def is_loading(self) -> bool:
        """True until all loads have ended."""
        return bool(self._loads)

    @property
    def tables(self) -> Iterator[BlockTable]:
        """Block tables of the loads."""
        return (load.table for load in self._loads.values())

    def save(self, digest: bytes, block: int) -> None:
        """Keep a block that is evicted. The next step copies it first, unless host memory has it already."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return
        if not self._free:
            victim = next((digest for digest, slot in self._slots.items() if not self._reading[slot]), None)
            if victim is None:
                self.num_dropped += 1
                return
            self.forget(victim)
        if len(self._new_saves) >= self._max_saves:
            first = next((digest for digest, copy in self._new_saves.items() if not self._reading[copy.slot]), None)
            if first is None:
                self.num_dropped += 1
                return
            self.forget(first)
        slot = self._slots[digest] = self._free.pop()
        self._new_saves[digest] = BlockCopy(block, slot)
        if self._events is not None:
            self._events.saved(digest)

    def find(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return the leading digests whose blocks are in host memory."""
        return list(itertools.takewhile(self._slots.__contains__, digests))

    @property
    def num_loading(self) -> int:
        """Number of blocks that loads in progress use."""
        return sum(len(load.table.block_ids) for load in self._loads.values())

    def load_of(self, digest: bytes) -> int | None:
        """Return the load in progress that contains a block; None if none does."""
        return self._load_of.get(digest)

    @property
    def oldest_load(self) -> int | None:
        """The load in progress that began first; None if there is none."""
        return next(iter(self._loads), None)

    def load(
        self, blocks: BlockManager, table: BlockTable, token_ids: Sequence[int],
        prefix: Sequence[int], digests: Sequence[bytes], spare: int
    ) -> int | None:
        """Begin to load blocks behind a cached prefix. Return the load's id.

        Returns None, and changes nothing, if blocks are lacking.

        table: without blocks, of the request's salt and scope. The load owns it.
        token_ids: tokens of the prefix and of the blocks.
        prefix: from `find_prefix`.
        digests: from `find`. No load contains them.
        spare: minimum number of cached and free blocks to leave.
        """
        slots = [self._slots[digest] for digest in digests]
        self._reading.update(slots)  # blocks that are evicted for these take no slot of them
        if not blocks.allocate(table, len(token_ids), prefix, spare):
            self._release(digests, slots)
            return None
        for digest in reversed(digests):  # a block is forgotten after its children
            self._slots.move_to_end(digest)
        load_id = next(self._ids)
        self._loads[load_id] = _Load(table, token_ids, len(prefix), list(digests), slots)
        self._load_of.update(dict.fromkeys(digests, load_id))
        self._new_loads.append(BlockLoad(load_id, list(map(BlockCopy, table.block_ids[len(prefix):], slots))))
        return load_id

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockLoad]]:
        """Return the saves and loads that the next step carries."""
        copies = list(self._new_saves.values()), self._new_loads
        self.num_saved += len(self._new_saves)
        self._new_saves = {}
        self._new_loads = []
        return copies

    @property
    def has_new_loads(self) -> bool:
        return bool(self._new_loads)

    def poll(self) -> None:
        """Let the runner queue further parts of loads. Call it often while a long step runs."""
        self._ended += self._take_loaded()

    def finish(self, blocks: BlockManager) -> set[int]:
        """Enter the blocks of the loads that have ended into the prefix cache. Return the ids of these loads."""
        ended: set[int] = set()
        self.poll()
        ended_loads = self._ended
        self._ended = []
        for load_id, num_intact in ended_loads:
            load = self._loads.pop(load_id)
            ended.add(load_id)
            for digest in load.digests:
                del self._load_of[digest]
            pairs = list(zip(load.digests, load.slots, strict=True))
            # Blocks that were forgotten meanwhile, as by a flush, do not return to the prefix cache.
            kept = sum(1 for _ in itertools.takewhile(
                lambda pair: self._slots.get(pair[0]) == pair[1], pairs[:num_intact]))
            if num_intact < len(pairs) and self._slots.get(load.digests[num_intact]) == load.slots[num_intact]:
                self.num_corrupt += 1
                self.forget(load.digests[num_intact])
            self._release(load.digests, load.slots)
            blocks.register(load.table, load.token_ids, (load.num_prefix + kept) * blocks.block_size)
            blocks.free(load.table)
            self.num_loaded += num_intact
        return ended

    def forget(self, digest: bytes) -> None:
        """Forget a block, and its save if no step carries it yet. Nothing if it is not in host memory."""
        slot = self._slots.pop(digest, None)
        if slot is None:
            return
        if not self._reading[slot]:
            self._free.append(slot)
            if self._new_saves.pop(digest, None) is not None:
                self.num_dropped += 1
        if self._events is not None:
            self._events.forgotten(digest)

    def clear(self) -> None:
        """Forget all blocks, also those that are being loaded. Not between the plan of a load and `take_copies`."""
        self._new_saves.clear()
        for digest in list(self._slots):
            self.forget(digest)

    def _release(self, digests: Sequence[bytes], slots: Sequence[int]) -> None:
        """End the reading of slots. Those whose blocks were forgotten are free then."""
        for digest, slot in zip(digests, slots, strict=True):
            self._reading[slot] -= 1
            if not self._reading[slot]:
                del self._reading[slot]
                if self._slots.get(digest) != slot:
                    self._free.append(slot)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless each slot is free, or has one block, or is read for one that was forgotten."""
        held = set(self._slots.values()) | set(self._reading)
        if len(set(self._slots.values())) < len(self._slots) or sorted([*self._free, *held]) != list(
                range(self.num_slots)):
            raise IntegrityError(f"slots {sorted(self._free)} of host memory are free, and {sorted(held)} are held")
        read = Counter(slot for load in self._loads.values() for slot in load.slots)
        if read != self._reading:
            raise IntegrityError(f"loads read the slots {sorted(read.elements())} of host memory, but "
                                 f"{sorted(self._reading.elements())} are marked")
