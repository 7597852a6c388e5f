"""Prompts of four times the KV cache, with blocks in host memory and without.

    python bench/serving/host_memory.py [MODEL] --cache 40MiB --host 1GiB [--tokens 900] [--clients 2] [--streams 2]
        [--rounds 3] -- --device npu --emulate --dtype float32 --emulate-relax fp32 --max-num-seqs 4

Clients send the prompts in a random order, each several times, beside streams that generate all the time. Three servers
in turn:

    device     the KV cache has --cache four and a half times, so that it keeps all prompts
    host       --cache, and --host of host memory
    nothing    --cache alone

Prints the share of prompt tokens from the cache, TTFT p50 and p99 of the clients, their requests a second, and the
inter-token latency p99 of the streams; then, as medians over the rounds with their range, the ratios of "host" to
"nothing" in TTFT and requests, and to "device" in inter-token latency. The times of an emulated device are those of its
host's processor: the ratios say what waiting and copying cost beside steps, not how fast a device is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import grpc

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import Serving, arguments, greedy_request, serving
from npuserve.service.settings import parse_size
from npuserve.v1 import inference_service_pb2_grpc as rpc

WORKING_SET = 4
"""Tokens of the prompts by tokens of the KV cache."""
ROOM = 4.5
"""KV cache of the server that keeps all prompts, by that of the others: the streams and answers need blocks, too."""
FIRST_ID, LAST_ID = 10, 2000


@dataclass(frozen=True)
class Figures:
    """cached: share of the prompt tokens. Times in ms."""

    cached: float
    ttft_p50: float
    ttft_p99: float
    requests_per_second: float
    streams_itl_p99: float


def ask(stub: rpc.InferenceServiceStub, prompt: list[int], tokens: int) -> tuple[list[float], int]:
    """Return the time of each message with tokens since the call, and the cached tokens."""
    request = greedy_request(prompt, tokens)
    began, times, cached = time.monotonic(), list[float](), 0
    for part in stub.StreamGenerate(request, timeout=600):
        if part.token_ids:
            times.append(time.monotonic() - began)
        cached = part.finish.usage.cached_tokens
    return times, cached


class Streams:
    """Streams that generate until `stop`. gaps: seconds between their tokens."""

    def __init__(self, stub: rpc.InferenceServiceStub, count: int, tokens: int):
        self.gaps: list[float] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(stub, seed, tokens)) for seed in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, stub: rpc.InferenceServiceStub, seed: int, tokens: int) -> None:
        draw = random.Random(f"stream {seed}")
        while not self._ended.is_set():
            times, _ = ask(stub, draw.choices(range(FIRST_ID, LAST_ID), k=20), tokens)
            self.gaps += [after - before for before, after in itertools.pairwise(times)]

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def measure(server: Serving, args: argparse.Namespace, prompts: list[list[int]], seed: int) -> Figures:
    with grpc.insecure_channel(server.target) as channel:
        stub = rpc.InferenceServiceStub(channel)
        for prompt in prompts:
            ask(stub, prompt, 1)
        order = [prompt for turn in range(args.turns) for prompt in random.Random(seed + turn).sample(
            prompts, len(prompts))]
        streams = Streams(stub, args.streams, args.stream_tokens)
        began = time.monotonic()
        with ThreadPoolExecutor(args.clients) as pool:
            answers = list(pool.map(lambda prompt: ask(stub, prompt, args.answer), order))
        seconds = time.monotonic() - began
        streams.stop()
    first, gaps = sorted(times[0] for times, _ in answers), sorted(streams.gaps)
    return Figures(sum(cached for _, cached in answers) / sum(map(len, order)),
                   1e3 * statistics.median(first), 1e3 * first[99 * (len(first) - 1) // 100], len(order) / seconds,
                   1e3 * gaps[99 * (len(gaps) - 1) // 100])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--cache", type=parse_size, required=True, help="KV cache")
    parser.add_argument("--host", type=parse_size, required=True, help="host memory: more than all prompts need")
    parser.add_argument("--tokens", type=int, default=900, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--stream-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2, help="how often each prompt is sent (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    args, flags = arguments(parser)
    arms = {"device": (int(ROOM * args.cache), 0), "host": (args.cache, args.host), "nothing": (args.cache, 0)}
    found: dict[str, list[Figures]] = {arm: [] for arm in arms}
    prompts: list[list[int]] = []
    for number in range(args.rounds):
        names = [*arms]
        for arm in names[number % 3 :] + names[: number % 3]:
            cache, host = arms[arm]
            memory = ["--kv-cache-memory", str(cache), "--kv-offload-memory", str(host)]
            with serving(args.model, [*flags, *memory]) as server:
                if not prompts:
                    [labels] = server.samples("kv_cache_config_info")
                    block, blocks = (int(re.findall(rf'{name}="(\d+)"', labels)[0])
                                     for name in ("block_size", "num_blocks"))
                    tokens = block * blocks / (ROOM if arm == "device" else 1)
                    draw = random.Random(0)
                    prompts = [draw.choices(range(FIRST_ID, LAST_ID), k=args.tokens)
                               for _ in range(round(WORKING_SET * tokens / args.tokens))]
                figures = measure(server, args, prompts, number)
            found[arm].append(figures)
            print(json.dumps({"arm": arm, "prompts": len(prompts)} | {
                field.name: round(getattr(figures, field.name), 3) for field in fields(figures)}), flush=True)
    for name, other in (("ttft_p50", "nothing"), ("ttft_p99", "nothing"), ("requests_per_second", "nothing"),
                        ("streams_itl_p99", "device"), ("streams_itl_p99", "nothing")):
        ratios = sorted(getattr(ours, name) / getattr(theirs, name)
                        for ours, theirs in zip(found["host"], found[other], strict=True))
        print(json.dumps({f"{name} of host to {other}": round(statistics.median(ratios), 3),
                          "range": [round(ratios[0], 3), round(ratios[-1], 3)]}))


if __name__ == "__main__":
    main()
