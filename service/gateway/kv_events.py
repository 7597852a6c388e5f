"""SubscribeKvEvents: the changes of the prefix cache, and the load of the engine, for a gateway that routes by them.

A stream without a cursor begins with a snapshot of the cache (`KvEventBatch.snapshot`). Numbers have no gap within a
stream. If `start_sequence_number` is not kept, the stream ends with OUT_OF_RANGE before any message. If the client
reads too slowly, or the engine dies and its cache with it, the stream ends with DATA_LOSS. The client then subscribes
from 0.

Each batch has the engine's load. While there are none, batches with `load_only` repeat the last number: when the load
changes, at most every LOAD_SECONDS, and as a heartbeat every HEARTBEAT_SECONDS.
"""

from __future__ import annotations

import time

from smg_grpc_proto.generated import common_pb2

from npuserve.service import clock
from npuserve.service.ipc import kv_events
from npuserve.service.ipc.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvents
from npuserve.service.ipc.messages import Load
from npuserve.service.rpc.call import VLLM_ENGINE, Context, call, rpc_name
from npuserve.service.streams.engine_client import EngineClient

LOAD_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0


async def subscribe(engine: EngineClient, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
    """Write batches until the client leaves or the server drains."""
    async with call(context, rpc_name(VLLM_ENGINE, "SubscribeKvEvents")) as fields:
        engine.require()
        fields["start"] = request.start_sequence_number
        subscription = await engine.kv_events.subscribe(request.start_sequence_number)
        try:
            await context.send_initial_metadata(())  # not before: a refusal is to arrive without a message
            records = _LoadRecords(engine)
            batches = _Batches()
            while True:
                batch = await subscription.next(LOAD_SECONDS)
                if batch:
                    message = batches.to_proto(batch)
                    message.load.CopyFrom(records.next())
                    await subscription.write(context.write(message))
                elif records.is_due and (batches.last or request.load_records_before_first_batch):
                    await subscription.write(context.write(common_pb2.KvEventBatch(
                        sequence_number=batches.last, timestamp=clock.unix_time(), dp_rank=0,
                        load=records.next(alone=True))))
        finally:
            engine.kv_events.unsubscribe(subscription)


class _LoadRecords:
    """Load records of one stream."""

    def __init__(self, engine: EngineClient):
        self._engine = engine
        self._sample = 0
        self._sent: Load | None = None
        self._sent_at = 0.0  # time.monotonic() seconds

    @property
    def is_due(self) -> bool:
        """True if a record without a batch is to be sent now."""
        return self._sent != self._engine.load or time.monotonic() - self._sent_at >= HEARTBEAT_SECONDS

    def next(self, alone: bool = False) -> common_pb2.EngineLoad:
        """Return the current record. alone: it is sent without events, and includes the size of the cache."""
        engine = self._engine
        load = self._engine.load
        now = time.monotonic()
        with_sizes = alone or self._sent is None
        self._sample += 1
        self._sent = load
        self._sent_at = now
        info = engine.model_info
        usage = load.used_kv_ratio
        record = common_pb2.EngineLoad(
            running_requests=load.running, waiting_requests=load.waiting, token_usage=usage, active_token_usage=usage,
            gen_throughput=load.tokens_per_second, max_running_requests=info.max_num_seqs if info else 0,
            age_ms=int(1000 * (now - engine.load_time)), sample=self._sample, load_only=alone)
        if with_sizes and info:
            record.max_total_num_tokens = info.kv_cache_tokens
            record.num_used_tokens = round(usage * info.kv_cache_tokens)
        return record


class _Batches:
    """Converter of the batches of one stream. last: number of the last batch; 0 before the first."""

    def __init__(self) -> None:
        self.last = 0
        self._last_event = 0

    def to_proto(self, batch: KvEvents) -> common_pb2.KvEventBatch:
        payload = kv_events.decode_batch(batch.payload)
        self.last = batch.sequence
        message = common_pb2.KvEventBatch(
            sequence_number=batch.sequence, timestamp=payload.timestamp, dp_rank=payload.rank)
        if batch.snapshot:
            message.snapshot.index = batch.snapshot.index
            message.snapshot.count = batch.snapshot.count
            message.snapshot.blocks = batch.snapshot.blocks
        for event in payload.events:
            if not batch.snapshot:
                self._last_event += 1
            _add_event(message.events.add(event_id=0 if batch.snapshot else self._last_event), event)
        return message


def _add_event(message: common_pb2.KvCacheEvent, event: kv_events.Event) -> None:
    match event:
        case BlockStored():
            stored = message.stored
            size = event.block_size
            stored.tier = _tier(event.medium)
            stored.medium = event.medium or ""
            stored.locality = common_pb2.KV_CACHE_LOCALITY_LOCAL
            if event.parent_block_hash is not None:
                stored.parent_block_hash = _signed(event.parent_block_hash)
            for index, block_hash in enumerate(event.block_hashes):
                stored.blocks.add(block_hash=_signed(block_hash), block_size=size,
                                  token_ids=event.token_ids[index * size : (index + 1) * size])
        case BlockRemoved():
            message.removed.block_hashes.extend(map(_signed, event.block_hashes))
            message.removed.tier = _tier(event.medium)
            message.removed.medium = event.medium or ""
            message.removed.locality = common_pb2.KV_CACHE_LOCALITY_LOCAL
        case AllBlocksCleared():
            message.cleared.SetInParent()


def _tier(medium: str | None) -> common_pb2.KvCacheTier:
    is_on_host = medium == kv_events.HOST_MEDIUM
    return common_pb2.KV_CACHE_TIER_HOST if is_on_host else common_pb2.KV_CACHE_TIER_DEVICE


def _signed(block_hash: int) -> int:
    """Return the 64 bits of an unsigned hash as a signed integer."""
    return block_hash - (1 << 64) if block_hash >= 1 << 63 else block_hash
