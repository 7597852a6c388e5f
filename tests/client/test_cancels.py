"""Both clients while a stream, its task or the client is cancelled, closed or timed out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from npuserve.client import AsyncClient, Cancelled, Client, ServerError
from npuserve.service import errors
from npuserve.v1 import generate_pb2 as pb
from tests.client.counting import Proxy, serving
from tests.support.fake_engine import until


def target(proxy: Proxy) -> str:
    return f"127.0.0.1:{proxy.port}"


async def test_task_cancelled_during_a_call_raises_cancelled_error() -> None:
    async with serving() as (server, proxy), AsyncClient(target(proxy)) as client:
        server.fail = [errors.QueueFull("full", 20.0)]
        waiting = asyncio.ensure_future(client.generate("x"))
        await until(lambda: server.asked)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_task_cancelled_at_any_point_raises_cancelled_error() -> None:
    """The cancel arrives after 0 to 399 iterations of the event loop: in a call that fails or succeeds, or a wait."""
    async with serving() as (server, proxy), AsyncClient(target(proxy)) as client:
        for iterations in range(0, 400, 3):
            server.fail = [errors.Unavailable("restarting", 0.001), grpc.StatusCode.CANCELLED]
            task = asyncio.ensure_future(client.generate("x"))
            for _ in range(iterations):
                await asyncio.sleep(0)
            if task.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert task.done()


class EndedCall:
    """grpc.aio call that ended with a server error while its reader waited, as happens on a loaded event loop."""

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


async def test_task_cancelled_after_its_call_ended_raises_cancelled_error() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        calls = []

        def begin(*arguments: object) -> EndedCall:
            calls.append(EndedCall())
            assert len(calls) == 1, "the client retried instead of cancelling"
            return calls[-1]

        client.call = begin  # type: ignore[method-assign]
        reading = asyncio.ensure_future(anext(client.stream("x")))
        await until(lambda: calls)
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert [call.is_cancelled for call in calls] == [True]


async def test_task_and_stream_cancelled_together_raise_cancelled_error() -> None:
    async with serving() as (server, proxy), AsyncClient(target(proxy)) as client:
        server.fail = [errors.QueueFull("full", 20.0)]
        stream = client.stream("x")
        waits: list[float] = []
        on_failure = stream.attempts.on_failure
        stream.attempts.on_failure = (  # type: ignore[method-assign]
            lambda error: waits.append(on_failure(error)) or waits[-1])
        waiting = asyncio.ensure_future(anext(stream))
        await until(lambda: waits)
        stream.cancel()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


class OneMessageCall:
    """Call of a thread that receives one message, and nothing more until it is cancelled."""

    def __init__(self, client: Client, offset: int = 0) -> None:
        self.cancelled = threading.Event()
        self._messages = iter([pb.StreamGenerateResponse(offset=offset, num_tokens=1)])
        client.call = lambda *arguments: self  # type: ignore[method-assign]

    def __next__(self) -> pb.StreamGenerateResponse:
        for message in self._messages:
            return message
        assert self.cancelled.wait(60)
        raise StopIteration

    def cancel(self) -> None:
        self.cancelled.set()

    def initial_metadata(self) -> tuple[()]:
        return ()


def test_stream_cancelled_by_another_thread_cancels_its_call() -> None:
    with Client("127.0.0.1:1") as client:
        call, stream = OneMessageCall(client), client.stream("x")
        assert next(stream).num_tokens == 1
        thread = threading.Thread(target=stream.cancel)
        thread.start()
        with pytest.raises(Cancelled):
            next(stream)
        thread.join()
        assert call.cancelled.is_set()


def test_stream_left_early_cancels_its_call() -> None:
    with Client("127.0.0.1:1") as client:
        call = OneMessageCall(client)
        with client.stream("x") as stream:
            next(stream)
        assert call.cancelled.is_set()


def test_stream_with_a_wrong_message_cancels_its_call() -> None:
    with Client("127.0.0.1:1") as client:
        call, stream = OneMessageCall(client, offset=5), client.stream("x")
        with pytest.raises(ServerError, match="a message at token 5 where 0 was next"):
            next(stream)
        assert call.cancelled.is_set()


async def test_unary_call_cancelled_by_the_server_is_retried() -> None:
    """A server or a proxy can end a call with CANCELLED. The task continues, and the client retries."""
    async with serving() as (server, proxy), AsyncClient(target(proxy)) as client:
        server.fail = [grpc.StatusCode.CANCELLED]
        asking = asyncio.ensure_future(client.model_info())
        await asyncio.wait([asking])
        assert not asking.cancelled()
        assert asking.result().name == "counting"
        assert len(server.asked) == 2


async def test_close_ends_waits_and_calls() -> None:
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
    """Call of the sync client without an answer: reading it would block forever."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def __next__(self) -> object:
        assert self.is_cancelled, "reads a call that never ends"
        return None

    def cancel(self) -> None:
        self.is_cancelled = True

    def initial_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize("source", ["stream", "client"])
def test_cancel_while_the_call_begins_cancels_the_call(source: str) -> None:
    with Client("127.0.0.1:1") as client:
        stream, calls = client.stream("x"), []

        def begin(*arguments: object, **options: object) -> SilentCall:
            stream.cancel() if source == "stream" else client.close()  # as another thread could
            calls.append(SilentCall())
            return calls[-1]

        client._stub.StreamGenerate = begin  # type: ignore[method-assign]
        with pytest.raises(Cancelled):
            next(stream)
        assert [call.is_cancelled for call in calls] == [True]


@pytest.mark.parametrize("ask", [lambda client: next(client.stream("x")), lambda client: client.model_info()])
def test_call_while_the_client_closes_raises_cancelled(ask: Callable[[Client], object]) -> None:
    """Another thread closes the channel between check and call, for which gRPC raises ValueError."""
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
async def test_call_after_close_of_the_asyncio_client_raises_cancelled(ask: Callable[[AsyncClient], Any]) -> None:
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    with pytest.raises(Cancelled):
        await ask(client)


async def test_cancel_from_another_thread_ends_the_wait() -> None:
    async with serving() as (server, proxy):
        server.fail = [errors.QueueFull("full", 20.0)]

        def work() -> None:
            with Client(target(proxy)) as client, client.stream("x") as stream:
                threading.Timer(0.2, stream.cancel).start()
                with pytest.raises(Cancelled):
                    next(stream)

        await asyncio.to_thread(work)


@pytest.mark.parametrize(("of_client", "of_call", "expected"), [
    (600.0, None, 600), (None, 600.0, 600), (600.0, 3600.0, 3600), (3600.0, 600.0, 600)])
@pytest.mark.parametrize("kind", [AsyncClient, Client])
async def test_timeout_of_a_call_takes_precedence(
    kind: Any, of_client: float | None, of_call: float | None, expected: float
) -> None:
    client = kind("h:1", timeout=of_client)
    for stream in (client.stream("x", timeout=of_call), client.resume("token", timeout=of_call)):
        *_, left = stream.attempts.next_call()
        assert expected - 60 < left <= expected
