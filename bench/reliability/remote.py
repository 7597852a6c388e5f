"""TCP proxy that delays all bytes, as between a server and distant clients."""

from __future__ import annotations

import asyncio
import contextlib
import time

CHUNK_BYTES = 1 << 16
MAX_CHUNKS = 64
"""Maximum number of delayed chunks of a direction. Beyond it the proxy does not read, so that the sender waits."""


class DelayProxy:
    """Proxy before `target` (host:port) that delays each direction by `seconds`. Use `target` after `start`."""

    def __init__(self, target: str, seconds: float):
        self.target = ""
        self._upstream = target
        self._seconds = seconds
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.target = f"{host}:{port}"

    async def close(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._upstream.rpartition(":")
        writers, directions = [writer], set[asyncio.Task[None]]()
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
            writers.append(upstream_writer)
            directions = {asyncio.create_task(self._forward(reader, upstream_writer)),
                          asyncio.create_task(self._forward(upstream_reader, writer))}
            # The end of one direction ends both: gRPC does not use half-closed connections.
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the server does not listen: the client's connection is closed
        finally:
            for direction in directions:
                direction.cancel()
            for each in writers:
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy bytes until one end closes its connection."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        writing = asyncio.create_task(self._write(chunks, writer))
        try:
            data = b"begin"
            while data and not writing.done():
                try:
                    data = await reader.read(CHUNK_BYTES)
                except OSError:
                    data = b""
                await chunks.put((time.monotonic() + self._seconds, data))
            await writing
        finally:
            writing.cancel()

    async def _write(self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        """Write each chunk when it is due. An empty chunk is the end."""
        with contextlib.suppress(OSError):
            while True:
                due, data = await chunks.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    return
                writer.write(data)
                await writer.drain()
