"""int8 activations times int8 weights (W8A8): a scale for each token, found as it comes, and one for each row of the
weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.linear import QWEN3_06B
from npuserve.kernels.native.packed import PackedInt8Weight
from npuserve.kernels.registry import Case, kernel

_MOST = 127


def _quantize_case(tokens: int, hidden: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor]:
        return (torch.randn(tokens, hidden, generator=generator).to(dtype),)

    return Case(f"{tokens}x{hidden}", make, benchmark)


@kernel(
    "quantize_per_token",
    cases=[
        *(_quantize_case(*shape) for shape in ((1, 8), (3, 33), (7, 64))),
        *(_quantize_case(tokens, 1024, benchmark=True) for tokens in (1, 32, 512)),
    ],
)
def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (int8 [T, K], scale [T] float32), x being about the one times the other.

    Symmetric: the scale is the largest magnitude divided by 127, as vLLM's kernels have it, or 1 where that is 0;
    x / scale is rounded to the nearest, halves to even. (compressed-tensors, which evaluates models in floating point,
    divides by 127.5.)
    """
    wide = x if x.dtype == torch.float64 else x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / _MOST
    scale = torch.where(scale > 0, scale, 1.0)
    return (wide / scale).round().clamp(-_MOST, _MOST).to(torch.int8), scale.squeeze(1).float()


def _linear_case(tokens: int, k: int, n: int, bias: bool = False, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        x, weight = (
            torch.randint(-128, 128, (rows, k), generator=generator, dtype=torch.int8) for rows in (tokens, n)
        )
        x_scale, w_scale = (torch.rand(rows, generator=generator).add(0.5) / k**0.5 / 64 for rows in (tokens, n))
        return x, x_scale, weight, w_scale, torch.randn(n, generator=generator).to(dtype) if bias else None, dtype

    return Case(f"{tokens}x{k}x{n}{'+bias' if bias else ''}", make, benchmark)


@kernel(
    "linear_w8a8",
    cases=[
        _linear_case(1, 8, 3),
        _linear_case(5, 33, 17, bias=True),
        _linear_case(16, 64, 96),
        _linear_case(47, 130, 200, bias=True),
        *(_linear_case(t, k, n, benchmark=True) for t in (1, 32, 512) for k, n in QWEN3_06B),
    ],
)
def linear_w8a8(
    x_q: Tensor,
    x_scale: Tensor,
    weight: Tensor | PackedInt8Weight,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x_q [T, K] and weight [N, K] int8, x_scale [T] and w_scale [N] float32, bias [N] of `dtype` or None -> [T, N] of
    `dtype`: the exact sum of products times both scales, plus bias. K below 2**17, so that a sum fits an int32."""
    rows = weight.dense() if isinstance(weight, PackedInt8Weight) else weight
    out = F.linear(x_q.double(), rows.double()) * x_scale.double().unsqueeze(1) * w_scale.double()
    return (out if bias is None else out + bias).to(dtype)


@native.implementation(quantize_per_token)
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scale = native.empty(*x.shape, dtype=torch.int8), native.empty(len(x), dtype=torch.float32)
    native.call("quantize_per_token", ("quantize_per_token", x.dtype, [x, quantized, scale], [*x.shape]))
    return quantized, scale


def _pack(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return *args[:2], PackedInt8Weight.pack(args[2]), *args[3:]


@native.implementation(linear_w8a8, adapt=_pack)
def _(
    x_q: Tensor, x_scale: Tensor, weight: PackedInt8Weight, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    n, k = weight.shape
    out = native.empty(len(x_q), n, dtype=dtype)
    p = [x_q, weight.packed.words, bias, out, x_scale, w_scale, weight.sums]
    native.call("linear_w8a8", ("linear_w8a8", dtype, p, [len(x_q), k, n]))
    return out


@ascend.implementation(quantize_per_token)
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scale = torch_npu.npu_dynamic_quant(x)
    return quantized, scale


def _to_nz(args: tuple[Any, ...]) -> tuple[Any, ...]:
    x_q, x_scale, weight, *rest = ascend.to_device(args)
    return x_q, x_scale, ascend.fractal_nz(weight), *rest


def _from_nz(args: tuple[Any, ...]) -> tuple[Any, ...]:
    x_q, x_scale, weight, *rest = args
    return ascend.to_host((x_q, x_scale, ascend.from_fractal_nz(weight), *rest))


@ascend.implementation(linear_w8a8, adapt=_to_nz, restore=_from_nz)
def _(
    x_q: Tensor, x_scale: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """weight: [K, N] as `ascend.fractal_nz` makes it. dtype: float16 or bfloat16."""
    out: Tensor = torch_npu.npu_quant_matmul(
        x_q, weight, w_scale, pertoken_scale=x_scale, bias=bias, output_dtype=dtype)
    return out
