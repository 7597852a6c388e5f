"""Quantization of activations to int8 or float8 (W8A8)."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.quantized import (
    DYNAMIC,
    FLOAT8,
    FLOAT8_MAX,
    FLOAT8_SCHEMES,
    GROUP,
    SCHEMES,
    ZEROS,
    Quantized,
    Scheme,
    native_int8,
    scheme_of,
)
from npuserve.kernels.registry import Case, kernel


def _quantize_case(tokens: int, hidden: int, scheme: str = "int8", benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Scheme | None]:
        return torch.randn(tokens, hidden, generator=generator).to(dtype), scheme_of(scheme, generator)

    return Case(f"{tokens}x{hidden} {scheme}", make, benchmark, zeros=scheme in ZEROS,
                float8=scheme in FLOAT8_SCHEMES)


@kernel(
    "quantize",
    cases=[
        *(_quantize_case(*shape, scheme) for scheme in (*SCHEMES, *FLOAT8_SCHEMES)
          for shape in ((1, 8), (3, 33), (7, 64))),
        *(_quantize_case(tokens, 1024, benchmark=True) for tokens in (1, 32, 512)),
    ],
)
def quantize(x: Tensor, scheme: Scheme) -> Quantized:
    """Quantize x [T, K]: x / scale, rounded to nearest, ties to even, plus zero, clamped to -128 .. 127.

    A symmetric scale is the largest magnitude divided by the scheme's levels. An asymmetric scheme has
    scale = (largest - least) / 255 and zero = rint(-128 - least / scale). Its range includes 0, as in
    compressed-tensors. The range in vLLM excludes 0 if all values of a row have one sign. A dynamic scale of 0
    becomes 1.

    To float8, x / scale is clamped to -448 .. 448 and then rounded to the nearest float8 number, ties to even. A
    grouped scheme does so for each GROUP columns as for a row.
    """
    if scheme.grouped:
        return _quantize_groups(x, scheme)
    wide = x if x.dtype == torch.float64 else x.float()
    zero = scheme.zero
    if scheme.scale is not None:
        scale = scheme.scale.to(wide.dtype).repeat(len(x))
        zero = None if zero is None else zero.repeat(len(x))
    elif scheme.symmetric:
        scale = _above_zero(wide.abs().amax(dim=-1) / scheme.levels)
    else:
        low = wide.amin(dim=-1).clamp(max=0)
        scale = _above_zero(wide.amax(dim=-1).clamp(min=0) / 255 - low / 255)  # the largest float does not overflow
        zero = (-128 - low / scale).round().clamp(-128, 127).int()
    if scheme.dtype == FLOAT8:
        near = (wide / scale.unsqueeze(1)).clamp(-FLOAT8_MAX, FLOAT8_MAX)
        return Quantized(near.to(FLOAT8), scale.float())
    values = (wide / scale.unsqueeze(1)).round()
    if zero is not None:
        values = values + zero.unsqueeze(1)
    return Quantized(values.clamp(-128, 127).to(torch.int8), scale.float(), zero)


def _quantize_groups(x: Tensor, scheme: Scheme) -> Quantized:
    shape = len(x), *scheme.scale_shape(*x.shape)[1:]
    padded = F.pad(x, (0, shape[1] * GROUP - x.shape[1]))
    made = quantize(padded.view(-1, GROUP), replace(scheme, grouped=False))
    values = made.values.view(len(x), -1)[:, : x.shape[1]].contiguous()
    return Quantized(values, made.scale.view(shape).t().contiguous().t())


def _above_zero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def int8_of(x: Tensor, generator: torch.Generator, scheme: Scheme = DYNAMIC) -> Quantized:
    """Quantize x [T, K] by a dynamic scheme as a case's argument, with another scale for each row."""
    made = quantize(x.float(), scheme)
    factor = torch.rand(len(x), generator=generator) + 0.5
    return Quantized(made.values, (made.scale.t() * factor).t(), made.zero)


def native_quantize(x: Tensor, scheme: Scheme, rows: int = 1) -> tuple[Quantized, native.Call]:
    """Return the output of `quantize` for x [T * rows, K], of T tokens, and the native call that fills it."""
    out, p = native_int8(x.shape, scheme)
    return out, ("quantize", x.dtype, [x, *p], [len(x) // rows, x.shape[1], rows], [scheme.levels])


@native.implementation(quantize)
def _(x: Tensor, scheme: Scheme) -> Quantized:
    out, call = native_quantize(x, scheme)
    native.call("quantize", call)
    return out


@ascend.implementation(quantize)
def _(x: Tensor, scheme: Scheme) -> Quantized:
    """Round a static scale to x's dtype, as the operator requires.

    Zero points are not supported. The scheme's levels must be `ascend.LEVELS`.
    """
    if ascend_fuses(scheme):
        values, scale = torch_npu.npu_dynamic_quant(x)
        return Quantized(values, scale)
    if scheme.scale is None or scheme.zero is not None:
        raise ValueError("scheme: on Ascend activations in int8 have no zeros")
    by = ascend.table_as(scheme.scale, x.dtype)
    values = torch_npu.npu_quantize(x, by, None, torch.qint8, -1)
    return Quantized(values, ascend.table_as(by, torch.float32).expand(len(x)).contiguous())


@triton.implementation(quantize)
def _(x: Tensor, scheme: Scheme) -> Quantized:
    from npuserve.kernels.triton import launch_rows

    return launch_rows.quantize(x, scheme)


ascend_quantize = quantize.implementations[ascend.LABEL].function


def ascend_fuses(scheme: Scheme | None) -> bool:
    """Return True for schemes that Ascend's fused operators support: dynamic, without zero points.

    Raises ValueError if the levels differ from `ascend.LEVELS`.
    """
    if scheme is None or scheme.scale is not None or not scheme.symmetric:
        return False
    if scheme.levels != ascend.LEVELS:
        raise ValueError(f"levels: {scheme.levels}; on Ascend the largest magnitude is divided by {ascend.LEVELS}")
    return True
