"""Effect on 30 clients of one client that reads nothing and one that reads a byte a second.

    python bench/serving/slow_reader.py MODEL [--others 30] [--seconds 15] [--rounds 3] [--json FILE] [-- FLAGS]

In turn: the others alone, and the others beside the two slow readers, in a closed loop. The others begin once the two
are paused; --max-buffered-tokens is 128, so that this is soon. Exit code 1 if one of these is missed:

    gap between tokens   99th percentile of the others beside the two: within the range of the rounds without them,
                         widened by that range's width, since a few rounds say little about the spread
    memory               resident memory of the front end grows by at most the buffers of two streams more than without
                         them. It keeps ended streams for `resume_seconds`, and grows for that long in both cases

The two are raw HTTP/2 with a window of 1 KiB and small socket buffers. The client that reads nothing does not
answer pings. The server would close its connection after about 50 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from npuserve.cli.bench import report as bench_report
from npuserve.cli.bench.load_generator import Load, Outcome
from npuserve.cli.bench.workload import Prompts, TimedRequest
from npuserve.v1 import generate_pb2 as pb

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import Serving, arguments, report, serving

METHOD = "/npuserve.v1.InferenceService/StreamGenerate"
GROWTH = 4.0
"""Allowed growth of the front end's resident memory, in MiB."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(fields: dict[str, str]) -> bytes:
    """Return a header block of literal fields without indexing and Huffman codes (RFC 7541, section 6.2.2)."""
    return b"".join(
        b"\x00" + b"".join(bytes([len(part)]) + part.encode() for part in field) for field in fields.items())


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            raise SystemExit("the server is not as it should be")
        time.sleep(0.1)


def raw_call(target: str, ask: pb.GenerateRequest) -> socket.socket:
    """Return a connection on which one call was sent and nothing was read."""
    host, _, port = target.rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    body = ask.SerializeToString()
    opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, 1024)) + frame(4, 1, 0, b"")
    fields = {":method": "POST", ":scheme": "http", ":path": METHOD, ":authority": target, "te": "trailers",
              "content-type": "application/grpc"}
    asked = frame(1, 4, 1, headers(fields)) + frame(0, 1, 1, b"\x00" + struct.pack(">I", len(body)) + body)
    connection.sendall(opening + asked)
    return connection


@contextlib.contextmanager
def slow_readers(server: Serving, tokens: int) -> Iterator[None]:
    """Run the two slow readers while the block runs."""
    ask = pb.GenerateRequest(text="Once upon a time")
    ask.stopping.max_tokens, ask.stopping.ignore_eos = tokens, True
    stalled, trickling = (raw_call(server.target, ask) for _ in range(2))
    stop = threading.Event()

    def read() -> None:
        while not stop.wait(1):
            trickling.recv(1)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        wait_until(lambda: server.metric("requests_paused") == 2)
        yield
    finally:
        stop.set()
        reading.join()
        stalled.close()
        trickling.close()


async def others(server: Serving, count: int, seconds: float) -> list[Outcome]:
    load = Load(server.target, 4, 0.0, 1)
    info = await load.model_info()
    requests = [TimedRequest(0.0, 32 + number % 32, 64 + number % 64) for number in range(100_000)]
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    await load.run(requests, Prompts(info.vocabulary_size, info.eos_token_ids, 1), stop, count)
    await load.close()
    return load.outcomes


def window(server: Serving, args: argparse.Namespace, slow: bool) -> dict[str, Any]:
    before = server.rss()
    with slow_readers(server, args.tokens) if slow else contextlib.nullcontext():
        outcomes = asyncio.run(others(server, args.others, args.seconds))
        paused, buffered = server.metric("requests_paused"), server.metric("stream_buffered_tokens")
        after = server.rss()
    wait_until(lambda: not server.metric("requests_running") + server.metric("requests_paused"))
    failed = sum(not o.ok and o.code != "INTERRUPTED" for o in outcomes)
    gaps = sorted(1000 * gap for o in outcomes for gap in bench_report.inter_token(o))
    return {
        "slow_readers": 2 * slow, "tokens": len(gaps), "failed": failed, "paused": paused, "buffered": buffered,
        "itl_ms": {f"p{p}": round(gaps[int(p / 100 * (len(gaps) - 1))], 3) for p in (50, 90, 99)},
        "frontend_growth_mib": round(after["frontend 0"] - before["frontend 0"], 2),
    }


def measure(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    with serving(args.model, ["--max-num-seqs", "64", "--max-buffered-tokens", "128", *flags]) as server:
        window(server, args, slow=True)  # warms up memory and caches
        for _ in range(args.rounds):
            for slow in (False, True):
                rounds.append(window(server, args, slow))
                print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
        rounds.append(window(server, args, False))
    wrong: list[str] = []
    spread: dict[str, Any] = {}
    for point in ("p50", "p90", "p99"):
        alone, beside = ([r["itl_ms"][point] for r in rounds if r["slow_readers"] == slow] for slow in (0, 2))
        spread[point] = {"alone": [min(alone), max(alone)], "beside": [min(beside), max(beside)]}
        if point == "p99" and max(beside) > 2 * max(alone) - min(alone):
            wrong.append(f"p99 of the others is {max(beside)} ms, {min(alone)} to {max(alone)} without the slow")
    usual = max(r["frontend_growth_mib"] for r in rounds if not r["slow_readers"])
    for found in rounds:
        if found["failed"]:
            wrong.append(f"{found['failed']} of the others failed")
        if found["frontend_growth_mib"] > max(usual, 0) + GROWTH:
            wrong.append(f"the front end grew by {found['frontend_growth_mib']} MiB, {usual} without the slow")
        if found["paused"] != found["slow_readers"]:
            wrong.append(f"{found['paused']:g} of {found['slow_readers']} were paused in the end")
    return {"itl_ms": spread, "wrong": wrong, "rounds": rounds}


def main() -> int:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("model", help="model whose context is longer than --tokens")
    parser.add_argument("--others", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15, help="length of half a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a slow reader (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, flags = arguments(parser)
    figures = measure(args, flags)
    report(figures, args.json)
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
