"""An implementation beside its golden function in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.registry import Case, Implementation, Kernel

# (relative, absolute): a few roundings of the dtype for values of about 1.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (5e-3, 5e-3), torch.bfloat16: (2e-2, 2e-2)}


def compare(kernel: Kernel[..., Any], made: Implementation[..., Any], case: Case, dtype: torch.dtype) -> None:
    """Results, arguments that are changed in place, and those that are left as they were."""
    wide = tuple(_widened(x) for x in case.make(torch.Generator().manual_seed(0), dtype))
    before = [x.clone() if isinstance(x, Tensor) else None for x in wide]
    expected = _tensors(kernel.golden(*wide))
    args = case.make(torch.Generator().manual_seed(0), dtype)
    adapted = made.adapt(args)
    result = _tensors(made.function(*adapted))
    after = made.restore(adapted)
    assert len(result) == len(expected)
    for got, given, want, was in zip(after, args, wide, before, strict=True):
        if was is not None and (got is given or not torch.equal(want, was)):
            result.append(got)
            expected.append(want)
    rtol, atol = TOLERANCE[dtype]
    for got, want in zip(result, expected, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype or got.is_floating_point()
        torch.testing.assert_close(got.cpu().double(), want.double(), rtol=rtol, atol=atol)


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return [x for x in values if isinstance(x, Tensor)]


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
