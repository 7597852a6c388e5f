"""KV events over ZeroMQ: real sockets of pyzmq, and an engine's loop."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.engine import kv_event_publisher as module
from npuserve.service.engine.kv_event_publisher import END, KvEventPublisher, topic_of
from npuserve.service.engine.process import EngineArgs, open_publisher
from npuserve.service.ipc.kv_events import ToSubscriber
from tests.service.engine.test_loop import Peer, until
from tests.service.engine.test_loop_kv_events import FIRST, RunningKv
from tests.support.kv_model import CacheModel

TOPIC = b"kv@10.0.0.7@stories"


class Subscriber:
    """SUB socket that follows one publisher. numbers: of the batches so far."""

    def __init__(self, context: zmq.Context, endpoint: str, prefix: bytes = b"kv@"):
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SUBSCRIBE, prefix)
        self.socket.connect(endpoint)
        self.model = CacheModel()
        self.numbers: list[int] = []

    def receive(self, seconds: float = 10.0) -> bool:
        """Apply the next batch. Return False if none arrives."""
        if not self.socket.poll(1000 * seconds):
            return False
        topic, number, payload = self.socket.recv_multipart()
        assert topic == TOPIC
        assert len(number) == 8
        self.numbers.append(int.from_bytes(number, "big"))
        self.model.apply(payload)
        return True

    def follow(self, number: int) -> None:
        while not self.numbers or self.numbers[-1] < number:
            assert self.receive()


class Publishing:
    """Engine with a publisher."""

    def __init__(self, tmp_path: Path, stack: ExitStack, blocks: int = 64):
        self.endpoint, self.replay_endpoint = (f"ipc://{tmp_path}/{name}" for name in ("live", "replay"))
        self.publisher = KvEventPublisher(self.endpoint, self.replay_endpoint, TOPIC)
        self.engine = RunningKv(tmp_path, blocks, self.publisher)
        stack.callback(self.engine.stop)
        self.publisher.start(FIRST, self.engine.engine._socket.wake)
        stack.callback(self.publisher.close)
        self.context = zmq.Context()
        stack.callback(self.context.destroy, 0)
        self.peer = Peer(self.engine.address)
        self._key = 0

    def subscriber(self, prefix: bytes = b"kv@") -> Subscriber:
        return Subscriber(self.context, self.endpoint, prefix)

    def generate(self, count: int = 1) -> None:
        """Answer requests whose prompts have no common prefix."""
        for _ in range(count):
            self._key += 1
            self.peer.submit(self._key, [self._key % 1000, *range(8)], 5)
            self.peer.until_end(self._key)

    def latest(self) -> int:
        """Return the number of the last batch as the publisher counts, once all are made."""
        until(lambda: not self.engine.stream.has_work)
        return self.engine.stream._latest - FIRST

    def replay(self, start: int, model: CacheModel | None = None, kind: int = zmq.DEALER) -> list[int]:
        """Request a replay; return its numbers. model: to which its batches are applied."""
        client = self.context.socket(kind)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(self.replay_endpoint)
        client.send_multipart([b"", start.to_bytes(8, "big")])
        numbers = []
        while True:
            assert client.poll(10_000), numbers
            empty, topic, number, payload = client.recv_multipart()
            assert empty == b""
            if not payload:
                assert (topic, number) == (b"", END)
                client.close()
                return numbers
            assert topic == TOPIC
            numbers.append(int.from_bytes(number, "big"))
            if model:
                model.apply(payload)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Publishing]]:
    with ExitStack() as stack:
        yield lambda **options: Publishing(tmp_path, stack, **options)


def test_publisher_sends_a_snapshot_then_every_change(make: Callable[..., Publishing]) -> None:
    server = make(blocks=16)
    server.generate(2)
    one = server.subscriber()
    one.follow(0)
    assert (one.numbers, one.model.clears, len(one.model.blocks)) == ([0], 1, 6)
    server.generate(8)
    one.follow(server.latest())
    assert one.numbers == list(range(one.numbers[-1] + 1))
    assert one.model.blocks.keys() == server.engine.hashes()


def test_publisher_without_a_subscriber_subscribes_to_nothing(make: Callable[..., Publishing]) -> None:
    server = make()
    other = server.subscriber(b"kv@10.0.0.8@")
    server.generate(5)
    assert not other.receive(0.2)
    assert not server.engine.stream._subscribers
    assert not server.engine.log.has_changes
    one = server.subscriber(TOPIC)
    one.follow(0)
    assert len(server.engine.stream._subscribers) == 1  # since before the first batch
    one.socket.close()
    until(lambda: not server.engine.stream._subscribers)


def test_replay_fills_a_gap(make: Callable[..., Publishing]) -> None:
    """Drop live batches as a full socket would. The replay of the missing numbers gives the cache."""
    server = make(blocks=16)
    one = server.subscriber()
    one.follow(0)
    server.generate(3)
    one.follow(server.latest())
    last = one.numbers[-1]
    server.generate(6)
    latest = server.latest()
    while one.numbers[-1] < latest:
        _, number, _ = one.socket.recv_multipart()  # lost
        one.numbers.append(int.from_bytes(number, "big"))
    server.generate(1)
    assert one.socket.poll(10_000)
    _, number, _ = one.socket.recv_multipart()
    first = int.from_bytes(number, "big")
    assert first > last + 1
    numbers = server.replay(last + 1, one.model)
    assert numbers[: first - last - 1] == list(range(last + 1, first))
    assert numbers == list(range(last + 1, numbers[-1] + 1))
    one.numbers = list(range(numbers[-1] + 1))
    while one.receive(0.3):
        pass
    assert one.model.blocks.keys() == server.engine.hashes()


def test_replay_from_the_start_before_any_subscriber_is_a_snapshot(make: Callable[..., Publishing]) -> None:
    server, model = make(), CacheModel()
    server.generate(3)
    assert server.replay(0, model) == [0]
    assert model.blocks.keys() == server.engine.hashes()


def test_replay_of_what_is_not_kept_is_a_snapshot_that_shows_the_gap(make: Callable[..., Publishing]) -> None:
    server = make()
    server.engine.stream._max_batches = 4
    one = server.subscriber()
    one.follow(0)
    server.generate(12)
    one.follow(latest := server.latest())
    assert latest > 8
    model = CacheModel()
    numbers = server.replay(2, model)
    assert numbers[0] > latest - 4
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert model.blocks.keys() == server.engine.hashes()
    assert server.replay(numbers[-1] + 1) == []
    assert server.replay(numbers[-1] + 100) == []


def test_replay_serves_several_clients_and_larger_histories_than_a_socket_holds(
    make: Callable[..., Publishing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HIGH_WATER_MARK", 2)
    server = make()
    one = server.subscriber()
    one.follow(0)
    server.generate(40)
    latest = server.latest()
    clients = []
    for _ in range(3):
        client = server.context.socket(zmq.DEALER)
        client.set_hwm(1)
        client.connect(server.replay_endpoint)
        client.send_multipart([b"", bytes(8)])
        clients.append(client)
    time.sleep(0.1)  # the sockets fill up
    for client in clients:
        numbers = []
        while True:
            assert client.poll(10_000), numbers
            _, _, number, payload = client.recv_multipart()
            if not payload:
                break
            numbers.append(int.from_bytes(number, "big"))
        assert numbers == list(range(latest + 1))


@pytest.mark.slow
def test_replay_ends_for_a_client_that_reads_nothing_or_left(
    make: Callable[..., Publishing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HIGH_WATER_MARK", 1)
    monkeypatch.setattr(module, "REPLAY_SECONDS", 0.2)
    server = make()
    one = server.subscriber()
    one.follow(0)
    server.generate(30)
    stuck, left = (server.context.socket(zmq.DEALER) for _ in range(2))
    for client in (stuck, left):
        client.setsockopt(zmq.LINGER, 1000)
        client.set_hwm(1)
        client.setsockopt(zmq.RCVBUF, 1024)
        client.connect(server.replay_endpoint)
        client.send_multipart([b"", bytes(8)])
    until(lambda: len(server.publisher._replays) > 0 or server.publisher._last_call >= 3)
    left.close()
    until(lambda: not server.publisher._replays)
    until(lambda: len(server.engine.stream._subscribers) == 1)
    monkeypatch.setattr(module, "REPLAY_SECONDS", 60)
    assert server.replay(0)[0] == 0


def test_replay_request_that_is_malformed_is_ignored(make: Callable[..., Publishing]) -> None:
    server = make()
    client = server.context.socket(zmq.DEALER)
    client.connect(server.replay_endpoint)
    for frames in ([b""], [b"", b"123"], [b"", bytes(8), b"more"], [bytes(8)]):
        client.send_multipart(frames)
    assert server.replay(0) == [0]
    assert server.replay(0, kind=zmq.DEALER) == [0]
    assert not client.poll(100)


def test_publisher_gets_a_snapshot_after_it_lost_batches(
    make: Callable[..., Publishing], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make()
    server.engine.stream._max_batches = 4
    one = server.subscriber()
    one.follow(0)
    (subscriber,) = server.engine.stream._subscribers.values()
    subscriber.credit = -(10**9)  # the publisher is slow
    server.generate(12)
    latest = server.latest()
    one.follow(latest)
    assert one.model.clears == 2
    assert one.numbers == sorted(one.numbers)
    assert one.numbers[1] > 1
    server.generate(2)
    one.follow(server.latest())
    assert one.model.blocks.keys() == server.engine.hashes()


def test_publisher_after_a_bug_serves_its_subscribers_again(
    make: Callable[..., Publishing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_POLL_SECONDS", 0.1)
    server = make(blocks=16)
    one = server.subscriber()
    one.follow(0)
    handle, failed = server.publisher._handle_live, []

    def fail_once(message: ToSubscriber) -> None:
        if not failed:
            failed.append(message)
            raise RuntimeError("a bug")
        handle(message)

    monkeypatch.setattr(server.publisher, "_handle_live", fail_once)
    server.generate(9)
    until(lambda: bool(failed) and len(server.engine.stream._subscribers) == 1)
    one.follow(server.latest())
    assert one.model.blocks.keys() == server.engine.hashes()


def test_publisher_connects_to_a_router_that_binds(tmp_path: Path) -> None:
    """The endpoint names another host: the subscriber binds."""
    with ExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.destroy, 0)
        bound = context.socket(zmq.SUB)
        port = bound.bind_to_random_port("tcp://127.0.0.1")
        bound.setsockopt(zmq.SUBSCRIBE, b"kv@")
        publisher = KvEventPublisher(f"tcp://127.0.0.1:{port}", "", TOPIC)
        engine = RunningKv(tmp_path, 64, publisher)
        stack.callback(engine.stop)
        publisher.start(FIRST, engine.engine._socket.wake)
        stack.callback(publisher.close)
        assert bound.poll(10_000)
        assert bound.recv_multipart()[:2] == [TOPIC, bytes(8)]


def test_publisher_connects_to_an_address_that_has_two_colons() -> None:
    """The discard prefix of RFC 6666 is no address of this host: it could not be bound."""
    KvEventPublisher("tcp://[100::1]:5557", "", TOPIC)._context.destroy(linger=0)


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as one:
        one.bind(("0.0.0.0", 0))
        one.listen()
        yield one.getsockname()[1]


def test_publisher_names_the_setting_of_a_port_that_is_taken() -> None:
    with taken_port() as port:
        with pytest.raises(ConfigError, match=rf"kv_events_endpoint: cannot open tcp://\*:{port}: "):
            KvEventPublisher(f"tcp://*:{port}", "", TOPIC)
        with pytest.raises(ConfigError, match="kv_events_replay_endpoint: cannot open"):
            KvEventPublisher("tcp://localhost:1", f"tcp://*:{port}", TOPIC)


def test_publisher_without_pyzmq_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, module.__name__)
    args = EngineArgs(ServerConfig(kv_events="zmq"), "", "", 1)
    with pytest.raises(ConfigError, match=r"kv_events: zmq needs pyzmq .*pip install 'npuserve\[gateway\]'"):
        open_publisher(args)
    assert open_publisher(EngineArgs(ServerConfig(kv_events="grpc"), "", "", 1)) is None


def test_topic_names_pod_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POD_IP", "POD_NAME"):
        monkeypatch.delenv(name, raising=False)
    assert topic_of("stories") == f"kv@{socket.gethostname()}@stories".encode()
    monkeypatch.setenv("POD_NAME", "llm-0")
    assert topic_of("org/model") == b"kv@llm-0@org/model"
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    assert topic_of("a@b") == b"kv@10.0.0.7@a_b"
