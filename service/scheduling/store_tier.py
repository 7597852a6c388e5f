"""Blocks in a store that servers share (service/store), behind those in host memory (host_tier.py).

    save    a block in host memory ──► the store, once its copy from the device is complete
    fetch   ASKED ──lookup──► LOADED into slots of host memory ──► entered there, and loaded as any block of it

A request whose prefix continues neither on the device nor in host memory is LOADING while the store is asked, and
others run. It asks once. Further requests that need the same block wait for the same fetch. What the store does not
have, or not in time, is computed.

Slots that the store reads or writes are held: no save may overwrite them. At most MAX_HELD_SHARE of the slots are held
for loads, and `max_saves` for saves. Blocks wait for their early saves until there are fewer. Those that are evicted
before reach host memory alone, as all blocks do while the store is not asked, for example at the start. Blocks in host
memory that the store lacks, also those whose saves failed, wait there and are saved later:

    waiting ──► copying, until the copy from the device is complete ──► sending ──► saved
       ▲                                                                   │
       └────────── failed, fewer than MAX_SAVE_TRIES times ◄───────────────┘

After a failure nothing that waits is saved for a pause, which doubles (`longer_pause`) until a save succeeds.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from npuserve.service.store.connector import UNREADABLE, SlotMemory, StoreConnector, longer_pause

MAX_HELD_SHARE = 2
"""Fetches hold at most 1 / MAX_HELD_SHARE of the slots."""
MAX_SAVE_TRIES = 5
"""Maximum number of times that the save of a block is tried, calls that were not made included."""


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


class _Save(NamedTuple):
    """Save of a block from a slot of host memory, which is held. num_failures: of earlier saves of the block."""

    digest: bytes
    slot: int
    num_failures: int


class StoreTier:
    """Saves to a store, and fetches from it. Its calls never block.

    memory: slots of host memory.
    max_saves: maximum number of slots that are held for saves.
    clock: returns the time in seconds.

    queries: prompt tokens that were looked up in the store.
    num_saved, num_loaded: blocks that were saved to the store and loaded from it, since the start.
    num_retried: saves that were begun again after a failure, since the start.
    """

    def __init__(
        self, connector: StoreConnector, memory: SlotMemory, max_saves: int, block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connector = connector
        self.block_size = block_size
        self.queries = 0
        self.num_saved = 0
        self.num_loaded = 0
        self.num_retried = 0
        self._memory = memory
        self._max_saves = max_saves
        self._clock = clock
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_of: dict[bytes, int] = {}
        self._ended: set[int] = set()
        self._waiting: dict[bytes, int] = {}  # blocks in host memory that the store lacks -> failures of their saves
        self._copying: deque[_Save] = deque()  # the copies of their blocks from the device are in progress
        self._sending: dict[int, _Save] = {}  # by call of the connector
        self._retry_pause = 0.0
        self._retry_time = 0.0  # what waits is not saved before

    @property
    def is_busy(self) -> bool:
        """True if `poll` is needed soon."""
        return bool(self._fetches or self._ended or self._copying or self._can_save_waiting)

    @property
    def _can_save_waiting(self) -> bool:
        return bool(self._waiting) and self.connector.is_available and self._clock() >= self._retry_time

    @property
    def held_slots(self) -> Iterator[int]:
        """Slots that the store reads or writes, or will."""
        for fetch in self._fetches.values():
            yield from fetch.slots
        for save in (*self._copying, *self._sending.values()):
            yield save.slot

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
        return max(0, min(count, self._max_saves - len(self._copying) - len(self._sending)))

    def save(self, index: SlotIndex, digest: bytes, slot: int) -> None:
        """Save a block, which a step copies to a slot of host memory."""
        if not self.connector.is_available:
            self._waiting[digest] = 0
            return
        if not self.limit_saves(1):
            self.connector.failures["dropped"] += 1
            self._waiting[digest] = 1
            return
        self._begin_save(index, _Save(digest, slot, 0))

    def _begin_save(self, index: SlotIndex, save: _Save) -> None:
        index.hold([save.slot])
        self._copying.append(save)

    def poll(self, index: SlotIndex) -> None:
        """Take in the results of the connector, and pass it the blocks that can be saved now."""
        self._save_waiting(index)
        while self._copying and self._memory.is_saved(self._copying[0].slot):
            save = self._copying.popleft()
            call = index.next_id()
            if self.connector.save(call, save.digest, save.slot):
                self._sending[call] = save
                continue
            if self.connector.is_available:
                self._fail(save)
            else:
                self._waiting[save.digest] = save.num_failures
            index.release(save.digest, save.slot)
        for call, count in self.connector.take_results():
            if call in self._sending:
                self._end_save(index, self._sending.pop(call), count)
            elif self._fetches[call].slots:
                self._end_load(index, call, count)
            elif not self._begin_load(index, call, count):
                self._end(call)

    def _save_waiting(self, index: SlotIndex) -> None:
        """Begin to save blocks that wait: those that were added last, the first ones of a prefix, first."""
        while self._can_save_waiting and self.limit_saves(1):
            digest, num_failures = self._waiting.popitem()
            slot = index.slot_of(digest)
            if slot is not None:  # host memory has the block still
                self.num_retried += num_failures > 0
                self._begin_save(index, _Save(digest, slot, num_failures))

    def _end_save(self, index: SlotIndex, save: _Save, count: int) -> None:
        if count > 0:
            self.num_saved += count
            self._retry_pause = 0.0
        elif count != UNREADABLE:
            self._fail(save)
        index.release(save.digest, save.slot)

    def _fail(self, save: _Save) -> None:
        """Begin a pause, and let the block of a failed save wait unless that was its last try."""
        now = self._clock()
        if now >= self._retry_time:  # failures during a pause do not extend it
            self._retry_pause = longer_pause(self._retry_pause)
            self._retry_time = now + self._retry_pause
        if save.num_failures + 1 < MAX_SAVE_TRIES:
            self._waiting[save.digest] = save.num_failures + 1

    def forget(self, digest: bytes) -> None:
        """Note that host memory has forgotten a block."""
        self._waiting.pop(digest, None)

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
        while self._copying:
            save = self._copying.popleft()
            index.release(save.digest, save.slot)
        self.connector.clear()
