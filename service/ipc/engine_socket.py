"""Engine's end of the local socket. Each connected front end has a name while its connection lasts."""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import socket
import time
from pathlib import Path

from npuserve.service.ipc import framing, messages
from npuserve.service.ipc.messages import ToEngine, ToFrontend

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 64 << 20
"""Maximum bytes that a front end may leave unread, besides the kernel's buffer. Beyond it, it is disconnected."""
READ_BYTES = 1 << 16
ACCEPT_RETRY_SECONDS = 0.5
"""Pause after a connection that the system could not accept, such as for want of a descriptor. The listening socket
stays readable meanwhile, so that without a pause the engine would do nothing else."""


class _Frontend:
    """Connection of one front end.

    unsent: bytes that did not fit the kernel's buffer.
    waits_for_write: whether the selector waits until the socket is writable.
    """

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.received = framing.Splitter()
        self.unsent = bytearray()
        self.waits_for_write = False


class EngineSocket:
    """Non-blocking socket to all front ends. Not thread-safe, except `wake`: only the engine loop uses it."""

    def __init__(self, address: str):
        """Bind the path `address`, replacing the socket of a dead engine. Raises OSError."""
        Path(address).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._retry_accept_at: float | None = None
        self._frontends: dict[bytes, _Frontend] = {}
        self._numbers = itertools.count(1)

    def receive(self, timeout: float) -> list[tuple[bytes, ToEngine | None]]:
        """Wait at most `timeout` seconds and return the received messages as (front end, message).

        None in place of a message means that the front end has disconnected; it is the last entry of that front end.
        """
        received: list[tuple[bytes, ToEngine | None]] = []
        for key, events in self._selector.select(self._until_accept_retry(timeout)):
            name: bytes | None = key.data
            if key.fileobj is self._woken:
                self._woken.recv(READ_BYTES)
                continue
            if name is None:
                self._accept()
                continue
            if events & selectors.EVENT_READ:
                received += [(name, messages.decode_to_engine(data)) for data in self._read(name)]
                if name not in self._frontends:
                    received.append((name, None))
            frontend = self._frontends.get(name)
            if events & selectors.EVENT_WRITE and frontend and not self._write(name, frontend):
                received.append((name, None))
        return received

    def wake(self) -> None:
        """End the wait of `receive`, or of the next one if none waits. Safe to call from any thread, also after
        `close`."""
        with contextlib.suppress(OSError):  # closed, or full of wakes that `receive` has not seen
            self._waker.send(b"w")

    def has_input(self) -> bool:
        """Return whether `receive` would have work to do without waiting."""
        return bool(self._selector.select(0))

    def send(self, frontend: bytes, message: ToFrontend) -> bool:
        """Send a message. Return False if the front end is disconnected, or is disconnected now because it reads too
        slowly.
        """
        known = self._frontends.get(frontend)
        if known is None:
            return False
        known.unsent += messages.encode(message)
        return self._write(frontend, known)

    def close(self) -> None:
        for name in list(self._frontends):
            self._disconnect(name, "the engine stops")
        self._selector.close()
        self._listener.close()
        self._waker.close()
        self._woken.close()

    def _until_accept_retry(self, timeout: float) -> float:
        """Wait for new connections again if their pause is over. Return `timeout`, at most until the pause is over."""
        if self._retry_accept_at is None:
            return timeout
        remaining = self._retry_accept_at - time.monotonic()
        if remaining > 0:
            return min(timeout, remaining)
        self._retry_accept_at = None
        self._selector.register(self._listener, selectors.EVENT_READ)
        return timeout

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the front end has died meanwhile
            return
        except OSError as error:  # EMFILE, ENFILE, ENOBUFS, ENOMEM
            log.warning("a front end waits, since its connection cannot be accepted: %s", error)
            self._selector.unregister(self._listener)
            self._retry_accept_at = time.monotonic() + ACCEPT_RETRY_SECONDS
            return
        connection.setblocking(False)
        name = b"%d" % next(self._numbers)
        self._frontends[name] = _Frontend(connection)
        self._selector.register(connection, selectors.EVENT_READ, name)

    def _read(self, name: bytes) -> list[bytes]:
        frontend = self._frontends[name]
        try:
            data = frontend.socket.recv(READ_BYTES)
        except OSError as error:
            self._disconnect(name, error)
            return []
        if not data:
            self._disconnect(name, "closed by the front end")
        return frontend.received.feed(data)

    def _write(self, name: bytes, frontend: _Frontend) -> bool:
        """Send what fits the kernel's buffer, and the rest once the socket is writable. Return False if the connection
        is lost.
        """
        try:
            with contextlib.suppress(BlockingIOError):
                del frontend.unsent[: frontend.socket.send(frontend.unsent)]
        except OSError as error:
            self._disconnect(name, error)
            return False
        if len(frontend.unsent) > MAX_UNSENT_BYTES:
            self._disconnect(name, f"{len(frontend.unsent)} bytes unread")
            return False
        if bool(frontend.unsent) != frontend.waits_for_write:
            frontend.waits_for_write = not frontend.waits_for_write
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if frontend.waits_for_write else 0)
            self._selector.modify(frontend.socket, events, name)
        return True

    def _disconnect(self, name: bytes, why: object) -> None:
        log.info("front end %s is disconnected: %s", name.decode(), why)
        connection = self._frontends.pop(name).socket
        self._selector.unregister(connection)
        connection.close()
