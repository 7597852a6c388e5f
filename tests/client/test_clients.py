"""Both clients on real sockets: connections reset after any number of bytes, errors at any message, deadlines."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npuserve.client import (
    AsyncClient,
    Cancelled,
    Client,
    ClientError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServerError,
    StreamLost,
    Tls,
    Unavailable,
)
from npuserve.service import errors
from npuserve.v1 import generate_pb2 as pb
from tests.client.counting import TEXT, WHOLE, Counting, Proxy, parts, serving


async def collect_async(target: str, **options: float) -> list[pb.StreamGenerateResponse]:
    async with AsyncClient(target, patience=options.get("patience", 30), timeout=options.get("timeout")) as client:
        return [delta async for delta in client.stream("x")]


async def collect_sync(target: str, **options: float) -> list[pb.StreamGenerateResponse]:
    def work() -> list[pb.StreamGenerateResponse]:
        with Client(target, patience=options.get("patience", 30), timeout=options.get("timeout")) as client:
            return list(client.stream("x"))

    return await asyncio.to_thread(work)


both = pytest.mark.parametrize("collect", [collect_sync, collect_async])


def check(deltas: list[pb.StreamGenerateResponse]) -> None:
    assert "".join(delta.text for delta in deltas) == WHOLE
    assert sum(delta.num_tokens for delta in deltas) == len(TEXT)
    assert [delta.HasField("finish") for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def target(proxy: Proxy) -> str:
    return f"127.0.0.1:{proxy.port}"


@pytest.mark.slow
@both
async def test_stream_connection_reset_after_any_byte_is_complete(collect: Callable) -> None:
    """Resets after every 17th byte of the server, each with a second reset soon after the first.

    A connection has more bytes than the answer: pings, and their number depends on the load of the machine. The answer
    has ended when no second connection was made.
    """
    async with serving() as (_, proxy):
        check(await collect(target(proxy)))
        for count in itertools.count(0, 17):
            async with proxy.another() as own:  # gRPC channels to one target can share a connection
                own.cuts = [count, 3 * count % 400]
                check(await collect(target(own)))
                if own.cuts:
                    break
        assert count >= sum(message.ByteSize() for message in parts())


@both
async def test_stream_failed_after_any_message_resumes_after_it(collect: Callable) -> None:
    """A call that fails after its n-th message is resumed where that message ended.

    A reset connection, in contrast, can lose messages that the client has not read.
    """
    async with serving() as (server, proxy):
        received = 0
        for number, message in enumerate(parts()[:-1], 1):
            received += message.num_tokens
            server.fail, server.fail_after = [grpc.StatusCode.UNAVAILABLE], number
            check(await collect(target(proxy)))
            name, asked, _ = server.asked[-1]
            assert (name, asked) == ("ResumeStream", pb.ResumeStreamRequest(
                resume_token=f"token-{len(server.asked) - 2}", token_offset=received))


@pytest.mark.slow
@given(cuts=st.lists(st.integers(0, 1200), max_size=4))
@settings(max_examples=25)
def test_stream_connection_reset_anywhere_is_complete(cuts: list[int]) -> None:
    async def run() -> None:
        async with serving() as (_, proxy):
            proxy.cuts = cuts
            check(await collect_async(target(proxy)))

    asyncio.run(run())


TRANSIENT = [
    errors.Unavailable("restarting", 0.01), errors.QueueFull("full", 0.01), grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED,
]


@both
@pytest.mark.parametrize("after", [0, 1, 3])
async def test_stream_transient_errors_at_any_message_is_complete(collect: Callable, after: int) -> None:
    async with serving() as (server, proxy):
        for error in TRANSIENT:
            if after and isinstance(error, errors.QueueFull):
                continue  # is sent only before an answer begins
            server.fail, server.fail_after = [error, error], after
            check(await collect(target(proxy)))


@both
@pytest.mark.parametrize(("error", "kind", "reason"), [
    (errors.InvalidField("stopping.max_tokens", "must be in [1, 9]"), InvalidRequest, "INVALID_FIELD"),
    (errors.InternalError("a bug, id 7"), ServerError, "INTERNAL_ERROR"),
    (errors.DeadlineExceeded("too late"), DeadlineExceeded, "DEADLINE_EXCEEDED"),
    (grpc.StatusCode.ABORTED, Cancelled, ""),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded, ""),
])
async def test_stream_final_error_raises_its_class(
    collect: Callable, error: errors.ServeError, kind: type[ClientError], reason: str
) -> None:
    async with serving() as (server, proxy):
        for server.fail_after in (0, 2):
            server.fail = [error]
            with pytest.raises(kind) as raised:
                await collect(target(proxy))
            assert raised.value.reason == reason
            # grpc.aio drops the initial metadata of a call whose status arrived before its first message.
            if server.fail_after or collect is collect_sync:
                assert raised.value.resume_token.startswith("token-")
            if kind is InvalidRequest:
                assert raised.value.field == "stopping.max_tokens"
        assert len(server.asked) == 2


@both
async def test_stream_that_ends_without_a_finish_raises_server_error(
    collect: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send_nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(Counting, "_send", send_nothing)
    async with serving() as (_, proxy):
        with pytest.raises(ServerError, match="without a finish"):
            await collect(target(proxy), patience=0)


@pytest.mark.parametrize("after", [0, 2])
async def test_stream_that_failed_raises_its_error_again(after: int) -> None:
    async with serving() as (server, proxy):
        server.fail_after = after

        def work() -> None:
            with Client(target(proxy)) as client:
                server.fail = [errors.InternalError("a bug")]
                stream = client.stream("x")
                errors_raised = []
                for _ in range(2):
                    with pytest.raises(ServerError) as raised:
                        list(stream)
                    errors_raised.append(raised.value)
                assert errors_raised[0] is errors_raised[1]

        await asyncio.to_thread(work)
        async with AsyncClient(target(proxy)) as client:
            server.fail = [errors.InternalError("a bug")]
            stream = client.stream("x")
            for _ in range(2):
                with pytest.raises(ServerError):
                    [delta async for delta in stream]
        assert len(server.asked) == 2


@both
async def test_stream_retry_info_is_the_minimum_wait(collect: Callable) -> None:
    async with serving() as (server, proxy):
        server.fail = [errors.QueueFull("full", 0.3)]
        began = time.monotonic()
        check(await collect(target(proxy)))
        assert time.monotonic() - began >= 0.3
        server.fail = [errors.QueueFull("full", 30.0)]
        with pytest.raises(Overloaded) as raised:  # immediately, since the wait would exceed the deadline
            await collect(target(proxy), timeout=5.0)
        assert raised.value.retry_seconds == 30.0


@both
async def test_stream_without_a_server_raises_unavailable(collect: Callable, free_port: Callable[[], int]) -> None:
    with pytest.raises(Unavailable):
        await collect(f"127.0.0.1:{free_port()}", patience=0.3)


def test_asyncio_client_made_before_its_event_loop_makes_calls(free_port: Callable[[], int]) -> None:
    client = AsyncClient(f"127.0.0.1:{free_port()}", patience=0)

    async def work() -> None:
        with pytest.raises(Unavailable):
            await client.model_info()
        with pytest.raises(Unavailable):
            await client.generate("x")
        await client.close()

    asyncio.run(work())


@both
@pytest.mark.parametrize("timeout", [math.inf, 1e10, 1e18])
async def test_stream_with_a_huge_timeout_is_complete(collect: Callable, timeout: float) -> None:
    async with serving() as (_, proxy):
        check(await collect(target(proxy), timeout=timeout))


@both
async def test_stream_without_resume_token_is_lost(collect: Callable) -> None:
    async with serving() as (server, proxy):
        server.fail, server.fail_after, server.token_less = [grpc.StatusCode.UNAVAILABLE], 2, True
        with pytest.raises(StreamLost, match="lost after 4 tokens"):
            await collect(target(proxy))


async def test_resume_by_token_continues_a_cancelled_stream() -> None:
    async with serving() as (server, proxy), AsyncClient(target(proxy), api_key="k-1") as one:
        stream = one.stream("x")
        first = await anext(stream)
        stream.cancel()
        with pytest.raises(Cancelled):
            await anext(stream)
        attempts = stream.attempts
        assert (attempts.request_id, attempts.resume_token, attempts.tokens) == ("r", "token-0", 1)
        rest = [delta.text async for delta in one.resume(attempts.resume_token, attempts.tokens)]
        assert first.text + "".join(rest) == WHOLE
        with pytest.raises(NotFound):
            await anext(one.resume("unknown", 3))
        assert {metadata["authorization"] for _, _, metadata in server.asked} == {"Bearer k-1"}


@both
async def test_stream_read_to_its_finish_sends_no_cancel(collect: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = []
    send = Counting._send

    async def recorded(self: Counting, *arguments: object) -> None:
        try:
            await send(self, *arguments)  # type: ignore[arg-type]
            await asyncio.sleep(0.05)  # the remainder of a handler
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    monkeypatch.setattr(Counting, "_send", recorded)
    async with serving() as (_, proxy):
        check(await collect(target(proxy)))
    assert not cancelled


async def test_generate_and_unary_calls_are_retried() -> None:
    async with serving() as (server, proxy):
        async with AsyncClient(target(proxy)) as client:
            server.fail, server.fail_after = [grpc.StatusCode.UNAVAILABLE], 2
            answer = await client.generate("x", max_tokens=20, temperature=0)
            assert (answer.text, answer.finish.reason) == (WHOLE, pb.FINISH_REASON_EOS)
            server.fail = [errors.Unavailable("loading", 0.01)]
            assert (await client.model_info()).name == "counting"

        def work() -> None:
            with Client(target(proxy)) as client:
                server.fail = [errors.Unavailable("loading", 0.01)]
                assert client.model_info().name == "counting"
                assert client.generate([1, 2]).text == WHOLE

        await asyncio.to_thread(work)
        asked = {name: message for name, message, _ in server.asked}
        assert asked["ResumeStream"] == pb.ResumeStreamRequest(resume_token="token-0", token_offset=4)


class Malformed:
    """Methods whose message is not protobuf. Streams go on until the client cancels them."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        unary = grpc.unary_unary_rpc_method_handler(lambda request, context: b"\xff")
        self.handlers = {"GetModelInfo": unary, "Tokenize": unary, "Detokenize": unary, "Embed": unary, "Rank": unary,
                         "StreamGenerate": grpc.unary_stream_rpc_method_handler(self._stream)}

    async def _stream(self, request: bytes, context: Any) -> None:
        try:
            await context.write(b"\xff")
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


ASKS: dict[str, Callable[[Any], Any]] = {
    "generate": lambda client: client.generate("x"), "model_info": lambda client: client.model_info(),
    "tokenize": lambda client: client.tokenize("x"), "detokenize": lambda client: client.detokenize([1]),
    "embed": lambda client: client.embed("x"), "rank": lambda client: client.rank("x", ["y"])}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
async def test_malformed_message_raises_server_error(ask: Callable[[Any], Any]) -> None:
    server, service = grpc.aio.server(), Malformed()
    server.add_registered_method_handlers("npuserve.v1.InferenceService", service.handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", patience=0) as client:
            with pytest.raises(ServerError) as raised:
                await ask(client)
            if ask is ASKS["generate"]:
                await asyncio.wait_for(service.cancelled.wait(), 30)
        with Client(f"127.0.0.1:{port}", patience=0) as other, pytest.raises(ServerError) as same:
            await asyncio.to_thread(ask, other)
        assert raised.value.code is same.value.code is grpc.StatusCode.INTERNAL
    finally:
        await server.stop(None)


async def test_samples_are_streamed_and_joined() -> None:
    async with serving() as (server, proxy):
        async with AsyncClient(target(proxy)) as client:
            answer = await client.generate("x", n=3)
            stream = client.stream("x", n=3)
            indices = [delta.index async for delta in stream]
        assert (answer.text, answer.HasField("finish")) == ("", False)
        assert [(sample.index, sample.text) for sample in answer.samples] == [(i, WHOLE) for i in range(3)]
        assert all(sample.finish.reason == pb.FINISH_REASON_EOS for sample in answer.samples)
        assert indices[:3] == [2, 1, 0]
        assert stream.attempts.is_complete

        def work() -> pb.GenerateResponse:
            with Client(target(proxy)) as client:
                return client.generate("x", n=3)

        assert answer == await asyncio.to_thread(work)
        assert {message.n for _, message, _ in server.asked} == {3}  # type: ignore[attr-defined]


@pytest.mark.parametrize("after", [0, 1])
async def test_samples_lost_connection_is_an_error_once_a_message_was_received(after: int) -> None:
    async with serving() as (server, proxy), AsyncClient(target(proxy)) as client:
        server.fail, server.fail_after = [grpc.StatusCode.UNAVAILABLE], after
        if after:
            with pytest.raises(StreamLost, match="lost after 2 tokens"):
                await client.generate("x", n=2)
        else:
            assert [sample.text for sample in (await client.generate("x", n=2)).samples] == [WHOLE] * 2
        assert [name for name, _, _ in server.asked] == ["StreamGenerate"] * (1 if after else 2)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(("options", "error", "message"), [
    ({"timeout": "5"}, TypeError, "timeout: must be a number of seconds"),
    ({"patience": None}, TypeError, "patience: must be a number of seconds"),
    ({"timeout": -1}, ValueError, "timeout: must be above 0"),
    ({"patience": -1}, ValueError, "patience: must be at least 0"),
    ({"target": 3}, TypeError, "target: must be a text, got int"),
    ({"target": "http://127.0.0.1:1"}, ValueError, "target: must be HOST:PORT or a gRPC name .*, got 'http://127.0.0.1:1'"),
    ({"target": "grpcs://127.0.0.1:1"}, ValueError, "target: must be HOST:PORT or a gRPC name"),
    ({"api_key": b"a"}, TypeError, "api_key: must be a text, got bytes"),
    ({"tls": "ca.pem"}, TypeError, "tls: must be a Tls, got str"),
    ({"tls": True}, TypeError, "tls: must be a Tls, got bool"),
    ({"tls": {}}, TypeError, "tls: must be a Tls, got dict"),
])
async def test_client_invalid_argument_raises_by_name(
    kind: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        kind(**{"target": "h:1", **options})


def test_client_invalid_argument_raises_value_error() -> None:
    with pytest.raises(ValueError, match="api_key: must be printable ASCII"):
        Client("h:1", api_key="a\nb")
    with pytest.raises(ValueError, match="cert and key go together"):
        Tls(cert=Path("x"))
    with Client("h:1") as client, pytest.raises(ValueError, match="timeout: must be above 0"):
        client.stream("x", timeout=0)
    with Client("h:1") as client, pytest.raises(TypeError, match="timeout: must be a number of seconds"):
        client.stream("x", timeout="5")  # type: ignore[arg-type]
