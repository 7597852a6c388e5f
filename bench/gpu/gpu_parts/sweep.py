"""Timing of the configurations and of the ones that the tables choose now; the best of each shape as a table entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_parts.variants import CHOSEN, Shape, shapes
from gpu_parts.worker import Context, Units
from npuserve.kernels.bench import measure
from npuserve.kernels.bench.measure import Bench

AGAIN = 3
"""Number of the fastest configurations that are timed again, with the chosen one."""


def units(context: Context) -> Units:
    if context.toy:
        measure.COLD_BYTES, measure._PASS_SECONDS = 1 << 16, 1e-4
    yield from ((shape.name, _unit(context, shape)) for shape in shapes(context))


def _unit(context: Context, shape: Shape) -> Callable[[], Iterator[dict[str, Any]]]:
    def run() -> Iterator[dict[str, Any]]:
        bench = Bench(shape.kernel, shape.case, torch.bfloat16, context.machine, seed=context.args.seed)
        seconds: dict[str, float] = {}
        for label in shape.kernel.implementations:
            try:
                seconds[label] = bench.alone(label, 2 if context.toy else 3)
            except Exception as failed:
                if type(failed).__name__ not in ("OutOfResources", "PTXASError"):
                    raise
        for label in {CHOSEN, *sorted(seconds, key=seconds.__getitem__)[:AGAIN]}:
            seconds[label] = min(seconds[label], bench.alone(label))
        best = min(seconds, key=seconds.__getitem__)
        _, ceilings = context.ceilings()
        yield {"table": "Best configurations", "key": shape.key, "best": best, "us": seconds[best] * 1e6,
               "chosen now, us": seconds[CHOSEN] * 1e6, "chosen / best": seconds[CHOSEN] / seconds[best],
               "library us": seconds["None"] * 1e6 if "None" in seconds else None,
               "share of the reads": bench.cost.nbytes / seconds[best] / (ceilings["read_gbs"] * 1e9),
               "timed": len(seconds)}

    return run
