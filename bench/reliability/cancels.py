"""Leaks after thousands of cancels at random moments, on a small KV cache.

    python bench/reliability/cancels.py [MODEL] [--requests 10000] [--at-once 64] [--seed 1] [--json FILE] [-- FLAGS]

Nine of ten requests are cancelled after a random time: in the queue, in prefill or in decode. Exit code 1 if one of
these does not hold:

    blocks      at the end nothing runs and all blocks are free
    log         no integrity error (the engine checks its whole state whenever it is idle) and no restart
    memory      the processes do not grow; resident memory is sampled over the second half of the requests

Prints a histogram of the time from a cancel's arrival at the front end until its blocks are free, and the mean step
time. FLAGS are settings of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc as rpc
from npuserve.v1 import model_pb2, prompt_pb2

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import Serving, arguments, percentile, report, serving

SMALL_POOL = ["--kv-cache-memory", "2MiB", "--max-num-seqs", "16", "--max-queue", "64", "--frontends", "2",
              "--resume-seconds", "10"]  # so that records of resumable streams expire within the run
GROWTH = 0.02
"""Allowed growth of a process's resident memory over the second half, as a share."""


async def load(server: Serving, requests: int, at_once: int, seed: int) -> tuple[Counter[str], list[dict[str, float]]]:
    """Send and cancel the requests; return the count of each status, and samples of memory."""
    dice = random.Random(seed)
    ends: Counter[str] = Counter()
    memory: list[dict[str, float]] = []
    numbers = iter(range(requests))
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(server.target, options) for _ in range(4)]
    stubs = [rpc.InferenceServiceStub(channel) for channel in channels]
    info = await stubs[0].GetModelInfo(model_pb2.GetModelInfoRequest())
    longest = min(info.max_model_len, info.kv_cache_tokens) // 2

    async def client() -> None:
        for number in numbers:
            if number % (requests // 40 or 1) == 0 and number >= requests // 2:
                memory.append(server.rss())
            ask = pb.GenerateRequest()
            prompt = [dice.randrange(3, 250) for _ in range(dice.randint(1, longest))]
            ask.token_ids.CopyFrom(prompt_pb2.TokenIds(ids=prompt))
            ask.stopping.max_tokens, ask.stopping.ignore_eos = dice.randint(1, longest), True
            stub = stubs[number % len(stubs)]
            call = (stub.Generate if number % 5 == 0 else stub.StreamGenerate)(ask)
            if number % 10:
                asyncio.get_running_loop().call_later(dice.random() ** 3 * 2, call.cancel)
            try:
                if number % 5 == 0:
                    await call
                else:
                    async for _ in call:
                        pass
                ends["OK"] += 1
            except asyncio.CancelledError:
                ends["CANCELLED"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    for channel in channels:
        await channel.close()
    return ends, memory


def growth(memory: list[dict[str, float]]) -> dict[str, float]:
    """Return each process's growth, as a share, from the first third of the samples to the last."""
    third = max(1, len(memory) // 3)
    mean = {name: [sum(sample[name] for sample in part) / len(part) for part in (memory[:third], memory[-third:])]
            for name in memory[0]}
    return {name: round((late - early) / early, 4) for name, (early, late) in mean.items()}


def measure(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    with serving(args.model, [*SMALL_POOL, *flags]) as server:
        began = time.monotonic()
        ends, memory = asyncio.run(load(server, args.requests, args.at_once, args.seed))
        seconds = time.monotonic() - began
        time.sleep(2)  # the idle engine checks its state and updates the metrics
        freed = server.histogram("cancel_to_free_seconds")
        steps, step_seconds = server.metric("step_seconds_count"), server.metric("step_seconds_sum")
        blocks = server.samples("kv_cache_blocks")
        grown = growth(memory)
        figures = {
            "requests": args.requests, "seconds": round(seconds, 1), "ends": dict(ends),
            "preemptions": server.metric("preemptions_total"), "steps": steps,
            "mean_step_ms": round(1000 * step_seconds / max(1, steps), 2),
            "cancels": list(freed.values())[-1],
            "cancel_to_free_ms": {f"p{p}": 1000 * percentile(freed, p / 100) for p in (50, 90, 99, 100)},
            "cancel_to_free_counts": {str(bound): count for bound, count in freed.items()},
            "rss_mib": {name: round(value, 1) for name, value in memory[-1].items()}, "rss_growth": grown,
            "wrong": [],
        }
        wrong = figures["wrong"]
        if used := next(value for labels, value in blocks.items() if '"used"' in labels):
            wrong.append(f"{used} blocks are held")
        for name in ("requests_running", "requests_waiting", "requests_paused", "engine_restarts_total"):
            if value := server.metric(name):
                wrong.append(f"{name} is {value}")
        if "Integrity" in server.log or "Traceback" in server.log:
            wrong.append("the log tells of an error")
        if sum(ends.values()) != args.requests or set(ends) - {"OK", "CANCELLED", "RESOURCE_EXHAUSTED"}:
            wrong.append(f"ends: {dict(ends)}")
        wrong += [f"{name} grew by {share:.1%}" for name, share in grown.items() if share > GROWTH]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("model", nargs="?", default="", help="(default: the built-in one)")
    parser.add_argument("--requests", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, flags = arguments(parser)
    figures = measure(args, flags)
    report(figures, args.json)
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
