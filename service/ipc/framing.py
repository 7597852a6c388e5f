"""Splitting of the socket's byte stream into messages. Each has its length before it, in LENGTH_BYTES."""

from __future__ import annotations

LENGTH_BYTES = 4


class Splitter:
    """Decoder that splits the socket's byte stream into messages. It buffers an incomplete message."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Append `data` and return the completed messages, without their lengths."""
        self._data += data
        found, start = [], 0
        while len(self._data) >= (body := start + LENGTH_BYTES):
            end = body + int.from_bytes(self._data[start:body], "little")
            if end > len(self._data):
                break
            found.append(bytes(self._data[body:end]))
            start = end
        del self._data[:start]
        return found
