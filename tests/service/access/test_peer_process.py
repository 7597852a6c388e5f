from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from npuserve.service.access.peer_process import PeerProcess

CONNECT = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(one.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def client(listener: socket.socket) -> Iterator[tuple[int, str]]:
    """Process that is connected to the listener: its id, and gRPC's name of it as a peer."""
    command = [sys.executable, "-c", CONNECT, str(listener.getsockname()[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        port = int(process.stdout.readline())
        with listener.accept()[0]:
            yield process.pid, f"ipv4:127.0.0.1:{port}"
            process.kill()


def peer_process(listener: socket.socket, pid: int) -> PeerProcess:
    process = PeerProcess(lambda: listener.getsockname()[1])
    process.pid = pid
    return process


def test_peer_process_holds_its_own_connection_alone(listener: socket.socket, client: tuple[int, str]) -> None:
    pid, peer = client
    process = peer_process(listener, pid)
    assert process.holds(peer)
    assert process.holds(peer)
    with socket.create_connection(listener.getsockname()) as other, listener.accept()[0]:
        assert not process.holds(f"ipv4:127.0.0.1:{other.getsockname()[1]}")
        assert peer_process(listener, os.getpid()).holds(f"ipv4:127.0.0.1:{other.getsockname()[1]}")


def test_peer_process_forgets_the_connections_of_the_last_process(
    listener: socket.socket, client: tuple[int, str]
) -> None:
    pid, peer = client
    process = peer_process(listener, pid)
    assert process.holds(peer)
    process.pid = os.getpid()
    assert not process.holds(peer)
    process.pid = 0
    assert not process.holds(peer)


def test_peer_process_refuses_a_port_that_another_process_uses_again(listener: socket.socket) -> None:
    """The same address of a peer, after the process's connection has ended."""
    process = peer_process(listener, os.getpid())
    first = socket.create_connection(listener.getsockname())
    accepted = listener.accept()[0]
    port = first.getsockname()[1]
    assert process.holds(f"ipv4:127.0.0.1:{port}")
    accepted.close()
    first.close()
    assert not process.holds(f"ipv4:127.0.0.1:{port}")


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.2:1234", "ipv6:%5B::1%5D:1234", "unix:a", "ipv4:127.0.0.1:1"])
def test_peer_process_has_no_other_peers(listener: socket.socket, peer: str) -> None:
    assert not peer_process(listener, os.getpid()).holds(peer)


def test_peer_process_that_has_ended_has_no_connections(listener: socket.socket, client: tuple[int, str]) -> None:
    _, peer = client
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        assert not peer_process(listener, ended.pid).holds(peer)
