"""TCP proxy that makes its clients distant: a delay each way, and a rate for what each client sends."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection

CHUNK_BYTES = 16 << 10
MAX_QUEUED_SECONDS = 0.05
"""A sender whose bytes would queue longer at the link's rate is read no further."""


class DelayProxy:
    """Proxy on a free port of 127.0.0.1.

    target: host and port of the server.
    delay_seconds: delay of each byte, each way.
    bytes_per_second: rate of each connection's bytes to the server; 0: no limit.
    own_addresses: connect to the server from an address of 127.0.0.0/8 of each connection's own.
    port: port that the proxy listens on.
    """

    def __init__(
        self, target: tuple[str, int], delay_seconds: float, bytes_per_second: float = 0.0, own_addresses: bool = False
    ):
        self.port = 0
        self._target = target
        self._delay_seconds = delay_seconds
        self._bytes_per_second = bytes_per_second
        self._own_addresses = own_addresses
        self._connections = 0
        self._serving: set[asyncio.Task[None]] = set()
        self._client_writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Close all connections."""
        self._server.close()
        for writer in self._client_writers:
            writer.transport.abort()
        await asyncio.gather(*self._serving)

    async def _serve(self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._client_writers.add(client_writer)
        with contextlib.suppress(OSError):
            await self._connect(client_reader, client_writer)
        client_writer.transport.abort()
        self._client_writers.remove(client_writer)
        self._serving.remove(task)

    async def _connect(self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        """Connect to the server, and copy until one end closes."""
        self._connections += 1
        number = self._connections
        source = (f"127.1.{number // 250}.{number % 250 + 1}", 0) if self._own_addresses else None
        server_reader, server_writer = await asyncio.open_connection(*self._target, local_addr=source)
        copies = [
            asyncio.ensure_future(self._copy(client_reader, server_writer, self._bytes_per_second)),
            asyncio.ensure_future(self._copy(server_reader, client_writer, 0.0)),
        ]
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        for copy in copies:
            copy.cancel()
        await asyncio.wait(copies)
        server_writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_second: float) -> None:
        """Copy until one end closes. Each chunk leaves at the link's rate and arrives `delay_seconds` later."""
        loop = asyncio.get_running_loop()
        departure = time.monotonic()
        travelling: deque[bytes] = deque()  # timers of nearly the same time may fire in another order

        def arrive() -> None:
            writer.write(travelling.popleft())

        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES if bytes_per_second else CHUNK_BYTES * 8):
                now = time.monotonic()
                departure = max(departure, now) + (len(chunk) / bytes_per_second if bytes_per_second else 0.0)
                travelling.append(chunk)
                loop.call_later(departure - now + self._delay_seconds, arrive)
                if departure - now > MAX_QUEUED_SECONDS:
                    await asyncio.sleep(departure - now - MAX_QUEUED_SECONDS / 2)
            await asyncio.sleep(self._delay_seconds)  # the last chunk is on its way


@contextlib.asynccontextmanager
async def delay_proxy(
    target: tuple[str, int], delay_seconds: float, bytes_per_second: float = 0.0, own_addresses: bool = False
) -> AsyncIterator[int]:
    """Run a DelayProxy in this event loop; yield its port."""
    proxy = DelayProxy(target, delay_seconds, bytes_per_second, own_addresses)
    await proxy.start()
    try:
        yield proxy.port
    finally:
        await proxy.close()


def _run(
    target: tuple[str, int], delay_seconds: float, bytes_per_second: float, own_addresses: bool, pipe: Connection
) -> None:
    async def run() -> None:
        async with delay_proxy(target, delay_seconds, bytes_per_second, own_addresses) as port:
            pipe.send(port)
            with contextlib.suppress(EOFError):  # the other process ended
                await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


@contextlib.contextmanager
def delay_proxy_process(
    target: tuple[str, int], delay_seconds: float, bytes_per_second: float = 0.0, own_addresses: bool = False
) -> Iterator[int]:
    """Run a DelayProxy in a process of its own, so that its timing does not depend on the clients; yield its port."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    arguments = (target, delay_seconds, bytes_per_second, own_addresses, other)
    process = context.Process(target=_run, args=arguments, daemon=True)
    process.start()
    other.close()
    try:
        yield pipe.recv()
    finally:
        pipe.close()
        process.join(60)
        process.kill()
        process.join()
