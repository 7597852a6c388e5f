"""HTTP server of the metrics page: one thread, bounded connections, and a time limit per connection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

from npuserve.service import logs

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS = 32
"""Maximum connections. Beyond it the oldest is closed; a scraper needs its connection only briefly."""
MAX_REQUEST_BYTES = 16 << 10
EXCHANGE_SECONDS = 10.0
"""Time limit of a connection, from its start to the last byte of the page."""
BACKLOG = 64
MAX_FREE_PORTS = 10
"""Ports that are tried for port 0: one that is free on the first address may be taken on another."""
NOT_FOUND = b"The metrics are at /metrics. Health is the gRPC service grpc.health.v1.Health.\n"
_PAGE = re.compile(rb"(https?://[^/?]*)?(/|/metrics/?)?(\?|$)")
"""Targets of a request that get the page, in origin form or, as to a proxy, in absolute form."""


class MetricsServer:
    """Server of a page on `port` of each address of `host`, in a thread of its own until `close`. One request per
    connection.

    port: 0 takes one that is free on every address.
    page: returns the text of the page. Called for each GET.

    Raises OSError if it cannot listen on any address, or if the port of one is taken.
    """

    def __init__(self, host: str, port: int, page: Callable[[], str]):
        self._sockets = _listen(host, port)
        self.port: int = self._sockets[0].getsockname()[1]
        self._page = page
        self._broken = ""  # type of the last page error; repetitions are not logged
        self._exchanges: dict[asyncio.Task[Any], None] = {}  # in order of arrival
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(EXCHANGE_SECONDS)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        servers = [await asyncio.start_server(self._connected, sock=listener, limit=MAX_REQUEST_BYTES)
                   for listener in self._sockets]
        await self._closing.wait()
        for server in servers:
            server.close()
        for exchange in self._exchanges:
            exchange.cancel()  # its connection's task ends with it; asyncio logs an error if that one is cancelled
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing.is_set():
            writer.transport.abort()
            return
        exchange = asyncio.ensure_future(self._exchange(reader, writer))
        self._exchanges[exchange] = None
        if len(self._exchanges) > MAX_CONNECTIONS:
            oldest = next(iter(self._exchanges))
            del self._exchanges[oldest]
            oldest.cancel()
        try:
            await asyncio.wait((exchange,), timeout=EXCHANGE_SECONDS)
        finally:
            exchange.cancel()
            self._exchanges.pop(exchange, None)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and wait until the client has received the answer."""
        writer.transport.set_write_buffer_limits(0)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                answer = _answer("431 Request Header Fields Too Large")
            else:
                answer = self._reply(head)
            writer.write(answer)
            await writer.drain()
            writer.write_eof()
            await reader.read(1)  # wait for the client's close: an earlier abort may discard the page

    def _reply(self, head: bytes) -> bytes:
        """Return the answer to the head of a request."""
        method, *rest = head.split(b"\r\n")[0].split(b" ")
        if len(rest) != 2 or not rest[1].startswith(b"HTTP/1."):
            return _answer("400 Bad Request")
        if method != b"GET":
            return _answer("405 Method Not Allowed", ("Allow", "GET"))
        if not _PAGE.match(rest[0]):  # a probe of /health must not succeed here
            return _answer("404 Not Found", body=NOT_FOUND)
        try:
            body = self._page().encode()
        except Exception as error:
            if self._broken != type(error).__name__:
                self._broken = type(error).__name__
                logs.bug(log, "no metrics page could be made", error)
            return _answer("500 Internal Server Error")
        self._broken = ""
        return _answer("200 OK", ("Content-Type", CONTENT_TYPE), body=body)


def _listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of `host` that this machine has. Raises as `MetricsServer` does."""
    for _ in range(MAX_FREE_PORTS - 1 if port == 0 else 0):
        try:
            return _listen_on(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _listen_on(host, port)


def _listen_on(host: str, port: int) -> list[socket.socket]:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, _, _, _, address in addresses:
            if listeners:
                address = address[0], listeners[0].getsockname()[1], *address[2:]
            try:
                listeners.append(_bound(family, address))
            except OSError as error:  # localhost may name an address of IPv6 that this machine lacks
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error
        if absent and not listeners:
            raise absent
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _bound(family: int, address: Any) -> socket.socket:
    """Return a listening socket. Raises OSError."""
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _answer(status: str, *headers: tuple[str, str], body: bytes = b"") -> bytes:
    fields = [*headers, ("Content-Length", str(len(body))), ("Connection", "close")]
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body
