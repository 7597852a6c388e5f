"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv:1910.07467).

Rounding matches Hugging Face's models: float32 inside, then the input's dtype, then times gamma. With a float32 gamma,
the weight 1 + w of a zero-centered norm, the result is rounded once, as in Qwen3.5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.quantize import ascend_fuses, ascend_quantize, quantize
from npuserve.kernels.quantized import FLOAT8_SCHEMES, SCHEMES, ZEROS, Quantized, Scheme, native_int8, scheme_of
from npuserve.kernels.registry import Case, kernel


def normalize(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Normalize x [..., H] over the last dimension and multiply by gamma [H]; the result has x's dtype.

    gamma: in x's dtype or float32.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if gamma.dtype != x.dtype:
        return (wide * gamma).to(x.dtype)
    return wide.to(x.dtype) * gamma


def native_gamma(gamma: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return (gamma, None) for a gamma in the dtype of a native op, (None, gamma) for one in float32."""
    return (gamma, None) if gamma is None or gamma.dtype == dtype else (None, gamma)


def _case(
    inputs: int, tokens: int, hidden: int, scheme: str, benchmark: bool = False, wide_gamma: bool = False,
    widens: bool = False,
) -> Case:
    """Return a case.

    inputs: 1 for x, 2 for x and the residual.
    wide_gamma: gamma is in float32.
    widens: of `add_rms_norm`.
    """

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        added = torch.randn(inputs, tokens, hidden, generator=generator).to(dtype)
        gamma = torch.rand(hidden, generator=generator).add(0.5)
        given = *added, gamma if wide_gamma else gamma.to(dtype), 1e-6, scheme_of(scheme, generator)
        return (*given, True) if widens else given

    name = f"{tokens}x{hidden}{scheme and ' ' + scheme}{' float32 gamma' if wide_gamma else ''}"
    name += " in float32, too" if widens else ""
    return Case(name, make, benchmark, zeros=scheme in ZEROS,
                float8=scheme in FLOAT8_SCHEMES)


def _cases(inputs: int) -> list[Case]:
    return [
        *(_case(inputs, *shape, scheme) for scheme in ("", *SCHEMES, *FLOAT8_SCHEMES)
          for shape in ((1, 8), (3, 33), (7, 64))),
        *(_case(inputs, 3, 33, scheme, wide_gamma=True) for scheme in ("", *SCHEMES)),
        *(_case(inputs, tokens, 1024, scheme, True) for scheme in ("", "int8") for tokens in (1, 32, 512))]


@kernel("rms_norm", cases=_cases(1))
def rms_norm(x: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None) -> Tensor | Quantized:
    """Normalize x [T, H] and multiply by gamma [H], in x's dtype or float32: [T, H].

    scheme: quantizes the result; None leaves it.
    """
    normed = normalize(x, gamma, eps)
    return normed if scheme is None else quantize(normed, scheme)


@kernel("add_rms_norm", cases=[*_cases(2), _case(2, 5, 64, "", widens=True)])
def add_rms_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None, widens: bool = False
) -> tuple[Tensor | Quantized, Tensor]:
    """Return (rms_norm of x + residual, x + residual); x, residual: [T, H], gamma: [H].

    widens: a kernel that follows computes in float32. A backend may write the norm in it, too.
    """
    total = x + residual
    return rms_norm.golden(total, gamma, eps, scheme), total


def _native(
    name: str, x: Tensor, residual: Tensor | None, gamma: Tensor, eps: float, scheme: Scheme | None,
    total: Tensor | None,
) -> Tensor | Quantized:
    out: Tensor | Quantized
    if scheme is None:
        out = native.empty(*x.shape, dtype=x.dtype)
        p: list[Tensor | None] = [out, total]
    else:
        out, int8 = native_int8(x.shape, scheme)
        p = [None, total, *int8]
    levels = scheme.levels if scheme else 0.0
    narrow, wide = native_gamma(gamma, x.dtype)
    p += [None] * (8 - len(p))
    native.call(name, (name, x.dtype, [x, residual, narrow, *p, wide], [*x.shape], [eps, levels]))
    return out


@native.implementation(rms_norm)
def _(x: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None) -> Tensor | Quantized:
    return _native("rms_norm", x, None, gamma, eps, scheme, None)


@native.implementation(add_rms_norm)
def _(
    x: Tensor, residual: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None, widens: bool = False
) -> tuple[Tensor | Quantized, Tensor]:
    total = native.empty(*x.shape, dtype=x.dtype)
    return _native("add_rms_norm", x, residual, gamma, eps, scheme, total), total


@ascend.implementation(rms_norm)
def _(x: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None) -> Tensor | Quantized:
    """Round once, after the product with gamma, which the operator takes in x's dtype."""
    out: Tensor = torch_npu.npu_rms_norm(x, ascend.table_as(gamma, x.dtype), epsilon=eps)[0]
    return out if scheme is None else ascend_quantize(out, scheme)


@ascend.implementation(add_rms_norm)
def _(
    x: Tensor, residual: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None, widens: bool = False
) -> tuple[Tensor | Quantized, Tensor]:
    """Use one fused operator for a dynamic scheme, or for a copy in float32. The operators take gamma in x's dtype."""
    weight = ascend.table_as(gamma, x.dtype)
    if widens and scheme is None and x.dtype != torch.float32:
        wide, out, _, total = torch_npu.npu_add_rms_norm_cast(x, residual, weight, eps)
        return ascend.keep_float32(out, wide), total
    if ascend_fuses(scheme):
        values, _, total, scale, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
            x, residual, weight, epsilon=eps, output_mask=[True, False])
        return Quantized(values, scale), total
    out, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, epsilon=eps)
    return out if scheme is None else ascend_quantize(out, scheme), total


@triton.implementation(rms_norm)
def _(x: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None) -> Tensor | Quantized:
    from npuserve.kernels.triton import launch_rows

    return launch_rows.rms_norm(x, gamma, eps, scheme)


@triton.implementation(add_rms_norm)
def _(
    x: Tensor, residual: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None, widens: bool = False
) -> tuple[Tensor | Quantized, Tensor]:
    from npuserve.kernels.triton import launch_rows

    return launch_rows.add_rms_norm(x, residual, gamma, eps, scheme)
