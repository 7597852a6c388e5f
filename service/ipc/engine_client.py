"""The front end's end of the local socket: hands requests to the engine and its outputs back to them.

One connection is one socket, so that nothing of a dead engine is left in it. While there is none, new requests are
refused, and those in flight wait: what came for them is here, and goes to the next engine with the answer to its Ready
(`Restore`), which goes on with prompt and answer so far. Readers see a pause. So do streams that were left or ended a
while ago and may still be resumed.

An engine that is there but says nothing, not even its heartbeat, is stalled: new requests are refused, those in flight
wait for it. Each request ends in exactly one way: with the engine's finish, with an error, or with `Stream.close`,
which cancels it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from npuserve.service import logs, metrics
from npuserve.service.errors import QueueFull, ServeError, Unavailable, from_wire
from npuserve.service.ipc import messages
from npuserve.service.ipc.messages import (
    Abort,
    Cancel,
    FlushPrefixCache,
    Load,
    ModelInfo,
    Outputs,
    Record,
    Request,
    Resume,
    Resumed,
)
from npuserve.service.ipc.records import Records, restore_messages
from npuserve.service.ipc.stream import Stream

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "stalled", "down"]
REFUSALS = {
    "starting": "the model is loading", "down": "the engine is restarting", "stalled": "the engine does not answer",
}

STALL_SECONDS = 60.0
"""Of silence, unless told otherwise. An engine beats twice a second, but not within a step, and a large model's long
chunk takes its time on a CPU."""

RECONNECT_SECONDS = 0.05
FAILED_SECONDS = 1.0
"""Time until work in the background that failed by a bug starts again."""
PAGE_SECONDS = 0.1
"""What is counted with every token reaches the metrics page no more often while tokens come."""


class EngineClient:
    """The connection to the engine at `address`, kept up from `start` to `close`, on one event loop.

    on_state: called with each new state. model_info: of the last engine, None before the first; epoch: its, 0 before;
    load: its last word. resume_seconds: how long streams that ended are kept for the next engine. max_buffered_tokens,
    slow_reader_seconds, stream_interval: see stream.py.
    """

    def __init__(
        self, address: str, on_state: Callable[[State], None] = lambda state: None,
        stall_seconds: float = STALL_SECONDS, resume_seconds: float = 0.0, max_buffered_tokens: int = 512,
        slow_reader_seconds: float = 300.0, stream_interval: int = 1,
    ):
        self.max_buffered_tokens = max_buffered_tokens
        self.stream_interval = stream_interval
        self._slow_reader_seconds = slow_reader_seconds
        self.state: State = "starting"
        self.model_info: ModelInfo | None = None
        self.epoch = 0
        self.load = Load()
        self._address = address
        self._stall_seconds = stall_seconds
        self._on_state = on_state
        self._connected: _Connection | None = None  # to an engine that is ready
        self._deferred: list[messages.ToEngine] | None = None  # until all is restored, what follows it
        self._restoring: asyncio.Task[None] | None = None
        self._streams: dict[int, Stream] = {}
        self._resuming: dict[int, asyncio.Future[Stream]] = {}
        self._records = Records(resume_seconds)
        self._calls: dict[int, asyncio.Future[int]] = {}
        self._last_key = 0
        self._silence = 0
        self._paged = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        work = {"engine client": self._connection, "slow readers": self._check_readers}
        self._tasks = [loop.create_task(self._repeat(name, each), name=name) for name, each in work.items()]

    async def close(self) -> None:
        """Every stream ends with Unavailable."""
        self.state = "down"  # and nobody is told: it is we who leave
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.give_up(Unavailable("the server is leaving"))

    def require(self) -> ModelInfo:
        """The model's facts, if the engine takes requests; Unavailable otherwise."""
        if self.state != "ready" or self.model_info is None:
            raise Unavailable(REFUSALS[self.state])
        return self.model_info

    def submit(self, request: Request) -> Stream:
        """Hand a request over. Unavailable if the engine is not ready, QueueFull if this front end alone holds more
        than the engine runs and queues, twice: what the engine refuses comes as the stream's error."""
        self._check_room()
        stream = Stream(self, self._key(), Record(request))
        self._streams[stream.key] = stream
        self.send(messages.Submit(stream.key, request))
        return stream

    async def resume(self, token: str, token_offset: int, owner: str, deadline: float | None) -> Stream:
        """The stream of that token. owner: see Caller. Raises what `submit` and Ledger.resume do."""
        self._check_room()
        key = self._key()
        found: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._resuming[key] = found
        self.send(Resume(key, token, token_offset, owner, deadline))
        try:
            return await found
        except asyncio.CancelledError:
            if found.done() and not found.cancelled() and not found.exception():
                found.result().close()
            raise
        finally:
            self._resuming.pop(key, None)

    def give_up(self, error: ServeError) -> None:
        """Every stream ends with it."""
        for stream in list(self._streams.values()):
            stream.end(error)

    async def abort(self, request_id: str, client: str = "") -> int:
        """End the one request of that id, and return how many there are; several are left alone. client: whose request;
        "" for any client's."""
        return await self._call(Abort(self._key(), request_id, client))

    async def flush_prefix_cache(self) -> int:
        """The number of blocks forgotten."""
        return await self._call(FlushPrefixCache(self._key()))

    def send(self, message: messages.ToEngine) -> bool:
        """Never waits: the engine takes all that comes, and refuses by an output. False without an engine."""
        if self._connected is None:
            return False
        if self._deferred is not None:
            self._deferred.append(message)
        else:
            self._connected.write(message)
        return True

    def forget(self, stream: Stream) -> None:
        """Nobody reads it any more."""
        if self._streams.pop(stream.key, None) and stream.resumable:
            self._records.end(stream.record, time.monotonic())

    def _check_room(self) -> None:
        info = self.require()
        most = 2 * (info.max_num_seqs + info.max_queue)
        if len(self._streams) + len(self._resuming) >= most:
            metrics.queue_rejections_total.labels("front_end").inc()
            raise QueueFull(
                f"front end full: it holds {most} requests, twice the sum of max_num_seqs ({info.max_num_seqs}) and "
                f"max_queue ({info.max_queue})")

    def _key(self) -> int:
        self._last_key += 1
        return self._last_key

    async def _call(self, message: Abort | FlushPrefixCache) -> int:
        self.require()
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._calls[message.call] = reply
        try:
            self.send(message)
            return await reply
        finally:
            del self._calls[message.call]

    async def _repeat(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` again and again. An exception is a bug: it is logged, and the work starts again after a while."""
        while True:
            try:
                await work()
            except Exception as error:
                logs.bug(log, f"{name}: failed, starting again", error)
                await asyncio.sleep(FAILED_SECONDS)

    async def _connection(self) -> None:
        """Connect, and serve the connection until it breaks. Raise what a message of it or its timer raised."""
        loop = asyncio.get_running_loop()
        try:
            transport, connection = await loop.create_unix_connection(lambda: _Connection(self._hear), self._address)
        except OSError:  # no engine is there
            await asyncio.sleep(RECONNECT_SECONDS)
            return
        listening = asyncio.ensure_future(self._listen())
        try:
            connection.write(messages.Hello())
            done, _ = await asyncio.wait((connection.ended, listening), return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            listening.cancel()
            transport.abort()
            self._lose()

    async def _check_readers(self) -> None:
        """Look once, after a while, for readers that take nothing."""
        await asyncio.sleep(min(1.0, self._slow_reader_seconds / 4))
        now = time.monotonic()
        for stream in list(self._streams.values()):
            stream.check_reader(now, self._slow_reader_seconds)

    async def _listen(self) -> None:
        """Count the seconds of silence: those in which this process ran, its own pauses not being the engine's."""
        while True:
            await asyncio.sleep(1)
            self._silence += 1
            if self._silence >= self._stall_seconds and self.state == "ready":
                self._set_state("stalled")

    def _hear(self, data: bytes, connection: _Connection) -> None:
        message = messages.decode_to_frontend(data)
        self._silence = 0
        if self.state == "stalled":
            self._set_state("ready")
        match message:
            case Outputs(epoch=epoch) if epoch == self.epoch and self._connected:
                self._take(message)
            case messages.Ready(epoch=epoch, model=model):
                self._lose()
                self._connected, self.epoch, self.model_info = connection, epoch, model
                self._deferred = []
                waiting = sorted(self._streams.values(), key=lambda stream: stream.request.arrival)
                self._restoring = asyncio.ensure_future(self._restore(connection, waiting))
                self._restoring.add_done_callback(connection.failed)
                self._set_state("ready")
            case Resumed(epoch=epoch, key=key, record=record) if epoch == self.epoch and self._connected:
                self._resumed(key, record)
            case messages.Reply(epoch=epoch, call=call, value=value) if epoch == self.epoch and self._connected:
                reply = self._calls.get(call)
                if reply and not reply.done():
                    reply.set_result(value)

    def _take(self, message: Outputs) -> None:
        now = time.monotonic()
        self.load = message.load
        for key in message.accepted:
            if stream := self._streams.get(key):
                stream.accept()
        for started in message.started:
            stream = self._streams.get(started.key)
            if stream:
                stream.started(started, now)
        for output in message.outputs:
            stream = self._streams.get(output.key)
            if stream:
                stream.push(output, now)
            elif output.error and (found := self._resuming.get(output.key)) and not found.done():
                found.set_exception(from_wire(output.error))
        if now - self._paged >= PAGE_SECONDS or not message.outputs:
            self._page(now)

    def _page(self, now: float) -> None:
        self._paged = now
        metrics.stream_buffered_tokens.set(sum(stream.buffered for stream in self._streams.values()))
        metrics.flush()

    def _resumed(self, key: int, record: Record) -> None:
        found = self._resuming.get(key)
        if found is None or found.done():  # who asked is gone
            self.send(Cancel(key))
            return
        stream = self._streams[key] = Stream(self, key, record, resumed=True)
        self._records.drop(record.request.resume_token)
        metrics.streams_continued_total.labels("client").inc()
        found.set_result(stream)

    async def _restore(self, connection: _Connection, waiting: list[Stream]) -> None:
        """Hand over what there was before this engine, or this connection to it; then send what was deferred."""
        for stream in waiting:
            stream.resubmit()
        if count := sum(stream.live for stream in waiting):
            metrics.streams_continued_total.labels("engine").inc(count)
            logs.event(log, "streams go on", level=logging.WARNING, streams=count, epoch=self.epoch)
        live = ((stream.key, stream.record) for stream in waiting if stream.live)
        for message in restore_messages(live, lambda: self._records.ended(time.monotonic())):
            connection.write(message)
            await connection.drained()
        deferred, self._deferred = self._deferred or [], None
        for later in deferred:
            connection.write(later)

    def _lose(self) -> None:
        """The connection is gone: readers wait for the next, callers do not."""
        self._connected = self._deferred = None
        if self._restoring:
            self._restoring.cancel()
        for stream in list(self._streams.values()):
            stream.cut()
        waiters: list[asyncio.Future[int] | asyncio.Future[Stream]] = [*self._calls.values(), *self._resuming.values()]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(Unavailable("the engine died before it answered"))
        self.load = Load()
        metrics.stream_buffered_tokens.set(0)
        metrics.flush()
        if self.state in ("ready", "stalled"):
            self._set_state("down")

    def _set_state(self, state: State) -> None:
        # The supervisor logs that the server is ready; the end of a stall is logged here alone.
        ready = logging.INFO if self.state == "stalled" else logging.DEBUG
        level = ready if state == "ready" else logging.WARNING
        self.state = state
        logs.event(log, f"engine is {state}", level=level, epoch=self.epoch)
        self._on_state(state)


class _Connection(asyncio.Protocol):
    """Hands each message that comes to `hear`, with itself. ended: its end, an error where `hear` raised one."""

    def __init__(self, hear: Callable[[bytes, _Connection], None]):
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hear = hear
        self._received = messages.Splitter()
        self._writable = asyncio.Event()
        self._writable.set()

    def write(self, message: messages.ToEngine) -> None:
        """Never waits."""
        self._transport.write(messages.encode(message))

    async def drained(self) -> None:
        """Wait until the engine has taken most of what was written, and let other tasks run in any case."""
        await asyncio.sleep(0)
        await self._writable.wait()

    def failed(self, task: asyncio.Task[None]) -> None:
        """End the connection with the error of a task that uses it, if it had one."""
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._received.feed(data):
                self._hear(message, self)
        except Exception as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._transport.abort()
        if not self.ended.done():
            self.ended.set_exception(error)
