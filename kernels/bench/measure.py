"""Time of a kernel's implementation, and its distance from the machine's ceilings."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from npuserve.kernels.bench.accuracy import Oracle
from npuserve.kernels.bench.ceilings import HOST, Ceilings, Machine, timed
from npuserve.kernels.bench.costs import Cost, cost, nbytes
from npuserve.kernels.bench.tensors import Args, copy_arguments, copy_value, tensors
from npuserve.kernels.native.caches import cache_bytes
from npuserve.kernels.registry import GOLDEN, Case, Kernel
from npuserve.kernels.weight import FloatWeight

COLD_BYTES = max(256 << 20, 2 * cache_bytes())
"""Total bytes of the copies of cold weights and KV caches, which calls use round-robin: more than the caches hold."""

_PASS_SECONDS, _LONGEST_PASS = 0.003, 0.06
_LEAST_PASSES, _MOST_PASSES, _SECONDS = 5, 25, 0.5

Bound = Literal["memory", "matrix", "cache"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of a kernel's implementation on one case.

    error, other_ids: see `Accuracy`.
    seconds: median of a call.
    bytes_per_second, operations_per_second: rates of the minimum bytes and operations of a call.

    bound: ceiling that demands the most time: "matrix" (products), "memory" or "cache" (bytes).
    share: part of `seconds` that this ceiling explains, by its best pass during the measurement. For "memory", only
        bytes that are in no cache count. None for "cache", whose speed is not measured.
    others: processors that other processes used meanwhile. Above a few hundredths, the results are unreliable.
    """

    error: float
    other_ids: int
    seconds: float
    bytes_per_second: float
    operations_per_second: float
    bound: Bound
    share: float | None
    others: float


class Bench(Oracle):
    """Oracle that also times calls on a machine. seed: for the arguments."""

    def __init__(
        self, kernel: Kernel[..., Any], case: Case, dtype: torch.dtype, machine: Machine = HOST, *, seed: int = 0
    ):
        super().__init__(kernel, case, dtype, seed=seed, device=machine.device)
        self.cost = cost(kernel.name, self.args)
        self._costs: dict[str, Cost] = {}
        self._machine = machine

    def measure(self, label: str, ceilings: Ceilings, best: dict[str, float]) -> Measurement:
        """Measure an implementation. ceilings: of the machine; best: its `best()` of this run."""
        accuracy, c = self.accuracy(label), self._cost(label)
        bound, seconds, share, others = self._time(label, ceilings, best)
        return Measurement(
            accuracy.error, accuracy.other_ids, seconds, c.nbytes / seconds, c.operations / seconds, bound, share,
            others)

    def _cost(self, label: str) -> Cost:
        """Return the cost with weights in the implementation's form, which may take fewer bytes."""
        if label not in self._costs:
            held = self.implementation(label).adapt(self.args)
            args = tuple(b if isinstance(b, FloatWeight) else a for a, b in zip(self.args, held, strict=True))
            self._costs[label] = cost(self.kernel.name, args)
        return self._costs[label]

    def seconds(self, label: str, synchronize: Callable[[], None]) -> float:
        """Return the median seconds of a call on any device, including launches. synchronize: waits for the device."""

        def clock(run: Callable[[], object]) -> float:
            synchronize()
            began = time.perf_counter()
            run()
            synchronize()
            return time.perf_counter() - began

        one_pass = self._passes(label, None, clock)
        one_pass()
        return statistics.median(one_pass() for _ in range(_LEAST_PASSES))

    def alone(self, label: str, passes: int = _LEAST_PASSES) -> float:
        """Return the median seconds of a call on the machine, without launches if it records them."""
        one_pass = self._passes(label, self._machine, partial(timed, self._machine))
        one_pass()
        return statistics.median(one_pass() for _ in range(passes))

    def _passes(
        self, label: str, recorder: Machine | None, clock: Callable[[Callable[[], object]], float]
    ) -> Callable[[], float]:
        """Return a function that runs a pass of calls with cold arguments and returns the seconds of a call.

        recorder: records a pass as one dispatch if possible.
        """
        made = self.implementation(label)
        args = made.adapt(copy_arguments(self.args, self.changed))
        cold = nbytes(*(self.args[i] for i in self.cost.cold))
        copies = [copy_arguments(args, self.cost.cold) for _ in range(-(-COLD_BYTES // cold) if cold else 1)]
        fresh = [pair for i in self.changed
                 for pair in zip(tensors(args[i]), tensors(copy_value(args[i])), strict=True)]

        def run(count: int) -> Callable[[], float]:
            calls = _calls(made.function, [copies[i % len(copies)] for i in range(count)], recorder)

            def one_pass() -> float:
                for tensor, before in fresh:
                    tensor.copy_(before)
                return clock(calls) / count

            return one_pass

        first = run(1)
        alone = min(first(), first())
        count = -(-int(_PASS_SECONDS / alone + 1) // len(copies)) * len(copies)
        return run(max(1, min(count, int(_LONGEST_PASS / alone))))

    def _time(
        self, label: str, ceilings: Ceilings, best: dict[str, float]
    ) -> tuple[Bound, float, float | None, float]:
        """Return bound, seconds of a call, share and others, as in `Measurement`."""
        one_pass = self._passes(label, None if label == GOLDEN else self._machine, partial(timed, self._machine))
        cold = min(nbytes(*(self.args[i] for i in self.cost.cold)), self.cost.nbytes)
        peak = next(value for name, value in best.items() if name.startswith(self.cost.kind)) * 1e9
        c = self._cost(label)
        by_bytes, by_operations = c.nbytes / (best["read_gbs"] * 1e9), c.operations / peak
        bound: Bound = "matrix" if by_operations > by_bytes else "memory" if 2 * cold > c.nbytes else "cache"
        ceiling: Callable[[], float] = {
            "matrix": lambda: c.operations / ceilings.peak(c.kind),
            "memory": lambda: (c.nbytes - (self.cost.nbytes - cold)) / ceilings.read(),
            "cache": lambda: 0.0,
        }[bound]
        passes: list[tuple[float, float]] = []
        one_pass()
        taken, began = _seconds_of_others(), time.perf_counter()
        while len(passes) < _LEAST_PASSES or (
                len(passes) < _MOST_PASSES and time.perf_counter() - began < _SECONDS):
            seconds = one_pass()
            passes.append((seconds, ceiling()))
        others = (_seconds_of_others() - taken) / (time.perf_counter() - began)
        taken_by_calls, taken_by_ceiling = zip(*passes, strict=True)
        seconds = statistics.median(taken_by_calls)
        share = None if bound == "cache" else min(taken_by_ceiling) / seconds
        return bound, seconds, share, max(others, 0.0)


def _calls(function: Callable[..., Any], copies: Sequence[Args], recorder: Machine | None) -> Callable[[], object]:
    """Return a function that calls `function` with each of `copies`; `recorder` makes it one dispatch if possible."""

    def call_all() -> Tensor:
        for args in copies:
            function(*args)
        return torch.empty(0)

    return (recorder and recorder.record(call_all)) or call_all


def _seconds_of_others() -> float:
    """Return the processor seconds that other processes of this machine have used so far."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    own = os.times()
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - own.user - own.system
