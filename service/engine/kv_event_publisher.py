"""Publisher of KV events over ZeroMQ, in the format of vLLM, which llm-d reads.

    live      frames [topic, number, batch]           to subscribers of a prefix of the topic kv@POD@MODEL
    replay    request [number]                        of a DEALER socket, after an empty frame
              replies [topic, number, batch] ...      from that number on
              end     ["", -1, ""]

A number has 8 bytes, big-endian. Numbers begin at 0 with each engine, as vLLM's do: llm-d takes a smaller number for a
restart. The first batch is a snapshot, which begins with AllBlocksCleared. A replay from a number that is not kept is a
snapshot: its first number shows the gap.

The publisher is a thread of the engine process and a subscriber of the stream of KV events (kv_event_stream.py), so it
gets the same order and bounds as other subscribers. It subscribes only while it has a subscriber itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from npuserve.service import logs
from npuserve.service.config import ConfigError
from npuserve.service.ipc.kv_events import (
    WINDOW_BYTES,
    KvEvents,
    KvEventsLost,
    KvSubscribed,
    ReadKvEvents,
    SubscribeKvEvents,
    ToEngineKv,
    ToSubscriber,
    UnsubscribeKvEvents,
)

try:
    import zmq
except ImportError as error:
    raise ConfigError(f"kv_events: zmq needs pyzmq ({error}); pip install 'npuserve[gateway]'") from None

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 1000
"""Batches that wait for one subscriber. Further ones are dropped for it: the numbers show the gap."""
MAX_REPLAYS = 8
"""Replays at the same time. Further requests wait in ZeroMQ."""
REPLAY_SECONDS = 10.0
"""Time after which a replay ends whose client takes nothing."""
RETRY_SECONDS = 0.01
"""Interval at which a full socket of a replay's client is tried again."""
MAX_POLL_SECONDS = 1.0
"""Interval at which the thread checks whether it is to end, also its pause after a bug."""
MAX_ORDERS = 64
"""Messages to the stream that wait for the engine's loop. At this number the thread waits."""
READ_BYTES = 1 << 12
END = (-1).to_bytes(8, "big", signed=True)


def topic_of(model: str) -> bytes:
    """Return the topic of this pod: its address (POD_IP), else its name (POD_NAME), else the host's name."""
    pod = os.environ.get("POD_IP") or os.environ.get("POD_NAME") or socket.gethostname()
    return f"kv@{pod}@{model.replace('@', '_')}".encode()


@dataclass
class _Replay:
    """A replay for one client.

    start: number of the first batch; 0 once a snapshot replaces it.
    last: number of the last batch to send; None until the stream has replied.
    unsent: frames that did not fit the client's socket.
    progress: time of the last frame that did.
    """

    client: bytes
    start: int
    last: int | None = None
    unsent: deque[tuple[bytes, bytes, bytes]] = field(default_factory=deque)
    progress: float = field(default_factory=time.monotonic)


class KvEventPublisher:
    """Publisher of the events of this process's engine. It binds its sockets now; `start` starts the thread.

    endpoint: to bind if its host is a wildcard or it is a path (ipc://), else to connect to.
    replay_endpoint: to bind; "" for no replays.

    Raises ConfigError if a socket cannot be bound.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, topic: bytes):
        self._topic = topic
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.set_hwm(HIGH_WATER_MARK)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set_hwm(HIGH_WATER_MARK)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise an error instead of dropping frames
        for zmq_socket in (self._publisher, self._router):
            zmq_socket.setsockopt(zmq.LINGER, 0)
            zmq_socket.setsockopt(zmq.IPV6, 1)
        wildcards = ("*", "//0.0.0.0:", "//[::]:", "//:::")
        is_bound = endpoint.startswith("ipc://") or any(wildcard in endpoint for wildcard in wildcards)
        self._open("kv_events_endpoint", self._publisher.bind if is_bound else self._publisher.connect, endpoint)
        if replay_endpoint:
            self._open("kv_events_replay_endpoint", self._router.bind, replay_endpoint)
        self._first = 0
        self._prefixes: set[bytes] = set()  # that are subscribed to
        self._live: int | None = None  # call of the live subscription
        self._live_read = 0  # bytes that were published and not reported as read
        self._replays: dict[int, _Replay] = {}  # by call
        self._last_call = 0
        self._orders: queue.Queue[ToEngineKv] = queue.Queue(MAX_ORDERS)
        self._delivered: deque[ToSubscriber] = deque()  # WINDOW_BYTES bounds it for each subscription
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._is_closing = False

    def start(self, first: int, wake_engine: Callable[[], None]) -> None:
        """Start publishing.

        first: number of the engine's first batch, which becomes 0.
        wake_engine: makes the engine's loop take the orders, also from this thread.
        """
        self._first = first
        self._wake_engine = wake_engine
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close the sockets."""
        self._is_closing = True
        self._wake()
        self._thread.join(10 * MAX_POLL_SECONDS)

    def take_orders(self) -> Iterator[ToEngineKv]:
        """Yield the messages to the stream, in order. For the engine's loop."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._orders.get_nowait()

    def deliver(self, message: ToSubscriber) -> None:
        """Hand a message of the stream to the thread. For the engine's loop."""
        self._delivered.append(message)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full of wakes that the thread has not read, or closed
            self._waker.send(b"w")

    def _open(self, setting: str, open_socket: Callable[[str], object], endpoint: str) -> None:
        try:
            open_socket(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{setting}: cannot open {endpoint}: {error.strerror}") from None

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._serve()
            except Exception as error:
                logs.bug(log, "KV events: failed, starting again", error)
                time.sleep(MAX_POLL_SECONDS)
            finally:
                self._forget()
        self._context.destroy(linger=0)
        self._woken.close()
        self._waker.close()

    def _serve(self) -> None:
        """Serve subscribers and replays until `close`."""
        self._update_live()
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._publisher, zmq.POLLIN)
        while not self._is_closing:
            is_blocked = any(replay.unsent for replay in self._replays.values())
            poller.register(self._router, zmq.POLLIN if len(self._replays) < MAX_REPLAYS else 0)
            ready = dict(poller.poll(int(1000 * (RETRY_SECONDS if is_blocked else MAX_POLL_SECONDS))))
            if self._publisher in ready:
                self._receive_subscriptions()
            if self._router in ready:
                self._receive_requests()
            if self._woken.fileno() in ready:
                self._woken.recv(READ_BYTES)
                while self._delivered:
                    self._handle(self._delivered.popleft())
            if is_blocked:
                self._continue_replays()

    def _forget(self) -> None:
        """End all subscriptions to the stream. Their messages that still arrive are ignored."""
        calls = [*self._replays, *([self._live] if self._live is not None else [])]
        self._live = None
        self._live_read = 0
        self._replays.clear()
        for call in calls:
            self._send(UnsubscribeKvEvents(call))

    def _send(self, message: ToEngineKv) -> None:
        """Send a message to the stream. Wait for the engine's loop while MAX_ORDERS wait for it."""
        while not self._is_closing:
            with contextlib.suppress(queue.Full):
                self._orders.put(message, timeout=MAX_POLL_SECONDS)
                self._wake_engine()
                return

    def _subscribe(self, start: int) -> int:
        """Subscribe to the stream's batches and return the call."""
        self._last_call += 1
        self._send(SubscribeKvEvents(self._last_call, start))
        return self._last_call

    def _receive_subscriptions(self) -> None:
        while self._publisher.poll(0):
            data = self._publisher.recv()
            kind = data[:1]
            prefix = data[1:]
            if kind == b"\x01" and self._topic.startswith(prefix):
                self._prefixes.add(prefix)
            elif kind == b"\x00":
                self._prefixes.discard(prefix)
        self._update_live()

    def _update_live(self) -> None:
        """Subscribe to the stream while this publisher has a subscriber."""
        if self._prefixes and self._live is None:
            self._live = self._subscribe(0)
        elif not self._prefixes and self._live is not None:
            self._send(UnsubscribeKvEvents(self._live))
            self._live = None
            self._live_read = 0

    def _receive_requests(self) -> None:
        while len(self._replays) < MAX_REPLAYS and self._router.poll(0):
            frames = self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logs.event(log, "KV events: malformed replay request", level=logging.WARNING,
                           sizes=[len(frame) for frame in frames])
                continue
            start = min(self._first + int.from_bytes(frames[2], "big"), (1 << 63) - 1)
            self._replays[self._subscribe(start)] = _Replay(frames[0], start)

    def _handle(self, message: ToSubscriber) -> None:
        """Handle a message of the stream. Messages of ended subscriptions are ignored."""
        if message.call == self._live:
            self._handle_live(message)
        elif replay := self._replays.get(message.call):
            self._handle_replay(message.call, replay, message)

    def _handle_live(self, message: ToSubscriber) -> None:
        if isinstance(message, KvEvents):
            self._publisher.send_multipart(self._frames(message))  # drops it for subscribers that are full
            self._live_read += len(message.payload)
            if self._live_read >= WINDOW_BYTES // 4:
                self._send(ReadKvEvents(message.call, self._live_read))
                self._live_read = 0
        elif isinstance(message, KvEventsLost):
            logs.event(log, "KV events: batches are lost, a snapshot follows", level=logging.WARNING,
                       batches=message.oldest - message.next)
            self._live = None
            self._live_read = 0
            self._update_live()

    def _handle_replay(self, call: int, replay: _Replay, message: ToSubscriber) -> None:
        match message:
            case KvSubscribed(accepted=accepted, latest=latest) if accepted or replay.start > latest + 1:
                replay.last = latest
                if replay.start > latest:
                    replay.unsent.append((b"", END, b""))
            case KvEvents(sequence=sequence):
                replay.unsent.append(self._frames(message))
                if sequence == replay.last:
                    replay.unsent.append((b"", END, b""))
            case KvSubscribed() | KvEventsLost():  # a snapshot takes the place of what is not kept
                del self._replays[call]
                replay.start = 0
                replay.last = None
                call = self._subscribe(0)
                self._replays[call] = replay
        self._send_frames(call, replay)

    def _continue_replays(self) -> None:
        for call, replay in list(self._replays.items()):
            if replay.unsent:
                self._send_frames(call, replay)

    def _send_frames(self, call: int, replay: _Replay) -> None:
        """Send what fits the client's socket. End the replay after its end marker, or if its client left or hangs."""
        sent = 0
        is_over = False
        try:
            while replay.unsent and not is_over:
                topic, number, batch = replay.unsent[0]
                self._router.send_multipart((replay.client, b"", topic, number, batch), zmq.NOBLOCK)
                replay.unsent.popleft()
                sent += len(batch)
                is_over = number == END
                replay.progress = time.monotonic()
        except zmq.Again:
            is_over = time.monotonic() - replay.progress > REPLAY_SECONDS
        except zmq.ZMQError:  # no route to the client
            is_over = True
        if is_over:
            del self._replays[call]
            self._send(UnsubscribeKvEvents(call))
        elif sent:
            self._send(ReadKvEvents(call, sent))

    def _frames(self, batch: KvEvents) -> tuple[bytes, bytes, bytes]:
        return self._topic, (batch.sequence - self._first).to_bytes(8, "big"), batch.payload
