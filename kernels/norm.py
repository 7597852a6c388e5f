"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv:1910.07467), rounded where Hugging Face's models
round: float32 inside, then the input's dtype, then times gamma."""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels import ascend, native
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.registry import Case, kernel

_SHAPES = ((1, 8), (3, 33), (7, 64))
_QWEN3_06B = ((1, 1024), (32, 1024), (512, 1024))


def normalize(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Over the last dimension: x [..., H], gamma [H] -> [..., H] of x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * gamma


def _rms_norm_case(tokens: int, hidden: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        x = torch.randn(tokens, hidden, generator=generator).to(dtype)
        return x, torch.rand(hidden, generator=generator).add(0.5).to(dtype), 1e-6

    return Case(f"{tokens}x{hidden}", make, benchmark)


@kernel("rms_norm", cases=[*(_rms_norm_case(*s) for s in _SHAPES), *(_rms_norm_case(*s, True) for s in _QWEN3_06B)])
def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x [T, H], gamma [H] -> [T, H]."""
    return normalize(x, gamma, eps)


def _add_rms_norm_case(tokens: int, hidden: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, float]:
        x, residual = torch.randn(2, tokens, hidden, generator=generator).to(dtype)
        return x, residual, torch.rand(hidden, generator=generator).add(0.5).to(dtype), 1e-6

    return Case(f"{tokens}x{hidden}", make, benchmark)


@kernel(
    "add_rms_norm",
    cases=[*(_add_rms_norm_case(*s) for s in _SHAPES), *(_add_rms_norm_case(*s, True) for s in _QWEN3_06B)],
)
def add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [T, H], gamma [H] -> (rms_norm of their sum, their sum), both [T, H]."""
    total = x + residual
    return normalize(total, gamma, eps), total


@native.implementation(rms_norm)
def _(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    out = native.empty(*x.shape, dtype=x.dtype)
    native.call("rms_norm", ("rms_norm", x.dtype, [x, None, gamma, out], [*x.shape], [eps]))
    return out


@native.implementation(add_rms_norm)
def _(x: Tensor, residual: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = (native.empty(*x.shape, dtype=x.dtype) for _ in range(2))
    native.call("add_rms_norm", ("add_rms_norm", x.dtype, [x, residual, gamma, out, total], [*x.shape], [eps]))
    return out, total


@ascend.implementation(rms_norm)
def _(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Rounded once, after gamma."""
    out: Tensor = torch_npu.npu_rms_norm(x, gamma, epsilon=eps)[0]
    return out


@ascend.implementation(add_rms_norm)
def _(x: Tensor, residual: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, _, total = torch_npu.npu_add_rms_norm(x, residual, gamma, epsilon=eps)
    return out, total
