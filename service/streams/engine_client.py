"""Client of the engine in a front end: sends requests over the local socket and passes outputs to their streams.

Each connection has its own socket, so that no data of a dead engine remains. Without a connection, new requests are
refused and accepted ones wait. The front end holds their outputs so far and sends them to the next engine in reply to
its Ready (`Restore`). The engine continues from there, so that readers see only a pause. Ended streams that may still
be resumed are sent too. Requests that the dead engine had not accepted, and calls that wait for a stream to resume, are
sent again.

An engine that sends nothing, not even heartbeats, is stalled: new requests are refused and accepted ones wait. Each
request ends exactly once: with the engine's finish, with an error, or with `Stream.close`, which cancels it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

import msgspec

from npuserve.service import logs, metrics
from npuserve.service.errors import ServeError, Unavailable, from_wire
from npuserve.service.ipc import messages
from npuserve.service.ipc.engine_connection import EngineConnection
from npuserve.service.ipc.explanations import ExplainReply, ExplainRequest, Explanation
from npuserve.service.ipc.kv_events import KvEvents, KvEventsLost, KvSubscribed
from npuserve.service.ipc.messages import Abort, FlushPrefixCache, Load, ModelInfo, Outputs, Record, Request
from npuserve.service.ipc.profile_messages import ProfileReply
from npuserve.service.streams.kv_subscription import KvSubscriptions
from npuserve.service.streams.profile_calls import ProfileCalls
from npuserve.service.streams.records import Records, restore_messages
from npuserve.service.streams.stream import Stream, StreamLimit

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "stalled", "down"]
REFUSALS = {
    "starting": "the model is loading", "down": "the engine is restarting", "stalled": "the engine does not answer",
}

STALL_SECONDS = 60.0
"""Default time without a message after which the engine counts as stalled.

An engine sends two heartbeats per second, but none during a step, and a long chunk of a large model can take seconds on
a CPU.
"""

MAX_UNSENT_BYTES = 128 << 20
"""Maximum bytes that the engine may leave unread, besides the kernel's buffer. Beyond it, new requests are refused:
clients that submit and cancel again and again would add to it until the engine counts as stalled. It exceeds the 80 MB
of 16 samples of a prompt of a million tokens, which are written together."""
RECONNECT_SECONDS = 0.05
RETRY_SECONDS = 1.0
"""Pause before a background task that failed by a bug restarts."""
PUBLISH_SECONDS = 0.1
"""Minimum time between updates of per-token metrics while tokens arrive."""
UNANSWERED_SECONDS = 1.0
"""Time without the engine's answer after which the gauge counts a request as waiting. An engine answers within
milliseconds, but reads no messages late in an unexpectedly long step. A shorter time would count requests twice."""


class PendingResume(NamedTuple):
    """Resume that the engine has not answered. The next engine gets `message` again if this one dies."""

    message: messages.Resume
    stream: asyncio.Future[Stream]


class EngineClient:
    """Connection to the engine at `address`, kept up from `start` to `close`, on one event loop.

    on_state: called with each new state.
    model_info, epoch: last values from the engine; None and 0 before the first Ready.
    load_time: when the load arrived, time.monotonic() seconds.
    kv_events, profiles: subscriptions to KV events, and calls about profiles.
    stall_seconds: time without a message after which the engine counts as stalled.
    resume_seconds: time for which ended streams are kept for the next engine.
    max_buffered_tokens, slow_reader_seconds, stream_interval: see stream.py.
    has_kv_events, profile_dir: what the engine offers, see KvSubscriptions and ProfileCalls.
    """

    def __init__(
        self,
        address: str,
        on_state: Callable[[State], None] = lambda state: None,
        stall_seconds: float = STALL_SECONDS,
        resume_seconds: float = 0.0,
        max_buffered_tokens: int = 512,
        slow_reader_seconds: float = 300.0,
        stream_interval: int = 1,
        has_kv_events: bool = False,
        profile_dir: str = "",
    ):
        self.max_buffered_tokens = max_buffered_tokens
        self.stream_interval = stream_interval
        self._slow_reader_seconds = slow_reader_seconds
        self.state: State = "starting"
        self.model_info: ModelInfo | None = None
        self.epoch = 0
        self.load_time = time.monotonic()
        self.kv_events = KvSubscriptions(has_kv_events, self.send)
        self.profiles = ProfileCalls(profile_dir, self.send)
        self._address = address
        self._stall_seconds = stall_seconds
        self._on_state = on_state
        self._connection: EngineConnection | None = None  # to a ready engine
        self._restoring: asyncio.Task[None] | None = None
        self._streams: dict[int, Stream] = {}
        self._limit = StreamLimit(self._streams)
        self._resuming: dict[int, PendingResume] = {}
        self._records = Records(resume_seconds)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_load = Load()
        self._unanswered: dict[int, float] = {}  # key of a request -> when it was sent, time.monotonic() seconds
        self._keys = itertools.count(1)
        self._silent_seconds = 0
        self._published = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the background tasks on the running event loop."""
        loop = asyncio.get_running_loop()
        work = {"engine client": self._serve_connection, "slow readers": self._check_readers}
        self._tasks = [loop.create_task(self._repeat(name, each), name=name) for name, each in work.items()]

    async def close(self) -> None:
        """Disconnect, and end every stream with Unavailable."""
        self.state = "down"  # without calling on_state: this side closes
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.fail_all(Unavailable("the server is leaving"))

    def require_model_info(self) -> ModelInfo:
        """Return the model's properties, also while the engine restarts. Raises Unavailable before the first start."""
        return self.model_info or self.require()

    def require(self) -> ModelInfo:
        """Return the model's properties. Raises Unavailable if the engine accepts no requests."""
        if self.state != "ready" or self.model_info is None:
            raise Unavailable(REFUSALS[self.state])
        if self._connection and self._connection.unsent_bytes > MAX_UNSENT_BYTES:
            raise Unavailable(f"{REFUSALS['stalled']}: more than {MAX_UNSENT_BYTES >> 20} MiB of requests wait for it")
        return self.model_info

    @property
    def load(self) -> Load:
        """Load of the engine as it sent it last; idle before. The requests of this front end that the engine has not
        answered are added to the waiting ones."""
        load = self._last_load
        if not self._unanswered:
            return load
        return msgspec.structs.replace(load, waiting=load.waiting + len(self._unanswered))

    def submit(self, request: Request) -> Stream:
        """Send a request to the engine and return its stream.

        Raises Unavailable if the engine is not ready, and QueueFull at the limits of StreamLimit. A refusal by the
        engine is raised by the stream.
        """
        stream = Stream(self, self._limited_key(request.client), Record(request))
        self._streams[stream.key] = stream
        self._unanswered[stream.key] = time.monotonic()
        self.send(messages.Submit(stream.key, request))
        return stream

    async def resume(
        self, token: str, token_offset: int, owner: str, deadline: float | None, client: str = ""
    ) -> Stream:
        """Return the stream of a resume token, from `token_offset` on.

        owner: caller of the request, see Caller.
        deadline: deadline of the new reader, time.monotonic() seconds; None for none.
        client: client of the new reader, see StreamLimit.

        Raises the errors of `submit`, and StreamNotFound or InvalidField from the engine.
        """
        key = self._limited_key(client)
        stream: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        message = messages.Resume(key, token, token_offset, owner, deadline)
        self._resuming[key] = PendingResume(message, stream)
        self.send(message)
        try:
            return await stream
        except asyncio.CancelledError:
            if stream.done() and not stream.cancelled() and not stream.exception():
                stream.result().close()
            raise
        finally:
            self._resuming.pop(key, None)
            if key not in self._streams:
                self._limit.remove(key)

    def fail_all(self, error: ServeError) -> None:
        """End every stream, and every call that waits for a stream to resume, with the error."""
        for stream in list(self._streams.values()):
            stream.fail(copy.copy(error))  # the traceback of each refers to the frames of one call
        for pending in self._resuming.values():
            if not pending.stream.done():
                pending.stream.set_exception(copy.copy(error))

    async def abort(self, request_id: str, client: str = "", service: str | None = None) -> int:
        """Abort the call of this id and return the number of calls that have it. With several, none is aborted.

        client, service: client and service of the call, see `Abort`.
        """
        return int(await self._call(Abort(next(self._keys), request_id, client, service)))

    async def flush_prefix_cache(self) -> int:
        """Flush the prefix cache and return the number of freed blocks."""
        return int(await self._call(FlushPrefixCache(next(self._keys))))

    async def explain(self, request_id: str, client: str = "") -> list[Explanation]:
        """Explain the requests of this id, live or ended; see `ExplainRequest`."""
        explanations: list[Explanation] = await self._call(ExplainRequest(next(self._keys), request_id, client))
        return explanations

    def send(self, message: messages.ToEngine) -> bool:
        """Send a message without waiting. Return False if no engine is connected."""
        if self._connection is None:
            return False
        self._connection.send(message)
        return True

    @property
    def waiting_prompt_tokens(self) -> int:
        """Number of prompt tokens of this front end's requests whose computation has not begun."""
        return sum(len(stream.request.prompt_ids) for stream in self._streams.values() if stream.is_waiting)

    def remove(self, stream: Stream) -> None:
        """Remove a stream that nobody reads any more."""
        self._unanswered.pop(stream.key, None)
        self._limit.remove(stream.key)
        if self._streams.pop(stream.key, None) and stream.is_resumable:
            self._records.end(stream.record, time.monotonic())

    def _limited_key(self, client: str) -> int:
        """Return the key of a further stream of a client. Raises Unavailable, and QueueFull at a limit."""
        info = self.require()
        key = next(self._keys)
        self._limit.add(key, client, info)
        return key

    async def _call(self, message: Abort | FlushPrefixCache | ExplainRequest) -> Any:
        """Return the reply of the engine: a number, or explanations."""
        self.require()
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[message.call] = reply
        try:
            self.send(message)
            return await reply
        finally:
            del self._calls[message.call]

    async def _repeat(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` in a loop. An exception is a bug: log it and restart the work after RETRY_SECONDS."""
        while True:
            try:
                await work()
            except Exception as error:
                logs.bug(log, f"{name}: failed, starting again", error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _serve_connection(self) -> None:
        """Connect, and serve the connection until it breaks. Raises the exception of a message handler or of the stall
        check.
        """
        loop = asyncio.get_running_loop()
        try:
            transport, connection = await loop.create_unix_connection(
                lambda: EngineConnection(self._on_message), self._address)
        except OSError:  # no engine is listening
            await asyncio.sleep(RECONNECT_SECONDS)
            return
        stall_check = asyncio.ensure_future(self._detect_stall())
        try:
            connection.write(messages.Hello())
            done, _ = await asyncio.wait((connection.ended, stall_check), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            stall_check.cancel()
            transport.abort()
            self._on_disconnect()

    async def _check_readers(self) -> None:
        """Sleep, then cancel streams whose readers are too slow."""
        every = min(1.0, self._slow_reader_seconds / 4)
        await asyncio.sleep(every)
        for stream in list(self._streams.values()):
            stream.check_reader(every, self._slow_reader_seconds)

    async def _detect_stall(self) -> None:
        """Count the seconds without a message while this process runs; its own pauses do not count."""
        while True:
            await asyncio.sleep(1)
            self._silent_seconds += 1
            self._publish(time.monotonic())
            if self._silent_seconds >= self._stall_seconds and self.state == "ready":
                self._set_state("stalled")

    def _on_message(self, data: bytes, connection: EngineConnection) -> None:
        message = messages.decode_to_frontend(data)
        self._silent_seconds = 0
        if self.state == "stalled":
            self._set_state("ready")
        if not isinstance(message, messages.Ready) and message.epoch != self.epoch:
            return  # of an earlier engine
        match message:
            case Outputs():
                self._on_outputs(message)
            case messages.Ready(epoch=epoch, model=model):
                self._connection = connection
                self.epoch = epoch
                self.model_info = model
                connection.defer()
                waiting = sorted(self._streams.values(), key=lambda stream: stream.request.arrival)
                resuming = list(self._resuming)
                self._restoring = asyncio.ensure_future(self._restore(connection, waiting, resuming))
                self._restoring.add_done_callback(connection.failed)
                self._set_state("ready")
            case messages.Resumed(key=key, record=record):
                self._on_resumed(key, record)
            case messages.Reply(call=call, value=value) | ExplainReply(call=call, explanations=value):
                reply = self._calls.get(call)
                if reply and not reply.done():
                    reply.set_result(value)
            case ProfileReply():
                self.profiles.receive(message)
            case KvSubscribed() | KvEvents() | KvEventsLost():
                self.kv_events.receive(message)

    def _on_outputs(self, message: Outputs) -> None:
        now = time.monotonic()
        self._last_load = message.load
        self.load_time = now
        for key in message.accepted:
            self._unanswered.pop(key, None)
            if stream := self._streams.get(key):
                stream.on_accepted()
        for started in message.started:
            stream = self._streams.get(started.key)
            if stream:
                stream.on_started(started, now)
        for output in message.outputs:
            if output.error:
                self._unanswered.pop(output.key, None)
            stream = self._streams.get(output.key)
            if stream:
                stream.push(output, now)
            elif output.error and (pending := self._resuming.get(output.key)) and not pending.stream.done():
                pending.stream.set_exception(from_wire(output.error))
        if now - self._published >= PUBLISH_SECONDS or not message.outputs:
            self._publish(now)

    def _publish(self, now: float) -> None:
        """Update the metrics of this process."""
        self._published = now
        metrics.stream_buffered_tokens.set(sum(stream.buffered for stream in self._streams.values()))
        metrics.requests_waiting.set(sum(now - sent >= UNANSWERED_SECONDS for sent in self._unanswered.values()))
        metrics.flush()

    def _on_resumed(self, key: int, record: Record) -> None:
        pending = self._resuming.get(key)
        if pending is None or pending.stream.done():  # the caller was cancelled
            self.send(messages.Cancel(key))
            self._records.end(record, time.monotonic())  # the reader before it has dropped it
            return
        stream = self._streams[key] = Stream(self, key, record, resumed=True)
        self._records.drop(record.request.resume_token)
        metrics.streams_continued_total.labels("client").inc()
        pending.stream.set_result(stream)

    async def _restore(self, connection: EngineConnection, waiting: list[Stream], resuming: list[int]) -> None:
        """Send the state from before this connection to the engine, then new requests and the deferred messages.

        waiting, resuming: streams, and keys of pending resumes, from before this connection.
        """
        for stream in waiting:
            stream.on_reconnect()
        self._unanswered.update((stream.key, time.monotonic()) for stream in waiting if stream.is_live)
        accepted = [stream for stream in waiting if stream.is_accepted]
        if count := sum(stream.is_live for stream in accepted):
            metrics.streams_continued_total.labels("engine").inc(count)
            logs.event(log, "streams continue", level=logging.WARNING, streams=count, epoch=self.epoch)
        live = ((stream.key, stream.record) for stream in accepted if stream.is_live)
        for message in restore_messages(live, lambda: self._records.ended(time.monotonic())):
            connection.write(message)
            await connection.drained()
        # Without acceptance, no engine has checked their limits.
        for stream in waiting:
            if stream.is_live and not stream.is_accepted:
                connection.write(messages.Submit(stream.key, stream.request))
        for key in resuming:
            if key in self._resuming:
                connection.write(self._resuming[key].message)
        connection.write_deferred()

    def _on_disconnect(self) -> None:
        """Handle the loss of the connection: streams wait for the next engine, calls fail."""
        self._connection = None
        if self._restoring:
            self._restoring.cancel()
        for stream in list(self._streams.values()):
            stream.on_disconnect()
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(Unavailable("the engine died before it replied"))
        self.kv_events.on_disconnect()
        self.profiles.on_disconnect()
        self._last_load = Load()
        self._unanswered.clear()
        metrics.requests_waiting.set(0)
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
