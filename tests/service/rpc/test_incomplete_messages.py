"""Account of incomplete messages: what connections hold, what reads reserve, and the client that holds most."""

from __future__ import annotations

import pytest

from npuserve.service.rpc import incomplete_messages as module
from npuserve.service.rpc.incomplete_messages import (
    MIN_FRESH_BYTES,
    MIN_READ_BYTES,
    NEW_CLIENT_BYTES,
    IncompleteMessages,
)
from tests.support.fake_sockets import FakeSockets

LARGEST = 12 << 20
FRESH = 6 << 20
UNMEASURED = 7 << 20
MIB = 1 << 20


class Clock:
    """Replacement of time.monotonic()."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    replacement = Clock()
    monkeypatch.setattr(module, "time", replacement)
    return replacement


@pytest.fixture
def sockets() -> FakeSockets:
    return FakeSockets()


@pytest.fixture
def messages(sockets: FakeSockets, clock: Clock) -> IncompleteMessages:
    return IncompleteMessages(sockets, LARGEST, FRESH, UNMEASURED)  # type: ignore[arg-type]


def test_incomplete_messages_held_is_what_has_arrived(messages: IncompleteMessages, sockets: FakeSockets) -> None:
    sockets.receive("a", 7 * MIB)  # of earlier calls
    read = messages.begin("a", "client")
    assert messages.held == MIN_READ_BYTES
    sockets.receive("a", 3 * MIB)
    messages.measure()
    assert messages.held == 3 * MIB
    messages.end(read, 3 * MIB)
    assert (messages.held, messages.charge, bool(messages)) == (0, 0, False)


def test_incomplete_messages_held_is_at_most_the_largest_of_each_read(
    messages: IncompleteMessages, sockets: FakeSockets
) -> None:
    messages.begin("a", "client")
    sockets.receive("a", 100 * MIB)
    messages.measure()
    assert messages.held == LARGEST


def test_incomplete_messages_complete_messages_count_no_longer(
    messages: IncompleteMessages, sockets: FakeSockets
) -> None:
    """A slow message beside many that arrive whole, on one connection, as of a gateway."""
    slow = messages.begin("a", "client")
    for _ in range(100):
        read = messages.begin("a", "client")
        sockets.receive("a", MIB + 100)
        messages.end(read, MIB)
    messages.measure()
    assert messages.held == max(MIN_READ_BYTES, 100 * 100)
    assert len(slow.connection.reads) == 1
    messages.end(slow, 10)
    assert not messages


def test_incomplete_messages_end_of_the_oldest_read_frees_no_bytes_of_a_later_one(
    messages: IncompleteMessages, sockets: FakeSockets
) -> None:
    """The first message arrives before the second read begins, and is complete after it."""
    first = messages.begin("a", "client")
    sockets.receive("a", 8 * MIB)
    messages.begin("a", "client")
    sockets.receive("a", 5 * MIB)
    messages.end(first, 8 * MIB)
    assert messages.held == 5 * MIB


def test_incomplete_messages_given_up_message_counts_until_older_reads_end(
    messages: IncompleteMessages, sockets: FakeSockets
) -> None:
    first, second = messages.begin("a", "client"), messages.begin("a", "client")
    sockets.receive("a", 5 * MIB)
    messages.end(second, None)
    assert messages.held == 5 * MIB
    messages.end(first, None)
    assert messages.held == 0


def test_incomplete_messages_closed_connection_keeps_its_bytes(
    messages: IncompleteMessages, sockets: FakeSockets
) -> None:
    messages.begin("a", "client")
    sockets.receive("a", MIB)
    messages.measure()
    sockets.close("a")
    messages.measure()
    assert messages.held == MIB
    assert messages.unmeasured == 0


def test_incomplete_messages_unmeasured_connection_is_charged_for_each_read(messages: IncompleteMessages) -> None:
    reads = [messages.begin("unknown", "client") for _ in range(2)]
    assert (messages.held, messages.unmeasured, messages.charge) == (0, 2 * UNMEASURED, 2 * UNMEASURED)
    assert messages.needed("other") == UNMEASURED
    for read in reads:
        messages.end(read, 1)
    assert (messages.unmeasured, messages.charge) == (0, 0)


def test_incomplete_messages_reservation_of_a_new_client(
    messages: IncompleteMessages, sockets: FakeSockets, clock: Clock
) -> None:
    sockets.receive("a", 1)
    assert messages.needed("client") == FRESH
    messages.begin("a", "client")
    assert messages.charge == FRESH
    clock.now += 2 * module.FRESH_SECONDS
    messages.measure()
    assert messages.charge == NEW_CLIENT_BYTES
    clock.now += module.RATE_SECONDS
    messages.measure()
    assert messages.charge == messages.held == MIN_READ_BYTES  # nothing arrives
    assert messages.last_size("client") == NEW_CLIENT_BYTES


def test_incomplete_messages_reservation_follows_the_last_message(
    messages: IncompleteMessages, sockets: FakeSockets
) -> None:
    sockets.receive("a", 1)
    sizes = {100: MIN_FRESH_BYTES, MIB: 4 * MIB, 4 * MIB: FRESH, 8 * MIB: 10 * MIB, LARGEST: LARGEST}
    for size, needed in sizes.items():
        messages.end(messages.begin("a", "client"), size)
        assert messages.needed("client") == needed


def test_incomplete_messages_large_message_is_remembered_before_it_is_whole(
    messages: IncompleteMessages, sockets: FakeSockets
) -> None:
    sockets.receive("a", 1)
    messages.end(messages.begin("a", "client"), 100)
    read = messages.begin("a", "client")
    sockets.receive("a", 4 * MIB)
    messages.measure()
    messages.end(read, None)
    assert messages.last_size("client") == 4 * MIB


@pytest.mark.parametrize(("bytes_per_second", "is_late"), [(0, True), (100, True), (1000, False)])
def test_incomplete_messages_late_is_a_message_without_progress(
    messages: IncompleteMessages, sockets: FakeSockets, clock: Clock, bytes_per_second: int, is_late: bool
) -> None:
    sockets.receive("a", 1)
    read = messages.begin("a", "client")
    late = []
    for _ in range(int(2 * module.MAX_SILENT_SECONDS)):
        clock.now += 1
        sockets.receive("a", bytes_per_second)
        late += messages.measure()
    assert (read in late) == is_late


def test_incomplete_messages_largest_client(messages: IncompleteMessages, sockets: FakeSockets, clock: Clock) -> None:
    reads = {}
    for peer, owner, size in ("a", "one", 4), ("b", "two", 3), ("c", "two", 2), ("d", "three", 4):
        sockets.receive(peer, 1)
        reads[peer] = messages.begin(peer, owner)
        sockets.receive(peer, size * MIB)
        clock.now += 0.001
    newest = messages.begin("b", "two")
    messages.measure()
    assert messages.largest_client((), 0) is newest  # `two` holds 5 MiB, most of it on `b`
    assert messages.largest_client((), 6 * MIB) is None
    messages.end(newest, None)
    messages.end(reads["b"], None)
    assert messages.largest_client((), 0) is reads["d"]  # as much as `a`, and newer
    assert messages.largest_client((reads["d"],), 0) is reads["a"]
