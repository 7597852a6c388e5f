"""Base of the socket's messages, and splitting of its byte stream into them. Each has its length before it."""

from __future__ import annotations

import msgspec

LENGTH_BYTES = 4


class Wire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: a msgpack array that begins with the name of its class."""


class Splitter:
    """Decoder that splits the socket's byte stream into messages. It buffers an incomplete message."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Append `data` and return the completed messages, without their lengths."""
        self._data += data
        complete = []
        start = 0
        while len(self._data) >= (body := start + LENGTH_BYTES):
            end = body + int.from_bytes(self._data[start:body], "little")
            if end > len(self._data):
                break
            complete.append(bytes(self._data[body:end]))
            start = end
        del self._data[:start]
        return complete
