"""Model of a prefix cache as a subscriber of KV events builds it, from the format's description alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class Block(NamedTuple):
    """A block. parent: hash of its parent, None at the begin of a prompt."""

    parent: int | None
    token_ids: tuple[int, ...]


class CacheModel:
    """Cache of one engine. blocks: by hash. payloads: of the first batches."""

    def __init__(self, *payloads: bytes) -> None:
        self.blocks: dict[int, Block] = {}
        self.clears = 0
        for payload in payloads:
            self.apply(payload)

    def apply(self, payload: bytes) -> None:
        """Apply the msgpack array [timestamp, events, rank]."""
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(timestamp, float)
        assert timestamp > 1e9
        assert rank == 0
        for event in events:
            self.apply_event(event)

    def apply_event(self, event: list[Any]) -> None:
        """Apply an event: an array that begins with its type."""
        match event:
            case ["BlockStored", hashes, parent, token_ids, size, None, "GPU", None]:
                assert len(token_ids) == len(hashes) * size
                for index, one in enumerate(hashes):
                    assert 0 <= one < 1 << 64
                    self.blocks[one] = Block(parent, tuple(token_ids[index * size : (index + 1) * size]))
                    parent = one
            case ["BlockRemoved", hashes, "GPU"]:
                for one in hashes:
                    self.blocks.pop(one, None)
            case ["AllBlocksCleared"]:
                self.blocks.clear()
                self.clears += 1
            case _:
                raise AssertionError(event)

    def prefixes(self) -> set[tuple[int, ...]]:
        """Return the tokens of each prefix that a request can find: from the begin to the end of a block."""
        found: dict[int, tuple[int, ...]] = {}
        for start in self.blocks:
            chain: list[int] = []
            at: int | None = start
            while at is not None and at in self.blocks and at not in found:
                chain.append(at)
                at = self.blocks[at].parent
            if at is not None and at not in found:
                continue  # an ancestor is missing
            tokens = found[at] if at is not None else ()
            for one in reversed(chain):
                tokens += self.blocks[one].token_ids
                found[one] = tokens
        return set(found.values())
