"""Counts of active calls by connection, and closing of idle connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npuserve.service.rpc.connections import Connections, _address


class Call:
    """Fake of a call's context with the parts that Connections uses."""

    def __init__(self, peer: str):
        self._peer = peer
        self._done: list[Callable[[Any], None]] = []

    def peer(self) -> str:
        return self._peer

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._done.append(callback)

    def end(self) -> None:
        for callback in self._done:
            callback(self)


async def test_connections_wait_until_idle_returns_after_last_call() -> None:
    connections, calls = Connections(), [Call("ipv4:127.0.0.1:1"), Call("ipv4:127.0.0.1:2"), Call("ipv4:127.0.0.1:1")]
    assert await connections.wait_until_idle(60)
    for call in calls:
        connections.begin(call)  # type: ignore[arg-type]
    assert not await connections.wait_until_idle(0)
    waiting = asyncio.ensure_future(connections.wait_until_idle(60))
    for call in calls:
        await asyncio.sleep(0)
        assert not waiting.done()
        assert not connections._idle.is_set()
        call.end()
    assert await waiting


def test_connections_close_idle_leaks_no_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w"), socket.socket():
        before = len(os.listdir("/proc/self/fd"))
        Connections().close_idle(1)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("family", "host", "peer"), [
    (socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}"),
    (socket.AF_INET6, "::ffff:127.0.0.1", "ipv4:127.0.0.1:{}"),
])
async def test_connections_close_idle_keeps_busy_connection(
    family: socket.AddressFamily, host: str, peer: str
) -> None:
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket(family))
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        idle, busy = (sockets.enter_context(socket.socket(family)) for _ in range(2))
        for client in (idle, busy):
            client.connect((host, port))
            client.setblocking(False)
            sockets.enter_context(listener.accept()[0])
        connections = Connections()
        running = Call(peer.format(busy.getsockname()[1]))
        for call in (running, Call("unix:/nowhere")):
            connections.begin(call)  # type: ignore[arg-type]
        connections.close_idle(port)
        assert await asyncio.get_running_loop().sock_recv(idle, 1) == b""
        with pytest.raises(BlockingIOError):
            busy.recv(1)
        running.end()
        connections.close_idle(port)
        assert await asyncio.get_running_loop().sock_recv(busy, 1) == b""


def test_address_of_a_link_local_peer_has_no_zone() -> None:
    """gRPC's name of the peer has the zone; socket.getpeername has it apart from the host."""
    assert _address("ipv6:%5Bfe80::1%252%5D:1234") == ("fe80::1", 1234)
