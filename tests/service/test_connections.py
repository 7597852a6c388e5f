"""Counting calls by connection, and closing a connection by its peer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from npuserve.service.connections import Connections


class Call:
    """What Connections needs of a call's context."""

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


async def test_connections_wait_until_none_ends_with_the_last_call() -> None:
    connections, calls = Connections(), [Call("ipv4:127.0.0.1:1"), Call("ipv4:127.0.0.1:1"), Call("ipv4:127.0.0.1:2")]
    await connections.wait_until_none(60)
    for call in calls:
        connections.begin(call)  # type: ignore[arg-type]
    await connections.wait_until_none(0)
    waiting = asyncio.ensure_future(connections.wait_until_none(60))
    for call in calls:
        await asyncio.sleep(0)
        assert not waiting.done()
        call.end()
    await waiting


@pytest.mark.parametrize(("family", "host", "peer"), [
    (socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}"),
    (socket.AF_INET6, "::ffff:127.0.0.1", "ipv4:127.0.0.1:{}"),
])
async def test_connections_refused_peer_is_closed_after_its_calls(
    family: socket.AddressFamily, host: str, peer: str
) -> None:
    """Neither before its call has ended, nor any other connection."""
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        pairs = []
        for _ in range(2):
            client = socket.socket(family)
            client.connect((host, port))
            pairs.append((client, listener.accept()[0]))
        (refused, _), (other, _) = pairs
        connections = Connections()
        running = Call(peer.format(refused.getsockname()[1]))
        connections.begin(running)  # type: ignore[arg-type]
        connections.refuse(running.peer())
        connections.refuse("unix:/nowhere")
        closing = asyncio.ensure_future(connections.close_refused(port, 0.001))
        await asyncio.sleep(0.02)
        refused.setblocking(False)
        with pytest.raises(BlockingIOError):
            refused.recv(1)
        running.end()
        assert await asyncio.get_running_loop().sock_recv(refused, 1) == b""
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
        closing.cancel()
        for pair in pairs:
            for end in pair:
                end.close()
