"""Account of the memory of messages that have not arrived whole.

gRPC returns whole messages only and does not say how much of one has arrived. The kernel counts what arrives on a
connection. An upper bound of a connection's incomplete messages is what has arrived since the oldest of its unfinished
reads began, less the messages whose reads began later and are complete. So the overhead of HTTP/2 and TLS counts for as
long as that oldest read only. Bytes of a message that was given up count for as long as well.

What has arrived says nothing of what arrives next, and a fast client sends many MiB between two measurements. So each
read also reserves memory: much until its connection is measured again, then what its client's messages need.
The reservation of a read on a connection that stalls ends, since a distant client and a silent one look alike.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from npuserve.service.rpc.connections import SocketTable

FRESH_SECONDS = 0.01
"""Age until which a read reserves more, see `Read.fresh_bytes`."""
FRESH_FACTOR = 4
"""Reservation of a fresh read, in messages of the size of its client's last one."""
NEW_CLIENT_BYTES = 1 << 20
"""Expected size of the message of a client of which no message has arrived."""
MIN_FRESH_BYTES = 2 << 20
"""Least reservation of a fresh read, since a client may send more than ever before."""
MIN_EXPECTED_BYTES = 64 << 10
MIN_READ_BYTES = 32 << 10
"""Memory of a read without a message: gRPC's call, the handler, and the unread bytes that gRPC buffers anyway."""
RATE_SECONDS = 1.0
"""Interval over which a connection's rate is measured."""
MIN_BYTES_PER_SECOND = 32 << 10
"""A connection with a lower rate stalls."""
MAX_SILENT_SECONDS = 30.0
"""Time limit for each MIN_PROGRESS_BYTES of a message to arrive."""
MIN_PROGRESS_BYTES = 8 << 10
MAX_KNOWN_CLIENTS = 4096
"""Limit of the number of clients whose last message is remembered."""


@dataclass(eq=False)
class Read:
    """One message that is being read.

    owner: name of the client.
    fresh_bytes: reservation until the read is FRESH_SECONDS old.
    expected_bytes: reservation from then on, the size that the message is expected to have.
    began: time.monotonic() of the begin.
    received_before: bytes that the connection had received at the begin.
    complete_bytes: messages of this connection that are complete, whose reads began after this one and before the next
        one that is unfinished.
    task: task that waits for the message; None until the reader has started it.
    """

    owner: str
    connection: _Connection
    fresh_bytes: int
    expected_bytes: int
    began: float
    received_before: int
    complete_bytes: int = 0
    task: asyncio.Task[object] | None = None


@dataclass(eq=False)
class _Connection:
    """Unfinished reads of one connection, the oldest first, and what has arrived.

    received_bytes: None: the system has not said so far.
    held, unmeasured, charge: its parts of the account's sums.
    """

    peer: str
    received_bytes: int | None
    rate_began: float
    rate_bytes: int
    progress: float
    progress_bytes: int
    reads: list[Read] = field(default_factory=list)
    complete_bytes: int = 0
    is_stalled: bool = False
    held: int = 0
    unmeasured: int = 0
    charge: int = 0


class IncompleteMessages:
    """Account of the unfinished reads of one RequestReader. Use it from one event loop.

    sockets: table of the process's sockets.
    largest: size limit of a message at the channel, in bytes.
    fresh_bytes: largest reservation of a fresh read, also that of a client of which no message has arrived.
    unmeasured_bytes: memory charged for a read of a connection whose bytes the system does not count.
    """

    def __init__(self, sockets: SocketTable, largest: int, fresh_bytes: int, unmeasured_bytes: int):
        self.held = 0
        """Upper bound of the bytes of incomplete messages, on connections that were measured."""
        self.unmeasured = 0
        """Bytes charged for those of other connections."""
        self.charge = 0
        """The sum of both, with reservations."""
        self._sockets = sockets
        self._largest = largest
        self._fresh_bytes = fresh_bytes
        self._unmeasured_bytes = unmeasured_bytes
        self._connections: dict[str, _Connection] = {}
        self._sizes: OrderedDict[str, int] = OrderedDict()  # last message of a client

    def __bool__(self) -> bool:
        """Return whether a read is unfinished."""
        return bool(self._connections)

    def last_size(self, owner: str) -> int | None:
        """Return the size of a client's last message, in bytes; None if it is not known."""
        return self._sizes.get(owner)

    def needed(self, owner: str) -> int:
        """Return the bytes that the next read of a client will reserve at its begin."""
        needed = max(self._reservations(owner))
        return max(needed, self._unmeasured_bytes) if self.unmeasured else needed

    def begin(self, peer: str, owner: str) -> Read:
        """Add a read. peer: gRPC's name of the connection's peer."""
        now = time.monotonic()
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(peer, None, now, 0, now, 0)
            self._receive(connection)
            connection.rate_bytes = connection.progress_bytes = connection.received_bytes or 0
        else:
            self._receive(connection)
        # A connection that was not measured yet has received nothing before, as far as is known.
        read = Read(owner, connection, *self._reservations(owner), now, connection.received_bytes or 0)
        connection.reads.append(read)
        self._update(connection, now)
        return read

    def end(self, read: Read, size: int | None) -> None:
        """Remove a read. size: bytes of its message; None if the message did not arrive."""
        connection = read.connection
        place = connection.reads.index(read)
        del connection.reads[place]
        if size is not None:
            self._remember(read.owner, size)
        now = time.monotonic()
        if not connection.reads:
            del self._connections[connection.peer]
            self._update(connection, now)
            return
        if place:
            complete = read.complete_bytes + (size or 0)
            connection.reads[place - 1].complete_bytes += complete
            connection.complete_bytes += size or 0
        else:
            connection.complete_bytes -= read.complete_bytes
        self._receive(connection)
        self._update(connection, now)

    def measure(self) -> list[Read]:
        """Measure all connections. Return the reads whose messages do not arrive in time."""
        late = []
        for connection in self._connections.values():
            now = time.monotonic()
            self._receive(connection)
            received = connection.received_bytes or 0
            if now - connection.rate_began >= RATE_SECONDS:
                minimum = MIN_BYTES_PER_SECOND * (now - connection.rate_began)
                connection.is_stalled = received - connection.rate_bytes < minimum
                connection.rate_began = now
                connection.rate_bytes = received
            if received - connection.progress_bytes >= MIN_PROGRESS_BYTES:
                connection.progress = now
                connection.progress_bytes = received
            late += [read for read in connection.reads
                     if now - max(read.began, connection.progress) >= MAX_SILENT_SECONDS]
            self._update(connection, now)
            self._remember_unfinished(connection, now)
        return late

    def _remember_unfinished(self, connection: _Connection, now: float) -> None:
        """Count a client's message as large before it is whole if much of it has arrived, or if it stalls."""
        size = connection.held // len(connection.reads)
        for read in connection.reads:
            if connection.is_stalled and now - read.began >= RATE_SECONDS:
                size = max(size, NEW_CLIENT_BYTES)
            if size > max(MIN_EXPECTED_BYTES, self._sizes.get(read.owner, 0)):
                self._remember(read.owner, size)

    def largest_client(self, excluded: Collection[Read], min_bytes: int) -> Read | None:
        """Return the newest read of the client that holds most, on its connection that holds most.

        Among clients that hold as much, the one whose newest read is the newest.

        excluded: reads that are as good as ended.
        min_bytes: only clients count that hold more, or whose connection stalls.
        """
        held: Counter[str] = Counter()
        newest: dict[str, tuple[int, float, Read]] = {}
        stalled = set()
        for connection in self._connections.values():
            for read in connection.reads:
                held[read.owner] += (connection.held + connection.unmeasured) // len(connection.reads)
                if connection.is_stalled or connection.received_bytes is None:
                    stalled.add(read.owner)
                key = (connection.held, read.began, read)
                if read not in excluded and key[:2] >= newest.get(read.owner, key)[:2]:
                    newest[read.owner] = key
        owners = [owner for owner in newest if held[owner] > min_bytes or owner in stalled]
        if not owners:
            return None
        return newest[max(owners, key=lambda owner: (held[owner], newest[owner][1]))][2]

    def _reservations(self, owner: str) -> tuple[int, int]:
        """Return `fresh_bytes` and `expected_bytes` of the next read of a client."""
        size = self._sizes.get(owner)
        if size is None:
            return self._fresh_bytes, min(self._largest, NEW_CLIENT_BYTES)
        expected = min(self._largest, max(MIN_EXPECTED_BYTES, size + size // 4))
        return min(self._fresh_bytes, max(MIN_FRESH_BYTES, FRESH_FACTOR * size)), expected

    def _remember(self, owner: str, size: int) -> None:
        self._sizes[owner] = size
        self._sizes.move_to_end(owner)
        if len(self._sizes) > MAX_KNOWN_CLIENTS:
            self._sizes.popitem(last=False)

    def _receive(self, connection: _Connection) -> None:
        """Ask the kernel what has arrived. A connection that is closed keeps its last number."""
        traffic = [accepted.traffic() for accepted in self._sockets.find(connection.peer)]
        if any(traffic):
            connection.received_bytes = sum(counted.received_bytes for counted in traffic if counted)

    def _update(self, connection: _Connection, now: float) -> None:
        """Compute what a connection holds and reserves."""
        count = len(connection.reads)
        held = 0
        unmeasured = 0
        charge = 0
        if connection.received_bytes is None:
            charge = unmeasured = count * self._unmeasured_bytes
        elif count:
            arrived = connection.received_bytes - connection.reads[0].received_before - connection.complete_bytes
            held = max(min(arrived, count * self._largest), count * MIN_READ_BYTES)
            charge = max(held, sum(self._reserved(read, now) for read in connection.reads))
        self.held += held - connection.held
        self.unmeasured += unmeasured - connection.unmeasured
        self.charge += charge - connection.charge
        connection.held = held
        connection.unmeasured = unmeasured
        connection.charge = charge

    def _reserved(self, read: Read, now: float) -> int:
        age = now - read.began
        if age < FRESH_SECONDS:
            return max(read.fresh_bytes, read.expected_bytes)
        return 0 if read.connection.is_stalled and age >= RATE_SECONDS else read.expected_bytes
