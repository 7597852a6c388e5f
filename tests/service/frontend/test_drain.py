"""Connections at the end of a drain, and without a free descriptor. test_process.py tests the other drains."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import threading
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from npuserve.service.frontend import server
from npuserve.service.frontend.drain import Drain
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2
from tests.support.fake_engine import make_folder, until
from tests.support.front_end import ask, running
from tests.support.raw_connection import RawConnection


@pytest.mark.slow
async def test_drain_without_a_free_descriptor_moves_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle connections cannot be listed, and a second server listens once there is a descriptor."""
    listdir, is_taken, attempts = os.listdir, server._is_taken, []

    def limited_listdir(path: str) -> list[str]:
        if path == "/proc/self/fd":
            raise OSError(errno.EMFILE, "Too many open files")
        return listdir(path)

    def limited_is_taken(host: str, port: int) -> bool:
        attempts.append(port)
        if len(attempts) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return is_taken(host, port)

    async with running(make_folder(tmp_path / "m")) as front_end:
        front_end.engine.hold.clear()
        stream = front_end.inference.StreamGenerate(ask("a", 2))
        await until(lambda: front_end.engine.live == 1)
        monkeypatch.setattr(os, "listdir", limited_listdir)
        monkeypatch.setattr(server, "_is_taken", limited_is_taken)
        stopping = asyncio.ensure_future(front_end.frontend.stop(60))
        front_end.frontend.stop = lambda *_: stopping  # type: ignore[method-assign,assignment,return-value]
        await until(lambda: front_end.channel.get_state() != grpc.ChannelConnectivity.READY)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await front_end.inference.Generate(ask(), wait_for_ready=True)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(attempts) >= 3
        front_end.engine.hold.set()
        assert "".join([part.text async for part in stream]) == "bc"
        await stopping


def test_is_taken_on_a_system_without_ipv6_checks_the_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a host may have an IPv6 address too, as localhost has in most files of hosts."""
    make, resolve = socket.socket, socket.getaddrinfo

    def make_ipv4(family: int, *others: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return make(family, *others)

    with make() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        found = [*resolve("::1", port, type=socket.SOCK_STREAM), *resolve("127.0.0.1", port, type=socket.SOCK_STREAM)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **options: found)
        monkeypatch.setattr(socket, "socket", make_ipv4)
        assert server._is_taken("localhost", port)
    assert not server._is_taken("localhost", port)


@pytest.mark.slow
async def test_drain_with_several_front_ends_listens_beside_them(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m"), frontends=2) as front_end:
        front_end.engine.hold.clear()
        stream = front_end.inference.StreamGenerate(ask("a", 2))
        await until(lambda: front_end.engine.live == 1)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(("127.0.0.1", front_end.frontend._servers.port))
            other.listen()
            stopping = asyncio.ensure_future(front_end.frontend.stop(60))
            front_end.frontend.stop = lambda *_: stopping  # type: ignore[method-assign,assignment,return-value]
            try:
                await until(lambda: len(front_end.frontend._servers._servers) == 2)
            finally:
                front_end.engine.hold.set()
            assert "".join([part.text async for part in stream]) == "bc"
            await stopping


async def test_drain_end_while_the_second_server_starts_stops_it(tmp_path: Path) -> None:
    """The drain ends at each point of that start in turn; gRPC's own start cannot be cancelled at some of them."""
    loop, failures = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    for turns in range(8):
        async with running(make_folder(tmp_path / str(turns)), frontends=2) as front_end:
            servers = front_end.frontend._servers
            drain = Drain(servers, 60)
            drain._moving = asyncio.ensure_future(drain._move_clients())
            for _ in range(turns):
                await asyncio.sleep(0)
            drain._moving.cancel()  # as `stop` does, after its wait
            await drain.stop()
            front_end.frontend.stop = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign,assignment,return-value]
    gc.collect()  # asyncio tells then of exceptions that nobody took
    assert not failures


async def test_drain_end_fails_calls_in_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(make_folder(tmp_path / "m", chat=True)) as front_end:
        served, release = front_end.frontend._generation.folder, threading.Event()
        assert served
        assert served.tokenizer
        monkeypatch.setattr(served.tokenizer.chat, "render", lambda *_: release.wait(60))
        call = front_end.inference.Generate(
            pb.GenerateRequest(chat=prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user", content="b")])))
        await until(lambda: front_end.frontend._generation.preparing)
        await front_end.frontend.stop(0.1)
        front_end.frontend.stop = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign,assignment,return-value]
        release.set()
        with pytest.raises(grpc.aio.AioRpcError, match="shut down before the request was prepared") as failed:
            await call
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_drain_without_calls_closes_connections_before_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that arrives while gRPC stops would be CANCELLED."""
    async with running(make_folder(tmp_path / "m")) as front_end:
        connection = await RawConnection.open(int(front_end.target.rpartition(":")[2]))
        stop = front_end.frontend._servers.stop

        async def stop_once_closed(seconds: float) -> None:
            await asyncio.wait_for(connection.wait_until_closed(), 10)
            await stop(seconds)

        monkeypatch.setattr(front_end.frontend._servers, "stop", stop_once_closed)
        await front_end.frontend.stop(60)
        front_end.frontend.stop = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign,assignment,return-value]


@pytest.mark.slow
async def test_drain_whose_clients_cannot_move_logs_the_exception_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has it while a call still runs, which ends as usual."""

    async def replace(grace_seconds: float) -> None:
        raise ValueError("bug")

    async with running(make_folder(tmp_path / "m")) as front_end:
        monkeypatch.setattr(front_end.frontend._servers, "replace", replace)
        front_end.engine.hold.clear()
        stream = front_end.inference.StreamGenerate(ask("a", 2))
        await until(lambda: front_end.engine.live == 1)
        stopping = asyncio.ensure_future(front_end.frontend.stop(60))
        front_end.frontend.stop = lambda *_: stopping  # type: ignore[method-assign,assignment,return-value]
        await until(lambda: "clients cannot move to other connections" in caplog.messages)
        assert front_end.engine.live == 1
        front_end.engine.hold.set()
        assert "".join([part.text async for part in stream]) == "bc"
        await stopping


async def test_drain_waits_for_no_call_that_has_ended(tmp_path: Path) -> None:
    """For answered, refused, cancelled and expired calls."""
    async with running(make_folder(tmp_path / "m")) as server:
        await server.inference.Generate(ask("a", 2))
        with pytest.raises(grpc.aio.AioRpcError):
            await server.inference.Generate(ask("a", 2, top_p=7.0))
        server.engine.hold.clear()
        cancelled = server.inference.StreamGenerate(ask("a", 5))
        await until(lambda: server.engine.live == 1)
        cancelled.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await server.inference.Generate(ask("a", 5), timeout=0.1)
        await asyncio.wait_for(server.frontend.stop(600), 60)
        server.frontend.stop = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign,assignment,return-value]


async def test_drain_waits_for_no_open_reflection_stream(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        call = reflection_pb2_grpc.ServerReflectionStub(server.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
        await call.read()
        await asyncio.wait_for(server.frontend.stop(600), 20)  # an unfinished message ends after 30 s
        server.frontend.stop = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign,assignment,return-value]
