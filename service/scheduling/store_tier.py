"""Blocks in a store that servers share (service/store), behind those in host memory (host_tier.py).

    save    a block in host memory ──► the store, once its copy from the device is complete
    fetch   ASKED ──lookup──► LOADED into slots of host memory ──► entered there, and loaded as any block of it

A request whose prefix continues neither on the device nor in host memory is LOADING while the store is asked, and
others run. It asks once. Further requests that need the same block wait for the same fetch. What the store does not
have, or not in time, is computed.

Slots that the store reads or writes are held: no save may overwrite them. At most MAX_HELD_SHARE of the slots are held
for loads, and `max_saves` for saves. Blocks wait for their early saves until there are fewer. Those that are evicted
before are not saved to the store. While the store is not asked, as at the start, blocks are saved to host memory alone.
Those that are still there when it is asked again are saved to it then.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from npuserve.service.store.connector import SlotMemory, StoreConnector

MAX_HELD_SHARE = 2
"""Fetches hold at most 1 / MAX_HELD_SHARE of the slots."""


class SlotIndex(Protocol):
    """Index of the slots of host memory: host_tier.py."""

    num_slots: int

    def next_id(self) -> int: ...
    def hold(self, slots: Iterable[int]) -> None: ...
    def reserve(self, count: int, is_busy: Callable[[int], bool]) -> list[int]: ...
    def enter(self, digest: bytes, slot: int) -> None: ...
    def release(self, digest: bytes, slot: int) -> None: ...
    def slot_of(self, digest: bytes) -> int | None: ...


@dataclass(slots=True)
class _Fetch:
    """Fetch in progress.

    digests: of the blocks that the device and host memory lack; after the lookup those that are loaded.
    slots: of host memory, to which they are loaded; empty until the lookup has ended.
    is_dropped: the prefix cache was flushed since.
    """

    digests: list[bytes]
    slots: list[int] = field(default_factory=list)
    is_dropped: bool = False


class StoreTier:
    """Saves to a store, and fetches from it. Its calls never block.

    memory: slots of host memory.
    max_saves: maximum number of blocks that wait to be saved.

    queries: prompt tokens that were looked up in the store.
    num_saved, num_loaded: blocks that were saved to the store and loaded from it, since the start.
    """

    def __init__(self, connector: StoreConnector, memory: SlotMemory, max_saves: int, block_size: int) -> None:
        self.connector = connector
        self.block_size = block_size
        self.queries = 0
        self.num_saved = 0
        self.num_loaded = 0
        self._memory = memory
        self._max_saves = max_saves
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_of: dict[bytes, int] = {}
        self._ended: set[int] = set()
        self._copied: deque[tuple[bytes, int]] = deque()  # blocks whose copies from the device are in progress
        self._missed: dict[bytes, None] = {}  # blocks that were saved to host memory while the store was not asked
        self._saves: dict[int, tuple[bytes, int]] = {}  # by call, the blocks that the connector saves

    @property
    def is_busy(self) -> bool:
        """True if `poll` is needed soon."""
        return bool(self._fetches or self._ended or self._copied or (self._missed and self.connector.is_available))

    @property
    def held_slots(self) -> Iterator[int]:
        """Slots that the store reads or writes, or will."""
        for fetch in self._fetches.values():
            yield from fetch.slots
        for _, slot in (*self._copied, *self._saves.values()):
            yield slot

    def fetch_of(self, digest: bytes) -> int | None:
        """Return the fetch in progress that may bring a block."""
        return self._fetch_of.get(digest)

    def begin_fetch(self, call: int, digests: Sequence[bytes]) -> bool:
        """Begin to fetch blocks, the first of which no fetch contains. Return False if the store is not asked."""
        digests = list(itertools.takewhile(lambda digest: digest not in self._fetch_of, digests))
        if not self.connector.is_available or not self.connector.lookup(call, digests):
            return False
        self._fetches[call] = _Fetch(digests)
        self._fetch_of.update(dict.fromkeys(digests, call))
        self.queries += len(digests) * self.block_size
        return True

    def limit_saves(self, count: int) -> int:
        """Return how many of `count` further blocks `save` takes; all of them while the store is not asked."""
        if not self.connector.is_available:
            return count
        return max(0, min(count, self._max_saves - len(self._copied) - len(self._saves)))

    def save(self, index: SlotIndex, digest: bytes, slot: int) -> None:
        """Save a block, which a step copies to a slot of host memory."""
        if not self.connector.is_available:
            self._missed[digest] = None
            return
        if not self.limit_saves(1):
            self.connector.failures["dropped"] += 1
            return
        index.hold([slot])
        self._copied.append((digest, slot))

    def poll(self, index: SlotIndex) -> None:
        """Take in the results of the connector, and pass it the blocks that can be saved now."""
        self._save_missed(index)
        while self._copied and self._memory.is_saved(self._copied[0][1]):
            digest, slot = self._copied.popleft()
            call = index.next_id()
            if self.connector.save(call, digest, slot):
                self._saves[call] = digest, slot
            else:
                index.release(digest, slot)
        for call, count in self.connector.take_results():
            if call in self._saves:
                self.num_saved += count
                index.release(*self._saves.pop(call))
            elif self._fetches[call].slots:
                self._end_load(index, call, count)
            elif not self._begin_load(index, call, count):
                self._end(call)

    def _save_missed(self, index: SlotIndex) -> None:
        """Begin to save blocks that the store missed: those that were saved last, the first ones of a prefix, first."""
        while self._missed and self.connector.is_available and self.limit_saves(1):
            digest, _ = self._missed.popitem()
            slot = index.slot_of(digest)
            if slot is not None:
                index.hold([slot])
                self._copied.append((digest, slot))

    def forget(self, digest: bytes) -> None:
        """Note that host memory has forgotten a block."""
        self._missed.pop(digest, None)

    def _begin_load(self, index: SlotIndex, call: int, count: int) -> bool:
        """Load the blocks that the store has. Return False if there are none, or no slots for them."""
        fetch = self._fetches[call]
        num_held = sum(len(other.slots) for other in self._fetches.values())
        count = min(count, index.num_slots // MAX_HELD_SHARE - num_held)
        if fetch.is_dropped or count < 1:
            return False
        slots = index.reserve(count, self._memory.is_copying)
        digests = fetch.digests[: len(slots)]
        if slots and self.connector.load(call, digests, slots):
            fetch.slots = slots
            for digest in fetch.digests[len(slots) :]:
                del self._fetch_of[digest]
            fetch.digests = digests
            return True
        for digest, slot in zip(digests, slots, strict=True):
            index.release(digest, slot)
        return False

    def _end_load(self, index: SlotIndex, call: int, count: int) -> None:
        fetch = self._fetches[call]
        if not fetch.is_dropped:
            self._memory.received(fetch.slots[:count])
            self.num_loaded += count
        for place, (digest, slot) in enumerate(zip(fetch.digests, fetch.slots, strict=True)):
            if place < count and not fetch.is_dropped:
                index.enter(digest, slot)
            index.release(digest, slot)
        self._end(call)

    def _end(self, call: int) -> None:
        for digest in self._fetches.pop(call).digests:
            self._fetch_of.pop(digest, None)
        self._ended.add(call)

    def take_ended(self) -> set[int]:
        """Return the fetches that have ended since the last call."""
        ended = self._ended
        self._ended = set()
        return ended

    def clear(self, index: SlotIndex) -> None:
        """Remove the model's blocks from the store. What fetches bring is dropped."""
        for fetch in self._fetches.values():
            fetch.is_dropped = True
        while self._copied:
            index.release(*self._copied.popleft())
        self.connector.clear()
