"""Guard of connections: whom it closes when places or memory are short, over fake sockets."""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from npuserve.service.rpc import connection_guard, connections
from npuserve.service.rpc.connection_guard import (
    ConnectionGuard,
    ResidentMemory,
    by_share,
    descriptor_count,
    strangers_share,
)
from npuserve.service.rpc.connections import Connections, Traffic
from tests.service.rpc.test_connections import Call

PORT = 50051
MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class Socket:
    """Fake of an AcceptedSocket."""

    peer: tuple[str, int]
    first_seen: float = 0.0
    received_bytes: int = 0
    local_port: int = PORT
    inode: int = 0
    closed: list[bool] = field(default_factory=list)

    def traffic(self) -> Traffic:
        return Traffic(self.received_bytes, 0.0)

    def shut_down(self, discards: bool = False) -> None:
        self.closed.append(True)


class Table:
    """Fake of a SocketTable."""

    def __init__(self) -> None:
        self.open: list[Socket] = []

    def scan(self) -> list[Socket]:
        return self.open

    @property
    def descriptors(self) -> int:
        return len(self.open) + 30


class Guarded:
    """Guard over fake sockets, and a process whose memory the test sets."""

    def __init__(self, max_connections: int = 100) -> None:
        self.connections = Connections()
        self.table = Table()
        self.resident = 100 * MIB
        self.guard = ConnectionGuard(self.connections, max_connections, lambda: (PORT,), lambda: self.resident)
        self.guard._sockets = self.table  # type: ignore[assignment]
        self._ports = iter(range(1, 10_000))

    def connect(self, host: str = "10.0.0.1", **options: Any) -> Socket:
        number = next(self._ports)
        options.setdefault("first_seen", float(number))
        made = Socket((host, number), **options)
        self.table.open.append(made)
        return made

    def call(self, of: Socket) -> Call:
        """Return an accepted call of a connection, which has begun."""
        made = Call(f"ipv4:{of.peer[0]}:{of.peer[1]}")
        self.connections.begin(made)  # type: ignore[arg-type]
        return made

    def closed(self) -> list[Socket]:
        return [one for one in self.table.open if one.closed]


def test_connection_guard_with_room_closes_nobody() -> None:
    guarded = Guarded()
    for number in range(100):
        guarded.connect(received_bytes=number << 10)
    guarded.guard.check_connections()
    assert guarded.closed() == []


def test_connection_guard_above_the_limit_closes_the_oldest_stranger_of_the_largest_address() -> None:
    guarded = Guarded()
    newcomer = guarded.connect("10.0.0.2")  # older than all others
    hostile = [guarded.connect() for _ in range(100)]
    guarded.guard.check_connections()
    assert guarded.closed() == hostile[:1]
    hostile += [guarded.connect() for _ in range(25)]
    guarded.guard.check_connections()
    assert guarded.closed() == hostile[:26]
    assert not newcomer.closed


def test_connection_guard_never_closes_a_connection_with_an_accepted_call() -> None:
    guarded = Guarded()
    for _ in range(100):
        guarded.call(guarded.connect())
    strangers = [guarded.connect() for _ in range(3)]
    guarded.guard.check_connections()
    assert guarded.closed() == strangers


def test_connection_guard_health_call_does_not_make_a_caller() -> None:
    guarded = Guarded()
    watcher = guarded.connect()
    call = Call(f"ipv4:{watcher.peer[0]}:{watcher.peer[1]}")
    guarded.connections.begin(call, is_accepted=False)  # type: ignore[arg-type]
    for _ in range(100):
        guarded.connect()
    guarded.guard.check_connections()
    assert guarded.closed() == [watcher]


def test_connection_guard_closes_idle_callers_for_newcomers_and_strangers_beyond_their_share() -> None:
    guarded = Guarded()
    callers = [guarded.connect() for _ in range(100)]
    calls = [guarded.call(one) for one in callers]
    for call in calls[:50]:
        call.end()
    newcomers = [guarded.connect(f"10.0.1.{number}") for number in range(20)]
    guarded.guard.check_connections()
    assert guarded.closed() == callers[:20]
    flood = [guarded.connect(f"10.0.2.{number}") for number in range(20)]
    guarded.guard.check_connections()
    assert guarded.closed() == [*callers[:25], *newcomers[:15]]
    assert not any(one.closed for one in flood)


def test_connection_guard_keeps_descriptors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard.resource, "getrlimit", lambda kind: (74, 1024))
    guarded = Guarded()
    strangers = [guarded.connect() for _ in range(30)]
    guarded.guard.check_connections()
    assert guarded.closed() == strangers[:10]  # 74 less 30 others and 24 that stay free


def test_connection_guard_forgets_callers_that_left() -> None:
    guarded = Guarded()
    caller = guarded.connect()
    guarded.call(caller).end()
    guarded.guard.check_connections()
    assert guarded.connections.is_idle_caller(caller.peer)
    guarded.table.open.clear()
    guarded.guard.check_connections()
    assert not guarded.connections.is_caller(caller.peer)


def test_connection_guard_memory_that_strangers_sent_too_little_for_closes_nobody() -> None:
    """The model's tokenizer, or the messages of callers, take the memory."""
    guarded = Guarded()
    guarded.guard.start_baseline()
    for number in range(20):
        guarded.connect(f"10.0.1.{number}", received_bytes=2048)
    guarded.call(guarded.connect(received_bytes=64 * MIB))
    for _ in range(10):
        guarded.resident += 100 * MIB
        guarded.guard.check_memory()
    assert guarded.closed() == []


@pytest.mark.parametrize(("growth", "closed_bytes"), [
    (8 * MIB, []), (20 * MIB, [900_000]), (120 * MIB, [900_000, 70_000, 16_400]),
    (300 * MIB, [900_000, 70_000, 16_400, 8_000])])
def test_connection_guard_memory_that_strangers_may_have_taken_closes_those_that_sent_most(
    growth: int, closed_bytes: list[int]
) -> None:
    guarded = Guarded()
    guarded.guard.start_baseline()
    caller = guarded.connect(received_bytes=64 * MIB)
    guarded.call(caller)
    for number, received_bytes in enumerate((900_000, 70_000, 16_400, 8_000, 500)):
        guarded.connect(f"10.0.1.{number}", received_bytes=received_bytes)
    for _ in range(100):
        guarded.connect(received_bytes=2_000)
    guarded.resident += growth
    guarded.guard.check_memory()
    guarded.guard.check_memory()
    assert [one.received_bytes for one in guarded.closed()] == closed_bytes
    assert [len(one.closed) for one in guarded.closed()] == [1] * len(closed_bytes)


def test_connection_guard_closes_the_strangers_of_an_attackers_address_that_sent_nothing() -> None:
    guarded = Guarded()
    guarded.guard.start_baseline()
    caller = guarded.connect()
    guarded.call(caller)
    hostile = [guarded.connect(received_bytes=received_bytes) for received_bytes in (900_000, 0, 500)]
    hostile += [guarded.connect(f"fd00::{number}", received_bytes=900_000 * number) for number in range(2)]
    guarded.connect("10.0.0.2")
    guarded.resident += 20 * MIB
    guarded.guard.check_memory()
    assert guarded.closed() == hostile


def test_connection_guard_further_attackers_may_not_send_as_much_as_the_first() -> None:
    guarded = Guarded()
    guarded.guard.start_baseline()
    for number in range(4):
        guarded.connect(f"10.0.1.{number}", received_bytes=900_000)
    guarded.resident += 300 * MIB
    guarded.guard.check_memory()
    guarded.table.open.clear()  # gRPC has closed them, and not freed what they took
    guarded.guard.check_memory()
    later = guarded.connect("10.0.2.1", received_bytes=20_000)
    guarded.resident += MIB
    guarded.guard.check_memory()
    assert later.closed


def test_connection_guard_closes_the_connection_of_a_call_with_large_metadata() -> None:
    guarded = Guarded()
    guarded.connect()
    hostile = guarded.connect()
    guarded.guard.close_for_metadata(guarded.call(hostile))  # type: ignore[arg-type]
    assert guarded.closed() == [hostile]


def test_connection_guard_headers_that_never_end_are_closed_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded()
    endless, short = guarded.connect(received_bytes=2 * MIB), guarded.connect(received_bytes=1000)
    caller = guarded.connect(received_bytes=64 * MIB)
    guarded.call(caller).end()
    monkeypatch.setattr(connection_guard.time, "monotonic", lambda: endless.first_seen + 59)
    guarded.guard.check_connections()
    assert guarded.closed() == []
    monkeypatch.setattr(connection_guard.time, "monotonic", lambda: caller.first_seen + 61)
    guarded.guard.check_connections()
    assert guarded.closed() == [endless]
    assert not short.closed


def test_by_share_closes_until_addresses_have_as_many() -> None:
    guarded = Guarded()
    many = [guarded.connect("10.0.0.1") for _ in range(4)]
    few = [guarded.connect("10.0.0.2") for _ in range(2)]
    assert by_share(guarded.table.open) == [many[0], many[1], many[2], few[0], many[3], few[1]]  # type: ignore[arg-type]


def test_strangers_share_of_few_connections_is_not_zero() -> None:
    assert (strangers_share(1), strangers_share(1024)) == (16, 256)


def test_descriptor_count_grows_with_a_file() -> None:
    before = descriptor_count()
    with open(os.devnull):
        assert before == sys.maxsize or descriptor_count() == before + 1


def test_resident_memory_counts_new_pages() -> None:
    memory = ResidentMemory()
    before = memory.bytes()
    with mmap.mmap(-1, 32 * MIB) as block:  # not of the allocator, which may have free pages
        block.write(bytes(32 * MIB))
        assert memory.bytes() - before > 16 * MIB


@pytest.mark.parametrize(("descriptors", "memory"), [
    ("/nonexistent/fd", connection_guard.MEMORY), (connections.DESCRIPTORS, "/nonexistent/statm")])
def test_start_of_a_guard_without_proc_warns_once(
    descriptors: str, memory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "DESCRIPTORS", descriptors)
    monkeypatch.setattr(connection_guard, "MEMORY", memory)
    guard = ConnectionGuard(Connections(), 100, lambda: (PORT,))
    guard.start()
    guard.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "the system does not show connections or memory: strangers' connections are not closed"]
