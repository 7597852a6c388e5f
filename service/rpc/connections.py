"""Client connections of a front end: the active calls of each, and the closing of idle connections during a drain.

A drain ends with gRPC's graceful stop, which sends GOAWAY. It then cancels each call that still arrives on an open
connection, without a reason and without RetryInfo (github.com/grpc/grpc/issues/41785). A client that reads its
connection receives GOAWAY and reconnects. Some libraries do not read idle connections, so gRPC would cancel their next
call. Idle connections are therefore closed before the graceful stop: the client's next call fails with UNAVAILABLE, or
opens a new connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import stat
from collections import Counter
from collections.abc import Set
from urllib.parse import unquote

from npuserve.service.rpc.call import Context


class Connections:
    """Number of active calls of each connection, by gRPC's name of its peer."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self, context: Context) -> None:
        """Count a call as active until its status is sent, or its client has left."""
        peer = context.peer()
        self._calls[peer] += 1
        self._idle.clear()
        context.add_done_callback(lambda _: self._end(peer))  # type: ignore[arg-type]  # the stub names a class

    def _end(self, peer: str) -> None:
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

    def close_idle(self, port: int) -> None:
        """Close this process's connections to its own `port` that have no active call.

        Does nothing where the system has no /proc/self/fd, or no free descriptor to list it.
        """
        busy = {_address(peer) for peer in self._calls}
        with contextlib.suppress(OSError):
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                        _close_unless_busy(descriptor, port, busy)


def _close_unless_busy(descriptor: int, port: int, busy: Set[tuple[str, int]]) -> None:
    """Close a connection to `port` whose peer is not in `busy`. Raises OSError if the socket is not connected."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
            return
        host, peer_port = connection.getpeername()[:2]
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        if (str(mapped or address), peer_port) not in busy:
            connection.shutdown(socket.SHUT_RDWR)


def _address(peer: str) -> tuple[str, int]:
    """Return host and port of `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`; ("", 0) for any other peer.

    A zone, as in `fe80::1%2`, is removed, since socket.getpeername returns it apart from the host.
    """
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (host.strip("[]").partition("%")[0], int(port)) if kind in ("ipv4", "ipv6") else ("", 0)
