"""Client connections during a drain: the calls under way on each, and the closing of those without calls.

A drain ends with gRPC's graceful stop. It sends GOAWAY, and then cancels each call that still arrives on an open
connection, without a reason or a time to retry (github.com/grpc/grpc/issues/41785). A client that reads its connection
sees GOAWAY and connects anew. Some libraries do not read idle connections, so their next call would be cancelled. So
idle connections are closed before the graceful stop: their next call is UNAVAILABLE, or goes to a new connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections import Counter
from urllib.parse import unquote

from npuserve.service.rpc.call import Context


class Connections:
    """Counts of the calls under way on each connection, by gRPC's name of its peer."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._none = asyncio.Event()
        self._none.set()

    def begin(self, context: Context) -> None:
        """Count a call as under way until its status is sent, or its client is gone."""
        peer = context.peer()
        self._calls[peer] += 1
        self._none.clear()
        context.add_done_callback(lambda _: self._end(peer))  # type: ignore[arg-type]  # the stub names a class

    def _end(self, peer: str) -> None:
        self._calls[peer] -= 1
        if not self._calls[peer]:
            del self._calls[peer]
        if not self._calls:
            self._none.set()

    async def wait_until_none(self, seconds: float) -> bool:
        """Wait until no call is under way, but at most `seconds`. Return whether there is none."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._none.wait(), max(0.0, seconds))
        return self._none.is_set()

    def close_idle(self, port: int) -> None:
        """Close this process's connections to its own `port` that have no call, where the system lists open files."""
        busy = {_address(peer) for peer in self._calls}
        with contextlib.suppress(FileNotFoundError):
            for descriptor in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    if connection.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    if connection.getsockname()[1] != port:
                        continue
                    host, peer_port = connection.getpeername()[:2]
                    address = ipaddress.ip_address(host)
                    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
                    if (str(mapped or address), peer_port) not in busy:
                        connection.shutdown(socket.SHUT_RDWR)


def _address(peer: str) -> tuple[str, int]:
    """Host and port of `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`; ("", 0) of anything else."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") else ("", 0)
