"""The engine's end of the local socket: a ROUTER that knows its front ends by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import zmq

from npuserve.service import messages
from npuserve.service.messages import ToEngine, ToFrontend

log = logging.getLogger(__name__)

MAX_UNREAD = 20_000
"""Messages that a front end may leave unread before it counts as lost."""


class EngineSocket:
    """Receives from all front ends, sends to one. Not thread-safe: the engine loop alone uses it."""

    def __init__(self, address: str):
        """Bind `address`, such as ipc:///run/x/engine. Raises zmq.ZMQError if it is taken."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNREAD)
        self._socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.bind(address)

    def receive(self, timeout: float) -> Iterator[tuple[bytes, ToEngine]]:
        """All messages that are there, after waiting at most `timeout` seconds for the first."""
        if not self._socket.poll(int(timeout * 1000)):
            return
        while True:
            try:
                name, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield name, messages.decode_to_engine(data)

    def send(self, frontend: bytes, message: ToFrontend) -> bool:
        """False if that front end is gone, or has left too much unread."""
        try:
            self._socket.send_multipart((frontend, messages.encode(message)), zmq.NOBLOCK)
            return True
        except zmq.ZMQError as error:
            log.info("front end %s is lost: %s", frontend.decode(errors="replace"), error)
            return False

    def close(self) -> None:
        self._socket.close()
        self._context.term()
