"""KV events on the local socket: what enters and leaves the prefix cache, for routers that follow it.

The engine numbers its batches and keeps the last ones (engine/kv_event_stream.py). A subscriber names the first batch
that it needs and gets all later ones in order, as fast as it reports them as read (`ReadKvEvents`).

The payload of a batch is the msgpack array [timestamp, events, rank] that vLLM publishes and llm-d reads. An event is
an array that begins with its type. The engine encodes it once for all subscribers. Block hashes are unsigned 64-bit
integers.

A snapshot is a run of batches that lists the whole cache: AllBlocksCleared, then every block after its parent.
"""

from __future__ import annotations

import msgspec

from npuserve.service.ipc.framing import Wire

WINDOW_BYTES = 1 << 20
"""Bytes of payload that the engine sends to a subscriber ahead of its ReadKvEvents; a batch may exceed it."""
MEDIUM = "GPU"
"""Where vLLM says that a block is: in the memory of the device that computes. Consumers weigh other media less."""
HOST_MEDIUM = "CPU"
"""Where vLLM says that an evicted block is: in host memory."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that form a chain, each the parent of the next.

    parent_block_hash: hash of the first block's parent; None at the beginning of a prompt.
    token_ids: tokens of all blocks, `block_size` each.
    lora_id, lora_name: None, for consumers that expect them.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that left the cache."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a batch. timestamp: Unix time in seconds. rank: of data parallelism."""

    timestamp: float
    events: list[Event]
    rank: int = 0


class SnapshotPart(msgspec.Struct, frozen=True, array_like=True):
    """Place of a batch in a snapshot.

    index, count: number of this batch from 0, and of the snapshot's batches, which have consecutive numbers.
    blocks: blocks of the whole snapshot.
    """

    index: int
    count: int
    blocks: int


# Subscriber to engine


class SubscribeKvEvents(Wire, frozen=True):
    """Send the batches from number `start` on; 0: from the latest snapshot, which is made if none is kept.

    The reply is KvSubscribed, followed by KvEvents if it accepts.
    """

    call: int
    start: int


class ReadKvEvents(Wire, frozen=True):
    """The subscriber has processed `size` further bytes of payload."""

    call: int
    size: int


class UnsubscribeKvEvents(Wire, frozen=True):
    """Send no further batches. Batches that are on their way may still arrive."""

    call: int


# Engine to subscriber


class KvSubscribed(Wire, frozen=True):
    """Reply to a subscription.

    accepted: False if `start` is neither kept nor the next number. A refusal ends the subscription.
    oldest: number of the first batch that is kept; latest + 1 if none is kept.
    latest: number of the last batch so far. It includes the parts of a snapshot that are still to be made.
    """

    epoch: int
    call: int
    accepted: bool
    oldest: int
    latest: int


class KvEvents(Wire, frozen=True):
    """One batch.

    sequence: its number.
    payload: encoded Batch.
    snapshot: its place in a snapshot; None for changes of the cache.
    """

    epoch: int
    call: int
    sequence: int
    payload: bytes
    snapshot: SnapshotPart | None = None


class KvEventsLost(Wire, frozen=True):
    """End of a subscription that read too slowly: its next batch, number `next`, is no longer kept; `oldest` is."""

    epoch: int
    call: int
    next: int
    oldest: int


ToEngineKv = SubscribeKvEvents | ReadKvEvents | UnsubscribeKvEvents
ToSubscriber = KvSubscribed | KvEvents | KvEventsLost

encode_batch = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(Batch).decode
