"""KV-cache blocks: their reference counts, and the prefix cache.

A block is in exactly one of three states:

    used     refs >= 1   in `refs` block tables; its digest is known once it is full and computed
    cached   refs == 0   holds a prefix under its digest: shared again on a hit, evicted when blocks run out
    free     refs == 0   its contents are not needed

Full blocks are found by content. The digest of a block is a 16-byte BLAKE2b of its parent's digest and its token ids.
The root is a keyed digest of the request's cache salt; each manager generates its own key, unless
servers share a store (service/store/keys.py). Equal digests therefore mean
equal salt, equal tokens and equal position, except after a collision. With n blocks in the cache its probability is
about n**2 / 2**129, 1e-27 for a million blocks. The key is secret, so nobody can search for a collision outside the
server. The method is vLLM's automatic prefix caching (v1, KVCacheManager), which evicts the least recently used leaf.

Requests that compute the same prompt at the same time hold blocks of equal content. The prefix cache shares one of
these blocks. When its tables release it, another one is shared. A block is therefore found as long as its children are,
and is evicted after them.

A table with a scope shares blocks only with tables of the same scope, since the scope is part of the root digest.
Scopes work also without prefix cache. `forget` ends a scope.
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from hashlib import blake2b
from typing import NamedTuple, Protocol

DIGEST_BYTES = 16
SCOPE_BYTES = 8
AUDIT_BLOCKS = 1024
"""Blocks in one part of an audit. A part takes less than 1 ms."""


_versions = itertools.count(1)  # of all managers: a runner may serve one after another


class IntegrityError(RuntimeError):
    """Inconsistent state: a bug, never a client's fault."""


class BlockCounts(NamedTuple):
    """Number of blocks by state. The sum is num_blocks."""

    used: int
    cached: int
    free: int


class CacheEvents(Protocol):
    """Receiver of the changes of the prefix cache: engine/kv_event_log.py. Salted blocks are not reported as stored."""

    def stored(self, digest: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None: ...
    def removed(self, digest: bytes) -> None: ...
    def cleared(self) -> None: ...


class EvictedBlocks(Protocol):
    """Keeper of evicted blocks and fixed states: host_tier.py. Those with a scope, which are used by one call, are not
    saved. Blocks and states that may be saved before their eviction are offered."""

    def offer(self, digest: bytes) -> None: ...
    def offer_state(self, digest: bytes) -> None: ...
    def save(self, digest: bytes, block: int) -> None: ...
    def save_state(self, digest: bytes, slot: int) -> None: ...
    def has(self, digest: bytes) -> bool: ...
    def clear(self) -> None: ...


class BlockTable:
    """Block table of one request. Only the BlockManager changes it; others read `block_ids` and `version`.

    block_ids: block i holds positions [i * block_size, (i + 1) * block_size). Grows in place. `free` replaces the list,
        so a list that was read before keeps its values.
    version: number of the allocation; 0 while the table is empty. Two tables, or one table before and after `free`,
        never have the same version in this process. Tables read under one version differ at most in their length.
    num_registered: leading blocks that are registered, or need not be.
    scope: only tables of the same salt and scope share its blocks; 0 for tables without a scope.
    """

    __slots__ = ("_digests", "_prefix", "_salt", "block_ids", "num_registered", "scope", "version")

    def __init__(self, salt: str = "", scope: int = 0) -> None:
        self.block_ids: list[int] = []
        self.version = 0
        self.num_registered = 0
        self.scope = scope
        self._salt = salt
        self._digests: list[bytes] = []  # of the leading full blocks, constant because the tokens are
        self._prefix: _FoundPrefix | None = None  # result of the last look-up


class _FoundPrefix(NamedTuple):
    """Result of a look-up.

    index_version: version of the manager's index. The result is valid while it is the same.
    max_blocks: number of blocks that were looked up at most.
    block_ids: the cached prefix.
    """

    index_version: int
    max_blocks: int
    block_ids: list[int]


class BlockManager:
    """Allocator of `num_blocks` blocks of `block_size` tokens by reference count. Every call is O(blocks it touches).

    prefix_cache: tables without a scope share blocks.
    events: receiver of the changes of the prefix cache; None for none.
    evicted: keeps the blocks that are evicted; None: they are lost.
    key: secret key of the digests, the same in servers that share a store; None for one of this manager.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: bool = True, events: CacheEvents | None = None,
        evicted: EvictedBlocks | None = None, key: bytes | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._events = events
        self._evicted = evicted
        self._key = key or secrets.token_bytes(DIGEST_BYTES)
        self._refs = [0] * num_blocks
        self._digest: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}  # the block that is shared
        self._index_version = 0  # increases with each change of _by_digest
        self._duplicates: dict[bytes, dict[int, None]] = {}  # used blocks of equal content that are not shared
        self._scopes: dict[int, set[bytes]] = {}  # digests that were registered under each scope; some may be evicted
        self._scoped: set[bytes] = set()  # all digests in _scopes
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_ever_cached = 0
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def capacity(self) -> int:
        """Number of tokens in num_blocks blocks."""
        return self.num_blocks * self.block_size

    @property
    def counts(self) -> BlockCounts:
        cached = len(self._cached)
        free = len(self._free)
        return BlockCounts(self.num_blocks - cached - free, cached, free)

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    def find_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix, of at most len(token_ids) - 1 tokens: one must be computed.

        Allocates nothing. Pass the result to `allocate` before any other call, and do not change it: the next look-up
        returns it again unless the prefix cache has changed.
        """
        if not self.is_shared(table):
            return []
        max_blocks = (len(token_ids) - 1) // self.block_size
        last = table._prefix
        if last is not None and last.index_version == self._index_version and last.max_blocks == max_blocks:
            return last.block_ids
        prefix: list[int] = []
        for digest in self.digests(table, token_ids, max_blocks):
            block = self._by_digest.get(digest)
            if block is None:
                break
            prefix.append(block)
        table._prefix = _FoundPrefix(self._index_version, max_blocks, prefix)
        return prefix

    def digests(self, table: BlockTable, token_ids: Sequence[int], count: int) -> list[bytes]:
        """Return the digests of the first `count` blocks of tokens, which are full."""
        return self._compute_digests(table, token_ids, count)[:count]

    def holds(self, digest: bytes) -> bool:
        """Return whether a block of this content can be found."""
        return digest in self._by_digest

    def block_of(self, digest: bytes) -> int | None:
        """Return the block of this content that is shared; None if there is none."""
        return self._by_digest.get(digest)

    @property
    def num_uncached(self) -> int:
        """Number of times that a block ceased to be cached, since the start."""
        return self._num_ever_cached - len(self._cached)

    def next_evicted(self, start: int, end: int) -> Iterator[tuple[int, bytes, int]]:
        """Yield place, digest and id of the cached blocks at the places [start, end) in the order of their eviction,
        without those with a scope. A block that ceases to be cached moves those behind it by one place."""
        for place, block in enumerate(itertools.islice(self._cached, start, end), start):
            digest = self._digest[block]
            if digest is not None and digest not in self._scoped:
                yield place, digest, block

    def save_state(self, digest: bytes, slot: int) -> None:
        """Let the keeper of evicted blocks save the fixed state after a block, which is in a slot of the device.

        Nothing if neither has the block, or if it has a scope.
        """
        keeper = self._evicted
        if keeper is not None and ((digest in self._by_digest and digest not in self._scoped) or keeper.has(digest)):
            keeper.save_state(digest, slot)

    def offer_state(self, digest: bytes) -> None:
        """Let the keeper of evicted blocks save the fixed state after a block before its eviction. Nothing if the block
        has a scope, or cannot be found."""
        if self._evicted is not None and digest in self._by_digest and digest not in self._scoped:
            self._evicted.offer_state(digest)

    def is_shared(self, table: BlockTable) -> bool:
        """Return whether the full computed blocks of a table can be found after it is freed."""
        return self.prefix_cache or table.scope != 0

    def covers(self, table: BlockTable, num_tokens: int) -> bool:
        """Return whether `table` holds positions [0, num_tokens)."""
        return num_tokens <= len(table.block_ids) * self.block_size

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Return how many blocks `table` lacks to hold positions [0, num_tokens)."""
        return max(0, -(-num_tokens // self.block_size) - len(table.block_ids))

    def shortage(self, table: BlockTable, num_tokens: int, prefix: Sequence[int], spare: int) -> int:
        """Return how many more blocks must be available for `allocate` with these arguments; 0 or less if it succeeds.

        Each block of a negative value is one more than needed.
        """
        return self.missing(table, num_tokens) - len(prefix) + spare + self._count_unused(prefix) - self.num_available

    def released(self, tables: Iterable[BlockTable], kept: Sequence[int] = ()) -> int:
        """Return how many blocks are available afterwards if all of these tables are freed; see `free`.

        kept: blocks that are not counted.
        """
        held = Counter(itertools.chain.from_iterable(table.block_ids for table in tables))
        if not held:
            return 0
        not_counted = set(kept)
        return sum(1 for block, count in held.items() if self._refs[block] == count and block not in not_counted)

    def allocate(self, table: BlockTable, num_tokens: int, prefix: Sequence[int] = (), spare: int = 0) -> bool:
        """Extend `table` to hold positions [0, num_tokens). Return False, and change nothing, if that is impossible.

        prefix: blocks to share at the beginning of an empty table, from `find_prefix`.
        spare: minimum number of cached and free blocks to leave.
        """
        missing = -(-num_tokens // self.block_size) - len(prefix) - len(table.block_ids)
        if missing + spare > self.num_available - self._count_unused(prefix):
            return False
        if not table.version:
            table.version = next(_versions)
        if prefix:
            for block in prefix:
                if not self._refs[block]:
                    del self._cached[block]
                self._refs[block] += 1
            table.block_ids.extend(prefix)
            table.num_registered = len(prefix)
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict(self._evicted)
            self._refs[block] = 1
            table.block_ids.append(block)
        return True

    def register(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Add the full blocks to the prefix cache: the KV of token_ids[:num_computed] is computed.

        If another table uses a block of equal content, that one is shared as long as it is used. A cached one is freed.
        """
        full = num_computed // self.block_size
        if full <= table.num_registered or not (self.prefix_cache or table.scope):
            return
        digests = self._compute_digests(table, token_ids, full)
        events = None if table._salt else self._events
        self._index_version += 1
        for index in range(table.num_registered, full):
            digest = digests[index]
            block = table.block_ids[index]
            self._digest[block] = digest
            other = self._by_digest.setdefault(digest, block)
            if other != block:
                self._duplicates.setdefault(digest, {})[block] = None
                if not self._refs[other]:
                    del self._cached[other]
                    self._release(other)
            elif table.scope:
                self._scopes.setdefault(table.scope, set()).add(digest)
                self._scoped.add(digest)
            else:
                if self._evicted is not None:
                    self._evicted.offer(digest)
                if events is not None:
                    start = index * self.block_size
                    events.stored(digest, digests[index - 1] if index else None,
                                  token_ids[start : start + self.block_size])
        table.num_registered = full
        table._prefix = None

    def free(self, table: BlockTable) -> None:
        """Release all blocks of a table, the last first, so that a prefix is evicted from its end."""
        for block in reversed(table.block_ids):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._release(block)
        table.block_ids = []
        table.version = 0
        table.num_registered = 0

    def forget(self, scope: int) -> None:
        """Free the cached blocks of a scope whose tables are empty. Nothing for 0."""
        self._index_version += 1
        for digest in self._scopes.pop(scope, ()):
            self._scoped.remove(digest)
            block = self._by_digest.pop(digest, None)
            if block is not None:
                self._digest[block] = None
                del self._cached[block]
                self._free.append(block)

    @property
    def scopes(self) -> Set[int]:
        """Scopes that have registered blocks and were not forgotten."""
        return self._scopes.keys()

    def flush_prefix_cache(self) -> int:
        """Free all cached blocks, and return their number. Used blocks stay in the prefix cache.

        Blocks that were evicted before are forgotten.
        """
        if self._evicted is not None:
            self._evicted.clear()
        flushed = len(self._cached)
        while self._cached:
            self._free.append(self._evict(None))
        if flushed and not self._by_digest and self._events is not None:
            self._events.cleared()
        return flushed

    def audit(self, holders: Iterable[BlockTable]) -> Iterator[None]:
        """Check all blocks, AUDIT_BLOCKS at a time, with a yield after each part. Nothing may change before its end.

        Raises IntegrityError unless the state is consistent and `holders` are exactly the tables with blocks.
        """
        tables = [table.block_ids for table in holders]
        for block_ids in tables:
            if len(set(block_ids)) < len(block_ids):
                raise IntegrityError(f"a block table holds a block twice: {block_ids}")
        held = Counter(itertools.chain.from_iterable(tables))
        if unknown := sorted(block for block in held if not 0 <= block < self.num_blocks):
            raise IntegrityError(f"block tables hold blocks that do not exist: {unknown}")
        free = bytearray(self.num_blocks)  # 1 where the free list has the block
        for start in range(0, len(self._free), AUDIT_BLOCKS):
            for block in self._free[start : start + AUDIT_BLOCKS]:
                if not 0 <= block < self.num_blocks or free[block]:
                    raise IntegrityError(f"block {block}: does not exist, or is in the free list twice")
                free[block] = 1
            yield
        shared = 0
        duplicates = 0  # used blocks of equal content that are not shared
        cached = self._cached
        num_holders = held.get
        by_digest = self._by_digest.get
        for start in range(0, self.num_blocks, AUDIT_BLOCKS):
            part = slice(start, start + AUDIT_BLOCKS)
            blocks = zip(itertools.count(start), self._refs[part], self._digest[part], free[part])
            for block, refs, digest, is_free in blocks:
                is_cached = block in cached
                if refs != num_holders(block, 0):
                    raise IntegrityError(f"block {block}: {refs} references, but {held[block]} tables hold it")
                if (states := (refs > 0) + is_cached + is_free) != 1:
                    raise IntegrityError(f"block {block}: in {states} of the states used, cached and free")
                if digest is None:
                    if is_cached:
                        raise IntegrityError(f"block {block}: cached, but without a digest")
                elif by_digest(digest) != block:
                    if not refs or block not in self._duplicates.get(digest, ()):
                        raise IntegrityError(f"block {block}: its digest {digest.hex()} does not find it")
                    duplicates += 1
                elif is_cached and digest in self._duplicates:
                    raise IntegrityError(f"block {block}: cached, but a duplicate of it is used")
                elif is_free:
                    raise IntegrityError(f"block {block}: free, but found by a digest")
                else:
                    shared += 1
            yield
        if len(self._by_digest) != shared:
            raise IntegrityError(f"{len(self._by_digest)} digests, but {shared} blocks have one")
        if (listed := sum(map(len, self._duplicates.values()))) != duplicates:
            raise IntegrityError(f"{listed} blocks are listed as duplicates, but {duplicates} are")
        if len(self._cached) + len(self._free) + len(held) != self.num_blocks:
            raise IntegrityError(f"blocks are cached that do not exist: {sorted(self._cached)[-1]} or others")

    def check_integrity(self, holders: Iterable[BlockTable]) -> None:
        """Run the whole audit."""
        deque(self.audit(holders), maxlen=0)

    def _count_unused(self, blocks: Sequence[int]) -> int:
        return list(map(self._refs.__getitem__, blocks)).count(0)

    def _release(self, block: int) -> None:
        """Cache a block without references, or free it: if its content is not registered, or a duplicate is in use."""
        digest = self._digest[block]
        if digest is not None:
            duplicates = self._duplicates.get(digest)
            if duplicates is None:
                self._cached[block] = None
                self._num_ever_cached += 1
                return
            if self._by_digest[digest] == block:
                self._by_digest[digest], _ = duplicates.popitem()
                self._index_version += 1
            else:
                del duplicates[block]
            if not duplicates:
                del self._duplicates[digest]
            self._digest[block] = None
        self._free.append(block)

    def _evict(self, keeper: EvictedBlocks | None) -> int:
        """Forget the least recently used cached block and return it. keeper: may save it; None for none."""
        block, _ = self._cached.popitem(last=False)
        digest = self._digest[block]
        assert digest is not None
        if keeper is not None and digest not in self._scoped:
            keeper.save(digest, block)
        del self._by_digest[digest]
        self._index_version += 1
        self._digest[block] = None
        if self._events is not None:
            self._events.removed(digest)
        return block

    def _compute_digests(self, table: BlockTable, token_ids: Sequence[int], count: int) -> list[bytes]:
        """Return the digests of at least the first `count` full blocks. Each is computed once per table."""
        digests = table._digests
        size = self.block_size
        if len(digests) < count:
            parent = digests[-1] if digests else self._root_digest(table)
            for start in range(len(digests) * size, count * size, size):
                tokens = array("I", token_ids[start : start + size]).tobytes()
                parent = blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()
                digests.append(parent)
        return digests

    def _root_digest(self, table: BlockTable) -> bytes:
        scope = table.scope.to_bytes(SCOPE_BYTES, "little")
        return blake2b(table._salt.encode(), digest_size=DIGEST_BYTES, key=self._key, person=scope).digest()
