"""The engine's end of the local socket: front ends connect, and each is known by a name as long as it stays."""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import socket
from pathlib import Path

from npuserve.service.ipc import messages
from npuserve.service.ipc.messages import ToEngine, ToFrontend

log = logging.getLogger(__name__)

MAX_UNSENT = 64 << 20
"""Bytes that a front end may leave unread before it counts as lost; the system's own buffer comes on top."""
READ_BYTES = 1 << 16


class _Frontend:
    """unsent: bytes for which the system's buffer has no room; waits: the selector looks out for it."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.received = messages.Splitter()
        self.unsent = bytearray()
        self.waits = False


class EngineSocket:
    """Receives from all front ends, sends to one, never waits for one. Not thread-safe: for the engine loop alone."""

    def __init__(self, address: str):
        """Bind `address`, a path; that of an engine that died is taken over. Raises OSError where it cannot be had."""
        Path(address).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._frontends: dict[bytes, _Frontend] = {}
        self._numbers = itertools.count(1)

    def receive(self, timeout: float) -> list[tuple[bytes, ToEngine | None]]:
        """What there is, after waiting at most `timeout` seconds for something: (front end, message), None being the
        last of one that is gone."""
        found: list[tuple[bytes, ToEngine | None]] = []
        for key, events in self._selector.select(timeout):
            name: bytes | None = key.data
            if name is None:
                self._accept()
                continue
            if events & selectors.EVENT_READ:
                found += [(name, messages.decode_to_engine(data)) for data in self._read(name)]
                if name not in self._frontends:
                    found.append((name, None))
            if events & selectors.EVENT_WRITE and (frontend := self._frontends.get(name)):
                self._write(name, frontend)
        return found

    def has_input(self) -> bool:
        """Whether `receive` would have something to do at once."""
        return bool(self._selector.select(0))

    def send(self, frontend: bytes, message: ToFrontend) -> bool:
        """False if that front end is gone, or has left too much unread."""
        known = self._frontends.get(frontend)
        if known is None:
            return False
        known.unsent += messages.encode(message)
        return self._write(frontend, known)

    def close(self) -> None:
        for name in list(self._frontends):
            self._lose(name, "the engine leaves")
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        name = b"%d" % next(self._numbers)
        self._frontends[name] = _Frontend(connection)
        self._selector.register(connection, selectors.EVENT_READ, name)

    def _read(self, name: bytes) -> list[bytes]:
        frontend = self._frontends[name]
        try:
            data = frontend.socket.recv(READ_BYTES)
        except OSError as error:
            self._lose(name, error)
            return []
        if not data:
            self._lose(name, "it has closed the connection")
        return frontend.received.feed(data)

    def _write(self, name: bytes, frontend: _Frontend) -> bool:
        """Send what there is room for, and the rest when there is more. False if the front end is lost."""
        try:
            with contextlib.suppress(BlockingIOError):
                del frontend.unsent[: frontend.socket.send(frontend.unsent)]
        except OSError as error:
            self._lose(name, error)
            return False
        if len(frontend.unsent) > MAX_UNSENT:
            self._lose(name, f"it left {len(frontend.unsent)} bytes unread")
            return False
        if bool(frontend.unsent) != frontend.waits:
            frontend.waits = not frontend.waits
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if frontend.waits else 0)
            self._selector.modify(frontend.socket, events, name)
        return True

    def _lose(self, name: bytes, why: object) -> None:
        log.info("front end %s is lost: %s", name.decode(), why)
        connection = self._frontends.pop(name).socket
        self._selector.unregister(connection)
        connection.close()
