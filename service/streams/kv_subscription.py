"""Subscriptions of a front end to the engine's KV events.

The engine sends a subscription at most WINDOW_BYTES ahead of its reader, so the buffer here is bounded. The engine may
drop the next batch of a slow reader: the subscription then ends with KvEventsLost. The end of a subscription drops its
batches, also while its reader waits for a client that reads nothing (`write`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import deque
from collections.abc import Awaitable, Callable

from npuserve.service.errors import EventsExpired, EventsLost, QueueFull, ServeError, TurnedOff, Unavailable
from npuserve.service.ipc import kv_events
from npuserve.service.ipc.kv_events import WINDOW_BYTES, KvEvents, KvEventsLost, KvSubscribed

MAX_SUBSCRIPTIONS = 16
"""Maximum subscriptions of a front end."""

Send = Callable[[kv_events.ToEngineKv], bool]


class KvSubscription:
    """Batches of one subscription, in order. Read them with `next` and send them with `write`, from one task."""

    def __init__(self, call: int, start: int, send: Send):
        self.call = call
        self._send = send
        self._start = start
        loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._batches: deque[KvEvents] = deque()
        self._error: ServeError | None = None
        self._changed = asyncio.Event()
        self._read_bytes = 0  # not reported yet

    async def wait_until_accepted(self) -> None:
        """Wait for the engine's reply. Raises EventsExpired if it does not keep the first batch."""
        await self._accepted

    async def next(self, seconds: float) -> KvEvents | None:
        """Return the next batch; None if none arrives for `seconds`. The batch before counts as processed.

        Raises EventsLost if batches are lost, and Unavailable if the server leaves.
        """
        self._report_read()
        if not self._batches and self._error is None:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
        if self._batches:
            batch = self._batches.popleft()
            self._read_bytes += len(batch.payload)
            return batch
        if self._error:
            raise self._error
        return None

    async def write(self, message: Awaitable[None]) -> None:
        """Wait until a message is sent. Raise the error of a subscription that ends meanwhile.

        The client may never read, so that the send takes for ever. gRPC keeps the message, and sends the status after
        it.
        """
        sending = asyncio.ensure_future(message)
        sending.add_done_callback(_retrieve_exception)
        try:
            await asyncio.wait((sending, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
            elif self._error:
                self._error.is_behind_messages = True
                raise self._error
        finally:
            sending.cancel()

    def receive(self, message: kv_events.ToSubscriber) -> None:
        """Handle a message of the engine."""
        match message:
            case KvSubscribed(accepted=accepted, oldest=oldest, latest=latest):
                if not accepted:
                    self.fail(EventsExpired(
                        f"start_sequence_number: {self._start} is not kept; {_kept(oldest, latest)}. Subscribe from 0 "
                        "for a snapshot"))
                elif not self._accepted.done():
                    self._accepted.set_result(None)
            case KvEvents() if not self._error:
                self._batches.append(message)
                self._changed.set()
            case KvEventsLost(next=expected, oldest=oldest):
                if self._batches:  # they are dropped
                    expected = self._batches[0].sequence
                self.fail(EventsLost(
                    f"the batches {expected} to {oldest - 1} are lost: they were not read in time. Subscribe from 0 "
                    "for a snapshot"))

    def fail(self, error: ServeError) -> None:
        """End the subscription: its reader gets this error. Drop the batches that it has not taken."""
        self._error = self._error or error
        self._batches.clear()
        if not self._ended.done():
            self._ended.set_result(None)
        if not self._accepted.done():
            self._accepted.set_exception(error)
        self._changed.set()

    def _report_read(self) -> None:
        """Report what was processed, each time that it is a quarter of the window."""
        if self._read_bytes >= WINDOW_BYTES // 4:
            self._send(kv_events.ReadKvEvents(self.call, self._read_bytes))
            self._read_bytes = 0


class KvSubscriptions:
    """All subscriptions of a front end.

    is_on: False if the server has no KV events.
    send: sends a message to the engine; returns False if none is connected.
    """

    def __init__(self, is_on: bool, send: Send):
        self._is_on = is_on
        self._send = send
        self._live: dict[int, KvSubscription] = {}
        self._last_call = 0
        self._closed: ServeError | None = None

    async def subscribe(self, start: int) -> KvSubscription:
        """Return a subscription that the engine has accepted. Pass it to `unsubscribe`.

        start: number of the first batch; 0: a snapshot of the cache first.

        Raises TurnedOff, EventsExpired, QueueFull if there are MAX_SUBSCRIPTIONS, and Unavailable.
        """
        if not self._is_on:
            raise TurnedOff("KV events are off; the server's setting kv_events turns them on")
        if self._closed:
            raise copy.copy(self._closed)
        if len(self._live) >= MAX_SUBSCRIPTIONS:
            raise QueueFull(
                f"{MAX_SUBSCRIPTIONS} subscriptions to KV events are open, the limit of each front end (frontends)")
        self._last_call += 1
        subscription = KvSubscription(self._last_call, start, self._send)
        self._live[subscription.call] = subscription
        try:
            if not self._send(kv_events.SubscribeKvEvents(subscription.call, start)):
                raise Unavailable("the engine is not connected")
            await subscription.wait_until_accepted()
        except BaseException:
            self.unsubscribe(subscription)
            raise
        return subscription

    def unsubscribe(self, subscription: KvSubscription) -> None:
        """End a subscription."""
        if self._live.pop(subscription.call, None):
            self._send(kv_events.UnsubscribeKvEvents(subscription.call))

    def receive(self, message: kv_events.ToSubscriber) -> None:
        """Handle a message of the engine. Messages of ended subscriptions are ignored."""
        if subscription := self._live.get(message.call):
            subscription.receive(message)

    def on_disconnect(self) -> None:
        """End all subscriptions: the engine is dead, and its cache with it."""
        self._fail_all(EventsLost("the engine restarts with an empty cache. Subscribe from 0"))

    def close(self, error: ServeError) -> None:
        """End all subscriptions with the error, and refuse new ones with it."""
        self._closed = error
        self._fail_all(error)

    def _fail_all(self, error: ServeError) -> None:
        live = list(self._live.values())
        self._live = {}
        for subscription in live:
            subscription.fail(copy.copy(error))  # the traceback of each refers to the frames of one call


def _kept(oldest: int, latest: int) -> str:
    return f"{oldest} to {latest} are" if oldest <= latest else "none is"


def _retrieve_exception(task: asyncio.Future[None]) -> None:
    """Mark the exception of a send as retrieved: its call may have been cancelled for the same reason."""
    if not task.cancelled():
        task.exception()
