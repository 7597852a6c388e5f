"""Limits of connections, calls and metadata, which gRPC enforces."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from pathlib import Path

import grpc
import pytest

from tests.e2e.fuzz.wire import PREFACE, SETTINGS, frame
from tests.support.fake_engine import until
from tests.support.front_end import Running, ask, running
from tests.support.raw_connection import RawConnection

MAX_CONCURRENT_STREAMS = 3
"""Identifier of the HTTP/2 setting."""


def port_of(server: Running) -> int:
    return int(server.target.rpartition(":")[2])


async def remaining(connections: list[RawConnection]) -> list[RawConnection]:
    """Wait until the server closes a connection, and return the others."""
    closing = {asyncio.ensure_future(one.wait_until_closed()): one for one in connections}
    closed, others = await asyncio.wait(closing, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    for reading in others:
        reading.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert len(closed) == 1
    return [closing[reading] for reading in others]


async def test_server_connections_above_the_limit_close_an_idle_one(folder: Path) -> None:
    """Without the guard, the third connection is refused."""
    async with running(folder, max_connections=2) as server:
        connections = await remaining([await RawConnection.open(port_of(server)) for _ in range(3)])
        for connection in connections:
            assert b"grpc-status\x010" in await connection.generate(ask("a", 1))
        newcomer = await RawConnection.open(port_of(server))
        connections = await remaining(connections)
        for connection in (*connections, newcomer):
            assert await connection.generate(ask("a", 1))
            connection.close()


async def test_server_closes_a_connection_whose_metadata_is_above_the_limit(folder: Path) -> None:
    """RawConnection acknowledges no SETTINGS, so that gRPC does not apply its own limit."""
    async with running(folder) as server:
        await server.inference.Generate(ask("a", 1))  # opens the connection, since the address is blocked afterwards
        hostile = await RawConnection.open(port_of(server))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await hostile.generate(ask("a", 1), *[(b"a", b"")] * 2500)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await hostile.generate(ask("a", 1))
        hostile.close()
        assert (await server.inference.Generate(ask("a", 1))).finish.usage.generated_tokens == 1


async def test_server_refuses_metadata_slightly_above_the_limit_alone(folder: Path) -> None:
    async with running(folder) as server:
        connection = await RawConnection.open(port_of(server))
        assert b"grpc-status\x018" in await connection.generate(ask("a", 1), *[(b"a", b"")] * 600)
        assert await connection.generate(ask("a", 1))
        connection.close()


@pytest.mark.slow
async def test_server_half_open_connection_ends_its_call(folder: Path) -> None:
    """The client's machine is down. An idle connection ends after 50 s, one with unacknowledged data after 20 s."""
    async with running(folder) as server:
        connections = server.frontend._servers.connections
        half_open = await RawConnection.open(port_of(server))
        server.engine.hold.clear()
        calling = asyncio.ensure_future(half_open.generate(ask("a", 1)))
        await until(lambda: connections._calls)
        half_open.vanish()
        assert await connections.wait_until_idle(120)
        calling.cancel()
        half_open.close()


@pytest.mark.parametrize(("running_and_queued", "calls"), [((64, 256), 640), ((1, 0), 256)])
async def test_server_calls_of_a_connection_are_limited(
    folder: Path, running_and_queued: tuple[int, int], calls: int
) -> None:
    max_num_seqs, max_queue = running_and_queued
    async with running(folder, max_num_seqs=max_num_seqs, max_queue=max_queue) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        writer.write(PREFACE + frame(SETTINGS))
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        assert head[3] == SETTINGS
        assert dict(struct.iter_unpack(">HI", payload))[MAX_CONCURRENT_STREAMS] == calls
        writer.close()


@pytest.mark.parametrize(("size", "code"), [
    (7 << 10, grpc.StatusCode.OK), (16 << 10, grpc.StatusCode.RESOURCE_EXHAUSTED)])
async def test_server_metadata_is_limited(folder: Path, size: int, code: grpc.StatusCode) -> None:
    """Between 8 and 16 KiB gRPC refuses at random."""
    async with running(folder) as server:
        assert await server.inference.Generate(ask("a", 1), metadata=(("x", "v" * size),)).code() is code
