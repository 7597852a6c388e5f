"""Refusals and time of distant clients of an idle server, by distance, size of a message and number of clients.

    python bench/reliability/distant.py [--delays 20,40,100,150] [--sizes 1000,40000,200000,1000000] [--clients 8,32]
        [--calls 4] [--rate 2e6] [--context 40960] [--addresses one|own] [--json FILE] [-- FLAGS]

The model is the built-in one with a context of CONTEXT tokens. In each cell every client has a connection through a
proxy that delays each byte by `--delays` milliseconds each way, and sends `--rate` bytes a second. All clients begin at
once and send Tokenize `--calls` times, one after the other. Reported are the statuses and the seconds until the last
answer. `local_seconds` is the same without the proxy, and `network_seconds` the least that the network needs: for each
call a round trip and the time to send the message. `ratio` is that of the seconds to their sum. Exit code 1 if a call
is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio

from npuserve.npu import storyteller
from npuserve.v1 import tokenize_pb2

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import Serving, arguments, report, serving
from tests.support.delay_proxy import delay_proxy_process

TOKENIZE = "/npuserve.v1.InferenceService/Tokenize"
WORD = " little girl named Lily"
"""Text of a few long tokens of the built-in model."""
ANSWERED = ("OK", "INVALID_ARGUMENT")
"""Statuses of calls that were not refused; a text may have too many tokens for the context."""


def message(size: int) -> bytes:
    """Return a serialized Tokenize of about `size` bytes of text."""
    return tokenize_pb2.TokenizeRequest(text=(WORD * (size // len(WORD) + 1))[:size]).SerializeToString()


async def client(
    target: str, data: bytes, calls: int, begin: asyncio.Event, ready: asyncio.Semaphore
) -> Counter[str]:
    """Connect, wait for `begin`, and send the message `calls` times; return the statuses."""
    ends: Counter[str] = Counter()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        await channel.channel_ready()
        ready.release()
        await begin.wait()
        call = channel.unary_unary(TOKENIZE)
        for _ in range(calls):
            try:
                await call(data, timeout=300)
                ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1
                if error.code().name not in ANSWERED:
                    ends[f"  {error.details()}"] += 1
    return ends


async def run_clients(target: str, clients: int, data: bytes, calls: int) -> tuple[float, Counter[str]]:
    """Run the clients; return the seconds from the first call to the last answer, and the statuses."""
    begin = asyncio.Event()
    ready = asyncio.Semaphore(0)
    running = asyncio.gather(*(client(target, data, calls, begin, ready) for _ in range(clients)))
    for _ in range(clients):
        await ready.acquire()
    began = time.monotonic()
    begin.set()
    ends = sum(await running, Counter[str]())
    return time.monotonic() - began, ends


def measure(server: Serving, delay: float, size: int, clients: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell. delay: seconds each way."""
    host, port = server.target.rsplit(":", 1)
    data = message(size)
    local, _ = asyncio.run(run_clients(server.target, clients, data, args.calls))
    with delay_proxy_process((host, int(port)), delay, args.rate, args.addresses == "own") as proxy:
        seconds, ends = asyncio.run(run_clients(f"127.0.0.1:{proxy}", clients, data, args.calls))
    network = args.calls * (2 * delay + size / args.rate)
    statuses = {name: number for name, number in ends.items() if not name.startswith(" ")}
    refused = sum(number for code, number in statuses.items() if code not in ANSWERED)
    return {
        "delay_ms": round(1000 * delay), "bytes": size, "clients": clients, "seconds": round(seconds, 2),
        "local_seconds": round(local, 2), "network_seconds": round(network, 2),
        "ratio": round(seconds / (local + network), 2), "refused": refused,
        "statuses": statuses, "reasons": {name.strip(): n for name, n in ends.items() if name.startswith(" ")},
    }


def main() -> int:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("--delays", type=numbers, default=[20, 40, 100, 150], help="ms each way (default: %(default)s)")
    parser.add_argument("--sizes", type=numbers, default=[1000, 40_000, 200_000, 1_000_000], help="bytes")
    parser.add_argument("--clients", type=numbers, default=[8, 32])
    parser.add_argument("--calls", type=int, default=4, help="calls of a client (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2e6, help="bytes a second of a client (default: %(default)s)")
    parser.add_argument("--context", type=int, default=40_960, help="tokens (default: %(default)s)")
    parser.add_argument("--addresses", choices=("one", "own"), default="one", help="of the clients")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, flags = arguments(parser)
    with tempfile.TemporaryDirectory(prefix="npuserve-bench-") as name:
        folder = Path(shutil.copytree(storyteller.FOLDER, Path(name, "model")))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": args.context}))
        cells = []
        with serving(str(folder), flags) as server:
            for delay, size, clients in itertools.product(args.delays, args.sizes, args.clients):
                cells.append(measure(server, delay / 1000, size, clients, args))
                print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
    report({"cells": cells, "refused": sum(cell["refused"] for cell in cells)}, args.json)
    return 1 if any(cell["refused"] for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
