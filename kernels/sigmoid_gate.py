"""Sigmoid gate of the output of attention (Qiu et al. 2025, arXiv:2505.06708)."""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.registry import Case, kernel


def _case(tokens: int, width: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x, gate = torch.randn(2, tokens, width, generator=generator).mul(2).to(dtype)
        return x, gate

    return Case(f"{tokens}x{width}", make, benchmark)


@kernel("sigmoid_gate", by_layer=True,
        cases=[_case(1, 8), _case(5, 33), *(_case(t, 2048, True) for t in (1, 32, 512))])
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate); x, gate: [T, N]."""
    return x * torch.sigmoid(gate)


@native.implementation(sigmoid_gate)
def _(x: Tensor, gate: Tensor) -> Tensor:
    out = native.empty(*x.shape, dtype=x.dtype)
    native.call("sigmoid_gate", ("sigmoid_gate", x.dtype, [x, gate, out], [*x.shape]))
    return out


@ascend.implementation(sigmoid_gate)
def _(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


@triton.implementation(sigmoid_gate)
def _(x: Tensor, gate: Tensor) -> Tensor:
    from npuserve.kernels.triton import launch_rows

    return launch_rows.sigmoid_gate(x, gate)
