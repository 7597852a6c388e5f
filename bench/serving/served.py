"""Share of the engine's own speed that clients of a server on the same machine receive.

    python bench/serving/served.py MODEL [--streams 1,8,32] [--prompt 128] [--output 64] [--requests 4] [--rounds 3]
        [-- FLAGS]

A closed loop: each of the streams sends `--requests` requests, one after the other. `engine` is scheduler and runner in
a loop, as in the engine process, without anything around them. `served` is `npuserve bench serve` against `npuserve
serve`, all on the same cores. The two alternate, each in a process of its own. Prints output tokens/s of both, and the
median ratio with its range. FLAGS are settings of both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from npuserve.npu.execution.in_flight import LaunchedStep
from npuserve.npu.step import SamplingParams, Step
from npuserve.service import settings
from npuserve.service.ipc.messages import Request
from npuserve.service.ranks.load import load_model
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.text.model_path import resolve

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import arguments


def engine(model: str, serve: list[str], streams: int, prompt: int, output: int, requests: int) -> float:
    """Return output tokens per second of the engine alone."""
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    config = settings.load(parser.parse_args([model, *serve]), os.environ)
    runner = load_model(config, str(resolve(config.model)))
    scheduler = Scheduler(
        BlockManager(runner.num_blocks, runner.block_size, config.prefix_cache), max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, max_queue=config.max_queue,
        aging_seconds=config.priority_aging_seconds)
    depth = 2 if config.double_buffering else 1
    in_flight: deque[tuple[Step, LaunchedStep]] = deque()

    def ask() -> None:
        ids = [random.randrange(runner.config.vocab_size) for _ in range(prompt)]
        now = time.monotonic()
        scheduler.add(Request("", ids, output, now, SamplingParams(temperature=0.0)), (b"", 0), now)

    def run(count: int) -> float:
        left = streams * (count - 1)
        for _ in range(streams):
            ask()
        began = time.perf_counter()
        while scheduler.has_work or in_flight:
            step = scheduler.schedule(time.monotonic()).step
            if step.rows:
                in_flight.append((step, runner.launch(step)))
                if len(in_flight) < depth:
                    continue
            step, launched = in_flight.popleft()
            result = runner.collect(launched)
            ended = [progress for progress in scheduler.apply(step, result, time.monotonic()) if progress.reason]
            for _ in ended[:left]:
                ask()
            left = max(0, left - len(ended))
        return streams * count * output / (time.perf_counter() - began)

    run(1)
    return run(requests)


@contextlib.contextmanager
def server(model: str, serve: list[str]) -> Iterator[str]:
    """Run a server and yield its address once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "npuserve.cli", "serve", model, "--port", "0", "--metrics-port", "0",
                 *serve], stdout=out, stderr=out)
            try:
                while "ready in" not in log.read_text():
                    if process.poll() is not None:
                        raise RuntimeError(log.read_text())
                    time.sleep(0.1)
                found = re.search(r"listening on ([\w.:]+)", log.read_text())
                assert found
                yield found[1]
            finally:
                process.terminate()
                process.wait()


def served(address: str, streams: int, prompt: int, output: int, requests: int) -> float:
    """Return output tokens per second that a client receives."""

    def run(count: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            subprocess.run(
                [sys.executable, "-m", "npuserve.cli", "bench", "serve", "--target", address, "--concurrency",
                 str(streams), "--requests", str(streams * count), "--prompt-tokens", str(prompt), "--output-tokens",
                 str(output), "--json", str(report)], check=True, stdout=subprocess.DEVNULL)
            return float(json.loads(report.read_text())["output_tokens_per_second"])

    run(1)
    return run(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", default="1,8,32")
    for name, value in (("prompt", 128), ("output", 64), ("requests", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--alone", type=int, metavar="STREAMS", help=argparse.SUPPRESS)
    args, flags = arguments(parser)
    serve = ["--no-prefix-cache", *flags]  # repeated prompts are computed again
    sizes = args.prompt, args.output, args.requests
    if args.alone:
        print(json.dumps(engine(args.model, serve, args.alone, *sizes)))
        return
    alone = [sys.executable, __file__, args.model, *(f"--{name}={getattr(args, name)}" for name in (
        "prompt", "output", "requests"))]
    for streams in map(int, args.streams.split(",")):
        pairs = []
        for _ in range(args.rounds):
            done = subprocess.run([*alone, f"--alone={streams}", "--", *serve], check=True, stdout=subprocess.PIPE)
            with server(args.model, serve) as address:
                pairs.append((float(json.loads(done.stdout)), served(address, streams, *sizes)))
        ratios = sorted(b / a for a, b in pairs)
        print(f"{streams} streams: engine {statistics.median(a for a, _ in pairs):.0f}, served "
              f"{statistics.median(b for _, b in pairs):.0f} tokens/s, ratio {statistics.median(ratios):.2f} "
              f"({ratios[0]:.2f}–{ratios[-1]:.2f})", flush=True)


if __name__ == "__main__":
    main()
