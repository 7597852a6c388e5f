"""Differences between the results of a kernel and of its golden function."""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels.bench.tensors import QUANTIZED
from npuserve.kernels.quantized import FLOAT8

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2, FLOAT8: 2.0**-3}
"""Largest correct `relative_of`: a few roundings of the dtype; for float8 a step."""


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the largest correct `relative_of` for a dtype; 1 for quantized integers, 0 for other integers."""
    return TOLERANCE[dtype] if dtype.is_floating_point else float(dtype in QUANTIZED)


def difference_of(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference; infinite for NaN."""
    if not want.numel():
        return 0.0
    wide = got.double()
    exact = want.double()
    return _largest(torch.where(wide == exact, 0.0, (wide - exact).abs()))


def norm_of(got: Tensor, want: Tensor, dim: int | None = None) -> float:
    """Return || got - want || / || want ||; infinite for NaN. dim: of the norms, of which the largest ratio counts."""
    exact = want.to("cpu", torch.float64)
    ratio = (got.to("cpu", torch.float64) - exact).norm(dim=dim) / exact.norm(dim=dim)
    return _largest(ratio)


def relative_of(got: Tensor, want: Tensor) -> float:
    """Return the largest difference relative to magnitude plus root mean square of the row; infinite for NaN.

    For integers return the fraction that differs, for quantized integers the largest difference.
    """
    if not want.numel():
        return 0.0
    if not want.is_floating_point():
        return difference_of(got, want) if want.dtype in QUANTIZED else float((got != want).double().mean())
    wide = got.double()
    exact = want.double()
    size = exact.abs() + exact.square().mean(-1, keepdim=True).sqrt()
    return _largest(torch.where(wide == exact, 0.0, (wide - exact).abs() / size))


def _largest(numbers: Tensor) -> float:
    return float(numbers.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
