"""Matrix product with weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.registry import Case, kernel

# (K, N) of a Qwen3-0.6B: qkv, attention output, gate and up, down.
_QWEN3_06B = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))


def _case(tokens: int, k: int, n: int, bias: bool = False, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        x = torch.randn(tokens, k, generator=generator).to(dtype)
        weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(dtype)
        return x, weight, torch.randn(n, generator=generator).to(dtype) if bias else None

    return Case(f"{tokens}x{k}x{n}{'+bias' if bias else ''}", make, benchmark)


@kernel(
    "linear",
    cases=[
        _case(1, 8, 3),
        _case(5, 33, 17, bias=True),
        _case(16, 64, 96),
        *(_case(t, k, n, benchmark=True) for t in (1, 8, 512) for k, n in _QWEN3_06B),
    ],
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] or None -> [T, N]."""
    return F.linear(x, weight, bias)
