"""Step times of two checkouts of this repository, in turns.

    python bench/engine/compare_checkouts.py BEFORE AFTER MODEL [--rows 1,8,32] [--context 128] [--prompt 512]
        [--turns 15] [--threads 1] [--gemm bf16] [--weights plain]

Each checkout has its native kernels built in place (`python setup.py build_ext --inplace`) and runs in a process of its
own. The two take turns of a few steps, so that the machine's drift meets both. A turn's figure is the processor time of
its steps, which other processes disturb little: with one thread it is the time of the step. More threads also wait for
each other, which counts as processor time.

Both compute in the same way, set by --gemm and --weights (settings cpu_gemm and cpu_weights): a start that chooses by
measurement may choose otherwise.

Prints a Markdown table: the least time of a turn, and ratios before / after: above 1, the second checkout is faster.
The first ratio is that of the least times, which other processes disturbed least. The second is the median over the
pairs of turns, with the middle half of them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STEPS = {1: 10, 8: 6, 32: 3}
"""Rows -> decode steps of a turn; the value of the nearest smaller number of rows."""


KV_CACHE = 2 << 30
"""Bytes of the KV cache: enough for 32 rows of 512 tokens of Qwen3-0.6B."""


class Checkout:
    """Process that runs steps of one checkout. Commands are JSON lines: a method of `Worker` and its arguments."""

    def __init__(self, folder: Path, args: Sequence[str]) -> None:
        path = os.pathsep.join((str(folder.resolve() / "src"), *sys.path[1:]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--worker", *args], env={**os.environ, "PYTHONPATH": path}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.call()

    def call(self, *command: str | int) -> float:
        """Run a command and return its result. Without a command, wait until the worker is ready."""
        assert self._process.stdin
        assert self._process.stdout
        if command:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self._process.wait()}")
        return float(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class Worker:
    """Runner and scheduler of one checkout."""

    def __init__(self, bench: Any, answer: int) -> None:
        self._bench, self._answer = bench, answer
        self._ids: list[int] = []

    def begin(self, rows: int, context: int) -> float:
        """Prefill rows, which then decode."""
        self._ids = [self._bench.add(context, self._answer) for _ in range(rows)]
        while self._bench.step().sampled < rows:
            pass
        return 0.0

    def decode(self, steps: int) -> float:
        """Return the processor seconds of a step."""
        return _processor_seconds(lambda: [self._bench.step() for _ in range(steps)]) / steps

    def end(self) -> float:
        """Cancel the rows."""
        for sequence_id in self._ids:
            self._bench.scheduler.cancel(sequence_id)
        while self._bench.pipeline:
            self._bench.step()
        return 0.0

    def prompt(self, tokens: int) -> float:
        """Return the processor seconds of a prompt."""
        return _processor_seconds(lambda: self._bench.prefill(tokens))


def _processor_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def work(args: argparse.Namespace) -> None:
    """Run the commands of the parent process."""
    try:
        step = importlib.import_module("npuserve.cli.bench.step")
    except ImportError:  # checkouts before the command line had a folder of its own
        step = importlib.import_module("npuserve.service.cli.bench.step")
    import msgspec

    from npuserve.service.config import ServerConfig

    threads, largest = int(args.threads), max(args.rows)
    config = msgspec.structs.replace(
        ServerConfig(), model=str(args.model), threads=threads, cpu_gemm=args.gemm, cpu_weights=args.weights,
        kv_cache_memory=KV_CACHE, double_buffering=False)  # no step is in flight between two turns
    steps = (args.turns + 1) * max(STEPS.values())
    bench = step.Bench.load(config, args.rows, args.context, args.prompt, steps)
    for thread in threading.enumerate():
        if thread.name == "npuserve-pages":  # it maps the cache's pages, in processor time of this process
            thread.join()
    worker = Worker(bench, steps + step.spare(largest, args.context, bench.budget))
    print(0.0, flush=True)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(getattr(worker, name)(*values), flush=True)


def compare(checkouts: Sequence[Checkout], turns: int, *command: str | int) -> str:
    """Return the cells of a line: least times in ms, their ratio, median and middle half of the ratios of turns."""
    taken: list[list[float]] = [[], []]
    for checkout in checkouts:
        checkout.call(*command)
    for turn in range(turns):
        for index in (0, 1) if turn % 2 else (1, 0):
            taken[index].append(checkouts[index].call(*command))
    ratios = sorted(before / after for before, after in zip(*taken, strict=True))
    before, after = (1e3 * min(each) for each in taken)
    low, high = (ratios[round((len(ratios) - 1) * share)] for share in (0.25, 0.75))
    return f"{before:.2f} | {after:.2f} | {before / after:.3f} | {statistics.median(ratios):.3f} ({low:.3f}–{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folders", nargs="*", type=Path, help="checkout before, checkout after, model")
    add("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    add("--context", type=int, default=128)
    add("--prompt", type=int, default=512)
    add("--turns", type=int, default=15)
    add("--threads", type=int, default=1)
    add("--gemm", default="bf16")
    add("--weights", default="plain")
    add("--model", help=argparse.SUPPRESS)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    if len(args.folders) != 3:
        parser.error("give two checkouts and a model")
    *trees, model = args.folders
    passed = [f"--rows={','.join(map(str, args.rows))}", f"--context={args.context}", f"--prompt={args.prompt}",
              f"--turns={args.turns}", f"--threads={args.threads}", f"--gemm={args.gemm}", f"--weights={args.weights}",
              f"--model={model.resolve()}"]
    checkouts = [Checkout(tree, passed) for tree in trees]
    print("| step | before, ms | after, ms | ratio | ratio of turns |", "|---|---|---|---|---|", sep="\n", flush=True)
    for rows in args.rows:
        for checkout in checkouts:
            checkout.call("begin", rows, args.context)
        steps = STEPS[max(each for each in STEPS if each <= rows)]
        print(f"| {rows} rows | {compare(checkouts, args.turns, 'decode', steps)} |", flush=True)
        for checkout in checkouts:
            checkout.call("end")
    print(f"| prompt of {args.prompt} | {compare(checkouts, args.turns, 'prompt', args.prompt)} |", flush=True)
    for checkout in checkouts:
        checkout.close()


if __name__ == "__main__":
    main()
