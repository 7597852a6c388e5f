"""Bad requests, health probes and counts of open files, which soak.py and attacks.py run beside their load."""

from __future__ import annotations

import asyncio
import math
import os
import random
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.serving.server import children
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import model_pb2

INVALID, NOT_FOUND, NO_TEMPLATE, TOO_LARGE = (
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED)
ALLOWED = {
    "model": (NOT_FOUND,), "temperature": (INVALID,), "long ids": (INVALID,), "long text": (INVALID,),
    "large message": (TOO_LARGE,), "escaped surrogate": (INVALID, NO_TEMPLATE), "surrogate": (INVALID,),
    "invalid UTF-8": (INVALID,), "malformed message": (INVALID,),
}
"""Kind of bad request -> the statuses that the server may return."""
STREAM_GENERATE = "/npuserve.v1.InferenceService/StreamGenerate"
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Statuses of calls that a killed front end or engine cut off."""
PROBE_SECONDS = 0.1
PROBE_TIMEOUT = 5.0
QUIET_SECONDS = 5.0
"""Health probes in this time after the kill of a front end do not count."""
COUNT_SECONDS = 5.0


class CompressedCalls:
    """HTTP/2 connection that sends one call after the other with an already compressed message.

    A gRPC client would compress the message again for each call. metadata: sent with each call.
    """

    def __init__(self, target: str, path: str, data: bytes, metadata: Iterable[tuple[str, str]] = ()):
        self._target = target
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", target), ("te", "trailers"),
                  ("content-type", "application/grpc"), ("grpc-encoding", "gzip"), *metadata]
        self._headers = b"".join(b"\0" + b"".join(bytes([len(part)]) + part.encode() for part in f) for f in fields)
        self._body = b"\1" + struct.pack(">I", len(data)) + data
        self._is_held = False
        self._stream = -1
        self._initial = self._connection = 65535

    async def open(self) -> None:
        host, _, port = self._target.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._frame(4, 0, 0))
        while (await self._read())[0] != 4:
            pass

    def close(self) -> None:
        self._writer.close()

    def hold(self, data: bytes) -> None:
        """Let further calls send this message, and one byte less than they announce."""
        self._body = b"\0" + struct.pack(">I", len(data) + 1) + data
        self._is_held = True

    async def call(self) -> str:
        """Send the message as far as the server takes it, and return the status."""
        self._stream += 2
        self._writer.write(self._frame(1, 4, self._stream, self._headers))
        window, at = self._initial, 0
        while True:
            size = min(window, self._connection, 16384, len(self._body) - at)
            if size > 0:
                is_last = at + size == len(self._body) and not self._is_held
                self._writer.write(
                    self._frame(0, is_last, self._stream, self._body[at : at + size]))
                window, self._connection, at = window - size, self._connection - size, at + size
                continue
            kind, flags, stream, payload = await self._read()
            if kind == 8 and stream == self._stream:
                window += int.from_bytes(payload, "big")
            elif kind == 1 and flags & 1 and stream == self._stream:  # trailing headers
                if at < len(self._body) or self._is_held:
                    self._writer.write(self._frame(3, 0, self._stream, bytes(4)))
                return trailing_status(payload)
            elif kind in (3, 7) and stream in (0, self._stream):
                return "RESET"

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    async def _read(self) -> tuple[int, int, int, bytes]:
        """Return a frame as (kind, flags, stream, payload); reply to SETTINGS and PING."""
        head = await self._reader.readexactly(9)
        payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        if kind == 4 and not flags & 1:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                self._initial = value if name == 4 else self._initial
            self._writer.write(self._frame(4, 1, 0))
        elif kind == 6 and not flags & 1:
            self._writer.write(self._frame(6, 1, 0, payload))
        elif kind == 8 and not stream:
            self._connection += int.from_bytes(payload, "big")
        return kind, flags, stream, payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""HTTP/2 preface and empty SETTINGS."""
HEADERS, CONTINUATION, END_HEADERS = 1, 9, 4
EMPTY_HEADER = b"\x8f"
"""HPACK's reference to an empty header of the static table."""


def header_call(target: str, stream: int, references: int, is_endless: bool = False) -> bytes:
    """Return the frames of a call with `references` empty headers, each of one byte, after those of any call.

    is_endless: the headers never end.
    """
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/npuserve.v1.InferenceService/Generate"),
              (":authority", target), ("te", "trailers"), ("content-type", "application/grpc")]
    block = b"".join(b"\0" + b"".join(bytes([len(part)]) + part.encode() for part in field) for field in fields)
    block += EMPTY_HEADER * references
    frames = []
    for at in range(0, len(block), 16_000):
        part = block[at : at + 16_000]
        is_last = at + len(part) == len(block) and not is_endless
        head = bytes((CONTINUATION if at else HEADERS, END_HEADERS if is_last else 0))
        frames.append(struct.pack(">I", len(part))[1:] + head + struct.pack(">I", stream) + part)
    return b"".join(frames)


async def send_headers(
    target: str, until: float, calls: int = 400, references: int = 16_000, is_endless: bool = False
) -> Counter[str]:
    """Send calls with many headers on one connection after the other, without acknowledging the server's SETTINGS.

    calls: calls of a connection.
    """
    host, _, port = target.rpartition(":")
    ends: Counter[str] = Counter()

    async def attack_once() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(PREFACE)
            for number in range(1 if is_endless else calls):
                writer.write(header_call(target, 2 * number + 1, references, is_endless))
                await writer.drain()
                ends["SENT"] += 1
            while await reader.read(1 << 16):
                pass
            ends["CLOSED"] += 1
        finally:
            writer.transport.abort()

    while time.monotonic() < until:
        try:
            await asyncio.wait_for(attack_once(), until - time.monotonic())
        except ConnectionError:
            ends["CLOSED"] += 1
        except asyncio.TimeoutError:
            ends["HELD"] += 1
    return ends


async def hold_idle(target: str, until: float) -> Counter[str]:
    """Keep a connection open that sends nothing; replace it when the server closes it."""
    host, _, port = target.rpartition(":")
    ends: Counter[str] = Counter()
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(0.1)
            continue
        try:
            await asyncio.wait_for(reader.read(), until - time.monotonic())
            ends["CLOSED"] += 1
        except ConnectionError:
            ends["CLOSED"] += 1
        except asyncio.TimeoutError:
            ends["HELD"] += 1
        finally:
            writer.transport.abort()
        await asyncio.sleep(0.1)
    return ends


def trailing_status(block: bytes) -> str:
    """Return the name of the gRPC status in a block of headers; "ENDED" if it is only in HPACK's dynamic table."""
    at = block.find(b"grpc-status")
    digits = block[at + 12 : at + 12 + block[at + 11]] if at >= 0 else b""
    codes = {str(code.value[0]).encode(): code.name for code in grpc.StatusCode}
    return codes.get(digits, "ENDED")


def bad_request(kind: str, info: model_pb2.GetModelInfoResponse, chance: random.Random) -> bytes:
    """Return a serialized request of one of the kinds in ALLOWED."""
    ask = pb.GenerateRequest(text="PLACE")
    if kind == "model":
        ask.model = f"typo-{chance.random()}"
    elif kind == "temperature":
        ask.sampling.temperature = -chance.random()
    elif kind == "long ids":
        ask.token_ids.ids.extend(chance.choices(range(info.vocabulary_size), k=info.max_model_len + 1))
    elif kind == "long text":
        ask.text = "x" * (chance.randrange(40, 200) * info.max_model_len)
    elif kind == "large message":
        ask.text = "x" * (80 << 20)
    elif kind == "escaped surrogate":
        ask.chat.messages.add(role="user", content="x")
        ask.chat.tools.append('{"type": "function", "function": {"name": "\\ud800"}}')
    elif kind == "surrogate":
        ask.chat.messages.add(role="user", content="x")
        ask.chat.template_args["x"] = "PLACE"
    # Invalid UTF-8, as sent by client libraries that do not check it.
    broken = b"\xed\xa0\x80xx" if kind == "surrogate" else b"caf\xe9x"
    data = ask.SerializeToString()
    if kind == "malformed message":
        return data + b"\xff"
    return data.replace(b"PLACE", broken) if kind in ("surrogate", "invalid UTF-8") else data


class BadRequests:
    """Client that sends bad requests and compares their statuses.

    metadata: sent with each request, such as an API key.
    ends: count by kind and status.
    """

    def __init__(
        self, target: str, info: model_pb2.GetModelInfoResponse, rate: float, seed: int,
        metadata: Sequence[tuple[str, str]] = (),
    ):
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._target = target
        self._info = info
        self._rate = rate
        self._chance = random.Random(seed)
        self._metadata = metadata

    async def run(self, seconds: float) -> None:
        """Send `rate` bad requests a second; a large message is rare."""
        until = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(self._target) as channel:
            send = channel.unary_stream(STREAM_GENERATE)
            while time.monotonic() < until:
                kind = self._chance.choice(list(ALLOWED))
                if kind == "large message" and self._chance.random() < 0.9:
                    continue
                code = await self._one(send, bad_request(kind, self._info, self._chance))
                self.ends[f"{kind}: {code.name}"] += 1
                if code not in (*ALLOWED[kind], *PASSING):
                    self.wrong.append(f"bad request ({kind}): {code.name}")
                await asyncio.sleep(self._chance.expovariate(self._rate))

    async def _one(self, send: Callable[..., grpc.aio.UnaryStreamCall[bytes, bytes]], data: bytes) -> grpc.StatusCode:
        call = send(data, timeout=60, metadata=self._metadata)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await call.code()


class HealthProbe:
    """Client that checks the server's health ten times a second on one connection."""

    def __init__(self, target: str):
        self.samples: list[tuple[float, float]] = []  # (time.monotonic(), seconds; infinity for a failed check)
        self._target = target

    async def run(self) -> None:
        async with grpc.aio.insecure_channel(self._target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                sent = time.monotonic()
                try:
                    await stub.Check(health_pb2.HealthCheckRequest(service="npuserve.liveness"), timeout=PROBE_TIMEOUT)
                    took = time.monotonic() - sent
                except grpc.aio.AioRpcError:
                    took = math.inf
                self.samples.append((sent, took))
                await asyncio.sleep(PROBE_SECONDS)

    def milliseconds(self, excluded: Sequence[float]) -> dict[str, float]:
        """Return percentiles in ms, without probes within QUIET_SECONDS after one of the times `excluded`."""
        counted = sorted(
            took for sent, took in self.samples
            if not any(0 <= sent + min(took, PROBE_TIMEOUT) - moment < QUIET_SECONDS + took for moment in excluded))
        if not counted:
            return {"probes": 0}
        return {"probes": len(counted), "excluded": len(self.samples) - len(counted), **{
            f"p{share}": round(counted[min(len(counted) - 1, len(counted) * share // 100)] * 1000, 1)
            for share in (50, 90, 99)}}


class FileCount:
    """Counts of the files in the server's private folder, and of the open files of its processes."""

    def __init__(self, supervisor: int):
        self._supervisor = supervisor
        self._counts: defaultdict[str, list[int]] = defaultdict(list)

    async def run(self) -> None:
        while True:
            living = {self._supervisor: "supervisor", **children(self._supervisor)}
            totals: Counter[str] = Counter()
            for pid, kind in living.items():
                totals[f"open in {kind}"] += entries(Path(f"/proc/{pid}/fd"))
            folder = next((found for pid in living if (found := metrics_folder(pid))), None)
            totals["files in the folder"] = entries(folder) if folder else 0
            for name, number in totals.items():
                self._counts[name].append(number)
            await asyncio.sleep(COUNT_SECONDS)

    def largest(self) -> dict[str, list[int]]:
        """Return the largest counts in the first and in the last third of the run."""
        return {name: [max(counts[: len(counts) // 3 + 1]), max(counts[-(len(counts) // 3 + 1) :])]
                for name, counts in self._counts.items()}


def entries(folder: Path) -> int:
    """Return the number of entries of a folder, 0 if it cannot be read."""
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def metrics_folder(pid: int) -> Path | None:
    """Return the folder of a process's metric files, from its environment."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    name = b"PROMETHEUS_MULTIPROC_DIR="
    return next((Path(os.fsdecode(one.removeprefix(name))) for one in variables if one.startswith(name)), None)
