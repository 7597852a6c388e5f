"""Subscriptions of a front end to KV events, with the engine's messages given by the test."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest

from npuserve.service.errors import EventsExpired, EventsLost, QueueFull, TurnedOff, Unavailable
from npuserve.service.ipc.kv_events import (
    WINDOW_BYTES,
    KvEvents,
    KvEventsLost,
    KvSubscribed,
    ReadKvEvents,
    SubscribeKvEvents,
    ToEngineKv,
    UnsubscribeKvEvents,
)
from npuserve.service.streams.kv_subscription import MAX_SUBSCRIPTIONS, KvSubscription, KvSubscriptions


class Front:
    """Subscriptions, and what they sent."""

    def __init__(self, is_on: bool = True):
        self.sent: list[ToEngineKv] = []
        self.is_connected = True
        self.all = KvSubscriptions(is_on, self.send)

    def send(self, message: ToEngineKv) -> bool:
        self.sent.append(message)
        return self.is_connected

    async def subscribe(self, start: int = 0) -> KvSubscription:
        """Subscribe; the engine accepts."""
        waiting = asyncio.ensure_future(self.all.subscribe(start))
        await asyncio.sleep(0)
        message = self.sent[-1]
        assert isinstance(message, SubscribeKvEvents)
        self.all.receive(KvSubscribed(1, message.call, True, 1, 9))
        return await waiting


async def test_subscription_returns_batches_in_order_and_reports_what_was_read() -> None:
    front = Front()
    subscription = await front.subscribe(7)
    assert front.sent == [SubscribeKvEvents(1, 7)]
    payload = bytes(WINDOW_BYTES // 8)
    batches = [KvEvents(1, 1, number, payload) for number in range(7, 12)]
    for batch in batches:
        front.all.receive(batch)
    assert [await subscription.next(1) for _ in batches] == batches
    assert front.sent[1:] == [ReadKvEvents(1, 2 * len(payload))] * 2
    assert await subscription.next(0.01) is None
    waiting = asyncio.ensure_future(subscription.next(10))
    await asyncio.sleep(0.01)
    front.all.receive(batches[0])
    assert await waiting == batches[0]
    front.all.unsubscribe(subscription)
    front.all.unsubscribe(subscription)
    assert front.sent[-1] == UnsubscribeKvEvents(1)
    assert front.sent.count(UnsubscribeKvEvents(1)) == 1
    front.all.receive(batches[0])  # sent before the engine received the unsubscription


async def test_subscription_that_is_refused_names_what_is_kept() -> None:
    front = Front()
    for oldest, latest, kept in ((5, 9, "5 to 9 are"), (10, 9, "none is")):
        waiting = asyncio.ensure_future(front.all.subscribe(4))
        await asyncio.sleep(0)
        front.all.receive(KvSubscribed(1, front.sent[-1].call, False, oldest, latest))
        with pytest.raises(EventsExpired, match=f"start_sequence_number: 4 is not kept; {kept}"):
            await waiting


async def test_subscription_that_is_too_slow_ends_with_the_gap_after_what_was_read() -> None:
    front = Front()
    subscription = await front.subscribe()
    for number in (1, 2, 3):
        front.all.receive(KvEvents(1, 1, number, b""))
    assert await subscription.next(1) == KvEvents(1, 1, 1, b"")
    front.all.receive(KvEventsLost(1, 1, 4, 7))
    front.all.receive(KvEvents(1, 1, 7, b""))  # after the end
    front.all.on_disconnect()
    for _ in range(2):
        with pytest.raises(EventsLost, match="batches 2 to 6 are lost"):
            await subscription.next(1)


async def test_subscription_that_ends_during_a_write_raises_its_error() -> None:
    """The client of each write reads nothing."""
    front = Front()
    live = [await front.subscribe() for _ in range(2)]
    sends = [asyncio.get_running_loop().create_future() for _ in live]
    writes = [asyncio.ensure_future(one.write(send)) for one, send in zip(live, sends, strict=True)]
    await asyncio.sleep(0)
    front.all.receive(KvEvents(1, 1, 5, b""))
    front.all.receive(KvEventsLost(1, 1, 6, 9))
    with pytest.raises(EventsLost, match="batches 5 to 8 are lost") as lost:
        await writes[0]
    front.all.close(Unavailable("the server is draining"))
    with pytest.raises(Unavailable, match="draining") as drained:
        await writes[1]
    assert lost.value.is_behind_messages
    assert drained.value.is_behind_messages
    assert all(send.cancelled() for send in sends)
    with pytest.raises(Unavailable, match="draining") as drained:
        await front.all.subscribe(0)
    assert not drained.value.is_behind_messages


async def test_subscription_write_returns_when_sent_and_raises_the_error_of_the_send() -> None:
    subscription = await Front().subscribe()
    sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sent.set_result(None)
    await subscription.write(sent)

    async def fail() -> None:
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError, match="lost"):
        await subscription.write(fail())
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    writing = asyncio.ensure_future(subscription.write(never))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert never.cancelled()


async def test_subscription_write_that_fails_when_cancelled_is_not_logged() -> None:
    """gRPC raises an error of its own from the send of a call that ends."""
    front = Front()
    subscription = await front.subscribe()
    logged: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))

    async def send() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("the call has ended") from None

    writing = asyncio.ensure_future(subscription.write(send()))
    await asyncio.sleep(0)
    front.all.close(Unavailable("the server is draining"))
    with pytest.raises(Unavailable, match="draining"):
        await writing
    await asyncio.sleep(0)
    del subscription, writing  # their error refers to the frame that has the task of the send
    gc.collect()
    assert logged == []


async def test_subscriptions_end_with_the_engine_and_continue_with_the_next() -> None:
    front = Front()
    subscription = await front.subscribe()
    waiting = asyncio.ensure_future(front.all.subscribe(0))
    await asyncio.sleep(0)
    front.all.on_disconnect()
    for call in (subscription.next(1), waiting):
        with pytest.raises(EventsLost, match="the engine restarts"):
            await call
    front.all.unsubscribe(subscription)
    assert front.sent == [SubscribeKvEvents(1, 0), SubscribeKvEvents(2, 0)]  # the next engine does not know it
    front.is_connected = False
    with pytest.raises(Unavailable, match="not connected"):
        await front.all.subscribe(0)
    front.is_connected = True
    await front.subscribe()


async def test_subscriptions_are_bounded_and_end_with_a_drain() -> None:
    front = Front()
    live = [await front.subscribe() for _ in range(MAX_SUBSCRIPTIONS)]
    with pytest.raises(QueueFull, match=f"{MAX_SUBSCRIPTIONS} subscriptions"):
        await front.all.subscribe(0)
    front.all.unsubscribe(live.pop())
    live.append(await front.subscribe())
    front.all.close(Unavailable("the server is draining"))
    errors: list[Unavailable] = []
    for call in [*(subscription.next(1) for subscription in live), front.all.subscribe(0), front.all.subscribe(0)]:
        with pytest.raises(Unavailable, match="draining") as failed:
            await call
        errors.append(failed.value)
    assert len({id(error) for error in errors}) == len(errors)  # the traceback of each refers to the frames of one call


async def test_subscriptions_of_a_server_without_kv_events_are_refused() -> None:
    front = Front(is_on=False)
    with pytest.raises(TurnedOff, match="kv_events"):
        await front.all.subscribe(0)
    assert front.sent == []


@pytest.mark.parametrize("event", [
    lambda front: None, lambda front: front.all.receive(KvSubscribed(1, 1, True, 1, 9)),
    lambda front: front.all.receive(KvSubscribed(1, 1, False, 1, 9))], ids=["none", "accepted", "refused"])
async def test_subscription_whose_caller_leaves_is_ended(event: Callable[[Front], None]) -> None:
    """The engine's reply may arrive before the caller's task runs again."""
    front = Front()
    waiting = asyncio.ensure_future(front.all.subscribe(0))
    await asyncio.sleep(0)
    waiting.cancel()
    event(front)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert front.sent == [SubscribeKvEvents(1, 0), UnsubscribeKvEvents(1)]
