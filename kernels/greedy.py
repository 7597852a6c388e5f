"""Argmax of the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.registry import Case, kernel


def _case(rows: int, vocabulary: int, padding: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, int]:
        logits = torch.randn(rows, vocabulary + padding, generator=generator).mul(3).round(decimals=1)
        logits[:, vocabulary:] = 100.0
        return logits.to(dtype), vocabulary

    return Case(f"{rows}x{vocabulary}+{padding}", make, benchmark)


@kernel("greedy", cases=[_case(1, 7, 0), _case(5, 101, 27), *(_case(r, 151936, 0, True) for r in (1, 8, 32))])
def greedy(logits: Tensor, vocabulary: int) -> Tensor:
    """Return the argmax of logits [R, Vp] over the first `vocabulary` ids: ids [R, 1] int64.

    The smallest id wins among equal logits. NaN counts as minus infinity. A row of minus infinity gives 0.
    """
    real = logits[:, :vocabulary]
    return real.masked_fill(real.isnan(), -torch.inf).argmax(dim=-1, keepdim=True)


@native.implementation(greedy)
def _(logits: Tensor, vocabulary: int) -> Tensor:
    parts = -(-vocabulary // native.CONSTANTS["GREEDY_PART"])
    best = native.empty(parts, len(logits), dtype=torch.float32)
    places = native.empty(parts, len(logits), dtype=torch.int32)
    ids = native.empty(len(logits), 1, dtype=torch.int64)
    sizes = [*logits.shape, vocabulary]
    native.call(
        "greedy",
        ("greedy", logits.dtype, [logits, best, places], sizes),
        ("greedy_merge", logits.dtype, [best, places, ids], sizes))
    return ids


@ascend.implementation(greedy)
def _(logits: Tensor, vocabulary: int) -> Tensor:
    real = logits[:, :vocabulary].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return ascend.first_true(real == real.amax(dim=-1, keepdim=True))


@triton.implementation(greedy)
def _(logits: Tensor, vocabulary: int) -> Tensor:
    from npuserve.kernels.triton import launch_vocabulary

    return launch_vocabulary.greedy(logits, vocabulary)
