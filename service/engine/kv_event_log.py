"""Log of what enters and leaves the prefix cache, recorded by the block manager.

Blocks of requests with a cache salt are not logged. A salt separates callers: no other caller may learn what it has
cached, and a router, which knows no salts, would take the block for one that others can share.

Blocks that were evicted to host memory (scheduling/host_tier.py) are logged with a medium of their own. A block may be
in both.

The log holds parent and tokens of each block in the cache, since a snapshot needs them. Changes are held only while
there is a subscriber (`is_recording`), until `take`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from npuserve.service.ipc.kv_events import (
    HOST_MEDIUM,
    MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
)

HASH_BYTES = 8
"""Bytes of a digest that are published. The digests of further blocks cannot be computed without the other half."""

Stored = tuple[bytes | None, bytes]
"""Digest of the parent, None at the begin of a prompt, and the block's tokens as an array of unsigned integers."""


Change = tuple[str, bytes, Stored | None]
"""Medium, digest, and the block if it was stored; None if it was removed."""


class KvEventLog:
    """Log of one block manager.

    blocks: digest -> parent and tokens of each logged block in the cache, in the order of their last addition. Blocks
        follow their parents, since the block manager evicts a block before its parent.
    host_blocks: the same of the blocks in host memory, in the order in which they were saved there.
    is_recording: changes are held for `take`.
    """

    def __init__(self, block_size: int):
        self.blocks: dict[bytes, Stored] = {}
        self.is_recording = False
        self._block_size = block_size
        self.host_blocks: dict[bytes, Stored] = {}
        self._changes: deque[Change | None] = deque()  # None: all cleared

    @property
    def has_changes(self) -> bool:
        """True if there are changes to take."""
        return bool(self._changes)

    def stored(self, digest: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """Log that a full block was added to the cache."""
        block = self.blocks[digest] = parent, array("I", token_ids).tobytes()
        if self.is_recording:
            self._changes.append((MEDIUM, digest, block))

    def removed(self, digest: bytes) -> None:
        """Log that a block was evicted. Nothing if it was not logged."""
        if self.blocks.pop(digest, None) is not None and self.is_recording:
            self._changes.append((MEDIUM, digest, None))

    def saved(self, digest: bytes) -> None:
        """Log that a block in the cache is also in host memory. Nothing if it was not logged."""
        block = self.blocks.get(digest)
        if block is not None and digest not in self.host_blocks:
            self.host_blocks[digest] = block
            if self.is_recording:
                self._changes.append((HOST_MEDIUM, digest, block))

    def forgotten(self, digest: bytes) -> None:
        """Log that a block left host memory. Nothing if it was not logged."""
        if self.host_blocks.pop(digest, None) is not None and self.is_recording:
            self._changes.append((HOST_MEDIUM, digest, None))

    @property
    def num_blocks(self) -> int:
        """Number of logged blocks; one in the cache and in host memory counts twice."""
        return len(self.blocks) + len(self.host_blocks)

    def cleared(self) -> None:
        """Log that the cache and host memory are empty. Changes before it need not be sent."""
        self.blocks.clear()
        self.host_blocks.clear()
        if self.is_recording:
            self._changes.clear()
            self._changes.append(None)

    def start(self) -> None:
        """Record changes from now on."""
        self.is_recording = True

    def stop(self) -> None:
        """Record no further changes, and drop the recorded ones."""
        self.is_recording = False
        self._changes.clear()

    def take(self, max_blocks: int) -> list[Event]:
        """Return the oldest changes, of at most max_blocks blocks, and drop them. Call until there are none."""
        events = _Events(self._block_size)
        while self._changes and events.num_blocks < max_blocks:
            match self._changes.popleft():
                case None:
                    events.add_cleared()
                case (medium, digest, None):
                    events.add_removed(medium, digest)
                case (medium, digest, block):
                    events.add_stored(medium, digest, block)
        return events.events

    def snapshot(self, max_blocks: int) -> tuple[int, Iterator[list[Event]]]:
        """Return the number of parts, and the parts: events that list the present blocks, at most max_blocks in each.

        The first part begins with AllBlocksCleared. Changes after this call do not change the parts. Blocks of the
        cache follow their parents. Those of host memory come last.
        """
        blocks = [(MEDIUM, digest, block) for digest, block in self.blocks.items()]
        blocks += [(HOST_MEDIUM, digest, block) for digest, block in self.host_blocks.items()]
        count = max(1, -(-len(blocks) // max_blocks))
        return count, _snapshot_parts(blocks, max_blocks, self._block_size)


class _Events:
    """Builder of events: consecutive changes of one kind are merged."""

    def __init__(self, block_size: int):
        self.events: list[Event] = []
        self.num_blocks = 0
        self._block_size = block_size
        self._last: tuple[str, bytes] | None = None  # the last block of the last event, if that is BlockStored

    def add_cleared(self) -> None:
        self.events.append(AllBlocksCleared())
        self._last = None

    def add_stored(self, medium: str, digest: bytes, block: Stored) -> None:
        parent, data = block
        event = self.events[-1] if self.events else None
        if parent is None or (medium, parent) != self._last or not isinstance(event, BlockStored):
            event = BlockStored(
                [], None if parent is None else to_hash(parent), [], self._block_size, medium=medium)
            self.events.append(event)
        event.block_hashes.append(to_hash(digest))
        event.token_ids.extend(array("I", data))
        self._last = medium, digest
        self.num_blocks += 1

    def add_removed(self, medium: str, digest: bytes) -> None:
        event = self.events[-1] if self.events else None
        if not isinstance(event, BlockRemoved) or event.medium != medium:
            event = BlockRemoved([], medium)
            self.events.append(event)
        event.block_hashes.append(to_hash(digest))
        self._last = None
        self.num_blocks += 1


def to_hash(digest: bytes) -> int:
    """Return the published hash of a digest, an unsigned 64-bit integer."""
    return int.from_bytes(digest[:HASH_BYTES], "big")


def _snapshot_parts(
    blocks: list[tuple[str, bytes, Stored]], max_blocks: int, block_size: int
) -> Iterator[list[Event]]:
    """Yield the events that list the blocks, at most max_blocks in each part."""
    events = _Events(block_size)
    events.add_cleared()
    for medium, digest, block in blocks:
        if events.num_blocks == max_blocks:
            yield events.events
            events = _Events(block_size)
        events.add_stored(medium, digest, block)
    yield events.events
