"""Instructions that the history for `npuserve explain` costs, beside those of the engine's steps, counted by valgrind.

    python bench/serving/explain_instructions.py [--model MODEL] [--rows 1,8,32] [--steps 40] [--tokens 96]

A count does not depend on what else the machine computes. First the scheduler, runner and kernels of an engine run
decode steps on one CPU thread. Then RequestHistory records the same steps: one entry a step, the kernel calls of each
timed step (one of `kernel_sampling`), and one entry a request of TOKENS tokens. The engine's messages and metrics are
not counted. A step of a server therefore takes more instructions, and the share is an upper bound.

valgrind has no AVX-512, so the kernels of AVX2 run. AVX2 needs more instructions than wider registers. Therefore the
share of the instructions outside of the kernels' library is printed too. Needs valgrind 3.19 or newer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from npuserve.cli.bench.step import WARM_UP, Bench, spare
from npuserve.service.config import ServerConfig
from npuserve.service.engine.request_history import RequestHistory

CONTEXT = 16
"""Tokens of each request before the counted steps."""
REPEATS = 100
"""Recordings of a timed step's kernel calls, and of the ends of requests."""


def load(model: str, rows: list[int], steps: int, **settings: Any) -> Bench:
    config = msgspec.structs.replace(ServerConfig(), model=model, threads=1, **settings)
    return Bench.load(config, rows, CONTEXT, 1, steps + 2)


def kernel_calls(model: str) -> list[str]:
    """Return the kernel of each call of a timed decode step."""
    bench = load(model, [1], 8, kernel_sampling=1, double_buffering=False)
    bench.add(CONTEXT, 8)
    for _ in range(3):
        bench.step()
    return [name for name, _ in bench.calls]


def mark() -> None:
    """Let callgrind write the instructions since the last mark (--dump-before)."""
    os.getppid()


def run_counted(model: str, rows: list[int], steps: int, calls: list[str]) -> None:
    """Do the counted work, with the marks that `counts` reads: six parts for each number of rows."""
    bench = load(model, rows, steps, kernel_sampling=0)
    for number in rows:
        answer = spare(number, CONTEXT, bench.budget) + WARM_UP + steps + 2
        sequences = [bench.scheduler.sequence(bench.add(CONTEXT, answer)) for _ in range(number)]
        while bench.step().sampled < number:
            pass
        for _ in range(WARM_UP):
            bench.step()
        done: list[Any] = []
        mark()
        while len(done) < steps:
            if (step := bench.pipeline.advance()) is not None:
                done.append(step)
        mark()
        for sequence in sequences:
            bench.scheduler.cancel(sequence.id)
        while bench.pipeline:
            bench.step()
        mark()
        history = RequestHistory()
        for step in done:
            history.add(step.step, False, 1.0, 2.0, None)
        mark()
        for _ in range(REPEATS):
            for name in calls:
                history.observe_kernel(f"{name}, decode", 1e-5)
            history.take_kernels()
        mark()
        now = time.monotonic()
        for repeat in range(REPEATS):
            history.end(sequences[repeat % number], now)
        mark()


def counts(folder: Path) -> list[tuple[int, int]]:
    """Return (all instructions, those outside of the kernels' library) between each mark and the one before it."""
    parts = []
    for number in range(1, len(list(folder.glob("out.*"))) + 1):
        text = (folder / f"out.{number}").read_text()
        total = re.search(r"^summary: (\d+)", text, re.MULTILINE)
        assert total, f"no summary in part {number}"
        parts.append((int(total[1]), int(total[1]) - library_instructions(text)))
    return parts


def library_instructions(text: str) -> int:
    """Return the instructions of the functions of libnpuserve.so in one file of callgrind."""
    names: dict[str, str] = {}
    is_library = is_call = False
    total = 0
    for line in text.splitlines():
        if line.startswith("ob="):
            key, _, name = line[3:].partition(" ")
            names.setdefault(key, name)
            is_library = "libnpuserve" in names[key]
        elif line.startswith("cob="):
            key, _, name = line[4:].partition(" ")
            names.setdefault(key, name)
        elif line.startswith("calls="):
            is_call = True  # the next line has the cost of the called function
        elif re.match(r"[+*\-\d]", line):
            if is_library and not is_call:
                total += int(line.split()[-1])
            is_call = False
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder or name of a model (default: the built-in one)")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--counted", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = [int(number) for number in args.rows.split(",")]
    if args.counted:
        run_counted(args.model, rows, args.steps, json.loads(args.counted))
        return
    calls = kernel_calls(args.model)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["valgrind", "-q", "--tool=callgrind", "--dump-before=getppid", f"--callgrind-out-file={folder}/out",
             sys.executable, __file__, "--model", args.model, "--rows", args.rows, "--steps", str(args.steps),
             "--counted", json.dumps(calls)], check=True, env={**os.environ, "PYTHONHASHSEED": "0"})
        parts = counts(Path(folder))
    sampling = ServerConfig().kernel_sampling
    print(f"{len(calls)} kernel calls in a timed step, one of {sampling}; answers of {args.tokens} tokens")
    for index, number in enumerate(rows):
        _, (steps, host), _, (entries, _), (kernels, _), (ends, _) = parts[6 * index:6 * index + 6]
        step_entry = entries / args.steps
        kernel_entries = kernels / REPEATS / sampling
        request_entries = ends / REPEATS * number / args.tokens
        history = step_entry + kernel_entries + request_entries
        print(
            f"{number} rows, instructions a step: {steps / args.steps:,.0f}, {host / args.steps:,.0f} of them outside "
            f"of the kernels' library; history {history:,.0f} (step {step_entry:,.0f}, timed kernels "
            f"{kernel_entries:,.0f}, ends of requests {request_entries:,.0f}): {history * args.steps / steps:.3%} of "
            f"the step, {history * args.steps / host:.2%} of the part outside", flush=True)


if __name__ == "__main__":
    main()
