"""Latency part of the acceptance check: kernels and decode steps compared with the time that the memory needs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npuserve.cli.acceptance.kernels import WRONG_NUMBERS, supported_cases, supported_dtypes
from npuserve.cli.acceptance.reference import Loaded
from npuserve.cli.acceptance.report import Finding
from npuserve.cli.bench.step import WARM_UP, Bench, spare
from npuserve.kernels.bench.ceilings import Ceilings
from npuserve.kernels.bench.measure import Bench as KernelBench
from npuserve.kernels.registry import KERNELS, Implementation, Span
from npuserve.kernels.sample import Filters, sample
from npuserve.npu.backends.base import Backend
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.backends.machine import served_kernel
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.state_slots import StateSlots

BATCHES = (1, 16, 64)
"""Rows of the timed decode steps."""
STEPS = 32
"""Number of timed decode steps for each number of rows."""

MAX_OPERATIONS_PER_BYTE = 64
"""Kernel cases with more operations are bound by arithmetic, and not compared with the memory."""

SAMPLED_ROWS = 8
VOCABULARY = 151_936
"""Rows and ids of the timed samplers."""

SAMPLERS: dict[str, tuple[int, float]] = {
    **{f"top_k {top_k}": (top_k, 1.0) for top_k in (1, 20, 50, 1024)}, "top_k and top_p off": (0, 1.0),
    "top_p alone": (0, 0.9)}
"""Name -> top_k and top_p of all rows of a timed sampler."""

MAX_SAMPLER_SECONDS = 5e-3
"""A slower sampler fails: it takes as long as a quarter of a step of a large model, or more."""

MIN_JUDGED_SECONDS = 50e-6
"""Kernel calls with a lower floor are dominated by their launch, and not judged."""


REPEATS = 5
"""Timed passes of each kind over memory."""

READ_BYTES = 1 << 30


@dataclass
class LatencyCheck:
    """Latencies compared with their floor: the bytes that must be read, by the memory bandwidth.

    emulated: whether the device is emulated; then fewer cases and steps run.
    min_share: minimum of floor / latency; None if latencies are not judged.
    bytes_per_second: memory bandwidth; 0 until `bandwidth` measured it. Without it nothing is timed.
    """

    emulated: bool
    min_share: float | None
    bytes_per_second: float = 0.0

    def bandwidth(self, backend: Backend) -> Iterator[Finding]:
        """Measure the memory bandwidth and yield it."""
        self.bytes_per_second = bandwidth(backend)
        gbs = self.bytes_per_second / 1e9
        yield Finding("memory", "bandwidth", f"{gbs:.1f} GB/s", None, {"gbs": gbs})

    def latency(self, name: str, seconds: float, nbytes: float, advice: str, judge: bool = True) -> Finding:
        """Return the finding for a latency. nbytes: bytes that must be read. judge: False if it is only reported."""
        floor = nbytes / self.bytes_per_second
        share = floor / seconds
        passed = share >= self.min_share if self.min_share is not None and judge else None
        return Finding("latency", name, f"{seconds * 1e3:.3f} ms, floor {floor * 1e3:.3f} ms, share {share:.2f}",
                       passed, {"seconds": seconds, "floor_seconds": floor, "share": share}, advice)

    def kernels(self, backend: Backend) -> Iterator[Finding]:
        """Time the backend's own kernels on the benchmark cases of decode steps; one case a kernel if emulated."""
        for kernel in KERNELS.values():
            if not self.bytes_per_second or backend.kernels not in kernel.implementations:
                continue
            dtype = supported_dtypes(kernel, backend)[0]
            for case in supported_cases(kernel, backend, benchmark=True):
                bench = KernelBench(served_kernel(backend, kernel), case, dtype)
                accuracy = bench.accuracy(backend.kernels)
                if accuracy.excess > 1:
                    yield Finding("kernels", f"{kernel.name} {case.name}", f"error {accuracy.error:.1e}", False,
                                  {"error": accuracy.error}, WRONG_NUMBERS)
                if bench.cost.operations > MAX_OPERATIONS_PER_BYTE * bench.cost.nbytes:
                    continue
                seconds = bench.seconds(backend.kernels, backend.synchronize)
                yield self.latency(
                    f"{kernel.name} {case.name}", seconds, bench.cost.nbytes,
                    "the kernel takes longer than its reads: make sure that nothing else runs on this device, then "
                    "send this report",
                    bench.cost.nbytes >= MIN_JUDGED_SECONDS * self.bytes_per_second)
                if self.emulated:
                    break

    def samplers(self, backend: Backend) -> Iterator[Finding]:
        """Time the backend's sampler for each of SAMPLERS, whose time may depend on the filters."""
        implementation: Implementation[..., Any] | None = sample.implementations.get(backend.kernels)
        if implementation is None or not self.bytes_per_second:
            return
        vocabulary = 4096 if self.emulated else VOCABULARY
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(SAMPLED_ROWS, vocabulary, generator=generator)
        ones = torch.ones(SAMPLED_ROWS)
        uniform = torch.rand(SAMPLED_ROWS, dtype=torch.float64, generator=generator)
        for name, (top_k, top_p) in SAMPLERS.items():
            args = implementation.adapt((
                logits, vocabulary, ones, torch.full((SAMPLED_ROWS,), top_k), ones * top_p, ones * 0, uniform))
            filters = Filters.of(top_k, top_p, vocabulary)
            seconds = []
            for _ in range(WARM_UP + STEPS):
                backend.synchronize()
                began = time.perf_counter()
                implementation.function(*args, filters)
                backend.synchronize()
                seconds.append(time.perf_counter() - began)
            median = statistics.median(seconds[WARM_UP:])
            yield Finding(
                "latency", f"sampler, {SAMPLED_ROWS} rows, {name}", f"{median * 1e3:.3f} ms",
                None if self.min_share is None else median <= MAX_SAMPLER_SECONDS, {"seconds": median},
                "an operator of the sampler is slow with this software: send this report; requests with other "
                "parameters are faster")

    def steps(self, loaded: Loaded, context: int, budget: int) -> Iterator[Finding]:
        """Time decode steps, each launched before the previous step is collected, and the updates of their lengths.

        context: tokens of each row before decoding. budget: maximum tokens of a step.
        """
        steps = 2 if self.emulated else STEPS
        runner = loaded.runner
        blocks = BlockManager(runner.num_blocks, runner.block_size, prefix_cache=False)
        scheduler = Scheduler(blocks, max_num_seqs=BATCHES[-1], max_num_batched_tokens=budget, max_queue=0,
                              aging_seconds=1.0, slots=StateSlots.of(runner.num_slots, blocks))
        bench = Bench(runner, scheduler, budget, 2, [])
        for rows in BATCHES if self.bytes_per_second else ():
            name = f"decode step, batch {rows}"
            length = row_length(rows, context, budget, steps)
            if length > runner.max_model_len or (-(-length // runner.block_size) + 1) * rows > runner.num_blocks:
                yield Finding("latency", name, f"{rows} rows of {length} tokens do not fit", None)
                continue
            loaded.backend.take_lengths_lags()
            timed = bench.decode(rows, context, steps)
            yield self.latency(
                f"{name}, context {context}", statistics.median(step.seconds for step in timed),
                statistics.mean(bench.decode_bytes(step.context, rows) for step in timed),
                "check which kernels above have a low share, whether npuserve_step_host_gap_seconds is above 0, and "
                "that nothing else runs on this device; then send this report")
            if updater := loaded.backend.lengths_updater:
                yield _lengths(rows, updater, loaded.backend.take_lengths_lags(), loaded.runner.config.num_layers)


def _lengths(rows: int, updater: str, lags: Sequence[float], layers: int) -> Finding:
    """Return the finding for the updates of lengths since the last call.

    lags: seconds from each replay's launch to the end of its update.
    """
    said = f"by {updater}, {layers} layers"
    if lags:
        said += f", {statistics.median(lags) * 1e3:.3f} ms after the launch"
    return Finding("latency", f"lengths, batch {rows}", said, None, {"updater": updater, "lags": len(lags)})


def row_length(rows: int, context: int, budget: int, steps: int) -> int:
    """Return the tokens of a row at the end of a measurement of `steps` steps."""
    return context + spare(rows, context, budget) + WARM_UP + steps


def bandwidth(backend: Backend) -> float:
    """Return the bandwidth of the device's memory in bytes per second.

    It is the best of several copies (reads and writes) and of several sums in plain torch; on the CPU that of
    `Ceilings`.
    """
    size = min(READ_BYTES, backend.memory.available() // 16)
    if isinstance(backend, CpuBackend):
        ceilings = Ceilings(size)
        return max(ceilings.read() for _ in range(REPEATS))

    def work() -> list[tuple[int, Span]]:
        source = torch.ones(size // 4, dtype=torch.float32, device=backend.device)
        target = torch.zeros_like(source)
        passes: tuple[tuple[int, Callable[[], Tensor]], ...] = (
            (2 * source.nbytes, lambda: target.copy_(source)), (source.nbytes, source.sum))
        return [(nbytes, spanned(backend, run)) for nbytes, run in passes * (REPEATS + 1)]

    spans = backend.enqueue(work).wait()[2:]
    backend.synchronize()
    return max(nbytes / span.read() for nbytes, span in spans)


def spanned(backend: Backend, run: Callable[[], Tensor]) -> Span:
    """Run a computation and return its span on the device's clock."""
    span = backend.span()
    run()
    span.stop()
    return span
