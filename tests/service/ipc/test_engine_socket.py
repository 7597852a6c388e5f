"""Engine socket with front ends that read slowly, read nothing, or disconnect."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from npuserve.service.ipc import engine_socket, framing
from npuserve.service.ipc import messages as m
from npuserve.service.ipc.engine_socket import EngineSocket


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineSocket]:
    made = EngineSocket(f"{tmp_path}/e")
    yield made
    made.close()


def connect(tmp_path: Path) -> socket.socket:
    frontend = socket.socket(socket.AF_UNIX)
    frontend.settimeout(10)
    frontend.connect(f"{tmp_path}/e")
    return frontend


def first(engine: EngineSocket) -> tuple[bytes, m.ToEngine]:
    for _ in range(100):
        if found := engine.receive(1.0):
            return found[0]
    raise AssertionError("no message arrived")


def test_engine_socket_each_front_end_gets_own_messages(tmp_path: Path, engine: EngineSocket) -> None:
    frontends = [connect(tmp_path) for _ in range(3)]
    names = []
    for number, frontend in enumerate(frontends):
        frontend.sendall(m.encode(m.FlushPrefixCache(number)))
        name, message = first(engine)
        assert message == m.FlushPrefixCache(number)
        names.append(name)
    for number in (2, 0, 1):
        assert engine.send(names[number], m.Reply(1, number, 7))
    for number, frontend in enumerate(frontends):
        [data] = framing.Splitter().feed(frontend.recv(1000))
        assert m.decode_to_frontend(data) == m.Reply(1, number, 7)
        frontend.close()


def test_engine_socket_full_buffer_sends_rest_later_in_order(tmp_path: Path, engine: EngineSocket) -> None:
    with connect(tmp_path) as frontend:
        frontend.sendall(m.encode(m.Hello()))
        name, _ = first(engine)
        sent = [m.Outputs(1, m.Load(), [m.Output(number, list(range(2000)))]) for number in range(500)]
        for message in sent:
            assert engine.send(name, message)
        splitter, found = framing.Splitter(), []
        while len(found) < len(sent):
            found += splitter.feed(frontend.recv(1 << 20))
            assert engine.receive(0.0) == []
        assert [m.decode_to_frontend(data) for data in found] == sent
        # Nothing is left to write, so nothing wakes the engine.
        assert not engine.has_input()


def test_engine_socket_slow_front_end_is_disconnected(
    tmp_path: Path, engine: EngineSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_socket, "MAX_UNSENT_BYTES", 10_000)
    with connect(tmp_path) as frontend:
        frontend.sendall(m.encode(m.Hello()))
        name, _ = first(engine)
        message = m.Outputs(1, m.Load(), [m.Output(0, list(range(2000)))])
        while engine.send(name, message):
            assert name in engine._frontends
        assert not engine.send(name, message)


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("heard", [True, False])
def test_engine_socket_closed_front_end_is_disconnected(
    tmp_path: Path, engine: EngineSocket, heard: bool, unread: bool
) -> None:
    """The next front end may get the file descriptor of the old one."""
    frontend = connect(tmp_path)
    frontend.sendall(m.encode(m.Hello()))
    name, _ = first(engine)
    if unread:  # the kernel resets the connection
        assert engine.send(name, m.Reply(1, 1, 1))
    frontend.close()
    if heard:
        assert engine.receive(1.0) == [(name, None)]
    assert not engine.send(name, m.Reply(1, 1, 1))
    with connect(tmp_path) as following:
        following.sendall(m.encode(m.Hello()))
        assert first(engine)[1] == m.Hello()


@pytest.mark.parametrize("last", [[], [m.Cancel(1)]])
def test_engine_socket_front_end_that_dies_with_unread_output_is_reported(
    tmp_path: Path, engine: EngineSocket, last: list[m.ToEngine]
) -> None:
    frontend = connect(tmp_path)
    frontend.sendall(m.encode(m.Hello()))
    name, _ = first(engine)
    large = m.Outputs(1, m.Load(), [m.Output(0, list(range(200_000)))])
    for _ in range(3):  # more than the socket holds
        assert engine.send(name, large)
    for message in last:
        frontend.sendall(m.encode(message))
    frontend.close()
    found = [*engine.receive(1.0), *engine.receive(0.0)]
    assert found == [*((name, message) for message in last), (name, None)]


def test_engine_socket_without_a_free_descriptor_serves_others_and_accepts_later(
    tmp_path: Path, engine: EngineSocket
) -> None:
    known, newcomer = connect(tmp_path), socket.socket(socket.AF_UNIX)
    known.sendall(m.encode(m.Hello()))
    name, _ = first(engine)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(newcomer.fileno())
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        newcomer.connect(f"{tmp_path}/e")
        newcomer.sendall(m.encode(m.FlushPrefixCache(7)))
        assert engine.receive(1.0) == []
        assert not engine.has_input()  # the connection that waits does not keep the engine busy
        known.sendall(m.encode(m.FlushPrefixCache(8)))
        assert engine.receive(1.0) == [(name, m.FlushPrefixCache(8))]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert first(engine)[1] == m.FlushPrefixCache(7)
    known.close()
    newcomer.close()


def test_engine_socket_replaces_socket_of_dead_engine(tmp_path: Path) -> None:
    dead, living = EngineSocket(f"{tmp_path}/e"), EngineSocket(f"{tmp_path}/e")
    with connect(tmp_path) as frontend:
        frontend.sendall(m.encode(m.Hello()))
        assert first(living)[1] == m.Hello()
    dead.close()
    living.close()


def test_engine_socket_wake_ends_a_wait_and_brings_no_message(tmp_path: Path, engine: EngineSocket) -> None:
    waker = threading.Timer(0.05, engine.wake)
    waker.start()
    assert engine.receive(600.0) == []
    waker.join()
    for _ in range(2000):  # more than the socket holds
        engine.wake()
    assert engine.has_input()
    assert engine.receive(600.0) == []
    assert not engine.has_input()
    peer = connect(tmp_path)
    peer.sendall(m.encode(m.Hello()))
    assert first(engine)[1] == m.Hello()
    engine.close()
    engine.wake()
    assert peer.recv(1) == b""
