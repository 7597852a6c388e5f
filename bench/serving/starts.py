"""Time to readiness by model and size of the cache, and the time to the first token of the first requests.

    python bench/serving/starts.py [MODEL ...] [--caches SIZE ...] [--full] [--rounds N] [--output FILE]

Each start is repeated --rounds times, and the output has medians. TTFT is that of the first 20 requests, one after
another, each of 64 tokens of its own. A MODEL that is not given is the built-in one.

--full    repeat with nearly full memory: another process holds all but the model, its cache and SPARE_BYTES. The kernel
          kills that process first if memory runs out.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import report, serving
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.storyteller import FOLDER
from npuserve.service.settings import parse_size
from npuserve.v1 import generate_pb2
from npuserve.v1 import inference_service_pb2_grpc as rpc

REQUESTS = 20
PROMPT = 64
SPARE_BYTES = 3 << 30
"""Memory that is left to a server beside its weights and its cache."""

HOLD = """
import mmap, sys
open("/proc/self/oom_score_adj", "w").write("1000")
held = mmap.mmap(-1, int(sys.argv[1]))
for page in range(0, len(held), mmap.PAGESIZE):
    held[page] = 1
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(count: int) -> Iterator[None]:
    """Let another process hold `count` bytes of memory."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    try:
        if process.stdout.readline() != b"held\n":
            raise SystemExit("the process that holds memory was killed")
        yield
    finally:
        process.kill()
        process.wait()


def first_token_seconds(stub: rpc.InferenceServiceStub, number: int) -> float:
    request = generate_pb2.GenerateRequest()
    request.token_ids.ids.extend(1 + (7 * number + 31 * i) % 200 for i in range(PROMPT))
    request.stopping.max_tokens = 2
    request.stopping.ignore_eos = True
    began = time.monotonic()
    for message in stub.StreamGenerate(request, timeout=60):
        if message.num_tokens:
            return time.monotonic() - began
    raise SystemExit("a stream ended without a token")


def start(model: str, cache: str) -> dict[str, Any]:
    """Start a server; return its seconds to readiness and the TTFT of the first requests."""
    began = time.monotonic()
    with serving(model, ["--kv-cache-memory", cache]) as server:
        ready = time.monotonic() - began
        with grpc.insecure_channel(server.target) as channel:
            stub = rpc.InferenceServiceStub(channel)
            return {"ready": ready, "ttft": [first_token_seconds(stub, number) for number in range(REQUESTS)]}


def measure(model: str, cache: str, rounds: int, *, full: bool) -> dict[str, Any]:
    folder = Path(model) if model else FOLDER
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed = weights + parse_size(cache) + SPARE_BYTES
    with held(max(CpuBackend().memory.available() - needed, 0)) if full else contextlib.nullcontext():
        starts = [start(model, cache) for _ in range(rounds)]
    ttft = sorted(seconds for each in starts for seconds in each["ttft"])
    return {
        "model": folder.name if model else "storyteller", "cache": cache, "memory": "nearly full" if full else "free",
        "ready_seconds": round(statistics.median(each["ready"] for each in starts), 2),
        "first_ttft_ms": round(1000 * statistics.median(each["ttft"][0] for each in starts), 1),
        "ttft_p50_ms": round(1000 * statistics.median(ttft), 1), "ttft_max_ms": round(1000 * ttft[-1], 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", metavar="MODEL", nargs="*", default=[""])
    parser.add_argument("--caches", nargs="+", default=["256MiB", "4GiB"])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for full in (False, True) if args.full else (False,):
        for model in args.models:
            for cache in args.caches:
                rows.append(measure(model, cache, args.rounds, full=full))
                print(rows[-1], file=sys.stderr, flush=True)
    report({"starts": rows}, args.output)


if __name__ == "__main__":
    main()
