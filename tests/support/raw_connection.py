"""gRPC client that reads its connection only during a call, like gRPC 1.51 for C++."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct

from npuserve.service.rpc.address_block import SO_ATTACH_FILTER
from npuserve.v1 import generate_pb2 as pb
from tests.e2e.fuzz.wire import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, header

BINARY_METADATA = struct.pack(">HI", 0xFE03, 1)
"""HTTP/2 setting with which a gRPC client accepts binary metadata without base64."""


class RawConnection:
    """One HTTP/2 connection. `open` it, then make one call at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._stream = 1

    @classmethod
    async def open(cls, port: int) -> RawConnection:
        """Connect, and read until the server has sent its settings."""
        made = cls(*await asyncio.open_connection("127.0.0.1", port))
        made._writer.write(PREFACE + frame(SETTINGS, payload=BINARY_METADATA))
        while (await made._frame())[0] != SETTINGS:
            pass
        return made

    async def generate(self, request: pb.GenerateRequest, *metadata: tuple[bytes, bytes]) -> bytes:
        """Call Generate; return the encoded trailers. HPACK leaves the strings of a connection's first call readable.

        metadata: names and values.

        Raises IncompleteReadError if the server closed the connection.
        """
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/npuserve.v1.InferenceService/Generate"),
                  (b":authority", b"x"), (b"te", b"trailers"), (b"content-type", b"application/grpc"), *metadata]
        stream, body = self._stream, request.SerializeToString()
        self._stream += 2
        self._writer.write(
            frame(HEADERS, END_HEADERS, stream, b"".join(header(name, value) for name, value in fields))
            + frame(DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(body)) + body))
        while True:
            kind, flags, of, payload = await self._frame()
            if kind == HEADERS and flags & END_STREAM and of == stream:
                return payload

    async def wait_until_closed(self) -> None:
        """Read until the server closes the connection."""
        while await self._reader.read(1 << 16):
            pass

    def vanish(self) -> None:
        """Drop all packets that arrive from now on, like a machine that is down: the server's are not acknowledged."""
        code = struct.pack("@HBBI", 0x06, 0, 0, 0)  # BPF: return 0
        buffer = ctypes.create_string_buffer(code, len(code))
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(buffer)))

    def close(self) -> None:
        self._writer.close()

    async def _frame(self) -> tuple[int, int, int, bytes]:
        """Read one frame; return (kind, flags, stream, payload)."""
        head = await self._reader.readexactly(9)
        payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big"), payload
