"""Correctness of each configuration of the tunable kernels; this also compiles them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_parts.numbers import Chosen, judged_by
from gpu_parts.variants import Shape, shapes
from gpu_parts.worker import Context, Units


def units(context: Context) -> Units:
    yield from ((shape.name, _unit(context, shape)) for shape in shapes(context))


def _unit(context: Context, shape: Shape) -> Callable[[], Iterator[dict[str, Any]]]:
    def run() -> Iterator[dict[str, Any]]:
        oracle = Chosen(shape.kernel, shape.case, torch.bfloat16, seed=context.args.seed, device=context.backend.device)
        worst, wrong, refused = 0.0, [], []
        for label in shape.kernel.implementations:
            try:
                error, ok = judged_by(oracle, context, label)
            except Exception as failed:
                if type(failed).__name__ not in ("OutOfResources", "PTXASError"):
                    raise
                refused.append(label)  # too many registers or too much shared memory for this GPU
                continue
            worst = max(worst, error)
            wrong += [] if ok else [label]
        yield {"table": "Configurations beside the golden function", "shape": shape.name,
               "configurations": len(shape.kernel.implementations), "that do not fit": len(refused),
               "largest relative error": worst, "ok": not wrong, "wrong": "; ".join(wrong[:2])}

    return run
