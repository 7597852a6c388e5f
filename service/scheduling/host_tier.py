"""Blocks and fixed states that were evicted from the device, in host memory: their index, and the copies of steps.

    evict    BlockManager, StateSlots ──save──► slots of host memory, before the memory is reused (`Step.saves`)
    admit    the next request's prefix only in host memory ──load──► blocks and a slot of the device (`Step.loads`)

A load brings one prefix back. A request whose prefix continues in host memory is LOADING before its admission, while
others run. Its load holds a block table of its own, and a slot of fixed state if that comes back. When the load ends,
they enter the prefix cache, and the request is admitted with them as with any cached prefix. The memory of a load is
therefore used until its end, whatever happens to the request. Each block and state is in one load at a time: further
requests that need it wait for the same load.

Blocks and states are found by the digests of the prefix cache (block_manager.py), which depend on salt, tokens and
position. A slot of host memory has the size of a block. A state takes several, one for each of its parts. What comes
back stays in host memory, so that it is not copied again at its next eviction. If slots run out, the least recently
used block or state is forgotten. One whose checksum differs is forgotten too, and computed again.

A step saves to at most `max_saves` slots. Blocks that are evicted beyond them are lost, the first ones first: a prefix
is evicted from its end, and is of no use without its beginning. Some blocks are therefore saved before their eviction
(early_saves.py).

With a store (store_tier.py) blocks and states are saved once they are computed, also in steps without rows, and from
host memory to the store. They are saved no faster than the store takes them.

The interface to block manager and scheduler is that of a connector: `save`, `find`, `begin_load`, and `end_loads` for
what has ended. The index ends with the engine's process, as the memory does.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from npuserve.npu.step import WHOLE_BLOCK, EndedLoad, HostCopy, HostLoad, HostSlots
from npuserve.service.scheduling.block_manager import BlockManager, BlockTable, IntegrityError
from npuserve.service.scheduling.early_saves import EarlySaves, NewSaves
from npuserve.service.scheduling.state_slots import StateSlots, state_key
from npuserve.service.scheduling.store_tier import StoreTier


class HostEvents(Protocol):
    """Receiver of the changes of the tier: engine/kv_event_log.py. It ignores the keys of fixed states."""

    def saved(self, digest: bytes) -> None: ...
    def forgotten(self, digest: bytes) -> None: ...


class _LoadedState(NamedTuple):
    """Fixed state at the end of a load's blocks. slot: of the device, which the load holds until its end."""

    digest: bytes
    slot: int


@dataclass(frozen=True, slots=True)
class _Load:
    """Load in progress.

    table: the cached prefix, and the blocks that are loaded after it.
    token_ids: tokens of all these blocks.
    num_prefix: number of blocks of the prefix.
    state: None if no state is loaded.
    slots: slots of host memory by key, those of the blocks in their order, then those of the state.
    """

    table: BlockTable
    token_ids: Sequence[int]
    num_prefix: int
    state: _LoadedState | None
    slots: dict[bytes, list[int]]


class HostTier:
    """Owner of the slots of host memory.

    take_ended: returns the loads that have ended since the last call.
    events: receiver of the changes; None for none.
    store: store behind host memory; None for none.

    num_saved, num_loaded: slots that were copied to host memory and from it, since the start.
    num_corrupt: blocks and states whose checksums differed, since the start.
    state_parts: number of slots of a state; 0 for a model without.
    num_dropped: evicted blocks and states that were not saved, for want of slots or because of `max_saves`, since the
        start.
    queries, hits: prompt tokens that the device's cache lacked at the first admission, and those of them that were
        loaded.
    """

    def __init__(
        self, host: HostSlots, take_ended: Callable[[], Iterable[EndedLoad]], events: HostEvents | None = None,
        store: StoreTier | None = None,
    ) -> None:
        self.num_slots = host.num_slots
        self.block_bytes = host.block_bytes
        self.num_saved = 0
        self.num_loaded = 0
        self.num_corrupt = 0
        self.num_dropped = 0
        self.queries = 0
        self.hits = 0
        self.store = store
        self._take_ended = take_ended
        self._events = events
        self.state_parts = host.state_parts
        self._slots: OrderedDict[bytes, list[int]] = OrderedDict()  # by key, the least recently used first
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._reading: Counter[int] = Counter()  # slots that loads read, which no save may overwrite
        self._max_saves = self.num_slots if host.max_saves is None else host.max_saves
        self._early = EarlySaves(host)
        self._new = NewSaves(host, self._max_saves)  # used with a store
        self._loads: dict[int, _Load] = {}  # in progress, the oldest first
        self._load_of: dict[bytes, int] = {}  # key -> the load in progress that contains it
        self._ids = itertools.count()
        self._ended: list[EndedLoad] = []  # loads that have ended, for the next `end_loads`
        self._new_saves: dict[bytes, list[HostCopy]] = {}  # by key, the saves that no step carries yet
        self._num_new = 0  # number of their slots
        self._new_loads: list[HostLoad] = []

    @property
    def num_used(self) -> int:
        """Number of slots that hold blocks and states."""
        return self.num_slots - len(self._free)

    @property
    def has_loads(self) -> bool:
        """True until all loads have ended, and the store needs no `poll` soon."""
        return bool(self._loads) or (self.store is not None and (self.store.is_busy or self._new.has_waiting))

    @property
    def has_new_loads(self) -> bool:
        """True if a load has begun that no step carries yet."""
        return bool(self._new_loads)

    @property
    def saves_without_rows(self) -> bool:
        """True if blocks are saved without waiting for a step: other servers may need them."""
        return self.store is not None

    @property
    def tables(self) -> Iterator[BlockTable]:
        """Block tables of the loads."""
        return (load.table for load in self._loads.values())

    @property
    def num_blocks_of_loads(self) -> int:
        """Number of blocks that loads in progress use."""
        return sum(len(load.table.block_ids) for load in self._loads.values())

    def offer(self, digest: bytes) -> None:
        """Let a block that the prefix cache has now be saved before its eviction."""
        if self.store is not None:
            self._new.add_block(digest)

    def offer_state(self, digest: bytes) -> None:
        """Let the fixed state after a block be saved before its eviction."""
        if self.store is not None:
            self._new.add_state(state_key(digest), digest)

    def count_lookup(self, num_lacking: int, num_loaded: int) -> None:
        """Count the look-up of a request that was admitted for the first time.

        num_lacking: prompt tokens that the device's cache lacked.
        num_loaded: how many of them were loaded.
        """
        self.queries += num_lacking
        self.hits += num_loaded

    def save(self, digest: bytes, block: int) -> None:
        """Keep a block that is evicted. The next step copies it first, unless host memory has it already."""
        self._new.discard(digest)
        if not self.keep(digest, block):
            self.num_dropped += 1

    def save_state(self, digest: bytes, slot: int) -> None:
        """Keep the fixed state in a slot of the device, which is evicted, as `save` keeps a block."""
        self._new.discard(state_key(digest))
        if not self.keep(state_key(digest), slot, self.state_parts):
            self.num_dropped += 1

    def keep(self, key: bytes, index: int, num_parts: int = 0) -> bool:
        """Plan a save unless host memory has the block or state. Return False if slots are lacking.

        index: of the block, or of the state's slot on the device.
        num_parts: number of parts of the state; 0 for a block.
        """
        if key in self._slots:
            self._slots.move_to_end(key)
            return True
        count = num_parts or 1
        if count > min(self._max_saves, self.num_slots - len(self._reading)):
            return False
        while self._num_new + count > self._max_saves:
            if not self._forget_oldest(self._new_saves):
                return False
        while len(self._free) < count:
            self._forget_oldest(self._slots)
        slots = self._slots[key] = [self._free.pop() for _ in range(count)]
        parts = range(num_parts) if num_parts else [WHOLE_BLOCK]
        self._new_saves[key] = [HostCopy(index, slot, part) for part, slot in zip(parts, slots, strict=True)]
        self._num_new += count
        if self._events is not None:
            self._events.saved(key)
        return True

    def _forget_oldest(self, keys: Iterable[bytes]) -> bool:
        """Forget the first of these blocks and states that no load reads. Return False if there is none."""
        key = next((key for key in keys if not self._reading[self._slots[key][0]]), None)
        if key is None:
            return False
        self.forget(key)
        return True

    def has(self, key: bytes) -> bool:
        """Return whether host memory has a block or state. The key of a block is its digest."""
        return key in self._slots

    def has_state(self, digest: bytes) -> bool:
        """Return whether host memory has the fixed state after a block."""
        return state_key(digest) in self._slots

    def find(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return the leading digests whose blocks are in host memory."""
        return list(itertools.takewhile(self._slots.__contains__, digests))

    def load_of(self, keys: Iterable[bytes]) -> int | None:
        """Return the load in progress that contains the first of these blocks and states that any contains."""
        return next((self._load_of[key] for key in keys if key in self._load_of), None)

    @property
    def oldest_load(self) -> int | None:
        """The load in progress that began first; None if there is none."""
        return next(iter(self._loads), None)

    def begin_load(
        self, blocks: BlockManager, table: BlockTable, token_ids: Sequence[int], prefix: Sequence[int],
        digests: Sequence[bytes], spare: int, states: StateSlots | None = None, state: bytes = b"",
    ) -> int | None:
        """Begin to load blocks behind a cached prefix, and the fixed state after them. Return the load's id.

        Returns None if blocks or a slot of the device are lacking.

        table: without blocks, of the request's salt and scope. The load owns it.
        token_ids: tokens of the prefix and of the blocks.
        prefix: from `find_prefix`.
        digests: from `find`. No load contains them.
        spare: minimum number of cached and free blocks to leave.
        states: slots of the device; needed for a state only.
        state: digest of the last block if its state is loaded, which host memory has; b"" for none.
        """
        keys = [*digests, state_key(state)] if state else digests
        slots = {key: self._slots[key] for key in keys}
        self._reading.update(itertools.chain.from_iterable(slots.values()))  # evictions for this load do not take them
        loaded: _LoadedState | None = None
        if state and states is not None and (slot := states.begin_load()) is not None:
            loaded = _LoadedState(state, slot)
        if (state and loaded is None) or not blocks.allocate(table, len(token_ids), prefix, spare):
            if loaded is not None and states is not None:
                states.cancel_load(loaded.slot)
            self._release(slots)
            return None
        for key in reversed(keys):  # a block is forgotten after its children, and they after the state
            self._slots.move_to_end(key)
        load_id = next(self._ids)
        self._loads[load_id] = _Load(table, token_ids, len(prefix), loaded, slots)
        self._load_of.update(dict.fromkeys(keys, load_id))
        copies = [HostCopy(block, slots[key][0])
                  for block, key in zip(table.block_ids[len(prefix):], digests, strict=True)]
        if loaded is not None:
            copies += [HostCopy(loaded.slot, slot, part) for part, slot in enumerate(slots[state_key(state)])]
        self._new_loads.append(HostLoad(load_id, copies))
        return load_id

    def take_copies(
        self, blocks: BlockManager, states: StateSlots | None = None
    ) -> tuple[list[HostCopy], list[HostLoad]]:
        """Return the saves and loads that the next step carries."""
        num_free = self._max_saves - self._num_new
        if self.store is None:
            self._early.plan(self, blocks, num_free)
        else:
            num_wanted = self.store.limit_saves(self._max_saves) - self._num_new
            self._new.plan(self, blocks, states, num_free, num_wanted)
        saves = list(itertools.chain.from_iterable(self._new_saves.values()))
        if self.store is not None:
            for key, copies in self._new_saves.items():
                self.store.save(self, key, [copy.slot for copy in copies])
        loads = self._new_loads
        self.num_saved += len(saves)
        self._new_saves = {}
        self._num_new = 0
        self._new_loads = []
        return saves, loads

    def poll(self) -> None:
        """Let the runner queue further copies of loads. Call it often while a long step runs."""
        self._ended += self._take_ended()
        if self.store is not None:
            self.store.poll(self)

    def end_loads(self, blocks: BlockManager, states: StateSlots | None = None) -> set[int]:
        """Enter what the loads that have ended brought into the prefix cache. Return the ids of these loads, and of
        fetches from the store that have ended."""
        self.poll()
        ended = {load.id: load.num_intact for load in self._ended}
        self._ended = []
        for load_id, num_intact in ended.items():
            load = self._loads.pop(load_id)
            num_kept = self._count_kept(load, num_intact)
            num_blocks = len(load.slots) - (load.state is not None)
            blocks.register(
                load.table, load.token_ids, (load.num_prefix + min(num_kept, num_blocks)) * blocks.block_size)
            if self.store is not None and self._events is not None:
                for digest in itertools.islice(load.slots, num_kept):  # those from the store were not on the device
                    self._events.saved(digest)
            if load.state is not None and states is not None:
                if num_kept == len(load.slots):
                    count = len(load.token_ids) // blocks.block_size
                    states.end_load(load.state.slot, blocks.digests(load.table, load.token_ids, count),
                                    len(load.token_ids))
                else:
                    states.cancel_load(load.state.slot)
            for key in load.slots:
                del self._load_of[key]
            self._release(load.slots)
            blocks.free(load.table)
            self.num_loaded += num_intact
        return set(ended) if self.store is None else ended.keys() | self.store.take_ended()

    def _count_kept(self, load: _Load, num_intact: int) -> int:
        """Return the number of the first blocks and states of a load that enter the prefix cache.

        What was forgotten meanwhile, as by a flush, does not. The first one whose checksum differs is forgotten.

        num_intact: number of slots with the right checksum.
        """
        num_kept = 0
        is_whole = True
        for key, slots in load.slots.items():
            is_known = self._slots.get(key) == slots
            num_intact -= len(slots)
            if num_intact < 0:
                self.forget_corrupt(key, slots)
                break
            is_whole = is_whole and is_known
            num_kept += is_whole
        return num_kept

    def forget(self, key: bytes) -> None:
        """Forget a block or state, and its save if no step carries it yet. Nothing if it is not in host memory."""
        slots = self._slots.pop(key, None)
        if slots is None:
            return
        if not self._reading[slots[0]]:
            self._free += slots
            if self._new_saves.pop(key, None) is not None:
                self._num_new -= len(slots)
                self.num_dropped += 1
        if self.store is not None:
            self.store.forget(key)
        if self._events is not None:
            self._events.forgotten(key)

    def forget_corrupt(self, key: bytes, slots: list[int]) -> None:
        """Forget a block or state whose checksum differs. Nothing if it was forgotten since."""
        if self._slots.get(key) == slots:
            self.num_corrupt += 1
            self.forget(key)

    def clear(self) -> None:
        """Forget all blocks and states, also those that are being loaded. Not between the plan of a load and
        `take_copies`."""
        self._new_saves.clear()
        self._num_new = 0
        for key in list(self._slots):
            self.forget(key)
        if self.store is not None:
            self.store.clear(self)

    def next_id(self) -> int:
        """Return a new id of a load or a call of the store."""
        return next(self._ids)

    def hold(self, slots: Iterable[int]) -> None:
        """Keep slots from being overwritten until `release`."""
        self._reading.update(slots)

    def reserve(self, count: int, is_busy: Callable[[int], bool]) -> list[int]:
        """Return at most `count` slots, which are held, for what comes from the store. Forgets the least recently used.

        is_busy: returns whether a copy to a slot is in progress, as of a block that was forgotten. It would overwrite
            what comes from the store.
        """
        while len(self._free) < count and self._forget_oldest(self._slots):
            pass
        slots: list[int] = []
        busy: list[int] = []
        while self._free and len(slots) < count:
            slot = self._free.pop()
            (busy if is_busy(slot) else slots).append(slot)
        self._free += busy
        self.hold(slots)
        return slots

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make blocks and states in host memory the most recently used ones, the last of them the first to be
        forgotten."""
        for key in reversed(keys):
            self._slots.move_to_end(key)

    def enter(self, key: bytes, slots: list[int]) -> None:
        """Enter a block or state that the store has brought into held slots, unless host memory has it."""
        self._slots.setdefault(key, slots)

    def slots_of(self, key: bytes) -> list[int] | None:
        """Return the slots of a block or state; None without one, or if no step carries its save yet."""
        return None if key in self._new_saves else self._slots.get(key)

    def release(self, key: bytes, slots: list[int]) -> None:
        """End a `hold`. The slots are free then if they do not hold this block or state."""
        self._release({key: slots})

    def _release(self, slots_by_key: dict[bytes, list[int]]) -> None:
        """End the reading of slots. Those whose blocks and states were forgotten are free then."""
        for key, slots in slots_by_key.items():
            for slot in slots:
                self._reading[slot] -= 1
                if not self._reading[slot]:
                    del self._reading[slot]
                    if self._slots.get(key) != slots:
                        self._free.append(slot)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless each slot is free, or has one block or part of a state, or is read for one that
        was forgotten."""
        kept = list(itertools.chain.from_iterable(self._slots.values()))
        held = set(kept) | set(self._reading)
        if len(set(kept)) < len(kept) or sorted([*self._free, *held]) != list(range(self.num_slots)):
            raise IntegrityError(f"slots {sorted(self._free)} of host memory are free, and {sorted(held)} are held")
        read = Counter(slot for load in self._loads.values() for slots in load.slots.values() for slot in slots)
        read.update(self.store.held_slots if self.store is not None else ())
        if read != self._reading:
            raise IntegrityError(f"loads and the store hold the slots {sorted(read.elements())} of host memory, but "
                                 f"{sorted(self._reading.elements())} are marked")
