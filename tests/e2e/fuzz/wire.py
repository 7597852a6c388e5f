"""Raw bytes sent to the port: invalid HTTP/2, inconsistent frames, calls with malformed protobuf."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
KEY = "npuserve-fuzz"
"""API key of an administrator of the server under test."""


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind & 255, flags & 255)) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Return HPACK's literal without indexing and Huffman code (RFC 7541, 6.2.2), of at most 16 kB each."""
    return b"\0" + _length(name) + _length(value)


def _length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes((len(text),)) + text
    rest, made = len(text) - 127, bytearray([127])
    while rest >= 128:
        made.append(rest % 128 + 128)
        rest //= 128
    return bytes(made) + bytes((rest,)) + text


class Noise:
    """Generator of data to send, from a seed. methods: full names of the RPCs. bodies: valid messages of any RPC."""

    def __init__(self, seed: int, methods: list[str], bodies: list[bytes]):
        self._random = random.Random(seed)
        self._methods = methods
        self._bodies = bodies

    def connection(self) -> list[bytes]:
        """Return the pieces that one connection writes; the first one may be a valid preface."""
        chance = self._random.random()
        if chance < 0.1:
            return [self._bytes(300) for _ in range(3)]
        if chance < 0.2:
            return [PREFACE, *(self._bytes(300) for _ in range(4))]
        made = [PREFACE + frame(SETTINGS, payload=self._settings() if self._random.random() < 0.2 else b"")]
        for number in range(self._random.randint(1, 40)):
            stream = 2 * number + 1
            made.append(self._call(stream) if self._random.random() < 0.7 else self._frame(stream))
        return made

    def body(self) -> bytes:
        """Return the bytes of a valid message with parts changed, cut, doubled or replaced."""
        pick, data = self._random.random(), bytearray(self._random.choice(self._bodies))
        if pick < 0.1:
            return self._bytes(200)
        for _ in range(self._random.randint(1, 6)):
            at = self._random.randrange(len(data) + 1)
            chance = self._random.random()
            if chance < 0.5 and at < len(data):
                data[at] ^= 1 << self._random.randrange(8)
            elif chance < 0.65:
                del data[at : at + self._random.randint(1, 8)]
            elif chance < 0.8:
                data[at:at] = self._bytes(8)
            else:
                data += self._random.choice(self._bodies)
        return bytes(data[:4000])

    def _call(self, stream: int) -> bytes:
        """Return an almost valid call."""
        body = self.body()
        length = len(body) if self._random.random() < 0.8 else self._random.choice([0, 1, 2**31, 2**32 - 1])
        compressed = self._random.choice([0, 0, 0, 0, 1, 2, 255])
        message = bytes((compressed,)) + struct.pack(">I", length) + body
        flags = END_HEADERS if self._random.random() < 0.95 else 0
        made = frame(HEADERS, flags, stream, b"".join(self._headers()))
        cut = self._random.randrange(len(message) + 1) if self._random.random() < 0.2 else len(message)
        made += frame(DATA, self._random.choice([END_STREAM, END_STREAM, 0]), stream, message[:cut])
        if self._random.random() < 0.3:
            made += frame(RST_STREAM, 0, stream, struct.pack(">I", self._random.choice([0, 1, 8, 2**32 - 1])))
        return made

    def _headers(self) -> list[bytes]:
        pick = self._random.choice
        fields = [
            (b":method", pick([b"POST"] * 9 + [b"GET", b"", b"\xff"])), (b":scheme", pick([b"http"] * 9 + [b"ftp"])),
            (b":path", pick(self._methods).encode() if self._random.random() < 0.9 else self._bytes(40)),
            (b":authority", b"x"), (b"te", b"trailers"), (b"authorization", f"Bearer {KEY}".encode()),
            (b"content-type", pick([b"application/grpc"] * 9 + [b"text/html", b"application/grpc+json", b""])),
        ]
        extra = [
            (b"grpc-timeout", pick([b"1S", b"0n", b"99999999H", b"-1S", b"S", b"1e9S", b"1" * 40, b"\xff"])),
            (b"grpc-encoding", pick([b"gzip", b"identity", b"nonsense"])), (b"grpc-accept-encoding", self._bytes(20)),
            (b"authorization", b"Bearer " + self._bytes(60)), (self._bytes(20), self._bytes(200)),
            (b"x-long", b"a" * self._random.choice([100, 5000, 9000])), (b":path", b"/"), (b"grpc-trace-bin", b"!!!"),
            (b"Upper", b"case"), (b"", b""), (b"traceparent", pick([b"00-0-0-00", self._bytes(60)])),
        ]
        fields += self._random.sample(extra, self._random.choice([0, 0, 0, 1, 2]))
        if self._random.random() < 0.1:
            del fields[self._random.randrange(len(fields))]
        return [header(name, value) for name, value in fields] + (
            [self._bytes(30)] if self._random.random() < 0.05 else [])

    def _frame(self, stream: int) -> bytes:
        payload = self._bytes(60)
        made = bytearray(frame(
            self._random.choice([*range(10), 99]), self._random.randrange(256),
            self._random.choice([0, 1, stream, 2, 2**31 - 1, 2**32 - 1]), payload))
        if self._random.random() < 0.2:
            made[:3] = self._bytes(3).ljust(3, b"\0")  # a wrong length
        return bytes(made)

    def _settings(self) -> bytes:
        values = [0, 1, 5, 16384, 65535, 2**31 - 1, 2**31, 2**32 - 1]
        return b"".join(struct.pack(">HI", self._random.randrange(9), self._random.choice(values)) for _ in range(4))

    def _bytes(self, most: int) -> bytes:
        return self._random.randbytes(self._random.randint(0, most))


def call(method: bytes, path: bytes) -> bytes:
    """Return the headers of a call, as one frame of stream 1."""
    fields = [(b":method", method), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"),
              (b"te", b"trailers"), (b"content-type", b"application/grpc")]
    return frame(HEADERS, END_HEADERS, 1, b"".join(header(name, value) for name, value in fields))


def header_bomb(stream: int, references: int) -> bytes:
    """Return a call whose HPACK holds `references` bytes, each of which stands for an empty header of the static
    table. Frames above 16 KiB are continued.
    """
    size, empty_header = 16_000, b"\x8f"
    beginning = call(b"POST", b"/npuserve.v1.InferenceService/Generate")
    block = beginning[9:] + empty_header * references
    parts = [block[at : at + size] for at in range(0, len(block), size)]
    kinds = [HEADERS, *[CONTINUATION] * (len(parts) - 1)]
    flags = [*[0] * (len(parts) - 1), END_HEADERS]
    return b"".join(frame(*part[:2], stream, part[2]) for part in zip(kinds, flags, parts, strict=True))


def send(port: int, pieces: list[bytes], linger: bool) -> None:
    """Write the pieces on one connection and close it; linger: read until the server closes, else reset."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.settimeout(0.05 if linger else 1)
        for piece in pieces:
            connection.sendall(piece)
        if linger:
            while connection.recv(65536):
                pass
        else:  # a reset instead of a regular close
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
