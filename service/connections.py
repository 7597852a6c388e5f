"""Client connections during a drain: the calls under way on each, and the closing of refused clients' connections.

gRPC's graceful stop sends GOAWAY and then cancels each call that still arrives on an open connection, without a reason
or a time to retry (github.com/grpc/grpc/issues/41785). A client library that does not read idle connections always
makes such a call. So a drain does not stop the gRPC server at once. It refuses new calls with UNAVAILABLE and
RetryInfo, and then closes the connection of each refused client. The client connects anew, and a balancer gives it
another server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections import Counter
from urllib.parse import unquote

from npuserve.service.call import Context


class Connections:
    """The calls under way on each connection. peer: a connection's, as `grpc.aio.ServicerContext.peer` names it."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._refused: dict[str, bool] = {}  # peer -> no call since the last round of `close_refused`
        self._none = asyncio.Event()
        self._none.set()

    def begin(self, context: Context) -> None:
        """Count a call until its status is sent or its client has disconnected."""
        peer = context.peer()
        self._calls[peer] += 1
        self._none.clear()
        context.add_done_callback(lambda _: self._end(peer))  # type: ignore[arg-type]  # its stub takes no function

    def _end(self, peer: str) -> None:
        self._calls[peer] -= 1
        if not self._calls[peer]:
            del self._calls[peer]
        if not self._calls:
            self._none.set()
        if peer in self._refused:
            self._refused[peer] = False

    def refuse(self, peer: str) -> None:
        """Note that a call was refused."""
        self._refused[peer] = False

    async def wait_until_none(self, seconds: float) -> None:
        """Wait until no call is under way; `seconds` at most."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._none.wait(), max(0.0, seconds))

    async def close_refused(self, port: int, every: float) -> None:
        """Close the connection of each refused client after at least `every` seconds without a call; run until
        cancelled. The pause lets the last answer leave gRPC's buffers."""
        while True:
            await asyncio.sleep(every)
            free = {peer for peer in self._refused if not self._calls[peer]}
            quiet = {peer for peer in free if self._refused[peer]}
            self._refused = {peer: peer in free for peer in self._refused if peer not in quiet}
            if quiet:
                _close({_address(peer) for peer in quiet}, port)


def _address(peer: str) -> tuple[str, int]:
    """Host and port of `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`; ("", 0) of anything else."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") else ("", 0)


def _close(peers: set[tuple[str, int]], port: int) -> None:
    """Close this process's connections from these peers to its own port, where the system lists open files."""
    with contextlib.suppress(FileNotFoundError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
                    continue
                host, peer_port = connection.getpeername()[:2]
                address = ipaddress.ip_address(host)
                mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
                if (str(mapped or address), peer_port) in peers:
                    connection.shutdown(socket.SHUT_RDWR)
