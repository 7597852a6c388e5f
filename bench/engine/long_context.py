"""Long prompts: latency and speed by chunk size, with prefill on the device and on the host (--prefill-device).

    python bench/engine/long_context.py [MODEL] --device npu --emulate --emulate-relax fp32 --dtype float32
    python bench/engine/long_context.py MODEL --device cpu --prompts 1024,8192 --chunks 128,512 --json

Each configuration runs in a process of its own: scheduler, runner and device as in the engine process, without gRPC and
without a prefix cache. It computes a prompt of each length alone, then the same prompt beside streams of short prompts.

    ttft ms, prefill tok/s   of the prompt, alone
    decode tok/s             of its answer
    gap before, p50, worst   ms between two tokens of a stream: before the prompt arrives, and during its prefill
    peak MiB                 of the process so far, with the memory of an emulated device
    tokens                   whether the tokens equal the first configuration's, or the first difference

A CPU device has one configuration per chunk size. Exit code 1 if tokens differ in float32. In half precision a
difference is only reported, since two backends may round a near tie to either side.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from npuserve.npu.step import SamplingParams, Step
from npuserve.service import settings
from npuserve.service.arguments import number
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.ipc.messages import Request
from npuserve.service.ranks.load import load_model
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.text.model_path import resolve

if TYPE_CHECKING:
    from npuserve.npu.execution.in_flight import LaunchedStep
    from npuserve.npu.execution.runner import Runner

STREAM_PROMPT, LEAD = 16, 8
"""Tokens of a stream's prompt, and its generated tokens before the long prompt arrives."""

COLUMNS = (
    ("prefill_device", "prefill", 8, ""), ("chunk", "chunk", 6, ""), ("prompt", "prompt", 8, ""),
    ("ttft_ms", "ttft ms", 10, ".1f"), ("prefill_tokens_per_second", "prefill/s", 11, ".1f"),
    ("decode_tokens_per_second", "decode/s", 10, ".1f"), ("gap_before_ms", "gap before", 12, ".1f"),
    ("gap_p50_ms", "p50", 9, ".1f"), ("gap_worst_ms", "worst", 9, ".1f"), ("peak_mib", "peak MiB", 10, ".0f"),
    ("agreement", "tokens", 24, ""))


def counts(text: str) -> list[int]:
    return [int(number(int, 1)(part)) for part in text.split(",")]


class Loop:
    """The engine's loop, with the time of each request's tokens."""

    def __init__(self, config: ServerConfig, runner: Runner):
        self.runner = runner
        self.scheduler = Scheduler(
            BlockManager(runner.num_blocks, runner.block_size, prefix_cache=False), max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens, max_queue=0,
            aging_seconds=config.priority_aging_seconds)
        self.depth = 2 if config.double_buffering else 1
        self.in_flight: deque[tuple[Step, LaunchedStep]] = deque()
        self.times: dict[int, list[float]] = {}

    def add(self, prompt: list[int], answer: int) -> Sequence:
        now = time.monotonic()
        request = Request("", prompt, answer, now, SamplingParams(temperature=0.0))
        sequence = self.scheduler.add(request, (b"", 0), now).sequence
        self.times[sequence.id] = []
        return sequence

    def step(self) -> None:
        step = self.scheduler.schedule(time.monotonic()).step
        if step.rows:
            self.in_flight.append((step, self.runner.launch(step)))
        if self.in_flight and (not step.rows or len(self.in_flight) == self.depth):
            done, handle = self.in_flight.popleft()
            progress = self.scheduler.apply(done, self.runner.collect(handle), time.monotonic())
            now = time.perf_counter()
            for made in progress:
                self.times[made.sequence.id] += [now] * len(made.token_ids)

    def until(self, sequence: Sequence, tokens: int) -> list[float]:
        """Run steps until the sequence has `tokens` tokens or has ended; return the times of its tokens."""
        while len(self.times[sequence.id]) < tokens and self.scheduler.has_work:
            self.step()
        return self.times[sequence.id]

    def finish(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.step()


def measure(loop: Loop, length: int, answer: int, streams: int) -> dict[str, Any]:
    """Measure one prompt length. Prompts depend on the length only."""
    r, vocabulary = random.Random(length), loop.runner.config.vocab_size
    prompt = r.choices(range(vocabulary), k=length)
    shorts = [r.choices(range(vocabulary), k=STREAM_PROMPT) for _ in range(streams)]
    began = time.perf_counter()
    alone = loop.add(prompt, answer)
    times = loop.until(alone, answer)
    loop.finish()
    row: dict[str, Any] = {
        "prompt": length, "ttft_ms": 1e3 * (times[0] - began), "prefill_tokens_per_second": length / (times[0] - began),
        "decode_tokens_per_second": (answer - 1) / (times[-1] - times[0]) if answer > 1 else None,
        "token_ids": [alone.token_ids[length:]]}
    if streams:
        limit = loop.runner.max_model_len - STREAM_PROMPT
        running = [loop.add(short, limit) for short in shorts]
        for stream in running:
            loop.until(stream, LEAD)
        arrived = time.perf_counter()
        beside = loop.add(prompt, answer)
        first = loop.until(beside, 1)[0]
        for stream in running:  # the gap that ends after the prompt counts, too
            loop.until(stream, sum(t <= first for t in loop.times[stream.id]) + 1)
        gaps = [(b, 1e3 * (b - a)) for s in running for a, b in pairwise(loop.times[s.id])]
        loop.until(beside, answer)
        during = [gap for end, gap in gaps if end > arrived]
        row |= {"gap_before_ms": statistics.median(gap for end, gap in gaps if end <= arrived),
                "gap_p50_ms": statistics.median(during), "gap_worst_ms": max(during)}
        row["token_ids"] += [beside.token_ids[length:], *(s.token_ids[STREAM_PROMPT:][:LEAD] for s in running)]
        for stream in running:
            loop.scheduler.cancel(stream.id)
        loop.finish()
    status = Path("/proc/self/status").read_text()
    return row | {"peak_mib": next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) / 1024}


def one_way(args: argparse.Namespace, config: ServerConfig) -> int:
    """Print a JSON object for each prompt length. Output of a device's libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        runner = load_model(config, str(resolve(config.model)), lambda *_: None)
    except (ValueError, OSError, MemoryError) as error:
        raise ConfigError(str(error)) from error
    loop, limit = Loop(config, runner), runner.max_model_len - args.tokens
    needed = args.streams * -(-runner.max_model_len // runner.block_size)
    for length in args.prompts or [limit // 4, limit // 2, limit]:
        if not 0 < length <= limit:
            raise ConfigError(f"prompts: {length} is not in [1, {limit}], the model's limit minus --tokens")
        blocks = needed + -(-(length + args.tokens) // runner.block_size)
        if blocks > runner.num_blocks:
            raise ConfigError(
                f"prompts: {length} tokens beside {args.streams} streams need {blocks} blocks of KV cache, there are "
                f"{runner.num_blocks}; see --kv-cache-memory and --streams")
        print(json.dumps(measure(loop, length, args.tokens, args.streams)), file=answers, flush=True)
    return 0


def difference(one: list[list[int]], other: list[list[int]]) -> str:
    """Return the first difference as text, "" if the tokens are equal."""
    for request, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"request {request} differs at {place}"
    return ""


def all_ways(args: argparse.Namespace, config: ServerConfig) -> int:
    found: dict[int, list[list[int]]] = {}
    bad = False
    if not args.json:
        print("".join(f"{title:>{width}}" for _, title, width, _ in COLUMNS))
    for chunk in args.chunks:
        for device in ("same", "cpu") if config.device != "cpu" else ("same",):
            command = [sys.executable, __file__, *sys.argv[1:], "--one-way", "--prefill-device", device,
                       "--max-num-batched-tokens", str(chunk)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout
                for line in child.stdout:
                    row = {"prefill_device": device, "chunk": chunk} | json.loads(line)
                    tokens = row.pop("token_ids")
                    differs = difference(found.setdefault(row["prompt"], tokens), tokens)
                    bad = bad or bool(differs)
                    row["agreement"] = differs or "the same"
                    print(json.dumps(row) if args.json else shown(row), flush=True)
            if child.returncode:
                return child.returncode
    return int(bad and config.dtype == "float32")


def shown(row: dict[str, Any]) -> str:
    cells = ((row.get(name), width, form) for name, _, width, form in COLUMNS)
    return "".join(f"{'' if value is None else format(value, form):>{width}}" for value, width, form in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompts", type=counts, help="tokens of the long prompts, comma-separated (default: a quarter, half and all "
                                       "of the model's limit)")
    add("--chunks", type=counts, default=[128, 512],
        help="tokens of a step, as max_num_batched_tokens, comma-separated (default: 128,512)")
    add("--tokens", type=number(int, 1), default=16, help="tokens of an answer (default: %(default)s)")
    add("--streams", type=number(int, 0), default=2, help="streams beside the prompt (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object per line")
    add("--one-way", action="store_true", help=argparse.SUPPRESS)
    settings.add_arguments(parser)
    args = parser.parse_args()
    try:
        config = settings.load(args, os.environ)
        config = msgspec.structs.replace(config, max_num_seqs=max(args.streams + 1, 2), prefix_cache=False)
        return one_way(args, config) if args.one_way else all_ways(args, config)
    except ConfigError as error:
        print(f"long_context: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
