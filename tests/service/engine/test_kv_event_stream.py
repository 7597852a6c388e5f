"""Numbers, bounds and subscribers of the stream of KV events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from npuserve.service.engine import kv_event_stream as module
from npuserve.service.engine.kv_event_log import KvEventLog
from npuserve.service.engine.kv_event_stream import LINGER_SECONDS, KvEventStream
from npuserve.service.ipc.kv_events import (
    KvEvents,
    KvEventsLost,
    KvSubscribed,
    ReadKvEvents,
    SubscribeKvEvents,
    ToEngineKv,
    ToSubscriber,
    UnsubscribeKvEvents,
)
from tests.support.kv_model import CacheModel

FIRST = 1000


class Streaming:
    """A stream over a log, with the messages that it sends. Blocks have one token; a block's name is its token."""

    def __init__(self, max_batches: int = 100):
        self.now = 0.0
        self.log = KvEventLog(1)
        self.stream = KvEventStream(self.log, 1, 7, max_batches, FIRST, lambda: self.now)
        self.sent: list[tuple[bytes, ToSubscriber]] = []

    def store(self, *tokens: int) -> None:
        """Add blocks without parents to the cache, and publish them as one batch."""
        for token in tokens:
            self.log.stored(token.to_bytes(8, "big") + bytes(8), None, [token])
        self.publish()

    def publish(self) -> None:
        self.stream.publish(lambda sender, message: self.sent.append((sender, message)))

    def publish_all(self) -> int:
        """Publish until there is nothing to do. Return the number of calls."""
        calls = 0
        while self.stream.has_work:
            self.publish()
            calls += 1
        return calls

    def tell(self, message: ToEngineKv, sender: bytes = b"f") -> None:
        self.stream.handle(sender, message, lambda sender, message: self.sent.append((sender, message)))

    def take(self, call: int, sender: bytes = b"f") -> list[ToSubscriber]:
        """Return the messages to a subscription since the last call."""
        found = [message for to, message in self.sent if to == sender and message.call == call]
        self.sent = [(to, message) for to, message in self.sent if to != sender or message.call != call]
        assert all(message.epoch == 7 for message in found)
        return found


def cached(batches: Sequence[ToSubscriber]) -> CacheModel:
    """Return the cache that the batches, the first of a subscription, describe."""
    assert all(isinstance(batch, KvEvents) for batch in batches)
    return CacheModel(*(batch.payload for batch in batches if isinstance(batch, KvEvents)))


def numbers(found: Sequence[ToSubscriber]) -> list[int]:
    return [message.sequence for message in found if isinstance(message, KvEvents)]


def test_stream_without_a_subscriber_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: object) -> bytes:
        raise AssertionError("a batch is encoded")

    monkeypatch.setattr(module, "encode_batch", encode)
    one = Streaming()
    for token in range(50):
        one.store(token)
    assert (one.sent, one.log.has_changes, len(one.stream._kept), one.stream.has_work) == ([], False, 0, False)


def test_stream_begins_with_a_snapshot_and_continues_without_a_gap() -> None:
    one = Streaming()
    one.store(1, 2)
    one.tell(SubscribeKvEvents(5, 0))
    one.store(3)
    one.publish_all()
    one.store(4)
    subscribed, *batches = one.take(5)
    assert subscribed == KvSubscribed(7, 5, True, FIRST, FIRST)
    assert numbers(batches) == [FIRST, FIRST + 1, FIRST + 2]
    assert [bool(batch.snapshot) for batch in batches if isinstance(batch, KvEvents)] == [True, False, False]
    model = cached(batches)
    assert model.prefixes() == {(1,), (2,), (3,), (4,)}
    assert model.clears == 1


def test_stream_sends_a_large_snapshot_in_parts_one_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BATCH_BLOCKS", 4)
    one = Streaming()
    one.store(*range(10))
    one.tell(SubscribeKvEvents(1, 0))
    assert one.stream.has_work
    one.store(10)  # also publishes the first part
    assert numbers(one.take(1)) == [FIRST]
    assert one.publish_all() == 3
    parts = one.take(1)
    assert numbers(parts) == [FIRST + 1, FIRST + 2, FIRST + 3]
    places = [part.snapshot for part in parts if isinstance(part, KvEvents)]
    assert [(place.index, place.count, place.blocks) for place in places if place] == [(1, 3, 10), (2, 3, 10)]


def test_stream_gives_later_subscribers_the_kept_snapshot() -> None:
    one = Streaming()
    one.tell(SubscribeKvEvents(1, 0))
    one.store(1)
    one.store(2)
    one.tell(SubscribeKvEvents(2, 0), b"other")
    one.publish_all()
    assert numbers(one.take(2, b"other")) == numbers(one.take(1)) == [FIRST, FIRST + 1]


def test_stream_makes_a_new_snapshot_once_the_last_is_dropped() -> None:
    one = Streaming(max_batches=3)
    one.tell(SubscribeKvEvents(1, 0))
    for token in range(6):
        one.store(token)
    last = numbers(one.take(1))[-1]
    one.tell(SubscribeKvEvents(2, 0))
    one.publish_all()
    subscribed, *batches = one.take(2)
    assert isinstance(subscribed, KvSubscribed)
    assert (subscribed.accepted, subscribed.latest) == (True, last + 1)
    assert numbers(batches) == numbers(one.take(1)) == [last + 1]
    assert len(cached(batches).blocks) == 6


def test_stream_resumes_at_any_kept_batch() -> None:
    one = Streaming(max_batches=4)
    one.tell(SubscribeKvEvents(1, 0))
    for token in range(8):
        one.store(token)
    latest = numbers(one.take(1))[-1]
    for call, start in enumerate(range(latest - 3, latest + 2), 10):
        one.tell(SubscribeKvEvents(call, start))
        one.publish_all()
        subscribed, *batches = one.take(call)
        assert subscribed == KvSubscribed(7, call, True, latest - 3, latest)
        assert numbers(batches) == list(range(start, latest + 1))


@pytest.mark.parametrize("start", [1, FIRST - 1, FIRST + 4, FIRST + 11, 1 << 62])
def test_stream_refuses_what_it_does_not_keep(start: int) -> None:
    one = Streaming(max_batches=4)
    one.tell(SubscribeKvEvents(1, 0))
    for token in range(9):
        one.store(token)
    one.take(1)
    one.tell(SubscribeKvEvents(2, start))
    one.store(9)
    assert one.take(2) == [KvSubscribed(7, 2, False, FIRST + 5, FIRST + 8)]


def test_stream_refuses_a_number_of_an_earlier_engine_before_it_records() -> None:
    one = Streaming()
    one.tell(SubscribeKvEvents(1, FIRST))
    assert one.take(1) == [KvSubscribed(7, 1, False, FIRST, FIRST - 1)]
    assert not one.log.is_recording


def test_stream_keeps_at_most_its_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 2000)
    one = Streaming(max_batches=10**6)
    one.tell(SubscribeKvEvents(1, 0))
    one.tell(UnsubscribeKvEvents(1))
    for token in range(200):
        one.store(token)
        assert sum(len(batch.payload) for batch in one.stream._kept) == one.stream._kept_bytes <= 2000
    assert len(one.stream._kept) > 5


def test_stream_slow_subscriber_gets_a_window_then_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    window = 50_000
    monkeypatch.setattr(module, "WINDOW_BYTES", window)
    one = Streaming(max_batches=8)
    one.tell(SubscribeKvEvents(1, 0))
    one.tell(SubscribeKvEvents(2, 0))
    one.publish_all()
    read = numbers(one.take(2))
    while len(one.stream._subscribers) == 2:
        one.store(*range(500))
        batches = one.take(2)
        read += numbers(batches)
        one.tell(ReadKvEvents(2, sum(len(batch.payload) for batch in batches if isinstance(batch, KvEvents))))
    *batches, last = one.take(1)
    slow = numbers(batches)
    assert window <= sum(len(batch.payload) for batch in batches if isinstance(batch, KvEvents)) < 1.2 * window
    assert isinstance(last, KvEventsLost)
    assert last.next == slow[-1] + 1
    assert last.next < last.oldest <= read[-1]
    assert read == list(range(FIRST, read[-1] + 1))
    assert slow == list(range(FIRST, slow[-1] + 1))


def test_stream_lingers_then_stops_and_continues_with_a_snapshot() -> None:
    one = Streaming()
    one.tell(SubscribeKvEvents(1, 0))
    one.store(1)
    last = numbers(one.take(1))[-1]
    one.tell(UnsubscribeKvEvents(1))
    one.now += LINGER_SECONDS - 1
    one.store(2)
    one.tell(SubscribeKvEvents(2, last + 1))
    one.publish_all()
    assert numbers(one.take(2)) == [last + 1]
    one.stream.on_disconnect(b"f")
    one.now += LINGER_SECONDS
    one.store(3)
    assert not one.log.is_recording
    assert len(one.stream._kept) == 0
    one.store(4)
    assert not one.log.has_changes
    one.tell(SubscribeKvEvents(3, last + 1))
    one.tell(SubscribeKvEvents(4, 0))
    one.publish_all()
    assert not one.take(3)[0].accepted  # type: ignore[union-attr]
    batches = one.take(4)[1:]
    assert numbers(batches)[0] == last + 2
    model = cached(batches)
    assert model.prefixes() == {(1,), (2,), (3,), (4,)}


def test_stream_loses_all_subscriptions_of_a_connection() -> None:
    one = Streaming()
    for call in (1, 2):
        one.tell(SubscribeKvEvents(call, 0))
    one.tell(SubscribeKvEvents(1, 0), b"other")
    one.stream.on_disconnect(b"f")
    one.store(1)
    assert len(one.stream._subscribers) == 1
    assert numbers(one.take(1)) == []
    assert numbers(one.take(1, b"other")) == [FIRST]


def test_first_number_grows_with_the_date() -> None:
    numbers = [module.first_number(date) for date in (1.7e9, 1.7e9 + 1, 4e9)]
    assert numbers == sorted(numbers)
    assert numbers[1] - numbers[0] == 1 << 20
    assert numbers[-1] < 1 << 53
