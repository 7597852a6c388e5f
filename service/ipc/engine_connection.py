"""Front end's end of one connection to the engine: an asyncio protocol that sends and receives messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from npuserve.service.ipc import framing, messages

READ_BYTES = 1 << 16


class EngineConnection(asyncio.BufferedProtocol):
    """Protocol that passes each received message, with itself, to `on_message`.

    It reads into one buffer. Otherwise asyncio would allocate 256 KiB for each read, which glibc maps and unmaps
    (LARGE_BLOCK_BYTES in frontend/process.py).

    ended: done when the connection has ended; holds the error if `on_message` raised one.
    """

    def __init__(self, on_message: Callable[[bytes, EngineConnection], None]):
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._received = framing.Splitter()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._writable = asyncio.Event()
        self._writable.set()
        self._deferred: bytearray | None = None  # encoded messages of `send`; None if it writes them at once

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that did not fit the kernel's buffer, or are deferred."""
        return self._transport.get_write_buffer_size() + len(self._deferred or b"")

    def write(self, message: messages.ToEngine) -> None:
        """Write a message without waiting."""
        self._transport.write(messages.encode(message))

    def send(self, message: messages.ToEngine) -> None:
        """Write a message without waiting; after `defer` with `write_deferred`."""
        data = messages.encode(message)
        if self._deferred is None:
            self._transport.write(data)
        else:
            self._deferred += data

    def defer(self) -> None:
        """Defer the messages of `send`."""
        self._deferred = bytearray()

    def write_deferred(self) -> None:
        """Write the deferred messages. Defer no further ones."""
        self._transport.write(self._deferred or b"")
        self._deferred = None

    async def drained(self) -> None:
        """Yield to other tasks, and wait until the engine has read most of what was written."""
        await asyncio.sleep(0)
        await self._writable.wait()

    def failed(self, task: asyncio.Task[None]) -> None:
        """End the connection if a task that uses it failed."""
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def get_buffer(self, size_hint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        try:
            for message in self._received.feed(self._buffer[:size]):
                self._on_message(message, self)
        except Exception as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._transport.abort()
        if not self.ended.done():
            self.ended.set_exception(error)
