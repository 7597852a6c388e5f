"""The front end's end of the local socket: hands requests to the engine and its outputs back to them.

One connection is one socket, so that nothing of a dead engine is left in it. While there is none, requests are refused;
when it breaks, every request in flight ends with Unavailable. An engine that is there but says nothing, not even its
heartbeat, is stalled: new requests are refused, those in flight wait for it. Each request ends in exactly one way:
with the engine's finish, with an error, or with `Stream.close`, which cancels it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

from npuserve.service import logs, messages, metrics
from npuserve.service.errors import QueueFull, ServeError, Unavailable, from_wire
from npuserve.service.messages import Abort, Cancel, FlushPrefixCache, Load, ModelInfo, Output, Outputs, Request

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "stalled", "down"]
REFUSALS = {
    "starting": "the model is loading", "down": "the engine is restarting", "stalled": "the engine does not answer",
}

STALL_SECONDS = 60
"""Of silence. An engine beats twice a second, but not within a step, and a large model's long chunk takes its time on
a CPU."""

RECONNECT_SECONDS = 0.05
PAGE_SECONDS = 0.1
"""What is counted with every token reaches the metrics page no more often while tokens come."""
INTER_TOKEN = metrics.tally(metrics.inter_token_latency_seconds)


class Stream:
    """What the engine makes for one request: iterate for lists of outputs, each of all that came since the last.

    Raises the error that ended it, if one did. `close` it in any case. Times are time.monotonic() seconds, None before.
    """

    def __init__(self, client: EngineClient, key: int, request: Request):
        self.key = key
        self.request = request
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.buffered = 0
        self._client = client
        self._outputs: list[Output] = []
        self._error: ServeError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[list[Output]]:
        return self

    async def __anext__(self) -> list[Output]:
        while not self._outputs:
            if self._error:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        self.buffered = 0
        return outputs

    async def stop(self, keep: int) -> messages.Finish:
        """End the answer at its `keep`-th token, where a stop string was found. The engine's finish; what else comes
        is dropped. Call at most once, and not after a finish was taken."""
        if not self._ended:
            self._client.send(Cancel(self.key, keep))
        async for outputs in self:
            if outputs[-1].finish:
                return outputs[-1].finish
        raise Unavailable("the request was closed")

    def close(self) -> None:
        """Nobody reads any more: cancels the request unless it has ended."""
        if not self._ended:
            self._client.send(Cancel(self.key))
            self.end(Unavailable("the request was closed"))
        self._client.forget(self)

    def end(self, error: ServeError | None) -> None:
        """The engine has nothing more for it. What came before is still there to be read."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def push(self, output: Output, now: float) -> None:
        """An output from the socket; it came at `now`."""
        if self._ended:
            return
        if output.token_ids:
            if self.last_token is None:
                self.first_token = now
                metrics.time_to_first_token_seconds.observe(now - self.request.arrival)
            else:
                INTER_TOKEN.observe(now - self.last_token)
            self.last_token = now
            self.buffered += len(output.token_ids)
        if output.error:
            self.end(from_wire(output.error))
            return
        self._outputs.append(output)
        if output.finish:
            self.end(None)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """The connection to the engine at `address`, kept up from `start` to `close`, on one event loop.

    on_state: called with each new state. model_info: of the last engine, None before the first; epoch: its, 0 before;
    load: its last word.
    """

    def __init__(self, address: str, on_state: Callable[[State], None] = lambda state: None):
        self.state: State = "starting"
        self.model_info: ModelInfo | None = None
        self.epoch = 0
        self.load = Load()
        self._address = address
        self._on_state = on_state
        self._transport: asyncio.WriteTransport | None = None
        self._streams: dict[int, Stream] = {}
        self._calls: dict[int, asyncio.Future[int]] = {}
        self._last_key = 0
        self._silence = 0
        self._paged = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine client")

    async def close(self) -> None:
        """What is in flight ends with Unavailable."""
        self.state = "down"  # and nobody is told: it is we who leave
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def require(self) -> ModelInfo:
        """The model's facts, if the engine takes requests; Unavailable otherwise."""
        if self.state != "ready" or self.model_info is None:
            raise Unavailable(REFUSALS[self.state])
        return self.model_info

    def submit(self, request: Request) -> Stream:
        """Hand a request over. Unavailable if the engine is not ready, QueueFull if this front end alone holds more
        than the engine runs and queues, twice: what the engine refuses comes as the stream's error."""
        info = self.require()
        most = 2 * (info.max_num_seqs + info.max_queue)
        if len(self._streams) >= most:
            metrics.queue_rejections_total.labels("front_end").inc()
            raise QueueFull(f"{most} requests are under way already")
        stream = Stream(self, self._key(), request)
        self._streams[stream.key] = stream
        self.send(messages.Submit(stream.key, request))
        return stream

    async def abort(self, request_id: str) -> bool:
        """End the request of that id, whoever asked for it. False if there is none."""
        return bool(await self._call(Abort(self._key(), request_id)))

    async def flush_prefix_cache(self) -> int:
        """The number of blocks forgotten."""
        return await self._call(FlushPrefixCache(self._key()))

    def send(self, message: messages.ToEngine) -> None:
        """Never waits: the engine takes all that comes, and refuses by an output. Without an engine it is dropped."""
        if self._transport:
            self._transport.write(messages.encode(message))

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream.key, None)

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

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._connection()
                except OSError:
                    await asyncio.sleep(RECONNECT_SECONDS)
                except msgspec.MsgspecError:
                    log.exception("the engine sent what is no message; connecting again")
                    await asyncio.sleep(1)
        finally:
            self._lose()

    async def _connection(self) -> None:
        """Connect, and serve the connection until it breaks. OSError if there is none to be had."""
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_unix_connection(lambda: _Connection(self._hear), self._address)
        listening = asyncio.ensure_future(self._listen())
        try:
            transport.write(messages.encode(messages.Hello()))
            await connection.ended
        finally:
            listening.cancel()
            transport.abort()
            self._lose()

    async def _listen(self) -> None:
        """Count the seconds of silence: those in which this process ran, its own pauses not being the engine's."""
        while True:
            await asyncio.sleep(1)
            self._silence += 1
            if self._silence >= STALL_SECONDS and self.state == "ready":
                self._set_state("stalled")

    def _hear(self, data: bytes, transport: asyncio.WriteTransport) -> None:
        message = messages.decode_to_frontend(data)
        self._silence = 0
        if self.state == "stalled":
            self._set_state("ready")
        match message:
            case Outputs(epoch=epoch) if epoch == self.epoch and self._transport:
                self._take(message)
            case messages.Ready(epoch=epoch, model=model):
                self._lose()
                self._transport, self.epoch, self.model_info = transport, epoch, model
                self._set_state("ready")
            case messages.Reply(epoch=epoch, call=call, value=value) if epoch == self.epoch and self._transport:
                reply = self._calls.get(call)
                if reply and not reply.done():
                    reply.set_result(value)

    def _take(self, message: Outputs) -> None:
        now = time.monotonic()
        self.load = message.load
        for output in message.outputs:
            stream = self._streams.get(output.key)
            if stream:
                stream.push(output, now)
        if now - self._paged >= PAGE_SECONDS or not message.outputs:
            self._page(now)

    def _page(self, now: float) -> None:
        self._paged = now
        metrics.stream_buffered_tokens.set(sum(stream.buffered for stream in self._streams.values()))
        metrics.flush()

    def _lose(self) -> None:
        """The connection is gone: so is all that was in flight."""
        self._transport = None
        for stream in list(self._streams.values()):
            stream.end(Unavailable("the engine died, and the request with it; it is being restarted"))
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(Unavailable("the engine died before it answered"))
        self.load = Load()
        metrics.stream_buffered_tokens.set(0)
        metrics.flush()
        if self.state in ("ready", "stalled"):
            self._set_state("down")

    def _set_state(self, state: State) -> None:
        self.state = state
        level = logging.INFO if state == "ready" else logging.WARNING
        logs.event(log, f"engine is {state}", level=level, epoch=self.epoch)
        self._on_state(state)


class _Connection(asyncio.Protocol):
    """Hands each message that comes to `hear`, with the way back. ended: its end, an error where `hear` raised one."""

    def __init__(self, hear: Callable[[bytes, asyncio.WriteTransport], None]):
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hear = hear
        self._received = messages.Splitter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._received.feed(data):
                self._hear(message, self._transport)
        except msgspec.MsgspecError as error:
            self._transport.abort()
            if not self.ended.done():
                self.ended.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
