"""The long run of the fuzzer: `python -m tests.e2e.fuzz [--messages 100000] [--seed 1]`.

Prints one JSON object. Exit code 1 after a crash, a leak or an undocumented status code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.e2e.fuzz.calls import calls
from tests.e2e.fuzz.fields import requests
from tests.e2e.fuzz.target import CODES, Target, bodies, target
from tests.e2e.fuzz.wire import Noise, send

ROUNDS = 10
GROWTH = 16 << 20
"""Allowed growth of a process, in bytes, after the first round, for the allocators."""


def burst(server: Target, noise: Noise, methods: dict[str, bool], messages: int) -> tuple[int, Counter[str]]:
    """Send about `messages` messages, half of them on raw sockets; return their number and the codes of the others."""
    sent = 0
    while sent < messages // 2:
        pieces = noise.connection()
        send(server.port, pieces, linger=sent % 7 == 0)
        sent += len(pieces)
    codes = asyncio.run(calls(server.server.target, methods, noise, messages - sent))
    return max(messages, sent), codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    args = parser.parse_args()
    methods = {name: method.server_streaming for name, (method, _) in requests().items()}
    noise = Noise(args.seed, sorted(methods), bodies())
    began, codes, sent, sizes = time.monotonic(), Counter[str](), 0, []
    with tempfile.TemporaryDirectory() as folder, target(Path(folder)) as server:
        for _ in range(ROUNDS):
            count, found = burst(server, noise, methods, args.messages // ROUNDS)
            sent += count
            codes += found
            server.settle()
            sizes.append(server.resident())
        restarts = server.server.metric("npuserve_engine_restarts_total")
    grown = {name: sizes[-1][name][0] - sizes[1][name][0] for name in sizes[1]}
    files = {name: [size[name][1] for size in sizes] for name in sizes[1]}
    wrong = sorted(codes.keys() - CODES - {"UNREAD"})
    wrong += [f"{name} grew" for name, size in grown.items() if size > GROWTH]
    wrong += [f"{name} has more files open" for name, counts in files.items() if counts[-1] > counts[1] + 8]
    print(json.dumps({
        "messages": sent, "seconds": round(time.monotonic() - began, 1), "codes": dict(codes), "grown_bytes": grown,
        "resident_mib": {name: [round(size[name][0] / 2**20, 1) for size in sizes] for name in sizes[1]},
        "open_files": files, "engine_restarts": restarts, "wrong": wrong}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
