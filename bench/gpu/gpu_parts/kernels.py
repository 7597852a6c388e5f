"""Each kernel alone at the shape of a whole model, with cold weights, compared with the ceiling that limits it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_parts.cases import large_cases
from gpu_parts.worker import Context, Units
from npuserve.kernels.bench import measure
from npuserve.kernels.bench.measure import Bench
from npuserve.kernels.registry import GOLDEN, KERNELS, Case, Kernel, KernelSet


def units(context: Context) -> Units:
    labels = KernelSet(context.backend.kernels).labels
    if context.toy:
        measure.COLD_BYTES, measure._PASS_SECONDS = 1 << 16, 1e-4
    measure._SECONDS = 0.0 if context.toy else 0.15
    for name, cases in large_cases(context, (1, 16, 64, 256)).items():
        if labels.get(name, GOLDEN) != GOLDEN:
            yield name, _unit(context, KERNELS[name], cases[:2] if context.toy else cases)


def _unit(context: Context, kernel: Kernel[..., Any], cases: list[Case]) -> Callable[[], Iterator[dict[str, Any]]]:
    def run() -> Iterator[dict[str, Any]]:
        ceilings, best = context.ceilings()
        dtype = torch.bfloat16 if torch.bfloat16 in kernel.dtypes else kernel.dtypes[0]
        for case in cases:
            bench = Bench(kernel, case, dtype, context.machine, seed=context.args.seed)
            found = bench.measure(context.backend.kernels, ceilings, best)
            yield {"table": f"Kernels alone, {context.args.shape}", "kernel": kernel.name, "case": case.name,
                   "us": found.seconds * 1e6, "GB/s": found.bytes_per_second / 1e9,
                   "TFLOP/s": found.operations_per_second / 1e12, "bound": found.bound, "share": found.share}

    return run
