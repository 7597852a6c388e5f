"""One kernel alone: how far off it is, how long a call takes, and how near that is to what the machine can do."""

from __future__ import annotations

import dataclasses
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

from npuserve.kernels import native
from npuserve.kernels.bench.ceilings import HOST, Ceilings, Machine, timed
from npuserve.kernels.bench.costs import Cost, cost, nbytes
from npuserve.kernels.native.packed import PackedWeight
from npuserve.kernels.quantized import Int8
from npuserve.kernels.registry import GOLDEN, Case, Implementation, Kernel, moved


def cache_bytes(processors: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the bytes of the last-level caches of the processors that this process may use; 0 if that is unknown."""
    found: dict[str, tuple[int, int]] = {}  # processors that share a cache -> its level and size
    for cpu in os.sched_getaffinity(0):
        for cache in sorted((processors / f"cpu{cpu}/cache").glob("index*")):
            try:
                level, size, sharing = (
                    (cache / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
                found[sharing] = max(found.get(sharing, (0, 0)), (int(level), int(size.removesuffix("K")) << 10))
            except (OSError, ValueError):
                continue
    last = max((level for level, _ in found.values()), default=0)
    return sum(size for level, size in found.values() if level == last)


COLD_BYTES = max(256 << 20, 2 * cache_bytes())
"""Weights and KV caches stand there in copies of so many bytes together, used in turn: more than processors cache."""

_PASS_SECONDS, _LONGEST_PASS = 0.003, 0.06
_LEAST_PASSES, _MOST_PASSES, _SECONDS = 5, 25, 0.5

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Of a result in that dtype, beside the golden one: absolute, and as a part of it. A few roundings of values of about
1."""

QUANTIZED = (torch.int8, torch.int16)
"""Of quantized numbers: as they are stored, and less their zeros."""

Args = tuple[Any, ...]
Bound = Literal["memory", "matrix", "cache"]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far an implementation is off on one case.

    error: the largest difference of a number from the golden function's in float64; infinite for what is not a number.
    other_ids: how many whole numbers, which are ids, ranks and counts, are others than the golden function's.
    excess: the largest difference by what is tolerated, above 1 for what is wrong: by `TOLERANCE`; of quantized numbers
    by 1 in place of its absolute part, since a half rounds either way.
    relative: the largest || difference || / || golden || of a tensor, those of whole numbers apart.
    """

    error: float
    other_ids: int
    excess: float
    relative: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A kernel's implementation on one case.

    error, other_ids: as in `Accuracy`.
    seconds: of a call, the median. bytes_per_second, operations_per_second: of what a call must at least move and do.
    bound: which ceiling asks for the most time: that of products ("matrix") or that of bytes, which come from memory
    or from a cache. share: the part of `seconds` that this ceiling explains, by its best pass among those of the
    kernel; of "memory" only the bytes that are in no cache count. None for "cache": the speed of caches is not
    measured, and the memory's is no ceiling of theirs.
    others: processors that everybody else took meanwhile; figures taken beside more than a few hundredths say little.
    """

    error: float
    other_ids: int
    seconds: float
    bytes_per_second: float
    operations_per_second: float
    bound: Bound
    share: float | None
    others: float


class Oracle:
    """One case of a kernel: its arguments, and the golden function's results for them in float64.

    seed: of the arguments. device: where the golden function computes.
    """

    def __init__(
        self, kernel: Kernel[..., Any], case: Case, dtype: torch.dtype, *, seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        self._kernel = kernel
        self._tolerance = max(TOLERANCE[dtype], case.tolerance)
        self._args = case.make(torch.Generator().manual_seed(seed), dtype)
        wide = tuple(widened(x) for x in moved(self._args, str(device)))
        versions = [_versions(x) for x in wide]
        results = tensors(kernel.golden(*wide))
        self._changed = [i for i, x in enumerate(wide) if _versions(x) != versions[i]]
        self._expected = [*results, *(tensor for i in self._changed for tensor in tensors(wide[i]))]

    def accuracy(self, label: str) -> Accuracy:
        """label: GOLDEN, which runs in the case's dtype, or a backend that has an implementation."""
        made = self._implementation(label)
        args = made.adapt(_copies(self._args, self._changed))
        results = tensors(made.function(*args))
        after = made.restore(args) if self._changed else ()
        results += [tensor for i in self._changed for tensor in tensors(after[i])]
        error, other_ids, excess, relative = 0.0, 0, 0.0, 0.0
        for result, want in zip(results, self._expected, strict=True):
            got = result.to(want.device)
            if not want.is_floating_point() and want.dtype not in QUANTIZED:
                other_ids += int((got != want).sum())
            elif want.numel():
                difference = torch.where(got == want, 0.0, (got.double() - want.double()).abs())
                difference = difference.nan_to_num(nan=torch.inf, posinf=torch.inf)
                error = max(error, float(difference.max()))
                tolerated = self._tolerance * want.double().abs() + (self._tolerance if want.is_floating_point() else 1)
                excess = max(excess, float((difference / tolerated).max()))
                whole = float(want.double().nan_to_num(posinf=0, neginf=0).norm())
                relative = max(relative, float(difference.norm()) / (whole or 1.0))
        return Accuracy(error, other_ids, excess, relative)

    def _implementation(self, label: str) -> Implementation[..., Any]:
        return Implementation(self._kernel.golden) if label == GOLDEN else self._kernel.implementations[label]


class Bench(Oracle):
    """An oracle that times calls, too, on a machine. seed: of the arguments."""

    def __init__(
        self, kernel: Kernel[..., Any], case: Case, dtype: torch.dtype, machine: Machine = HOST, *, seed: int = 0
    ):
        super().__init__(kernel, case, dtype, seed=seed, device=machine.device)
        self.cost = cost(kernel.name, self._args)
        self._costs: dict[str, Cost] = {}
        self._machine = machine

    def measure(self, label: str, ceilings: Ceilings, best: dict[str, float]) -> Measured:
        """ceilings, best: of the machine, and its `best()` of this run."""
        accuracy, c = self.accuracy(label), self._cost(label)
        bound, seconds, share, others = self._time(label, ceilings, best)
        return Measured(accuracy.error, accuracy.other_ids, seconds, c.nbytes / seconds, c.operations / seconds, bound,
                        share, others)

    def _cost(self, label: str) -> Cost:
        """`cost`, with weights as the implementation holds them, which may be in fewer bytes."""
        if label not in self._costs:
            held = self._implementation(label).adapt(self._args)
            args = tuple(b if isinstance(b, PackedWeight) else a for a, b in zip(self._args, held, strict=True))
            self._costs[label] = cost(self._kernel.name, args)
        return self._costs[label]

    def seconds(self, label: str, synchronize: Callable[[], None], passes: int = _LEAST_PASSES) -> float:
        """Of a call on any device, the median; launches included. synchronize: returns once the device is done."""

        def clock(run: Callable[[], object]) -> float:
            synchronize()
            began = time.perf_counter()
            run()
            synchronize()
            return time.perf_counter() - began

        one_pass = self._passes(label, None, clock)
        one_pass()
        return statistics.median(one_pass() for _ in range(passes))

    def alone(self, label: str, passes: int = _LEAST_PASSES) -> float:
        """Seconds of a call on the machine, the median; launches left out where it records them."""
        one_pass = self._passes(label, self._machine, partial(timed, self._machine))
        one_pass()
        return statistics.median(one_pass() for _ in range(passes))

    def _passes(
        self, label: str, recorder: Machine | None, clock: Callable[[Callable[[], object]], float]
    ) -> Callable[[], float]:
        """What runs a pass of calls, each of them on cold arguments, and returns the seconds of a call. recorder: makes
        one dispatch of a pass, where it can."""
        made = self._implementation(label)
        args = made.adapt(_copies(self._args, self._changed))
        cold = nbytes(*(self._args[i] for i in self.cost.cold))
        turns = [_copies(args, self.cost.cold) for _ in range(-(-COLD_BYTES // cold) if cold else 1)]
        fresh = [pair for i in self._changed for pair in zip(tensors(args[i]), tensors(_copy(args[i])), strict=True)]

        def run(count: int) -> Callable[[], float]:
            calls = _calls(made.function, [turns[i % len(turns)] for i in range(count)], recorder)

            def one_pass() -> float:
                for tensor, before in fresh:
                    tensor.copy_(before)
                return clock(calls) / count

            return one_pass

        first = run(1)
        alone = min(first(), first())
        count = -(-int(_PASS_SECONDS / alone + 1) // len(turns)) * len(turns)
        return run(max(1, min(count, int(_LONGEST_PASS / alone))))

    def _time(
        self, label: str, ceilings: Ceilings, best: dict[str, float]
    ) -> tuple[Bound, float, float | None, float]:
        """Return (bound, seconds of a call, share, others)."""
        one_pass = self._passes(label, None if label == GOLDEN else self._machine, partial(timed, self._machine))
        cold = min(nbytes(*(self._args[i] for i in self.cost.cold)), self.cost.nbytes)
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
        taken, began = _taken_by_others(), time.perf_counter()
        while len(passes) < _LEAST_PASSES or (
                len(passes) < _MOST_PASSES and time.perf_counter() - began < _SECONDS):
            seconds = one_pass()
            passes.append((seconds, ceiling()))
        others = (_taken_by_others() - taken) / (time.perf_counter() - began)
        taken_by_calls, taken_by_ceiling = zip(*passes, strict=True)
        seconds = statistics.median(taken_by_calls)
        share = None if bound == "cache" else min(taken_by_ceiling) / seconds
        return bound, seconds, share, max(others, 0.0)


def _calls(function: Callable[..., Any], turns: Sequence[Args], recorder: Machine | None) -> Callable[[], object]:
    """What calls `function` with each of `turns`. recorder: makes it one dispatch, where it can."""

    def all_of_them() -> Tensor:
        for args in turns:
            function(*args)
        return torch.empty(0)

    return (recorder and recorder.record(all_of_them)) or all_of_them


def _taken_by_others() -> float:
    """Processor seconds of this machine so far that were not ours."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    own = os.times()
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def _copies(args: Args, which: Sequence[int]) -> Args:
    return tuple(_copy(x) if i in which else x for i, x in enumerate(args))


def _copy(value: Any) -> Any:
    """Of a tensor, in large pages where there are such, or of a dataclass of tensors."""
    if isinstance(value, Tensor):
        if not native.available() or not value.is_cpu or not value.nbytes:
            return value.clone()
        made = native.library().allocate(value.nbytes).view(value.dtype).view(value.shape)
        return made.copy_(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: _copy(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def widened(value: Any) -> Any:
    """Floats as float64, also in dataclasses, for a golden function."""
    if isinstance(value, torch.dtype):  # of the result
        return torch.float64
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: widened(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def tensors(value: Any) -> list[Tensor]:
    """Those of a result or an argument, quantized numbers less their zeros."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Int8):
        return [value.values if value.zero is None else value.values.short() - value.zero.short().unsqueeze(-1),
                value.scale]
    if isinstance(value, tuple):
        return [tensor for x in value for tensor in tensors(x)]
    if dataclasses.is_dataclass(value):
        return [tensor for f in dataclasses.fields(value) for tensor in tensors(getattr(value, f.name))]
    return []


def _versions(value: Any) -> list[int]:
    if isinstance(value, Int8):
        return _versions((value.values, value.scale))
    return [tensor._version for tensor in tensors(value)]
