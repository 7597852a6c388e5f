"""Guard of a front end's connections: it keeps places and memory for callers, and closes connections of strangers.

A caller is a connection with a call that was accepted, after its API key was checked. Calls of grpc.health.v1, which
need no key, do not count. Every other connection is a stranger's: one that has just been opened, sends nothing, never
ends its TLS handshake, or has no valid key.

gRPC itself refuses connections above a limit, whoever has the others. The guard acts before: above `max_connections`,
or where the process is short of descriptors, it closes connections without an accepted call. Strangers above their
share are closed first, then idle callers; among these those of the address that has most, the oldest first. So a
newcomer has time for its first call.

gRPC limits the headers of a call only once the client has acknowledged the server's SETTINGS. Before, the limits are
those of HTTP/2 and of gRPC's defaults: 16 MiB, and one byte of HPACK may stand for a header that takes 64 bytes in gRPC
and 180 with its Python objects. No channel argument changes that, and an attacker acknowledges nothing. So the guard
compares the growth of the process's memory with the bytes that strangers have sent. It closes those that sent most, and
all other strangers of their addresses: an attacker opens many connections before it sends on the first. The guard has a
thread, since the event loop may be busy for seconds with the headers of one such call.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable

from npuserve.service import logs, metrics
from npuserve.service.rpc.address_block import AddressBlock, network_of
from npuserve.service.rpc.call import Context
from npuserve.service.rpc.connections import (
    DESCRIPTORS,
    AcceptedSocket,
    Connections,
    SocketTable,
    open_descriptors,
    peer_address,
)

log = logging.getLogger(__name__)

MEMORY = "/proc/self/statm"
CHECK_SECONDS = 0.02
"""Time between two looks at the process's memory."""
CHECKS_PER_COUNT = 5
"""Looks at the memory between two counts of descriptors, which cost little."""
CHECKS_PER_SCAN = 50
"""Looks at the memory between two scans of the connections; 1 while there are nearly as many as allowed."""
CROWDED_SHARE = 0.9
"""Share of the allowed connections from which on there are nearly as many."""
STRANGERS_SHARE = 0.25
"""Share of `max_connections` that strangers keep when all are taken. gRPC's own limit is above `max_connections` by as
much, so that newcomers find a place between two counts."""
MIN_STRANGERS = 16
RESERVED_DESCRIPTORS = 24
"""Descriptors that connections leave free, for files, the engine's socket and new connections between two counts."""
MAX_BYTES_BY_GROWTH = ((16 << 20, 96 << 10), (96 << 20, 12 << 10), (256 << 20, 2 << 10))
"""Growth of the memory that strangers may have caused -> bytes that each of them may have sent then. Before its first
call is accepted, a client can send 64 KiB of messages, the initial HTTP/2 window, besides headers. A TLS handshake with
a client certificate takes up to 6 KiB."""
MAX_AMPLIFICATION = 256
"""Bytes of memory that a byte of headers may take."""
ATTACK_SECONDS = 2.0
"""Time for which the bytes of a closed attacker may still be the cause of the memory's growth. Without it the next of
several attackers could send as much as the first."""
BASELINE_BYTES_PER_SECOND = 1 << 20
"""Speed at which the memory that is taken for normal follows the memory in use."""
MAX_HEADER_BYTES = 1 << 20
MAX_HEADER_SECONDS = 60.0
"""A stranger that has sent more in this time or longer is closed: headers that never end."""
LOG_SECONDS = 10.0
"""Minimum time between two log lines."""


def strangers_share(max_connections: int) -> int:
    """Return the number of strangers that keep their connections when all are taken."""
    return max(MIN_STRANGERS, int(max_connections * STRANGERS_SHARE))


class ConnectionGuard:
    """Guard of the connections of a front end. `start` its thread, then `stop` it.

    max_connections: connections of each port.
    ports: returns the ports that the front end listens on.
    resident_bytes: returns the memory of the process; 0: unknown.
    """

    def __init__(self, connections: Connections, max_connections: int, ports: Callable[[], Iterable[int]],
                 resident_bytes: Callable[[], int] | None = None):
        self._connections = connections
        self._sockets = SocketTable()  # of the guard's thread; that of `connections` is the event loop's
        self._block = AddressBlock()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._is_crowded = False
        self._crowded_descriptors = 0  # of the process, at which a port may be crowded
        self._max_connections = max_connections
        self._ports = ports
        self._resident_bytes = resident_bytes or ResidentMemory().bytes
        self._baseline = 0  # resident bytes; 0: memory is not compared yet
        self._shut_down: set[AcceptedSocket] = set()  # whose descriptors gRPC has not closed yet
        self._attacks: deque[tuple[float, int]] = deque()  # latest attackers: time of the closing, bytes received
        self._closed: defaultdict[str, int] = defaultdict(int)  # why -> connections since the last log line
        self._next_log = 0.0
        for why in ("headers", "connections"):
            metrics.closed_connections_total.labels(why)  # on the metrics page from the start

    def start(self) -> None:
        """Start the thread, and log what it cannot guard on this system."""
        lacking = [file for file, is_read in (
            (DESCRIPTORS, bool(open_descriptors())), (MEMORY, self._resident_bytes() > 0)) if not is_read]
        if lacking:
            logs.event(log, "the system does not show connections or memory: strangers' connections are not closed",
                       level=logging.WARNING, unreadable=" ".join(lacking))
        threading.Thread(target=self._run, name="connections", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        """Look at memory and connections until `stop`."""
        checks = 0
        while not self._stopping.wait(CHECK_SECONDS):
            checks += 1
            try:
                self.check_memory()
                if ((checks % CHECKS_PER_COUNT == 0 and descriptor_count() >= self._crowded_descriptors)
                        or self._is_crowded or checks % CHECKS_PER_SCAN == 0):
                    self.check_connections()
            except Exception as error:  # a bug must not end the guard
                logs.bug(log, "connections are not checked", error)

    def start_baseline(self) -> None:
        """Take the present memory for normal. The memory is compared from now on."""
        self._baseline = self._resident_bytes()

    def check_memory(self) -> None:
        """Close connections of strangers if they may be the cause of the memory's growth."""
        resident = self._resident_bytes()
        growth = resident - self._baseline
        rise = int(BASELINE_BYTES_PER_SECOND * CHECK_SECONDS)
        if not self._baseline or growth < MAX_BYTES_BY_GROWTH[0][0]:
            self._baseline = min(resident, self._baseline + rise)
            return
        with self._lock:
            self._close_large_strangers(resident, growth, rise)

    def _close_large_strangers(self, resident: int, growth: int, rise: int) -> None:
        received = self._received_by_strangers()
        while self._attacks and self._attacks[0][0] < time.monotonic() - ATTACK_SECONDS:
            self._attacks.popleft()
        of_attackers = sum(received_bytes for _, received_bytes in self._attacks)
        growth = min(growth, MAX_AMPLIFICATION * (sum(received.values()) + of_attackers))
        limits = [max_bytes for min_growth, max_bytes in MAX_BYTES_BY_GROWTH if growth >= min_growth]
        if not limits:
            self._baseline = resident  # callers, or the server itself, are the cause
            return
        self._baseline += rise
        attackers = [stranger for stranger, received_bytes in received.items() if received_bytes > limits[-1]]
        networks = {(network_of(attacker.peer[0]), attacker.local_port) for attacker in attackers}
        self._close_attackers(attackers, [
            stranger for stranger in received if (network_of(stranger.peer[0]), stranger.local_port) in networks])

    def check_connections(self) -> None:
        """Close connections above `max_connections`, and those with headers that never end."""
        with self._lock:
            self._close_excess_connections()

    def _close_excess_connections(self) -> None:
        open_sockets = self._scan()
        self._is_crowded = False
        self._crowded_descriptors = sys.maxsize
        self._connections.keep_callers({accepted.peer for accepted in open_sockets})
        self._block.expire()
        for port in self._ports():
            self._make_room([accepted for accepted in open_sockets if accepted.local_port == port])
        latest = time.monotonic() - MAX_HEADER_SECONDS
        self._close_attackers([
            stranger for stranger in self._strangers(open_sockets)
            if stranger.first_seen < latest and (traffic := stranger.traffic())
            and traffic.received_bytes > MAX_HEADER_BYTES])

    def close_for_metadata(self, context: Context) -> None:
        """Close the connection of a call whose metadata is far above gRPC's limit: its client has not acknowledged the
        limit, so that its next calls would be as large.
        """
        address = peer_address(context.peer())
        with self._lock:
            self._close_attackers([
                accepted for accepted in self._scan()
                if accepted.peer == address and accepted.local_port in self._ports()])

    def _make_room(self, open_sockets: list[AcceptedSocket]) -> None:
        """Close connections of one port until `max_connections` are left and descriptors are free, or until all others
        have an accepted call.
        """
        places = self._max_connections
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        others = self._sockets.descriptors - len(open_sockets)
        if limit != resource.RLIM_INFINITY:
            places = min(places, limit - RESERVED_DESCRIPTORS - others)
        crowded = int(CROWDED_SHARE * places)
        self._is_crowded = self._is_crowded or len(open_sockets) > crowded
        self._crowded_descriptors = min(self._crowded_descriptors, others + crowded)
        excess = len(open_sockets) - places
        if excess <= 0:
            return
        strangers = by_share(self._strangers(open_sockets))
        kept = min(len(strangers), strangers_share(places))
        idle = by_share(accepted for accepted in open_sockets if self._connections.is_idle_caller(accepted.peer))
        # Strangers beyond their share, then idle callers, then all strangers.
        order = strangers[: len(strangers) - kept] + idle + strangers[len(strangers) - kept :]
        for closed in order[:excess]:
            self._close(closed, "connections")

    def _scan(self) -> list[AcceptedSocket]:
        """Return the sockets of all connections, without those that the guard has closed."""
        scanned = list(self._sockets.scan())
        self._shut_down.intersection_update(scanned)
        return [accepted for accepted in scanned if accepted not in self._shut_down]

    def _strangers(self, open_sockets: Iterable[AcceptedSocket]) -> list[AcceptedSocket]:
        ports = set(self._ports())
        return [
            accepted for accepted in open_sockets
            if accepted.local_port in ports and not self._connections.is_caller(accepted.peer)]

    def _received_by_strangers(self) -> dict[AcceptedSocket, int]:
        strangers = self._strangers(self._scan())
        return {stranger: traffic.received_bytes for stranger in strangers if (traffic := stranger.traffic())}

    def _close_attackers(
        self, attackers: Collection[AcceptedSocket], neighbours: Collection[AcceptedSocket] = ()
    ) -> None:
        """Close connections, and let their addresses open no new ones for a time, since each could be as costly.

        neighbours: further connections to close.
        """
        for closed in {*attackers, *neighbours} - self._shut_down:
            if traffic := closed.traffic():
                self._attacks.append((time.monotonic(), traffic.received_bytes))
            self._close(closed, "headers")
        for attacker in attackers:
            self._block.block(attacker.peer[0], attacker.local_port)

    def _close(self, closed: AcceptedSocket, why: str) -> None:
        if closed in self._shut_down:
            return
        closed.shut_down(discards=why == "headers")
        self._shut_down.add(closed)
        metrics.closed_connections_total.labels(why).inc()
        self._closed[why] += 1
        if time.monotonic() >= self._next_log:
            logs.event(log, "connections closed", level=logging.WARNING, **self._closed)
            self._closed.clear()
            self._next_log = time.monotonic() + LOG_SECONDS


def descriptor_count() -> int:
    """Return the number of this process's descriptors; unknown, and then very large, before Linux 6.2."""
    try:
        return os.stat("/proc/self/fd").st_size or sys.maxsize
    except OSError:
        return sys.maxsize


def by_share(open_sockets: Iterable[AcceptedSocket]) -> list[AcceptedSocket]:
    """Return the sockets in the order in which to close them: such that the addresses with most of them lose them
    until all have as many, and each address its oldest first.
    """
    by_address: defaultdict[str, list[AcceptedSocket]] = defaultdict(list)
    # The system numbers the sockets that were found at the same time roughly in their order.
    for accepted in sorted(open_sockets, key=lambda accepted: (-accepted.first_seen, -accepted.inode)):
        by_address[accepted.peer[0]].append(accepted)
    ranked = [(rank, accepted) for newest_first in by_address.values() for rank, accepted in enumerate(newest_first)]
    ranked.sort(key=lambda entry: (-entry[0], entry[1].first_seen))
    return [accepted for _, accepted in ranked]


class ResidentMemory:
    """Resident memory of this process. The file stays open, so that reading it needs no free descriptor."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open(MEMORY, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def bytes(self) -> int:
        """Return the resident bytes, 0 where the system does not tell."""
        if self._file is None:
            return 0
        return int(os.pread(self._file, 256, 0).split()[1]) * self._page_bytes
