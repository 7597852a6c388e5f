"""Tensors of kernels' arguments and results: copies, float64, in-place changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.quantized import FLOAT8, Quantized
from npuserve.kernels.registry import map_leaves

Args = tuple[Any, ...]

QUANTIZED = {torch.int8: (0.0, 1.0), torch.int16: (0.0, 1.0), FLOAT8: (2.0**-3, 4.0)}
"""Dtype of quantized numbers, as stored and with their zero points subtracted -> relative and absolute tolerance of one
step, since a half may round either way. Both absolute ones are about a hundredth of the largest number."""


def copy_arguments(args: Args, which: Sequence[int]) -> Args:
    """Return the arguments; copy the arguments at positions `which`."""
    return tuple(copy_value(x) if i in which else x for i, x in enumerate(args))


def copy_value(value: Any) -> Any:
    """Copy a tensor, in large pages if possible, or a sequence or dataclass of tensors."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not native.available() or not x.is_cpu or not x.nbytes:
            return x.clone()
        return native.library().allocate(x.nbytes).view(x.dtype).view(x.shape).copy_(x)

    return map_leaves(copy, value)


def widened(value: Any) -> Any:
    """Convert floats to float64, also in sequences and dataclasses, for a golden function; float8 is exact as it is."""

    def widen(x: Any) -> Any:
        if isinstance(x, torch.dtype):  # dtype of the result; a scheme keeps its own
            return x if x in QUANTIZED else torch.float64
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() and x.itemsize > 1 else x

    return map_leaves(widen, value)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a result or an argument; from quantized numbers their zero points are subtracted."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Quantized):
        return [value.values if value.zero is None else value.values.short() - value.zero.short().unsqueeze(-1),
                value.scale]
    if isinstance(value, tuple | list):
        return [tensor for x in value for tensor in tensors(x)]
    if dataclasses.is_dataclass(value):
        return [tensor for f in dataclasses.fields(value) for tensor in tensors(getattr(value, f.name))]
    return []


def versions(value: Any) -> list[int]:
    """Return the version counters of the tensors, which change when a tensor is written in place."""
    if isinstance(value, Quantized):
        return versions((value.values, value.scale))
    return [tensor._version for tensor in tensors(value)]
