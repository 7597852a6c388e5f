"""Blocks and slots of the sequences: what a request takes, finds in the prefix cache, and leaves there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import NamedTuple

from npuserve.service.scheduling.block_manager import BlockManager, BlockTable
from npuserve.service.scheduling.checkpoints import checkpoint_positions
from npuserve.service.scheduling.host_tier import HostTier
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.scheduling.state_slots import StateSlots, slots_of_request, state_key
from npuserve.service.scheduling.store_tier import PrefixEnd, Wanted

MAX_LOADS = 3
"""Maximum number of loads that one request begins before its admission. More than one are needed only if blocks that
came back are evicted before it is admitted."""
MAX_FETCHES = 2
"""Maximum number of fetches from the store for which one request waits before its admission: one of another request
that has a part of its prefix, and one for the rest."""
MAX_LOADING_SHARE = 2
"""Loads together use at most 1 / MAX_LOADING_SHARE of the KV cache's blocks, unless there is only one."""
MISS_REASONS = "too_short", "no_block", "no_state"


class LoadWait(NamedTuple):
    """Wait of a request for a load from host memory.

    load_id: the load in progress.
    num_cached_before: tokens of the prefix that is cached when the wait begins.
    num_cached_after: tokens of the prefix that will be cached when the load has ended.
    """

    load_id: int
    num_cached_before: int
    num_cached_after: int


class _LocalPrefix(NamedTuple):
    """What the device and host memory have of the prefix of a waiting request.

    digests: of all blocks that the request can share.
    cached: cached blocks at its beginning.
    num_found: number of these, and of the blocks behind them that host memory has.
    num_usable: number of its first blocks that are cached, for a model with fixed state up to the last checkpoint.
    num_loadable: number of its first blocks that can be used after a load: `num_found`, for a model with fixed state up
        to the last state that the device or host memory has.
    """

    digests: list[bytes]
    cached: list[int]
    num_found: int
    num_usable: int
    num_loadable: int


class SequenceMemory:
    """Blocks of the KV cache and slots of fixed state, which a sequence takes and frees together.

    slots: None for a model without fixed state.
    message_end_ids: tokens that end messages of a chat; see checkpoints.py.
    tier: evicted blocks and states in host memory; None for none.
    prefix_queries, prefix_hits: prompt tokens looked up and found in the prefix cache at the first admission.
    """

    def __init__(
        self, blocks: BlockManager, slots: StateSlots | None, message_end_ids: Set[int], tier: HostTier | None = None
    ) -> None:
        self.blocks = blocks
        self.slots = slots
        self.tier = tier
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._message_end_ids = message_end_ids
        self._misses: Counter[str] = Counter()

    def take(self, sequence: Sequence, spare: int) -> int | None:
        """Give a request the blocks of its longest cached prefix, blocks for its other tokens, and slots.

        spare: blocks that must remain free.

        Returns the number of tokens of the prefix; None, and changes nothing, if any are lacking.
        """
        prefix, checkpoint = self._find_prefix(sequence)
        if not self.blocks.allocate(sequence.blocks, sequence.num_tokens, prefix, spare=spare):
            return None
        if self.slots is not None and not self.slots.allocate(
                sequence.slots, checkpoint, has_spare=_has_spare(sequence),
                is_shared=self.blocks.is_shared(sequence.blocks)):
            self.blocks.free(sequence.blocks)
            return None
        return len(prefix) * self.blocks.block_size

    def join_fetch(self, sequence: Sequence) -> LoadWait | None:
        """Ask the store for what a waiting request lacks on the device and in host memory, or join a fetch of it.

        A request begins at most one fetch before its admission, and waits for at most MAX_FETCHES.
        """
        tier = self.tier
        if tier is None or tier.store is None or sequence.num_fetches >= MAX_FETCHES or sequence.blocks.scope:
            return None
        if (local := self._find_local(tier, sequence)) is None:
            return None
        wanted = self._wanted(tier, local)
        if not wanted.ends:
            return None
        sequence.num_fetches += 1
        call = tier.store.fetch_of([*wanted.blocks[:1], *wanted.states])
        if call is None:
            sequence.num_fetches = MAX_FETCHES
            call = tier.next_id()
            if not tier.store.begin_fetch(tier, call, wanted):
                return None
        tier.touch(self._keys_in_host(tier, local))  # what the fetch brings needs them
        size = self.blocks.block_size
        return LoadWait(call, local.num_usable * size, local.num_loadable * size)

    def _wanted(self, tier: HostTier, local: _LocalPrefix) -> Wanted:
        """Return what a request lacks. A state is not worth its copy for fewer tokens than checkpoints are apart."""
        size = self.blocks.block_size
        digests, _, num_found, _, num_loadable = local
        first = num_loadable + 1
        if self.slots is not None:
            first = num_loadable + max(1, -(-self.slots.spacing.expected // size))
        ends: list[PrefixEnd] = []
        for count in range(first, len(digests) + 1):
            digest = digests[count - 1]
            has_state = self.slots is None or self.slots.has(digest) or tier.has_state(digest)
            ends.append(PrefixEnd(
                max(0, count - num_found), (count - num_loadable) * size, b"" if has_state else state_key(digest)))
        return Wanted(digests[num_found:], ends, is_whole=self.slots is not None)

    def _keys_in_host(self, tier: HostTier, local: _LocalPrefix) -> list[bytes]:
        """Return the keys of the blocks behind the cached ones, and of the states, that host memory has."""
        keys = local.digests[len(local.cached) : local.num_found]
        if self.slots is not None:
            keys += [state_key(digest) for digest in local.digests if tier.has_state(digest)]
        return keys

    def join_load(self, sequence: Sequence, spare: int) -> LoadWait | None:
        """Begin the load of what a waiting request's cached prefix lacks and host memory has, or join one.

        If another load contains a part of it, or loads use too many blocks, the request waits for that load or for the
        oldest one instead, and may begin its own afterwards.

        spare: blocks that must remain free.

        Returns None, and changes nothing, if host memory does not continue the prefix, if blocks or slots are lacking
        for the request, or if the request has begun MAX_LOADS before.
        """
        tier = self.tier
        if tier is None or (local := self._find_local(tier, sequence)) is None:
            return None
        num_blocks = local.num_loadable
        if num_blocks == local.num_usable:
            return None
        blocks = self.blocks
        prefix = local.cached[:num_blocks]
        digests = local.digests[len(prefix) : num_blocks]
        state = b""
        if self.slots is not None and not self.slots.has(local.digests[num_blocks - 1]):
            state = local.digests[num_blocks - 1]
        load_id = tier.load_of([*digests, state_key(state)] if state else digests)
        if load_id is None:
            if sequence.num_loads == MAX_LOADS:
                return None
            if blocks.shortage(sequence.blocks, sequence.num_tokens, prefix, spare) > 0:
                return None
            num_slots = slots_of_request(has_spare=_has_spare(sequence))
            if state and self.slots is not None and self.slots.num_available < num_slots:
                return None
            if tier.num_blocks_of_loads + num_blocks > blocks.num_blocks // MAX_LOADING_SHARE:
                load_id = tier.oldest_load
        if load_id is None:
            table = BlockTable(sequence.request.cache_salt, sequence.blocks.scope)
            token_ids = sequence.token_ids[: num_blocks * blocks.block_size]
            load_id = tier.begin_load(blocks, table, token_ids, prefix, digests, spare, self.slots, state)
            if load_id is None:
                return None
            sequence.num_loads += 1
        return LoadWait(load_id, local.num_usable * blocks.block_size, num_blocks * blocks.block_size)

    def _find_local(self, tier: HostTier, sequence: Sequence) -> _LocalPrefix | None:
        """Return what the device and host memory have of a request's prefix; None if the request cannot use any."""
        if not sequence.uses_prefix_cache:
            return None
        blocks = self.blocks
        cached = blocks.find_prefix(sequence.blocks, sequence.token_ids)
        max_blocks = (len(sequence.token_ids) - 1) // blocks.block_size
        digests = blocks.digests(sequence.blocks, sequence.token_ids, max_blocks)
        num_found = len(cached) + len(tier.find(digests[len(cached) :]))
        if self.slots is None:
            return _LocalPrefix(digests, cached, num_found, len(cached), num_found)
        has_spare = _has_spare(sequence)
        if not self.slots.can_continue(has_spare=has_spare):
            return None
        num_usable, _ = self.slots.find(digests[: len(cached)], has_spare=has_spare)
        num_loadable = num_found
        while num_loadable > num_usable and not (
                self.slots.has(digests[num_loadable - 1]) or tier.has_state(digests[num_loadable - 1])):
            num_loadable -= 1
        return _LocalPrefix(digests, cached, num_found, num_usable, num_loadable)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens of a waiting request's cached prefix that it can use."""
        prefix = self.blocks.find_prefix(sequence.blocks, sequence.token_ids)
        count = len(prefix)
        if self.slots is not None:
            digests = self.blocks.digests(sequence.blocks, sequence.token_ids, count)
            count, _ = self.slots.find(digests, has_spare=_has_spare(sequence))
        return count * self.blocks.block_size

    def _find_prefix(self, sequence: Sequence) -> tuple[list[int], bytes]:
        """Return the blocks of the longest cached prefix, and the digest of the checkpoint at its end.

        A model with fixed state continues only at a checkpoint, so its prefix ends at the last one.
        """
        if not sequence.uses_prefix_cache:
            return [], b""
        prefix = self.blocks.find_prefix(sequence.blocks, sequence.token_ids)
        if self.slots is None:
            return prefix, b""
        digests = self.blocks.digests(sequence.blocks, sequence.token_ids, len(prefix))
        count, checkpoint = self.slots.find_and_touch(digests, has_spare=_has_spare(sequence))
        return prefix[:count], checkpoint

    def grow(self, sequence: Sequence, num_tokens: int, spare: int = 0) -> bool:
        """Provide the blocks of `num_tokens` tokens. Return False if some are lacking.

        spare: blocks that must remain free.
        """
        blocks = self.blocks
        return blocks.covers(sequence.blocks, num_tokens) or blocks.allocate(sequence.blocks, num_tokens, spare=spare)

    def grow_for_drafts(self, sequence: Sequence, num_tokens: int, spare: int) -> bool:
        """Provide the blocks and the slot of a row with drafts up to `num_tokens`. Return False if some are lacking."""
        return self.grow(sequence, num_tokens, spare) and (
            self.slots is None or self.slots.lend_spare(sequence.slots))

    def plan_checkpoints(self, sequence: Sequence) -> None:
        """Let rows of an admitted request end where other requests are likely to continue its state."""
        sequence.checkpoint_positions = []
        if self.slots is None or not self.blocks.is_shared(sequence.blocks):
            return
        size = self.blocks.block_size
        parting = len(self.blocks.find_prefix(sequence.blocks, sequence.token_ids)) * size
        sequence.checkpoint_positions = [
            position for position in checkpoint_positions(
                sequence.request.prompt_ids, sequence.num_computed_tokens, parting, size, self.slots.spacing,
                self._message_end_ids)
            if not self.slots.has(self._digest(sequence, position))]

    def plan_forced_checkpoint(self, sequence: Sequence) -> None:
        """Let the row of a run of forced tokens end at its last block boundary first, if it begins before."""
        if self.slots is not None:
            size = self.blocks.block_size
            sequence.checkpoint_positions = [(len(sequence.token_ids) - 1) // size * size]

    def register(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Enter the computed blocks, and the states that were taken at their ends, into the prefix cache."""
        self.blocks.register(sequence.blocks, sequence.token_ids, num_computed_tokens)
        if self.slots is None:
            return
        while (taken := sequence.slots.taken) and (position := taken[0].position) <= num_computed_tokens:
            self.slots.register(sequence.slots, self._digest(sequence, position),
                                is_of_answer=position > sequence.num_prompt_tokens)

    def _digest(self, sequence: Sequence, position: int) -> bytes:
        """Return the digest of the block that ends at a position."""
        count = position // self.blocks.block_size
        return self.blocks.digests(sequence.blocks, sequence.token_ids, count)[-1]

    def free(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.blocks)
        if self.slots is not None:
            self.slots.free(sequence.slots)

    def count_lookup(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Count the look-up of a request that was admitted for the first time."""
        if not self.blocks.prefix_cache or sequence.blocks.scope:
            return
        self.prefix_queries += sequence.num_prompt_tokens
        self.prefix_hits += sequence.cached_tokens
        if self.tier is not None:
            num_loaded = min(sequence.num_loaded_before_admission, sequence.cached_tokens)
            num_missing = sequence.num_prompt_tokens - sequence.cached_tokens
            self.tier.count_lookup(num_missing + num_loaded, num_loaded)
        if not num_cached_tokens:
            self._misses[self._miss_reason(sequence)] += 1

    def _miss_reason(self, sequence: Sequence) -> str:
        """Return why the prefix cache holds nothing of a request; one of MISS_REASONS."""
        if sequence.num_prompt_tokens <= self.blocks.block_size:
            return "too_short"
        is_cached = self.slots is not None and self.blocks.find_prefix(sequence.blocks, sequence.token_ids)
        return "no_state" if is_cached else "no_block"

    def take_misses(self) -> Counter[str]:
        """Return the number of requests that the prefix cache held nothing of, by reason, since the last call."""
        misses = self._misses
        self._misses = Counter()
        return misses

    def flush_prefix_cache(self) -> int:
        """Free all cached blocks and checkpoints. Return the number of blocks."""
        if self.slots is not None:
            self.slots.clear()
        return self.blocks.flush_prefix_cache()


def _has_spare(sequence: Sequence) -> bool:
    """Return whether a request needs a slot for retractable rows."""
    return sequence.request.constraint is not None
