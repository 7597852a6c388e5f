"""Client connections of a front end: their sockets, the active calls of each, and the closing of idle ones.

gRPC gives a handler the name of its peer and nothing else of the connection. The sockets themselves are found among the
process's descriptors, in /proc/self/fd. The kernel counts the bytes that each has received, of TLS and HTTP/2 as well:
an upper bound of the bytes of messages.

A drain ends with gRPC's graceful stop, which sends GOAWAY. It then cancels each call that still arrives on an open
connection, without a reason and without RetryInfo (github.com/grpc/grpc/issues/41785). A client that reads its
connection receives GOAWAY and reconnects. Some libraries do not read idle connections, so gRPC would cancel their next
call. Idle connections are therefore closed before the graceful stop: the client's next call fails with UNAVAILABLE, or
opens a new connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import resource
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote

from npuserve.service.rpc.call import Context

Address: TypeAlias = tuple[str, int]
"""Host and port of a peer, an IPv4 address in IPv6 as IPv4."""

DESCRIPTORS = "/proc/self/fd"
MAX_SCAN_SHARE = 0.1
"""Share of the time that may go into the search for sockets of unknown peers."""
MAX_AGE_SECONDS = 1.0
"""A lookup scans again after this time, since a peer may have a second connection, to another address of this host."""
DISCARD_BYTES = 1 << 16
_TCP_INFO_BYTES = 136
_LAST_RECEIVED = struct.Struct("@I")
_LAST_RECEIVED_OFFSET = 52
_RECEIVED = struct.Struct("@Q")
_RECEIVED_OFFSET = 128
"""Places of tcpi_last_data_recv and tcpi_bytes_received in Linux's struct tcp_info."""


class Traffic(NamedTuple):
    """What the kernel knows of a connection.

    received_bytes: bytes received, whether or not gRPC has read them.
    idle_seconds: time since the last of them.
    """

    received_bytes: int
    idle_seconds: float


@dataclass(frozen=True)
class AcceptedSocket:
    """Socket of one connection. gRPC owns its descriptor and may close it at any time, so that the number is reused.

    local_port: port on which the connection was accepted.
    inode: the socket's inode, which tells it from a later one with the same descriptor.
    first_seen: time.monotonic() when it was found. The kernel does not know when it was accepted.
    """

    descriptor: int
    inode: int
    peer: Address
    local_port: int
    first_seen: float

    @property
    def is_open(self) -> bool:
        """Whether the descriptor is still this socket's."""
        return _inode(self.descriptor) == self.inode

    def traffic(self) -> Traffic | None:
        """Return the connection's traffic. None: it is closed, or the system does not count its bytes."""
        try:
            info = _tcp_info(self.descriptor)
        except OSError:
            return None
        # Compared afterwards: a descriptor that still is this socket's was so during the call.
        if len(info) < _TCP_INFO_BYTES or not self.is_open:
            return None
        (received_bytes,) = _RECEIVED.unpack_from(info, _RECEIVED_OFFSET)
        (idle_milliseconds,) = _LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_OFFSET)
        return Traffic(received_bytes, idle_milliseconds / 1000) if received_bytes else None

    def shut_down(self, discards: bool = False) -> None:
        """End the connection. Does nothing if it is closed.

        discards: drops what has arrived and gRPC has not read; it would read that after the end, too.
        """
        try:
            duplicate = os.dup(self.descriptor)
        except OSError as error:
            if error.errno == errno.EMFILE and self.is_open:
                # gRPC could close the descriptor just now. That is unlikely, and without a free one nothing works.
                connection = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, self.descriptor)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.detach()
            return
        with contextlib.suppress(OSError), socket.socket(fileno=duplicate) as connection:
            if _inode(duplicate) == self.inode:
                connection.shutdown(socket.SHUT_RDWR)
                while discards and connection.recv(DISCARD_BYTES, socket.MSG_DONTWAIT):
                    pass


class SocketTable:
    """Table of the TCP sockets of this process that are connected, by the address of their peer.

    It is empty where the system has no /proc/self/fd. Use it from one thread.
    """

    def __init__(self) -> None:
        self._by_descriptor: dict[int, AcceptedSocket] = {}
        self._others: dict[int, int] = {}  # descriptor -> inode of what is not a connected TCP socket
        self._by_peer: dict[Address, list[AcceptedSocket]] = {}
        self._last_scan = -MAX_AGE_SECONDS
        self._next_scan = 0.0

    def find(self, peer: str) -> list[AcceptedSocket]:
        """Return the sockets of a peer, given gRPC's name of it; nearly always one.

        Empty for a connection that is closed or not of TCP. It may also be empty for a new one, since the searches for
        unknown peers take at most MAX_SCAN_SHARE of the time.
        """
        address = peer_address(peer)
        if not address[1]:
            return []
        sockets = self._open_sockets(address)
        now = time.monotonic()
        if now >= self._next_scan and (not sockets or now >= self._last_scan + MAX_AGE_SECONDS):
            self.scan()
            sockets = self._open_sockets(address)
        return sockets

    def scan(self) -> Iterable[AcceptedSocket]:
        """Search this process's descriptors. Return all sockets, those that this process connected included."""
        began = time.monotonic()
        descriptors = open_descriptors()
        for descriptor in self._by_descriptor.keys() - descriptors:
            self._remove(descriptor)
        for descriptor in descriptors:
            self._update(descriptor, began)
        self._others = {descriptor: inode for descriptor, inode in self._others.items() if descriptor in descriptors}
        self._last_scan = time.monotonic()
        self._next_scan = self._last_scan + (self._last_scan - began) / MAX_SCAN_SHARE
        return self._by_descriptor.values()

    @property
    def descriptors(self) -> int:
        """Number of descriptors of this process at the last scan, of sockets and of others."""
        return len(self._by_descriptor) + len(self._others)

    def _open_sockets(self, address: Address) -> list[AcceptedSocket]:
        return [accepted for accepted in self._by_peer.get(address, ()) if accepted.is_open]

    def _update(self, descriptor: int, now: float) -> None:
        """Bring the table's entry of a descriptor up to date."""
        inode = _inode(descriptor)
        known = self._by_descriptor.get(descriptor)
        if inode == (known.inode if known else self._others.get(descriptor)):
            return
        self._remove(descriptor)
        accepted = _accepted_socket(descriptor, now)
        if accepted is None:
            self._others[descriptor] = inode
            return
        self._others.pop(descriptor, None)
        self._by_descriptor[descriptor] = accepted
        self._by_peer.setdefault(accepted.peer, []).append(accepted)

    def _remove(self, descriptor: int) -> None:
        removed = self._by_descriptor.pop(descriptor, None)
        if removed is None:
            return
        sockets = self._by_peer[removed.peer]
        sockets.remove(removed)
        if not sockets:
            del self._by_peer[removed.peer]


class Connections:
    """Sockets of a front end's connections, and the number of active calls of each, by gRPC's name of its peer.

    A connection with an accepted call, now or earlier, is a caller's. Calls of grpc.health.v1 need no API key and are
    not accepted ones.
    """

    def __init__(self) -> None:
        self.sockets = SocketTable()
        self._calls: Counter[str] = Counter()
        self._accepted: Counter[Address] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self, context: Context, is_accepted: bool = True) -> None:
        """Count a call as active until its status is sent, or its client has left.

        is_accepted: its connection is a caller's.
        """
        peer = context.peer()
        self._calls[peer] += 1
        if is_accepted:
            self._accepted[peer_address(peer)] += 1
        self._idle.clear()
        end = functools.partial(self._end, peer, is_accepted)
        context.add_done_callback(end)  # type: ignore[arg-type]  # the stub names a class

    def is_caller(self, address: Address) -> bool:
        """Return whether a call of this peer is or was accepted."""
        return address in self._accepted

    def is_idle_caller(self, address: Address) -> bool:
        """Return whether calls of this peer were accepted, and none of them is active."""
        return self._accepted.get(address) == 0

    def keep_callers(self, connected: Set[Address]) -> None:
        """Forget the callers that are idle and not in `connected`."""
        for address, active in list(self._accepted.items()):
            if not active and address not in connected:
                self._accepted.pop(address, None)

    def _end(self, peer: str, is_accepted: bool, context: object) -> None:
        if is_accepted:
            self._accepted[peer_address(peer)] -= 1
        self._calls[peer] -= 1
        if not self._calls[peer]:
            del self._calls[peer]
        if not self._calls:
            self._idle.set()

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait at most `seconds` until no call is active. Return whether none is."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), max(0.0, seconds))
        return self._idle.is_set()

    def idle_sockets(self, port: int) -> list[AcceptedSocket]:
        """Return the sockets accepted on this process's own `port` that have no active call."""
        busy = {peer_address(peer) for peer in self._calls}
        return [
            accepted for accepted in self.sockets.scan() if accepted.local_port == port and accepted.peer not in busy]

    def close_idle(self, port: int) -> None:
        """Close this process's connections to its own `port` that have no active call.

        Does nothing where the system has no /proc/self/fd, or no free descriptor.
        """
        for idle in self.idle_sockets(port):
            idle.shut_down()


def _tcp_info(descriptor: int) -> bytes:
    """Return the beginning of the kernel's struct tcp_info. Raises OSError."""
    connection = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    finally:
        connection.detach()  # gRPC closes the descriptor


def _inode(descriptor: int) -> int:
    """Return the inode of a descriptor's file, 0 if it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0


def open_descriptors() -> set[int]:
    """Return the numbers of this process's descriptors; none where the system has no /proc/self/fd."""
    try:
        return {int(name) for name in os.listdir(DESCRIPTORS)}
    except OSError as error:
        if error.errno != errno.EMFILE:
            return set()
        # No descriptor is free to list them: all up to the limit are in use.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return {descriptor for descriptor in range(limit) if _inode(descriptor)}


def _accepted_socket(descriptor: int, now: float) -> AcceptedSocket | None:
    """Return the connected TCP socket of a descriptor, None if it has another kind of file or is closed."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode):
            return None
        connection = socket.socket(fileno=descriptor)
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return None
            host, port = connection.getpeername()[:2]
            local_port = connection.getsockname()[1]
        finally:
            connection.detach()  # gRPC closes the descriptor
    except OSError:  # closed meanwhile, or not connected
        return None
    if _inode(descriptor) != status.st_ino:  # closed meanwhile
        return None
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return AcceptedSocket(descriptor, status.st_ino, (str(mapped or address), port), local_port, now)


@functools.lru_cache(maxsize=4096)
def peer_address(peer: str) -> Address:
    """Return host and port of `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`; ("", 0) for any other peer.

    A zone, as in `fe80::1%2`, is removed, since socket.getpeername returns it apart from the host.
    """
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (host.strip("[]").partition("%")[0], int(port)) if kind in ("ipv4", "ipv6") else ("", 0)
