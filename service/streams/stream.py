"""Streams of a front end, which survive a restart of the engine, and the limit of their number.

Unread outputs are delivered as one list. With more than max_buffered_tokens unread, the request pauses in the engine
until the reader catches up. A reader that takes nothing for slow_reader_seconds is cancelled. After the first token the
reader is woken for every stream_interval tokens, after MAX_INTERVAL_SECONDS, and at the end, because each message has a
fixed cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from enum import Enum
from typing import Protocol

from npuserve.service import metrics
from npuserve.service.client_queue import ClientShares
from npuserve.service.errors import QueueFull, ServeError, SlowReader, Unavailable, from_wire
from npuserve.service.ipc.messages import (
    Cancel,
    Finish,
    ModelInfo,
    Output,
    Pause,
    Record,
    Started,
    Timing,
    ToEngine,
    Unpause,
)

MAX_INTERVAL_SECONDS = 0.25
"""Time after the last read at which the next token wakes the reader, whatever stream_interval is."""
INTER_TOKEN = metrics.tally(metrics.inter_token_latency_seconds)


class StreamClient(Protocol):
    """Interface to the engine client. send: returns False without an engine."""

    max_buffered_tokens: int
    stream_interval: int

    def send(self, message: ToEngine) -> bool: ...

    def remove(self, stream: Stream) -> None: ...


class State(Enum):
    """Where a stream is in its life. Methods of Stream make the transitions.

        RUNNING ──push──► PAUSED ──read──► RUNNING
        RUNNING, PAUSED ──on_disconnect──► DISCONNECTED ──push──► RUNNING
        any of them ──push──► FINISHED, or FAILED with an error of the engine
        any of them ──fail──► FAILED
        any of them ──close, check_reader──► CLOSED

    A stream begins in RUNNING, or in FINISHED if it is resumed after its finish. Once `stop` was called, a lost engine
    leads to FINISHED.
    """

    RUNNING = "running"
    """Waits for outputs of the engine."""
    PAUSED = "paused"
    """The engine computes no tokens, because the reader has more than max_buffered_tokens unread."""
    DISCONNECTED = "disconnected"
    """The engine is lost, and the next one has sent no output yet."""
    FINISHED = "finished"
    """Has a finish, which the reader may not have taken yet."""
    FAILED = "failed"
    """Ended by an error. No later call can resume it."""
    CLOSED = "closed"
    """The reader left or was cancelled before the finish. A later call may resume it."""


_ENDED = State.FINISHED, State.FAILED, State.CLOSED


class Stream:
    """Async iterator over lists of outputs, each holding everything since the last. Raises the error that ended the
    stream. `close` it in any case.

    request: the record's.
    record: all outputs so far. The first read of a resumed stream returns the record's outputs.
    buffered: number of unread tokens.
    first_token, last_token: arrival times, time.monotonic() seconds; None before. first_token stays None in a resumed
        stream, since another call has sent its first token.
    slow: error of a reader that was cancelled for being slow, also after the finish has arrived; None otherwise.
    is_accepted: whether the engine has queued the request, so that the client knows its resume token.
    """

    def __init__(self, client: StreamClient, key: int, record: Record, resumed: bool = False):
        self.key = key
        self.request = record.request
        self.record = record
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.buffered = 0
        self.slow: SlowReader | None = None
        self.is_accepted = resumed
        self._client = client
        self._is_resumed = resumed
        self._state = State.FINISHED if record.finish else State.RUNNING
        self._error: ServeError | None = None  # in the states FAILED and CLOSED
        self._keep: int | None = None  # tokens of the answer once a stop string was found
        has_outputs = record.token_ids or record.prompt_logprobs or record.finish
        self._outputs = [record.as_output(key)] if has_outputs else []  # unread
        self._enough = min(client.stream_interval, client.max_buffered_tokens)  # unread tokens that wake the reader
        self._waiter: asyncio.Future[None] | None = None
        self._reader: asyncio.Task[object] | None = None
        self._processing: float | None = None  # seconds for which the reader processes outputs, see `check_reader`
        self._last_read: float | None = None  # when the reader last took tokens
        # Under the current engine: launch of its first step, arrival of its first token.
        self._first_step: float | None = None
        self._first_arrival: float | None = None

    @property
    def is_live(self) -> bool:
        """Return whether further outputs may arrive."""
        return self._state not in _ENDED

    @property
    def is_waiting(self) -> bool:
        """Return whether the request waits for its first step under the current engine."""
        return self.is_live and self._first_step is None

    @property
    def is_resumable(self) -> bool:
        """Return whether a later call can resume the stream."""
        return bool(self.request.resume_token) and self.is_accepted and self._state is not State.FAILED

    def __aiter__(self) -> AsyncIterator[list[Output]]:
        self._reader = asyncio.current_task()
        return self

    async def __anext__(self) -> list[Output]:
        self._processing = None
        while not self._due(time.monotonic()):
            if self._error:
                raise self._error
            if self._state is State.FINISHED:
                raise StopAsyncIteration
            await self._change()
        outputs = self._outputs
        self._outputs = []
        self._processing = 0.0
        if self.buffered:
            self._last_read = time.monotonic()
            self.buffered = 0
        if self._state is State.PAUSED:
            self._state = State.RUNNING
            self._client.send(Unpause(self.key))
        return outputs

    async def wait_until_accepted(self) -> None:
        """Wait until the engine has queued the request. Raises the engine's refusal."""
        while not self.is_accepted:
            if self._error:
                raise self._error
            await self._change()

    def check_reader(self, every: float, seconds: float) -> None:
        """Cancel the reader's task if it has processed its last outputs for `seconds` or longer.

        Call it `every` seconds. The time is counted, since a clock would advance while this process or the whole
        machine is suspended.
        """
        if self._processing is None or self.slow or self._reader is None:
            return
        if self._processing < seconds:
            self._processing += every
            return
        self.slow = SlowReader(f"the client took nothing for {seconds:g} s (slow_reader_seconds)")
        if self.is_live:
            self._cancel(self.slow)
        self._reader.cancel()

    def suspend_check(self) -> None:
        """Exclude the time until `restart_check` from the time for which the reader processes outputs."""
        self._processing = None

    def restart_check(self) -> None:
        """Measure the reader's time anew from now on."""
        self._processing = 0.0

    async def stop(self, keep: int) -> Finish:
        """End the answer after `keep` tokens, at a stop string. Return the engine's finish; later outputs are dropped.

        Call it at most once, and not after the finish was read.
        """
        if self.is_live:
            self._keep = keep
            if not self._client.send(Cancel(self.key, keep)):
                self._finish()
        async for outputs in self:
            if outputs[-1].finish:
                return outputs[-1].finish
        raise Unavailable("the request was closed")

    def close(self) -> None:
        """Cancel the request unless it has ended. Call it when nobody reads the stream any more."""
        if self.is_live:
            self._cancel(Unavailable("the request was closed"))
        self._client.remove(self)

    def fail(self, error: ServeError) -> None:
        """End the stream with an error. Outputs that arrived before can still be read."""
        if self.is_live:
            self._end(State.FAILED, error)

    def on_accepted(self) -> None:
        """Record that the engine has queued the request."""
        self.is_accepted = True
        self._wake()

    def on_started(self, message: Started, now: float) -> None:
        """Record that the request is in the step being launched."""
        self._first_step = now
        if self.record.cached_tokens is None:
            self.record.cached_tokens = message.cached_tokens

    def push(self, output: Output, now: float) -> None:
        """Add an output that arrived at `now`."""
        if self._state is not State.RUNNING:
            if self._state in _ENDED:
                return
            if self._state is State.DISCONNECTED:
                self._state = State.RUNNING
        if output.token_ids:
            if self.last_token is not None:
                INTER_TOKEN.observe(now - self.last_token)
            elif not self._is_resumed:
                self.first_token = now
                metrics.time_to_first_token_seconds.observe(now - self.request.arrival)
            self.last_token = now
            if self._first_arrival is None:
                self._first_arrival = now
            self.buffered += len(output.token_ids)
        if output.error:
            self.fail(from_wire(output.error))
            return
        self.record.add(output)
        self._outputs.append(output)
        if output.finish:
            self._end(State.FINISHED)
            return
        if self._due(now):
            self._wake()
        if self.buffered > self._client.max_buffered_tokens and self._state is State.RUNNING:
            self._state = State.PAUSED
            self._client.send(Pause(self.key))

    def on_disconnect(self) -> None:
        """Handle the loss of the engine. If a stop string was found, the answer ends here."""
        if not self.is_live:
            return
        if self._keep is not None:
            self._finish()
            return
        self._state = State.DISCONNECTED
        if self._due(time.monotonic()):
            self._wake()

    def on_reconnect(self) -> None:
        """Add the phases under the lost engine to the record, before the next engine gets it."""
        self.record.timing = self._timing()
        self._first_step = self._first_arrival = None

    def _cancel(self, error: ServeError) -> None:
        """Cancel the request, which has not ended."""
        self._client.send(Cancel(self.key))
        self._end(State.CLOSED, error)

    def _end(self, state: State, error: ServeError | None = None) -> None:
        self._state = state
        self._error = error
        self._wake()

    def _finish(self) -> None:
        """Finish the answer at the stop string, in place of the engine."""
        assert self._keep is not None
        request = self.request
        self.push(Output(self.key, finish=Finish(
            "stop_string", len(request.prompt_ids), self.record.cached_tokens or 0, self._keep, self._timing())),
            time.monotonic())

    def _timing(self) -> Timing:
        """Return the phases up to the last token, as measured in the front end."""
        earlier = self.record.timing or Timing(0.0, [], 0.0, 0.0, 0.0, self.request.arrival)
        if self._first_step is None or self._first_arrival is None or self.last_token is None:
            return earlier
        return Timing(
            earlier.queue + self._first_step - earlier.last_step_end,
            [*earlier.prefill_chunks, self._first_arrival - self._first_step],
            earlier.decode + self.last_token - self._first_arrival, earlier.device, earlier.host, self.last_token)

    def _due(self, now: float) -> bool:
        """Return whether to deliver the available outputs to the reader."""
        if not self._outputs:
            return False
        return (self.buffered >= self._enough or self._state is not State.RUNNING or self._last_read is None
                or now - self._last_read >= MAX_INTERVAL_SECONDS)

    def _change(self) -> asyncio.Future[None]:
        """Return a future that is done at the next `_wake`."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


class StreamLimit:
    """Limit of the streams of a front end: twice the requests that the engine can run and queue.

    A client may have half of them. A stream counts until it is closed, so those that have ended and are not read count
    too. At this limit a client without unread ones has filled the engine's queue.

    streams: streams of the front end, by key.
    """

    def __init__(self, streams: Mapping[int, Stream]) -> None:
        self._streams = streams
        self._clients: dict[int, str] = {}  # by the key of a stream
        self._shares = ClientShares()

    def add(self, key: int, client: str, info: ModelInfo) -> None:
        """Count a stream. Raises QueueFull."""
        share = info.max_num_seqs + info.max_queue
        self._shares.max_items = 2 * share
        limits = f"max_num_seqs ({info.max_num_seqs}) and max_queue ({info.max_queue})"
        bound = self._shares.exceeded(client)
        if bound == "queue_full":
            metrics.queue_rejections_total.labels("front_end").inc()
            raise QueueFull(f"front end full: it holds {2 * share} requests, twice the sum of {limits}")
        if bound == "client_limit":
            held = f"the front end holds {share} requests of this client, the sum of {limits}"
            if self._has_unread(client):
                error = QueueFull(
                    f"client limit: {held}, with the ones that have ended and are not read", why="client_limit")
            else:
                error = QueueFull(f"queue full: {held}")
            metrics.queue_rejections_total.labels(error.why).inc()
            raise error
        self._clients[key] = client
        self._shares.add(client)

    def remove(self, key: int) -> None:
        """Remove a stream unless it was removed before."""
        client = self._clients.pop(key, None)
        if client is not None:
            self._shares.remove(client)

    def _has_unread(self, client: str) -> bool:
        """Return whether a stream of the client has ended and is not closed."""
        return any(
            (stream := self._streams.get(key)) and not stream.is_live
            for key, owner in self._clients.items() if owner == client)
