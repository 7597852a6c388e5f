"""Saves to host memory before an eviction (host_tier.py).

- `EarlySaves`, without a store: a long prompt evicts more blocks than one step saves. Some of the blocks that the block
  manager will give away next are therefore saved in each step, once there are as many to save as one step may save.
- `NewSaves`, with a store: blocks are saved once they are in the prefix cache, and so are the fixed states that other
  requests are likely to continue. All parts of a state are saved in one step, which may therefore exceed its bound by
  those of one state.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from npuserve.npu.step import HostSlots
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.state_slots import StateSlots
from npuserve.service.scheduling.store_tier import MAX_HELD_SHARE


class SavedKeys(Protocol):
    """Index of what host memory has: host_tier.py."""

    def has(self, key: bytes) -> bool: ...
    def keep(self, key: bytes, index: int, num_parts: int = 0) -> bool: ...


class EarlySaves:
    """Choice of the blocks that are saved before their eviction."""

    def __init__(self, host: HostSlots) -> None:
        self._num_early = min(host.num_early, host.num_slots // 2)
        self._max_early_saves = host.max_early_saves
        self._num_checked = 0  # of the blocks that are evicted next, those that need no early save
        self._num_uncached = 0  # of the block manager when they were counted

    def plan(self, index: SavedKeys, blocks: BlockManager, num_free: int) -> None:
        """Save some of the blocks that will be evicted next. num_free: number of slots to which the step can save."""
        counts = blocks.counts
        num_next = min(self._num_early - counts.free, counts.cached)
        num_uncached = blocks.num_uncached
        self._num_checked = max(0, self._num_checked - (num_uncached - self._num_uncached))
        self._num_uncached = num_uncached
        if num_next - self._num_checked < self._max_early_saves:
            return
        num_left = min(num_free, self._max_early_saves)
        for place, digest, block in blocks.next_evicted(self._num_checked, num_next):
            if index.has(digest):
                continue
            if not num_left or not index.keep(digest, block):
                self._num_checked = place
                return
            num_left -= 1
        self._num_checked = num_next


class NewSaves:
    """Queue of blocks and states on the device that wait for their save, in the order in which they were computed.

    max_saves: maximum number of slots that a step saves to.

    has_waiting: the last step could not save all of them.
    """

    def __init__(self, host: HostSlots, max_saves: int) -> None:
        self.has_waiting = False
        self._max_early_saves = host.max_early_saves
        self._state_parts = host.state_parts
        self._saves_states = host.state_parts <= min(max_saves, host.num_slots // MAX_HELD_SHARE)
        # By key, the oldest first. A dict would pass over all removed keys before the oldest one.
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()

    def add_block(self, digest: bytes) -> None:
        """Let a block wait. Its digest is its key."""
        self._digests[digest] = digest

    def add_state(self, key: bytes, digest: bytes) -> None:
        """Let the state after a block wait, unless it takes more slots than a step saves or a fetch loads."""
        if self._saves_states:
            self._digests[key] = digest

    def discard(self, key: bytes) -> None:
        """Remove what is evicted."""
        self._digests.pop(key, None)

    def plan(
        self, index: SavedKeys, blocks: BlockManager, states: StateSlots | None, num_free: int, num_wanted: int
    ) -> None:
        """Save the oldest ones.

        num_free: number of slots to which the step can save.
        num_wanted: number of slots after which it saves nothing more.
        """
        self.has_waiting = False
        num_wanted = min(num_wanted, self._max_early_saves)
        while self._digests:
            key, digest = next(iter(self._digests.items()))
            is_block = key == digest
            place: int | None = None
            if is_block:
                place = blocks.block_of(digest)
            elif states is not None:
                place = states.expected_slot(digest)
            if place is not None and not index.has(key):
                count = 1 if is_block else self._state_parts
                if num_wanted <= 0 or count > num_free:
                    self.has_waiting = True
                    return
                if not index.keep(key, place, 0 if is_block else count):
                    return
                num_wanted -= count
                num_free -= count
            del self._digests[key]
