"""Cost of constrained rows in a decode step: masks, LM head and sampling, without a grammar library.

    python bench/engine/constrained_cost.py MODEL [--rows 32] [--constrained 0,16,32] [--steps 60] [--rounds 5]
        [--temperature 0] [--context 64] [--dtype auto] [--json]

Every request decodes, with two steps in flight as in the engine: a step is launched, the previous one is collected,
then the launched one gets ready-made masks. `step` is the median time from one collected step to the next. `sample` is
the time that `Runner.sample` takes on the host. Rounds of all numbers of constrained rows alternate, so that a slow
time of the machine affects all of them; the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from npuserve.npu.execution.load import load_runner
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import PENDING, NewRequest, Row, SamplingParams, Step

WARM_UP = 5
MASKS = 64
ALLOWED = (0.0005, 0.3, 0.999)
"""Shares of the vocabulary that the masks allow in turn: a key of an object, a number, the inside of a string."""


def masks_of(vocabulary: int) -> list[np.ndarray[Any, Any]]:
    """Return masks of random ids."""
    random, words = np.random.default_rng(0), -(-vocabulary // 32)
    made = []
    for i in range(MASKS):
        allowed = np.zeros(32 * words, np.bool_)
        allowed[:vocabulary] = random.random(vocabulary) < ALLOWED[i % len(ALLOWED)]
        allowed[i] = True
        made.append(np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32))
    return made


class Decoding:
    """Requests that decode, of which the first `constrained` have masks."""

    def __init__(self, runner: Runner, rows: int, context: int, temperature: float):
        self.runner, self.rows, self.context = runner, rows, context
        self.masks = masks_of(runner.config.vocab_size)
        self.temperature = temperature
        self.blocks = runner.num_blocks // rows

    def run(self, constrained: int, steps: int) -> tuple[list[float], list[float]]:
        """Return seconds of each step and of each call of `sample`."""
        runner, own = self.runner, range(self.blocks)
        prompts = [[(row + i) % 97 + 1 for i in range(self.context)] for row in range(self.rows)]
        for row, prompt in enumerate(prompts):  # one after the other, so that no step has too many tokens
            new = NewRequest(row, prompt, [], SamplingParams(temperature=self.temperature, seed=row))
            runner.collect(runner.launch(
                Step([Row(row, prompt, 0, [row * self.blocks + i for i in own], True)], [new])))
        ids = [runner._last[:1].tolist()[0]] * self.rows  # any known token
        in_flight: deque[Any] = deque()
        seconds: list[float] = []
        sampling: list[float] = []
        last = 0.0
        for step in range(steps + WARM_UP):
            at = self.context + step
            in_flight.append(runner.launch(Step([
                Row(row, [PENDING] if step else [ids[row]], at, [row * self.blocks + i for i in own], True,
                    is_constrained=row < constrained) for row in range(self.rows)])))
            if len(in_flight) == 2:
                runner.collect(in_flight.popleft())
                now = time.perf_counter()
                if last:
                    seconds.append(now - last)
                last = now
            if constrained:
                given = {row: self.masks[(row + step) % MASKS] for row in range(constrained)}
                began = time.perf_counter()
                runner.sample(in_flight[-1], given)
                sampling.append(time.perf_counter() - began)
        runner.collect(in_flight.popleft())
        runner.launch(Step([], ended=list(range(self.rows))))
        return seconds[WARM_UP:], sampling[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=32, help="decode rows (default: %(default)s)")
    parser.add_argument("--constrained", default="0,16,32", help="constrained rows (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    length = args.context + args.steps + WARM_UP + 3
    runner = load_runner(args.model, backend="cpu", dtype=args.dtype, max_num_seqs=args.rows, max_model_len=length,
                         max_num_batched_tokens=max(512, args.rows), progress=lambda done, total: None)
    decoding = Decoding(runner, args.rows, args.context, args.temperature)
    counts = [int(count) for count in args.constrained.split(",")]
    steps: dict[int, list[float]] = {count: [] for count in counts}
    sampling: dict[int, list[float]] = {count: [] for count in counts}
    for round_ in range(args.rounds):
        for count in counts if round_ % 2 == 0 else counts[::-1]:
            seconds, calls = decoding.run(count, args.steps)
            steps[count].append(statistics.median(seconds))
            sampling[count].append(statistics.median(calls) if calls else 0.0)
    if not args.json:
        print(f"load average {os.getloadavg()[0]:.1f}\n{'constrained':>12}{'step ms':>9}{'ratio':>7}{'sample us':>11}")
    for count in counts:
        ratio = statistics.median(a / b for a, b in zip(steps[count], steps[counts[0]], strict=True))
        line = {"rows": args.rows, "constrained": count, "step_ms": 1e3 * statistics.median(steps[count]),
                "ratio": ratio, "sample_us": 1e6 * statistics.median(sampling[count]),
                "load": os.getloadavg()[0]}
        print(json.dumps(line) if args.json else
              f"{count:>12}{line['step_ms']:>9.3f}{ratio:>7.3f}{line['sample_us']:>11.1f}", flush=True)


if __name__ == "__main__":
    main()
