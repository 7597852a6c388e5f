"""Blocks and fixed states in a store that servers share (service/store), behind those in host memory (host_tier.py).

    save    a block or state in host memory ──► the store, once its copy from the device is complete
    fetch   ASKED ──lookup──► LOADED into slots of host memory ──► entered there, and loaded as any prefix of it

A value of the store has the bytes of one slot. A block is one value under its digest. A state is as many as it has
parts, under keys of their own (`value_keys`).

A request whose prefix ends neither on the device nor in host memory is LOADING while the store is asked, and others
run. It asks once. Further requests that need the same block or state wait for the same fetch. What the store does not
have, or not in time, is computed. A prefix of a model with fixed state ends where there is a state (`Wanted.ends`). The
look-up asks for the last part of each, since parts are saved in their order. The load brings all of them or none.

Slots that the store reads or writes are held: no save may overwrite them. At most MAX_HELD_SHARE of the slots are held
for loads. A save begins while fewer than `max_saves` are held for saves. Blocks and states wait on the device until
there are fewer (early_saves.py). Those that are evicted before reach host memory alone, as all do while the store is
not asked, for example at the start. What host memory has and the store lacks, also after failed saves, waits there and
is saved later:

    waiting ──► copying, until the copy from the device is complete ──► sending ──► saved
       ▲                                                                   │
       └────────── failed, fewer than MAX_SAVE_TRIES times ◄───────────────┘

After a failure nothing that waits is saved for a pause, which doubles (`longer_pause`) until a save succeeds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from npuserve.service.store.connector import UNREADABLE, SlotMemory, StoreConnector, longer_pause

MAX_HELD_SHARE = 2
"""Fetches hold at most 1 / MAX_HELD_SHARE of the slots."""
MAX_SAVE_TRIES = 5
"""Maximum number of times that the save of a block or state is tried, calls that were not made included."""


def value_keys(key: bytes, count: int) -> list[bytes]:
    """Return the keys of the values of a block or state that takes `count` slots of host memory, in their order."""
    return [key] if count == 1 else [key + part.to_bytes(2, "big") for part in range(count)]


class SlotIndex(Protocol):
    """Index of the slots of host memory: host_tier.py."""

    num_slots: int
    state_parts: int

    def next_id(self) -> int: ...
    def hold(self, slots: Iterable[int]) -> None: ...
    def reserve(self, count: int, is_busy: Callable[[int], bool]) -> list[int]: ...
    def enter(self, key: bytes, slots: list[int]) -> None: ...
    def release(self, key: bytes, slots: list[int]) -> None: ...
    def slots_of(self, key: bytes) -> list[int] | None: ...
    def forget_corrupt(self, key: bytes, slots: list[int]) -> None: ...


class PrefixEnd(NamedTuple):
    """Place where a prefix may end.

    num_blocks: number of the first blocks of `Wanted.blocks` before it.
    num_tokens: tokens that need not be computed if the prefix ends here.
    state: key of the state there; b"" if the model has none, or if the device or host memory has it.
    """

    num_blocks: int
    num_tokens: int
    state: bytes = b""


class Wanted(NamedTuple):
    """What a request lacks of its prefix on the device and in host memory.

    blocks: digests of the blocks, in order.
    ends: places where the prefix may end, ascending; at least one.
    is_whole: a part of a prefix is of no use.
    """

    blocks: list[bytes]
    ends: list[PrefixEnd]
    is_whole: bool

    @property
    def states(self) -> list[bytes]:
        """Keys of the states at these ends that neither the device nor host memory has."""
        return [end.state for end in self.ends if end.state]


NO_PREFIX = PrefixEnd(0, 0)


@dataclass(slots=True)
class _Fetch:
    """Fetch in progress.

    keys: what is looked up, and after that what is loaded.
    loads: what is loaded, and its slots of host memory, in order; empty until the lookup has ended.
    is_dropped: the prefix cache was flushed since.
    """

    wanted: Wanted
    keys: list[bytes]
    loads: list[tuple[bytes, list[int]]] = field(default_factory=list)
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class _Save:
    """Save of a block or state from slots of host memory, which are held.

    num_failures: of earlier saves of it.
    num_sending: values whose results are missing.
    result: the least of the values' results so far.
    is_refused: the store was not asked for all of them.
    """

    key: bytes
    slots: list[int]
    num_failures: int
    num_sending: int = 0
    result: int = 1
    is_refused: bool = False


class StoreTier:
    """Saves to a store, and fetches from it. Its calls never block.

    memory: slots of host memory.
    max_saves: number of slots held for saves from which on no further save begins.
    clock: returns the time in seconds.

    queries, hits: prompt tokens that were looked up in the store, and those that need not be computed by what it
        brought, since the start.
    num_saved, num_loaded: values that were saved to the store and loaded from it, since the start.
    num_retried: saves that were begun again after a failure, since the start.
    """

    def __init__(
        self, connector: StoreConnector, memory: SlotMemory, max_saves: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connector = connector
        self.queries = 0
        self.hits = 0
        self.num_saved = 0
        self.num_loaded = 0
        self.num_retried = 0
        self._memory = memory
        self._max_saves = max_saves
        self._clock = clock
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_of: dict[bytes, int] = {}
        self._ended: set[int] = set()
        # What host memory has and the store lacks -> failures of its saves. A dict would pass over all removed keys
        # before the oldest one.
        self._waiting: OrderedDict[bytes, int] = OrderedDict()
        self._copying: deque[_Save] = deque()  # the copies from the device are in progress
        self._sending: dict[int, _Save] = {}  # by call of the connector
        self._num_held = 0  # slots that are held for saves
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
            for _, slots in fetch.loads:
                yield from slots
        for save in {*self._copying, *self._sending.values()}:
            yield from save.slots

    def fetch_of(self, keys: Iterable[bytes]) -> int | None:
        """Return the fetch in progress that may bring the first of these blocks and states that any may bring."""
        return next((self._fetch_of[key] for key in keys if key in self._fetch_of), None)

    def begin_fetch(self, index: SlotIndex, call: int, wanted: Wanted) -> bool:
        """Begin to fetch a prefix. Return False if the store is not asked.

        wanted: no fetch contains its first block or its states. It is fetched up to a block that one contains.
        """
        blocks = list(itertools.takewhile(lambda digest: digest not in self._fetch_of, wanted.blocks))
        ends = [end for end in wanted.ends if end.num_blocks <= len(blocks)]
        if not ends:
            return False
        wanted = Wanted(blocks, ends, wanted.is_whole)
        values = [*blocks, *(value_keys(state, index.state_parts)[-1] for state in wanted.states)]
        if not self.connector.is_available or not self.connector.lookup(call, values):
            return False
        keys = [*blocks, *wanted.states]
        self._fetches[call] = _Fetch(wanted, keys)
        self._fetch_of.update(dict.fromkeys(keys, call))
        self.queries += ends[-1].num_tokens
        return True

    def limit_saves(self, count: int) -> int:
        """Return how many of `count` further slots `save` takes; all of them while the store is not asked."""
        if not self.connector.is_available:
            return count
        return max(0, min(count, self._max_saves - self._num_held))

    def save(self, index: SlotIndex, key: bytes, slots: list[int]) -> None:
        """Save a block or state, which a step copies to slots of host memory."""
        if not self.connector.is_available:
            self._waiting[key] = 0
            return
        if not self.limit_saves(1):
            self.connector.failures["dropped"] += 1
            self._waiting[key] = 1
            return
        self._begin_save(index, _Save(key, slots, 0))

    def _begin_save(self, index: SlotIndex, save: _Save) -> None:
        index.hold(save.slots)
        self._num_held += len(save.slots)
        self._copying.append(save)

    def poll(self, index: SlotIndex) -> None:
        """Take in the results of the connector, and pass it what can be saved now."""
        self._save_waiting(index)
        while self._copying and all(map(self._memory.is_saved, self._copying[0].slots)):
            self._send(index, self._copying.popleft())
        for call, num_values, present in self.connector.take_results():
            if call in self._sending:
                self._end_value(index, self._sending.pop(call), num_values)
            elif self._fetches[call].loads:
                self._end_load(index, call, num_values)
            elif not self._begin_load(index, call, present):
                self._end(call)

    def _save_waiting(self, index: SlotIndex) -> None:
        """Begin to save what waits, the oldest first: the first blocks of a prefix before the others."""
        while self._can_save_waiting and self.limit_saves(1):
            key = next(iter(self._waiting))
            num_failures = self._waiting.pop(key)
            slots = index.slots_of(key)
            if slots is not None:  # host memory has it still
                self.num_retried += num_failures > 0
                self._begin_save(index, _Save(key, slots, num_failures))

    def _send(self, index: SlotIndex, save: _Save) -> None:
        """Pass the values of a block or state to the connector, until it refuses one."""
        for key, slot in zip(value_keys(save.key, len(save.slots)), save.slots, strict=True):
            call = index.next_id()
            if not self.connector.save(call, key, slot):
                save.is_refused = True
                if self.connector.is_available:
                    save.result = min(save.result, 0)
                break
            self._sending[call] = save
            save.num_sending += 1
        if not save.num_sending:
            self._end_save(index, save)

    def _end_value(self, index: SlotIndex, save: _Save, result: int) -> None:
        self.num_saved += result > 0
        save.result = min(save.result, result)
        save.num_sending -= 1
        if not save.num_sending:
            self._end_save(index, save)

    def _end_save(self, index: SlotIndex, save: _Save) -> None:
        if save.result == UNREADABLE:
            index.forget_corrupt(save.key, save.slots)
        elif not save.result:
            self._fail(save)
        elif save.is_refused:
            self._waiting[save.key] = save.num_failures
        else:
            self._retry_pause = 0.0
        self._release_save(index, save)

    def _release_save(self, index: SlotIndex, save: _Save) -> None:
        self._num_held -= len(save.slots)
        index.release(save.key, save.slots)

    def _fail(self, save: _Save) -> None:
        """Begin a pause, and let what was not saved wait unless that was its last try."""
        now = self._clock()
        if now >= self._retry_time:  # failures during a pause do not extend it
            self._retry_pause = longer_pause(self._retry_pause)
            self._retry_time = now + self._retry_pause
        if save.num_failures + 1 < MAX_SAVE_TRIES:
            self._waiting[save.key] = save.num_failures + 1

    def forget(self, key: bytes) -> None:
        """Note that host memory has forgotten a block or state."""
        self._waiting.pop(key, None)

    def _begin_load(self, index: SlotIndex, call: int, present: bytes) -> bool:
        """Load the longest prefix that the store has. Return False if there is none, or no slots for it.

        present: of each key of the look-up, whether the store has its value.
        """
        fetch = self._fetches[call]
        if fetch.is_dropped:
            return False
        keys = {key for key, is_present in zip(fetch.keys, present, strict=False) if is_present}
        num_held = sum(len(slots) for other in self._fetches.values() for _, slots in other.loads)
        max_slots = index.num_slots // MAX_HELD_SHARE - num_held
        sizes = self._sizes(index, fetch.wanted, keys, max_slots)
        slots = index.reserve(sum(sizes.values()), self._memory.is_copying)
        sizes = self._sizes(index, fetch.wanted, keys, len(slots))  # they may be fewer
        unused = iter(slots)
        loads = [(key, list(itertools.islice(unused, size))) for key, size in sizes.items()]
        index.release(b"", list(unused))
        values = [value for key, its_slots in loads for value in value_keys(key, len(its_slots))]
        targets = [slot for _, its_slots in loads for slot in its_slots]
        if loads and self.connector.load(call, values, targets, is_whole=fetch.wanted.is_whole):
            for key in fetch.keys:
                if key not in sizes:
                    del self._fetch_of[key]
            fetch.keys = list(sizes)
            fetch.loads = loads
            return True
        for key, its_slots in loads:
            index.release(key, its_slots)
        return False

    def _sizes(self, index: SlotIndex, wanted: Wanted, keys: Set[bytes], max_slots: int) -> dict[bytes, int]:
        """Return the number of slots of each block and state to load, in order, of at most `max_slots` together.

        keys: of the blocks and states that the store has.
        """
        end = self._longest_end(wanted, keys, max_slots, index.state_parts)
        sizes = dict.fromkeys(wanted.blocks[: end.num_blocks], 1)
        if end.state:
            sizes[end.state] = index.state_parts
        return sizes

    @staticmethod
    def _longest_end(
        wanted: Wanted, keys: Set[bytes], num_slots: float = math.inf, state_parts: int = 0
    ) -> PrefixEnd:
        """Return the end of the longest prefix of these blocks and states; NO_PREFIX if there is none.

        num_slots: maximum number of slots that the prefix takes.
        state_parts: number of slots of a state.
        """
        num_blocks = sum(1 for _ in itertools.takewhile(keys.__contains__, wanted.blocks))
        for end in reversed(wanted.ends):
            num_needed = end.num_blocks + (state_parts if end.state else 0)
            if end.num_blocks <= num_blocks and num_needed <= num_slots and (not end.state or end.state in keys):
                return end
        return NO_PREFIX

    def _end_load(self, index: SlotIndex, call: int, num_values: int) -> None:
        """Enter what has arrived, in order, as far as it is whole."""
        fetch = self._fetches[call]
        if fetch.is_dropped:
            num_values = 0
        self._memory.received([slot for _, slots in fetch.loads for slot in slots][:num_values])
        self.num_loaded += num_values
        arrived: set[bytes] = set()
        for key, slots in fetch.loads:
            num_values -= len(slots)
            if num_values >= 0:
                index.enter(key, slots)
                arrived.add(key)
            index.release(key, slots)
        if arrived:
            self.hits += self._longest_end(fetch.wanted, arrived).num_tokens
        self._end(call)

    def _end(self, call: int) -> None:
        for key in self._fetches.pop(call).keys:
            self._fetch_of.pop(key, None)
        self._ended.add(call)

    def take_ended(self) -> set[int]:
        """Return the fetches that have ended since the last call."""
        ended = self._ended
        self._ended = set()
        return ended

    def clear(self, index: SlotIndex) -> None:
        """Remove the model's blocks and states from the store. What fetches bring is dropped."""
        for fetch in self._fetches.values():
            fetch.is_dropped = True
        while self._copying:
            self._release_save(index, self._copying.popleft())
        self.connector.clear()
