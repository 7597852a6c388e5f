"""Parts of the soak: the delaying proxy, waits of tenants, and schemas."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from bench.reliability import soak
from bench.reliability.remote import DelayProxy
from bench.reliability.tenants import RECOVERY_SECONDS, wait_percentiles


async def test_delay_proxy_delays_each_direction_and_passes_all_bytes_and_the_end() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = DelayProxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", 0.05)
    await proxy.start()
    host, _, port = proxy.target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sent, data = time.monotonic(), bytes(range(256)) * 4096
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    assert time.monotonic() - sent >= 0.1
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    server.close()
    await proxy.close()


async def test_delay_proxy_of_a_closed_port_closes_connections() -> None:
    proxy = DelayProxy("127.0.0.1:1", 0.0)
    await proxy.start()
    host, _, port = proxy.target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    await proxy.close()


def test_wait_percentiles_exclude_waits_after_kills() -> None:
    waits = [(100.0, 0.1), (200.0, 9.0), (200.0 + RECOVERY_SECONDS, 0.3)]
    assert wait_percentiles(waits, [195.0]) == {
        "requests": 2, "excluded": 1, "p50": 0.3, "p90": 0.3, "p99": 0.3, "max": 0.3}
    assert wait_percentiles(waits[1:2], [205.0]) == {"requests": 0, "excluded": 1}


def test_satisfies_checks_the_length_of_the_string() -> None:
    schema = soak.schema(1)
    low, high = soak.MIN_STRING + 1, soak.MAX_STRING + 1
    answers = [json.dumps({"text": "x" * length}) for length in (low - 1, low, high, high + 1)]
    assert [soak.satisfies(schema, answer) for answer in answers] == [False, True, True, False]
    assert not soak.satisfies(schema, '{"text": "x')
