"""Random tensors, and comparison of an implementation with its golden function in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.bench.tensors import QUANTIZED, tensors, widened
from npuserve.kernels.registry import Case, Implementation, Kernel

# (relative, absolute): a few roundings of the dtype for values of about 1.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (5e-3, 5e-3), torch.bfloat16: (2e-2, 2e-2)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def compare(kernel: Kernel[..., Any], made: Implementation[..., Any], case: Case, dtype: torch.dtype) -> None:
    """Compare results, arguments changed in place, and unchanged arguments. Quantized numbers may differ by a step."""
    wide = tuple(widened(x) for x in case.make(generator(), dtype))
    before = [[tensor.clone() for tensor in tensors(x)] for x in wide]
    expected = tensors(kernel.golden(*wide))
    args = case.make(generator(), dtype)
    adapted = made.adapt(args)
    result = tensors(made.result(made.function(*adapted)))
    after = made.restore(adapted)
    for got, given, want, was in zip(after, args, wide, before, strict=True):
        same = [torch.equal(x.double(), y.double()) for x, y in zip(tensors(want), was, strict=True)]
        if got is given or not all(same):
            result += tensors(got)
            expected += tensors(want)
    rtol, atol = (max(x, case.tolerance) for x in TOLERANCE[dtype])
    for got, want in zip(result, expected, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype or got.is_floating_point()
        step, least = QUANTIZED.get(want.dtype, (0.0, atol))
        torch.testing.assert_close(got.cpu().double(), want.double(), rtol=max(rtol, step), atol=least)
