"""Stream of KV events: numbered batches, the last ones of which are kept, and their subscribers.

Numbers are shared by all subscribers. They begin at a value that grows with the date, so that they never go back, also
not when the engine or the server restarts. A subscriber that names a number of an earlier engine is refused: it knows
another cache.

Nothing is recorded without a subscriber. The first subscriber causes a snapshot, whose batches are part of the stream.
Later ones begin at the latest snapshot that is kept; if none is, another one is made. The stream continues for
LINGER_SECONDS without subscribers, so that one that reconnects misses nothing.

A subscriber is a cursor into the batches that are kept. It gets at most WINDOW_BYTES ahead of what it has read, and
holds up nobody: when the batch at its cursor is dropped, its subscription ends with KvEventsLost, which names the gap.
Subscribers are front ends, and the publisher over ZeroMQ, a thread of this process (kv_event_publisher.py).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from npuserve.service.clock import unix_time
from npuserve.service.engine.kv_event_log import KvEventLog
from npuserve.service.ipc.kv_events import (
    WINDOW_BYTES,
    Batch,
    Event,
    KvEvents,
    KvEventsLost,
    KvSubscribed,
    ReadKvEvents,
    SnapshotPart,
    SubscribeKvEvents,
    ToEngineKv,
    ToSubscriber,
    UnsubscribeKvEvents,
    encode_batch,
)

if TYPE_CHECKING:
    from npuserve.service.engine.kv_event_publisher import KvEventPublisher

MAX_KEPT_BYTES = 64 << 20
"""Maximum payload of the batches that are kept. Both bounds hold: this one and the number of batches."""
MAX_BATCH_BLOCKS = 512
"""Maximum blocks in a batch, so that engine and front end spend about a millisecond on it."""
MAX_BATCH_TOKENS = 1 << 15
"""Maximum tokens of these blocks, for the same reason."""
LINGER_SECONDS = 30.0
SEND_BYTES = 256 << 10
"""Payload that a subscriber is sent in one iteration of the engine's loop, so that a replay does not delay a step. A
batch may exceed it."""

PUBLISHER = b"publisher"
"""Name of the publisher in place of a connection's."""

Send = Callable[[bytes, ToSubscriber], None]


class KeptBatch(NamedTuple):
    """A numbered batch. snapshot: see KvEvents."""

    sequence: int
    payload: bytes
    snapshot: SnapshotPart | None


class _Subscriber:
    """Subscription. cursor: number of the next batch to send. credit: bytes that it may be sent without reading."""

    def __init__(self, cursor: int):
        self.cursor = cursor
        self.credit = WINDOW_BYTES


class KvEventStream:
    """Stream of the changes in `log`. Not thread-safe: the engine's loop calls it.

    log: changes of the block manager's prefix cache.
    block_size: tokens of a block.
    epoch: number of the run of the engine, in every message.
    max_batches: number of batches that are kept.
    first: number of the first batch.
    clock: returns monotonic seconds.
    publisher: publisher over ZeroMQ; None for none.
    """

    def __init__(
        self,
        log: KvEventLog,
        block_size: int,
        epoch: int,
        max_batches: int,
        first: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        publisher: KvEventPublisher | None = None,
    ):
        self.first = first_number(unix_time()) if first is None else first
        self._log = log
        self._max_blocks = max(1, min(MAX_BATCH_BLOCKS, MAX_BATCH_TOKENS // block_size))
        self._epoch = epoch
        self._max_batches = max_batches
        self._publisher = publisher
        self._clock = clock
        self._kept: deque[KeptBatch] = deque()
        self._kept_bytes = 0
        self._latest = self.first - 1
        self._snapshot: Iterator[KeptBatch] = iter(())  # parts that were not added yet
        self._snapshot_start = math.inf  # number of the first part of the latest snapshot; infinite: none was made
        self._snapshot_end = 0  # number of its last part
        self._subscribers: dict[tuple[bytes, int], _Subscriber] = {}
        self._idle_since = 0.0

    @property
    def has_work(self) -> bool:
        """True if `publish` has something to do now."""
        return self._log.is_recording and (
            self._log.has_changes or self._latest < self._snapshot_end
            or any(map(self._can_send, self._subscribers.values())))

    def handle(self, sender: bytes, message: ToEngineKv, send: Send) -> None:
        """Handle a message of a subscriber.

        sender: name of its connection.
        send: sends a message to a connection.
        """
        match message:
            case SubscribeKvEvents(call=call, start=start):
                accepted = self._subscribe((sender, call), start)
                latest = max(self._latest, self._snapshot_end)
                send(sender, KvSubscribed(self._epoch, call, accepted, self._oldest, latest))
            case ReadKvEvents(call=call, size=size):
                if subscriber := self._subscribers.get((sender, call)):
                    subscriber.credit = min(WINDOW_BYTES, subscriber.credit + size)
            case UnsubscribeKvEvents(call=call):
                self._remove((sender, call))

    def on_disconnect(self, sender: bytes) -> None:
        """End the subscriptions of a connection that is lost."""
        for key in [key for key in self._subscribers if key[0] == sender]:
            self._remove(key)

    def publish(self, send: Send) -> None:
        """Make batches of the changes so far, and send what the subscribers may have. Call it once a step."""
        if self._publisher:
            for message in self._publisher.take_orders():
                self.handle(PUBLISHER, message, self._deliver)
        if not self._log.is_recording:
            return
        if not self._subscribers and self._clock() - self._idle_since >= LINGER_SECONDS:
            self._stop()
            return
        if self._latest < self._snapshot_end:
            self._keep(next(self._snapshot))  # one part in each call, so that a large cache does not delay a step
        else:
            self._keep_changes()
        for key, subscriber in list(self._subscribers.items()):
            if key in self._subscribers:  # the connection of one subscriber may be lost while another is sent to
                self._send_next(key, subscriber, self._deliver if key[0] == PUBLISHER else send)

    def _deliver(self, sender: bytes, message: ToSubscriber) -> None:
        """Send a message to the publisher."""
        assert self._publisher
        self._publisher.deliver(message)

    @property
    def _oldest(self) -> int:
        """Number of the first batch that is kept, or of the next batch if none is."""
        return self._kept[0].sequence if self._kept else self._latest + 1

    def _subscribe(self, key: tuple[bytes, int], start: int) -> bool:
        """Add a subscriber. Return False if it cannot begin at `start`."""
        if start and not (self._log.is_recording and self._oldest <= start <= self._latest + 1):
            return False
        if not start:
            if not self._log.is_recording or self._snapshot_start < self._oldest or self._snapshot_start == math.inf:
                self._start_snapshot()
            start = int(self._snapshot_start)
        self._subscribers[key] = _Subscriber(start)
        return True

    def _start_snapshot(self) -> None:
        """Begin a snapshot of the cache as it is now. Changes so far become batches before it."""
        self._keep_changes()
        self._log.start()
        count, parts = self._log.snapshot(self._max_blocks)
        start = self._latest + 1
        blocks = self._log.num_blocks
        self._snapshot = (
            KeptBatch(start + index, _encode(events), SnapshotPart(index, count, blocks))
            for index, events in enumerate(parts))
        self._snapshot_start = start
        self._snapshot_end = start + count - 1

    def _stop(self) -> None:
        """Record nothing until the next subscriber. It begins with a snapshot, so the numbers continue without a gap.
        """
        self._log.stop()
        self._kept.clear()
        self._kept_bytes = 0
        self._snapshot = iter(())
        self._snapshot_start = math.inf
        self._snapshot_end = 0

    def _remove(self, key: tuple[bytes, int]) -> None:
        if self._subscribers.pop(key, None):
            self._idle_since = self._clock()

    def _keep_changes(self) -> None:
        """Make batches of the changes so far."""
        while events := self._log.take(self._max_blocks):
            self._keep(KeptBatch(self._latest + 1, _encode(events), None))

    def _keep(self, batch: KeptBatch) -> None:
        """Add a batch, and drop the oldest ones beyond the bounds."""
        self._kept.append(batch)
        self._kept_bytes += len(batch.payload)
        self._latest = batch.sequence
        while len(self._kept) > self._max_batches or (self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft().payload)

    def _can_send(self, subscriber: _Subscriber) -> bool:
        return subscriber.credit > 0 and subscriber.cursor <= self._latest

    def _send_next(self, key: tuple[bytes, int], subscriber: _Subscriber, send: Send) -> None:
        """Send a subscriber its next batches, at most SEND_BYTES, or the end of its subscription."""
        sender, call = key
        if subscriber.cursor < self._oldest:
            self._remove(key)
            send(sender, KvEventsLost(self._epoch, call, subscriber.cursor, self._oldest))
            return
        left = SEND_BYTES
        while self._can_send(subscriber) and left > 0:
            batch = self._kept[subscriber.cursor - self._oldest]
            subscriber.cursor += 1
            subscriber.credit -= len(batch.payload)
            left -= len(batch.payload)
            send(sender, KvEvents(self._epoch, call, batch.sequence, batch.payload, batch.snapshot))
            if key not in self._subscribers:  # the connection was lost
                return


def first_number(date: float) -> int:
    """Return a first number above the numbers of all engines that began at an earlier date.

    date: Unix time in seconds.

    It leaves 2**20 numbers for each second between two starts, and stays below 2**53 for JSON.
    """
    return int(date) << 20


def _encode(events: list[Event]) -> bytes:
    return encode_batch(Batch(unix_time(), events))
