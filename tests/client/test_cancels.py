"""Both clients when a stream, its task or the client is cancelled or closed at any moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from npuserve.client import AsyncClient, Cancelled, Client
from npuserve.service import errors
from tests.client.counting import Proxy, serving
from tests.support.fake_engine import until


def target(proxy: Proxy) -> str:
    return f"127.0.0.1:{proxy.port}"


async def test_cancelling_the_task_cancels_the_call() -> None:
    async with serving() as (server, proxy), AsyncClient(target(proxy)) as client:
        server.fail = [errors.QueueFull("full", 20.0)]
        waiting = asyncio.ensure_future(client.generate("x"))
        await until(lambda: server.asked)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_cancelling_the_task_at_any_point_cancels_it() -> None:
    """After any number of turns of the event loop: in a call that fails, in the wait, in one that works."""
    async with serving() as (server, proxy), AsyncClient(target(proxy)) as client:
        for turns in range(0, 400, 3):
            server.fail = [errors.Unavailable("restarting", 0.001), grpc.StatusCode.CANCELLED]
            task = asyncio.ensure_future(client.generate("x"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert task.done()


class EndedCall:
    """A grpc.aio call that ended with an error of the server while its reader waited, as a loaded event loop has it."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._ended = asyncio.get_running_loop().create_future()

    async def read(self) -> object:
        await self._ended
        raise grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, details="full")

    def cancel(self) -> bool:
        self.is_cancelled = True
        if not self._ended.done():
            self._ended.set_result(None)
        return False

    def done(self) -> bool:
        return True

    async def details(self) -> str:
        return "full"

    async def initial_metadata(self) -> tuple[()]:
        return ()


async def test_cancelling_the_task_of_a_call_that_has_ended_is_not_lost() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        calls = []

        def begin(*arguments: object) -> EndedCall:
            calls.append(EndedCall())
            assert len(calls) == 1, "the cancel was taken for a failure"
            return calls[-1]

        client.call = begin  # type: ignore[method-assign]
        reading = asyncio.ensure_future(anext(client.stream("x")))
        await until(lambda: calls)
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert [call.is_cancelled for call in calls] == [True]


async def test_cancelling_the_task_is_not_lost_when_the_stream_is_cancelled_too() -> None:
    async with serving() as (server, proxy), AsyncClient(target(proxy)) as client:
        server.fail = [errors.QueueFull("full", 20.0)]
        stream = client.stream("x")
        waits: list[float] = []
        failed = stream.attempts.failed
        stream.attempts.failed = lambda error: waits.append(failed(error)) or waits[-1]  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(anext(stream))
        await until(lambda: waits)
        stream.cancel()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_unary_call_cancelled_elsewhere_does_not_cancel_the_task() -> None:
    """A server or a proxy may end a call with CANCELLED: the task goes on, and the call is made again."""
    async with serving() as (server, proxy), AsyncClient(target(proxy)) as client:
        server.fail = [grpc.StatusCode.CANCELLED]
        asking = asyncio.ensure_future(client.model_info())
        await asyncio.wait([asking])
        assert not asking.cancelled()
        assert asking.result().name == "counting"
        assert len(server.asked) == 2


async def test_closing_the_client_ends_waits_and_calls() -> None:
    async with serving() as (server, proxy):
        for ask in (lambda client: client.generate("x"), lambda client: client.model_info()):
            client = AsyncClient(target(proxy))
            server.fail = [errors.Unavailable("restarting", 30.0)]
            asked = len(server.asked)
            waiting = asyncio.ensure_future(ask(client))
            await until(lambda asked=asked: len(server.asked) > asked)
            await client.close()
            with pytest.raises(Cancelled):
                await waiting

        def work(ask: Callable[[Client], object]) -> None:
            client = Client(target(proxy))
            server.fail = [errors.Unavailable("restarting", 30.0)]
            wait = client.wait

            def closing(*arguments: Any) -> None:
                threading.Timer(0.05, client.close).start()
                wait(*arguments)

            client.wait = closing  # type: ignore[method-assign]
            with pytest.raises(Cancelled):
                ask(client)

        for ask in (lambda client: client.generate("x"), lambda client: client.model_info()):
            await asyncio.to_thread(work, ask)


class SilentCall:
    """A call of the threads' client that nobody answers: reading it would wait for ever."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def __next__(self) -> object:
        assert self.is_cancelled, "reads a call that nobody will end"
        return None

    def cancel(self) -> None:
        self.is_cancelled = True

    def initial_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize("leave", ["stream", "client"])
def test_a_cancel_while_the_call_begins_cancels_it(leave: str) -> None:
    with Client("127.0.0.1:1") as client:
        stream, calls = client.stream("x"), []

        def begin(*arguments: object, **options: object) -> SilentCall:
            stream.cancel() if leave == "stream" else client.close()  # as another thread may at this moment
            calls.append(SilentCall())
            return calls[-1]

        client._stub.StreamGenerate = begin  # type: ignore[method-assign]
        with pytest.raises(Cancelled):
            next(stream)
        assert [call.is_cancelled for call in calls] == [True]


@pytest.mark.parametrize("ask", [lambda client: next(client.stream("x")), lambda client: client.model_info()])
def test_a_call_of_a_client_that_was_just_closed_is_cancelled(ask: Callable[[Client], object]) -> None:
    """Between the check and the call another thread closes the channel, for which gRPC raises ValueError."""
    client = Client("127.0.0.1:1")

    class Closing:
        def __getattr__(self, name: str) -> object:
            client.close()
            return getattr(stub, name)

    stub, client._stub = client._stub, Closing()  # type: ignore[assignment]
    with pytest.raises(Cancelled):
        ask(client)


@pytest.mark.parametrize("ask", [
    lambda client: client.generate("x"), lambda client: client.model_info(), lambda client: client.tokenize("x"),
    lambda client: client.detokenize([1]), lambda client: anext(client.resume("t")),
])
async def test_a_call_after_the_close_of_the_asyncio_client_is_cancelled(ask: Callable[[AsyncClient], Any]) -> None:
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    with pytest.raises(Cancelled):
        await ask(client)


async def test_a_thread_is_cancelled_from_another() -> None:
    async with serving() as (server, proxy):
        server.fail = [errors.QueueFull("full", 20.0)]

        def work() -> None:
            with Client(target(proxy)) as client, client.stream("x") as stream:
                threading.Timer(0.2, stream.cancel).start()
                with pytest.raises(Cancelled):
                    next(stream)

        await asyncio.to_thread(work)
