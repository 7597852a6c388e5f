"""Time of a step by kernel, beside the machine's bounds.

    python bench/engine/step_kernels.py MODEL [--rows 1,8,32] [--context 128] [--prompt 512] [--steps 16] [SETTINGS]

Decode steps of rows after `--context` tokens, then prompts of `--prompt` tokens, one at a time. All of them are timed
kernel by kernel, as the engine times one step in `kernel_sampling`. Products are told apart by the shape of the weight.
SETTINGS are those of the server, for example --threads 2.

Prints Markdown tables. `ms` is the median over the steps. `bound` is the least time of the calls. That of a call is the
longer of two: its bytes (`npu/profiling/floor.py`) at the memory's bandwidth, and its operations at the peak of its
numbers, both measured before and after the steps. Weights count in the dtype of the checkpoint. So a kernel that reads
compact weights, or data in the caches, can take less.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from npuserve.cli.bench.step import CEILING_PASSES, WARM_UP, Bench, spare
from npuserve.kernels.bench.ceilings import Ceilings, Peak
from npuserve.kernels.bench.costs import Cost
from npuserve.npu.backends.machine import machine_of
from npuserve.npu.profiling.floor import CostRecorder, MetaModel
from npuserve.service import settings
from npuserve.service.arguments import number

Calls = list[tuple[str, float]]
"""(kernel, seconds) of the calls of one step, in order."""


class LabelRecorder(CostRecorder):
    """Recorder of the calls with a label: the kernel and, for products, the shape of the weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.labelled: list[tuple[str, Cost]] = []

    def _record(self, name: str, *args: Any) -> None:
        super()._record(name, *args)
        label = f"{name} {'x'.join(map(str, args[1].shape))}" if name.startswith("linear") else name
        self.labelled.append((label, self.costs[name][-1]))


@dataclass
class Line:
    """Line of a table: all calls of a step with one label. bound: seconds; 0 if the kernel has no cost."""

    label: str
    calls: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    operations: int = 0
    bound: float = 0.0


@dataclass(frozen=True)
class Limits:
    """The machine's limits. read: bytes a second. peaks: operations a second."""

    read: float
    peaks: dict[Peak, float]

    def bound(self, cost: Cost) -> float:
        """Return the least seconds of a call."""
        return max(cost.nbytes / self.read, cost.operations / self.peaks[cost.kind])


def lines_of(steps: Sequence[Calls], labelled: Sequence[tuple[str, Cost]], limits: Limits) -> list[Line]:
    """Return the lines of equal steps, the longest first.

    labelled: the calls of such a step that have costs, in order; other calls may be between them.
    """
    expected, lines = list(labelled), dict[str, Line]()
    for index, (kernel, _) in enumerate(steps[0]):
        label, cost = kernel, None
        if expected and expected[0][0].split()[0] == kernel:
            label, cost = expected.pop(0)
        line = lines.setdefault(label, Line(label))
        line.calls += 1
        line.seconds += statistics.median(step[index][1] for step in steps)
        if cost:
            line.nbytes += cost.nbytes
            line.operations += cost.operations
            line.bound += limits.bound(cost)
    if expected:
        raise ValueError(f"{expected[0][0]}: the step did not call it")
    return sorted(lines.values(), key=lambda line: -line.seconds)


def table(title: str, seconds: float, lines: Sequence[Line], limits: Limits) -> str:
    """Return a Markdown table. seconds: median of the whole steps."""
    in_kernels, bound = (sum(getattr(line, name) for line in lines) for name in ("seconds", "bound"))
    peaks = ", ".join(f"{kind} {peak / 1e9:.0f}" for kind, peak in limits.peaks.items())
    rows = [f"{title}: {1e3 * seconds:.2f} ms, kernels {1e3 * in_kernels:.2f} ms, bound {1e3 * bound:.2f} ms; memory "
            f"{limits.read / 1e9:.1f} GB/s, GFLOP/s: {peaks}", "",
            "| kernel | calls | ms | MB | GFLOP | GB/s | GFLOP/s | bound, ms | bound / time |", "|---" * 9 + "|"]
    for line in lines:
        speeds = (line.nbytes / line.seconds / 1e9, line.operations / line.seconds / 1e9) if line.seconds else (0, 0)
        share = line.bound / line.seconds if line.seconds else 0.0
        rows.append(
            f"| {line.label} | {line.calls} | {1e3 * line.seconds:.3f} | {line.nbytes / 1e6:.1f} "
            f"| {line.operations / 1e9:.2f} | {speeds[0]:.1f} | {speeds[1]:.0f} "
            f"| {1e3 * line.bound:.3f} | {share:.2f} |")
    return "\n".join(rows)


class StepKernels:
    """Tables of a loaded model's steps."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        runner = bench.runner
        self._dtype = getattr(torch, runner.dtype_name)
        can = runner.backend.capabilities
        self._model = MetaModel(
            runner.config, self._dtype, vocabulary_tile=can.vocabulary_tile, int8_levels=can.int8_levels,
            block_size=runner.block_size, cache_dtype=runner.cache_dtype)
        self._ceilings = Ceilings(machine=machine_of(runner.backend))

    def decode(self, rows: int, context: int, steps: int) -> str:
        """Return the table of decode steps."""
        bench = self._bench
        answer = spare(rows, context, bench.budget) + WARM_UP + steps
        ids = [bench.add(context, answer) for _ in range(rows)]
        while bench.step().sampled < rows:
            pass
        for _ in range(WARM_UP):
            bench.step()

        def measure() -> tuple[list[Calls], list[float]]:
            timed, seconds = [], []
            for _ in range(steps):
                seconds.append(bench.step().seconds)
                timed.append(list(bench.calls))
            return timed, seconds

        rows_table = self._table(f"{rows} x {context}", [(1, context)] * rows, rows, measure)
        for sequence_id in ids:
            bench.scheduler.cancel(sequence_id)
        while bench.pipeline:
            bench.step()
        return rows_table

    def prompt(self, tokens: int, repeats: int) -> str:
        """Return the table of a prompt that one step computes."""
        bench = self._bench

        def measure() -> tuple[list[Calls], list[float]]:
            timed, seconds = [], []
            for _ in range(repeats):
                bench.add(tokens, 1)
                seconds.append(bench.step().seconds)
                timed.append(list(bench.calls))
            return timed, seconds

        measure()
        return self._table(f"prompt of {tokens}", [(tokens, tokens)], 1, measure)

    def _table(
        self, title: str, rows: list[tuple[int, int]], sampled: int,
        measure: Callable[[], tuple[list[Calls], list[float]]],
    ) -> str:
        recorder = LabelRecorder(self._dtype)
        self._model.costs(rows, sampled, recorder)
        kinds = sorted({cost.kind for _, cost in recorder.labelled})
        before = self._limits(kinds)
        timed, seconds = measure()
        after = self._limits(kinds)
        limits = Limits(max(before.read, after.read),
                        {kind: max(before.peaks[kind], after.peaks[kind]) for kind in kinds})
        return table(title, statistics.median(seconds), lines_of(timed, recorder.labelled, limits), limits)

    def _limits(self, kinds: Sequence[Peak]) -> Limits:
        return Limits(max(self._ceilings.read() for _ in range(CEILING_PASSES)),
                      {kind: max(self._ceilings.peak(kind) for _ in range(CEILING_PASSES)) for kind in kinds})


def counts(text: str) -> list[int]:
    return [int(number(int, 1)(part)) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=counts, default=[1, 8, 32])
    add("--context", type=number(int, 1), default=128)
    add("--prompt", type=number(int, 1), default=512)
    add("--steps", type=number(int, 1), default=16, help="timed decode steps (default: %(default)s)")
    add("--repeats", type=number(int, 1), default=5, help="timed prompts (default: %(default)s)")
    settings.add_arguments(parser)
    args = parser.parse_args()
    config = msgspec.structs.replace(settings.load(args, os.environ), kernel_sampling=1)
    if args.prompt > config.max_num_batched_tokens:
        parser.error(f"--prompt: one step computes at most {config.max_num_batched_tokens} tokens; see "
                     "max_num_batched_tokens")
    kernels = StepKernels(Bench.load(config, args.rows, args.context, args.prompt, args.steps))
    for rows in args.rows:
        print(kernels.decode(rows, args.context, args.steps), end="\n\n", flush=True)
    print(kernels.prompt(args.prompt, args.repeats))


if __name__ == "__main__":
    main()
