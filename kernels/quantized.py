"""int8 and float8 activations (W8A8), and their schemes. quantize.py quantizes; quantized_weight.py has the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.registry import Case

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
"""Largest float8 number: e4m3 has no infinities."""

GROUP = 128
"""Columns that share a scale where a row has several."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Scheme by which activations are quantized.

    scale: [1] float32 of a static scheme, for all tokens. None for a dynamic scheme, which computes each token's scale.
    zero: [1] int32 (-128 to 127), the zero point of a static scheme; None for 0. A dynamic scheme has zero points
        unless it is symmetric.
    levels: divisor of a token's largest magnitude in a dynamic symmetric scheme. Common values for int8 are 127.5
        (compressed-tensors) and 127 (Ascend's operators, vLLM's kernels). For float8 it is FLOAT8_MAX.
    dtype: int8, or FLOAT8, which has no zero points.
    grouped: a dynamic scheme of FLOAT8 computes a scale for each GROUP columns of a token.
    """

    scale: Tensor | None = None
    zero: Tensor | None = None
    symmetric: bool = True
    levels: float = 127.5
    dtype: torch.dtype = torch.int8
    grouped: bool = False

    @property
    def has_zero(self) -> bool:
        """True if the quantized numbers have zero points."""
        return not self.symmetric if self.scale is None else self.zero is not None

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor [rows, columns]."""
        return (rows, -(-columns // GROUP)) if self.grouped else (rows,)


DYNAMIC = Scheme()
FLOAT8_DYNAMIC = Scheme(levels=FLOAT8_MAX, dtype=FLOAT8)
FLOAT8_GROUPED = replace(FLOAT8_DYNAMIC, grouped=True)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized numbers (values - zero) * scale.

    values: int8 or FLOAT8 [..., K].
    scale: [...]; [T] float32 of activations [T, K], or [T, ceil(K / GROUP)] by columns (stride 1 between rows).
    zero: int32 [...], or None for 0; -128 to 127 for activations.
    sums: int32 [T], the sum of each row's values, for the native products; None for other backends.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None = None
    sums: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def with_values(self, values: Tensor) -> Quantized:
        """Return other values of the same scale and zero."""
        sums = None if self.sums is None else values.sum(dim=-1, dtype=torch.int32)
        return replace(self, values=values, sums=sums)


SCHEMES = ("int8", "asymmetric", "static", "static zero")
"""Names of schemes in the names of cases."""

ZEROS = ("asymmetric", "static zero")
"""Names of the schemes with zero points."""

FLOAT8_SCHEMES = ("float8", "static float8", "grouped float8")
"""Names of the schemes of float8 in the names of cases."""


def scheme_of(name: str, generator: torch.Generator) -> Scheme | None:
    """Return the scheme of a case, for values of about 1; None for ""."""
    scale = torch.rand(1, generator=generator) / 40 + 0.01
    zero = torch.randint(-128, 128, (1,), generator=generator, dtype=torch.int32)
    return {"": None, "int8": DYNAMIC, "asymmetric": Scheme(symmetric=False), "static": Scheme(scale),
            "static zero": Scheme(scale, zero), "float8": FLOAT8_DYNAMIC, "grouped float8": FLOAT8_GROUPED,
            "static float8": replace(FLOAT8_DYNAMIC, scale=scale / 4)}[name]


def with_levels(case: Case, levels: float) -> Case:
    """Return the case with `levels` in all its schemes of int8."""

    def changed(value: Any) -> Any:
        if isinstance(inputs := getattr(value, "inputs", None), Scheme):
            return replace(value, inputs=changed(inputs))
        return replace(value, levels=levels) if isinstance(value, Scheme) and value.dtype == torch.int8 else value

    return replace(case, make=lambda generator, dtype: tuple(map(changed, case.make(generator, dtype))))


def native_int8(shape: Sequence[int], scheme: Scheme) -> tuple[Quantized, list[Tensor | None]]:
    """Return an uninitialized output [T, K] of a native kernel, and the tensors that the kernel takes for it."""
    rows, columns = shape
    zero = native.empty(rows, dtype=torch.int32) if scheme.has_zero else None
    out = Quantized(native.empty(rows, columns, dtype=torch.int8), native.empty(rows, dtype=torch.float32), zero,
                    native.empty(rows, dtype=torch.int32))
    return out, [out.values, out.scale, out.zero, out.sums, scheme.scale, scheme.zero]
