"""KV events of the engine's loop, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npuserve.service.engine import kv_event_stream
from npuserve.service.engine.kv_event_log import KvEventLog, to_hash
from npuserve.service.engine.kv_event_stream import KvEventStream
from npuserve.service.engine.loop import Engine
from npuserve.service.ipc import messages as m
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.ipc.kv_events import KvEvents, KvSubscribed, SubscribeKvEvents, UnsubscribeKvEvents
from tests.service.engine.test_loop import MODEL, Peer, Running, until
from tests.support.kv_model import CacheModel

if TYPE_CHECKING:
    from npuserve.service.engine.kv_event_publisher import KvEventPublisher

FIRST = 1 << 40


class RunningKv(Running):
    """Engine with KV events, and with a publisher if one is given."""

    def __init__(self, tmp_path: Path, blocks: int = 64, publisher: KvEventPublisher | None = None):
        self.publisher = publisher
        super().__init__(tmp_path, 0.0, 64, blocks)

    def make(self) -> Engine:
        self.log = KvEventLog(4)
        self.stream = KvEventStream(self.log, 4, 7, 1000, FIRST, publisher=self.publisher)
        self.blocks._events = self.log
        return Engine(self.scheduler, self.runner, EngineSocket(self.address), MODEL, epoch=7, kv_events=self.stream)

    def hashes(self) -> set[int]:
        """Return the hashes of the blocks in the cache."""
        return {to_hash(digest) for digest in self.blocks._by_digest}


@contextmanager
def running(tmp_path: Path, blocks: int = 64) -> Iterator[RunningKv]:
    engine = RunningKv(tmp_path, blocks)
    yield engine
    engine.stop()


def follow(peer: Peer, model: CacheModel, call: int, until_number: int) -> list[int]:
    """Apply the batches of a subscription up to a number; return their numbers."""
    numbers: list[int] = []
    while not numbers or numbers[-1] < until_number:
        message = peer.receive()
        if isinstance(message, KvEvents) and message.call == call:
            model.apply(message.payload)
            numbers.append(message.sequence)
    return numbers


def subscribed(peer: Peer, call: int, start: int = 0) -> KvSubscribed:
    peer.send(SubscribeKvEvents(call, start))
    while not isinstance(message := peer.receive(), KvSubscribed):
        pass
    return message


def test_engine_events_replayed_equal_its_cache(tmp_path: Path) -> None:
    with running(tmp_path, blocks=16) as engine:
        asking, following, model = Peer(engine.address), Peer(engine.address), CacheModel()
        asking.submit(1, list(range(10, 22)), 6)
        asking.until_end(1)
        assert subscribed(following, 3) == KvSubscribed(7, 3, True, FIRST, FIRST)
        for key in range(2, 12):  # more than the cache holds
            asking.submit(key, [key * 50 + i for i in range(9)], 20)
            asking.until_end(key)
        until(lambda: not engine.stream.has_work)
        numbers = follow(following, model, 3, engine.stream._latest)
        assert numbers == list(range(FIRST, numbers[-1] + 1))
        assert model.blocks.keys() == engine.hashes()
        assert len(model.blocks) > 10
        asking.send(m.FlushPrefixCache(9))
        assert asking.reply(9) == len(model.blocks)
        follow(following, model, 3, numbers[-1] + 1)
        assert model.blocks == {}


def test_engine_sends_a_snapshot_while_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_stream, "MAX_BATCH_BLOCKS", 1)
    with running(tmp_path) as engine:
        peer, model = Peer(engine.address), CacheModel()
        peer.submit(1, list(range(40)), 5)
        peer.until_end(1)
        found = subscribed(peer, 1)
        assert found.latest == FIRST + 10  # 11 full blocks
        numbers = follow(peer, model, 1, found.latest)
        assert numbers == list(range(FIRST, FIRST + 11))
        assert len(model.blocks) == 11


def test_engine_without_a_subscriber_builds_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    monkeypatch.setattr(kv_event_stream, "encode_batch", lambda batch: built.append(batch) or b"")
    with running(tmp_path) as engine:
        peer = Peer(engine.address)
        for key in range(1, 6):
            peer.submit(key, [key * 10 + i for i in range(9)], 9)
            peer.until_end(key)
        assert (engine.log.has_changes, built, engine.stream._latest) == (False, [], FIRST - 1)
        assert len(engine.log.blocks) == len(engine.blocks._by_digest) > 10


def test_engine_ends_the_subscriptions_of_a_lost_front_end(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        lost, other = Peer(engine.address), Peer(engine.address)
        subscribed(lost, 1)
        subscribed(other, 1)
        subscribed(other, 2)
        lost.socket.close()
        until(lambda: len(engine.stream._subscribers) == 2)
        other.send(UnsubscribeKvEvents(1))
        until(lambda: len(engine.stream._subscribers) == 1)
        other.submit(1, [5, 6], 9)
        other.until_end(1)
