"""Saves of cached blocks to host memory before their eviction (host_tier.py).

A long prompt evicts more blocks than one step saves. Some of the blocks that the block manager will give away next are
therefore saved in each step, once there are as many to save as one step may save.

With a store all cached blocks are saved, and with a block the fixed state after it, if other requests are likely to
continue that. All parts of a state are saved in one step, which may therefore exceed its bound by those of one state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from npuserve.npu.step import HostSlots
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.state_slots import NO_SLOT, StateSlots, state_key
from npuserve.service.scheduling.store_tier import MAX_HELD_SHARE


class SavedKeys(Protocol):
    """Index of what host memory has: host_tier.py."""

    def has(self, key: bytes) -> bool: ...
    def keep(self, key: bytes, index: int, num_parts: int = 0) -> bool: ...


class _Candidate(NamedTuple):
    """Block or state to save; the fields are the arguments of `SavedKeys.keep`."""

    key: bytes
    device_index: int
    num_parts: int


class EarlySaves:
    """Choice of what is saved before its eviction.

    has_store: see the module.
    max_saves: maximum number of slots that a step saves to.

    has_waiting: the last step could not save all that was to be saved.
    """

    def __init__(self, host: HostSlots, max_saves: int, *, has_store: bool) -> None:
        self.has_waiting = False
        self._has_store = has_store
        self._num_early = min(host.num_early, host.num_slots // 2)
        self._max_early_saves = host.max_early_saves
        can_be_loaded = host.state_parts <= min(max_saves, host.num_slots // MAX_HELD_SHARE)
        self._state_parts = host.state_parts if has_store and can_be_loaded else 0
        self._num_checked = 0  # of the blocks that are evicted next, those that need no early save
        self._num_uncached = 0  # of the block manager when they were counted

    def plan(
        self, index: SavedKeys, blocks: BlockManager, states: StateSlots | None, num_free: int, num_wanted: int
    ) -> None:
        """Save some of what will be evicted next.

        num_free: number of slots to which the step can save.
        num_wanted: number of slots after which it saves nothing more.
        """
        counts = blocks.counts
        num_next = counts.cached if self._has_store else min(self._num_early - counts.free, counts.cached)
        num_uncached = blocks.num_uncached
        self._num_checked = max(0, self._num_checked - (num_uncached - self._num_uncached))
        self._num_uncached = num_uncached
        self.has_waiting = False
        if num_next - self._num_checked < (1 if self._has_store else self._max_early_saves):
            return
        num_wanted = min(num_wanted, num_free, self._max_early_saves)
        for place, digest, block in blocks.next_evicted(self._num_checked, num_next):
            for candidate in self._candidates(digest, block, states):
                if index.has(candidate.key):
                    continue
                count = candidate.num_parts or 1
                is_possible = num_wanted > 0 and count <= num_free
                if not is_possible or not index.keep(*candidate):
                    self._num_checked = place
                    self.has_waiting = not is_possible
                    return
                num_wanted -= count
                num_free -= count
        self._num_checked = num_next

    def _candidates(self, digest: bytes, block: int, states: StateSlots | None) -> Iterator[_Candidate]:
        yield _Candidate(digest, block, 0)
        if states is not None and self._state_parts and (slot := states.expected_slot(digest)) != NO_SLOT:
            yield _Candidate(state_key(digest), slot, self._state_parts)
