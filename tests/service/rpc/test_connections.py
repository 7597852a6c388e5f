"""Sockets of connections, counts of active calls by connection, and closing of idle connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from npuserve.service.rpc import connections as module
from npuserve.service.rpc.connections import Connections, SocketTable, peer_address
from tests.support.processes import until


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
        connections, rounds = Connections(), 100
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(rounds):
            connections.close_idle(1)
        # Other tests' channels may open or close some meanwhile.
        assert abs(len(os.listdir("/proc/self/fd")) - before) < rounds / 2


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
    assert peer_address("ipv6:%5Bfe80::1%252%5D:1234") == ("fe80::1", 1234)


@dataclass
class Pair:
    """A listener of this process and its connections. Each is (the client's socket, gRPC's name of the client)."""

    listener: socket.socket
    accepted: list[socket.socket] = field(default_factory=list)

    def connect(self) -> tuple[socket.socket, str]:
        client = socket.create_connection(self.listener.getsockname())
        self.accepted.append(self.listener.accept()[0])
        host, port = client.getsockname()
        return client, f"ipv4:{host}:{port}"


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Pair(listener)
        yield made
        for accepted in made.accepted:
            accepted.close()


def test_socket_table_find_counts_received_bytes(pair: Pair) -> None:
    table = SocketTable()
    client, peer = pair.connect()
    with client:
        client.sendall(bytes(70_000))
        (found,) = table.find(peer)
        assert found.local_port == pair.listener.getsockname()[1]
        until(lambda: found.traffic().received_bytes == 70_000)  # without a read
        assert found.traffic().idle_seconds < 60


@pytest.mark.parametrize(("discards", "unread"), [(False, 70_000), (True, 0)])
def test_shut_down_that_discards_leaves_nothing_to_read(pair: Pair, discards: bool, unread: int) -> None:
    client, peer = pair.connect()
    with client:
        client.sendall(bytes(70_000))
        (found,) = SocketTable().find(peer)
        until(lambda: found.traffic().received_bytes == 70_000)
        found.shut_down(discards=discards)
        assert len(pair.accepted[0].recv(100_000)) == unread


def test_socket_table_find_of_reused_descriptor_is_the_new_socket(pair: Pair) -> None:
    table = SocketTable()
    client, peer = pair.connect()
    client.sendall(b"x")
    (before,) = table.find(peer)
    client.close()
    pair.accepted.pop().close()
    assert not before.is_open
    assert before.traffic() is None
    client, later = pair.connect()
    with client:
        client.sendall(bytes(3))
        table._next_scan = 0.0
        assert table.find(peer) == []
        (found,) = table.find(later)
        until(lambda: found.traffic().received_bytes == 3)
        before.shut_down()  # must not end the connection that has its descriptor now
        client.sendall(b"x")
        until(lambda: found.traffic().received_bytes == 4)


@pytest.mark.parametrize("peer", ["unix:/nowhere", "ipv4:127.0.0.1:1", "", "unknown"])
def test_socket_table_find_of_unknown_peer_is_empty(peer: str) -> None:
    assert SocketTable().find(peer) == []


def test_socket_table_without_proc_is_empty(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DESCRIPTORS", "/nonexistent")
    client, peer = pair.connect()
    with client:
        assert SocketTable().find(peer) == []


def test_socket_table_find_of_unknown_peers_scans_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of connections that are closed already must not cost a scan each."""
    table = SocketTable()
    table.scan()
    table._next_scan = time.monotonic() + 60
    monkeypatch.setattr(table, "scan", lambda: pytest.fail("scanned"))
    assert table.find("ipv4:127.0.0.1:1") == []


def test_socket_table_without_a_free_descriptor_finds_and_ends_connections(pair: Pair) -> None:
    table = SocketTable()
    client, peer = pair.connect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with client:
        lowest_free = os.dup(client.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            (found,) = table.find(peer)
            found.shut_down()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.settimeout(30)
        assert client.recv(1) == b""


def test_socket_table_knows_sockets_only() -> None:
    table = SocketTable()
    with socket.socket(), socket.socketpair()[0]:
        assert all(one.peer[1] for one in table.scan())
        others = dict(table._others)
        table.scan()
        assert table._others == others
