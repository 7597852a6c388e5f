"""Numbers of the x and the weight in a case of a product (linear.py, experts.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from npuserve.kernels.int4_weight import int4_of
from npuserve.kernels.quantize import int8_of
from npuserve.kernels.quantized import DYNAMIC, FLOAT8, Quantized, Scheme
from npuserve.kernels.quantized_weight import weight_of
from npuserve.kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of x [T, K] and of a weight [N, K].

    label: part of the case's name.
    scheme: of x. It is also that of a weight without groups. None for an x of floats.
    is_given: x is quantized before the call. Otherwise the kernel quantizes it.
    group_size: columns of a group of a weight of 4 bits; 0 for another weight.
    has_group_zeros: the groups have zero points.
    """

    label: str = ""
    scheme: Scheme | None = None
    is_given: bool = False
    group_size: int = 0
    has_group_zeros: bool = False

    @property
    def has_zeros(self) -> bool:
        """True if the int8 numbers have zero points."""
        return self.scheme is not None and self.scheme.has_zero

    @property
    def is_float8(self) -> bool:
        return self.scheme is not None and self.scheme.dtype == FLOAT8

    @property
    def is_w4a8(self) -> bool:
        """True for a weight of 4 bits and an x of int8."""
        return self.group_size > 0 and self.scheme is not None

    @property
    def quantizes(self) -> bool:
        """True if the kernel quantizes x."""
        return self.scheme is not None and not self.is_given

    def rows_of_4_bits(self, rows: int) -> int:
        """Return `Case.int4` for a weight of `rows` rows."""
        return rows if self.group_size else 0

    def x(self, floats: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor | Quantized:
        """Return the x of a case."""
        if self.is_given and self.scheme is not None:
            return int8_of(floats, generator, self.scheme)
        return floats.to(dtype)

    def weight(self, floats: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Weight:
        """Return the weight of a case."""
        if self.group_size:
            return int4_of(floats, self.group_size, dtype, zeros=self.has_group_zeros, inputs=self.scheme)
        if self.scheme is None:
            return floats.to(dtype)
        return weight_of(floats, generator, dtype, self.scheme)


FLOATS = Numbers()


def int4(size: int, *, zeros: bool = False) -> Numbers:
    """Return the numbers of a weight of 4 bits in groups of `size` columns, and an x of floats."""
    return Numbers(f"int4 zeros {size}" if zeros else f"int4 {size}", group_size=size, has_group_zeros=zeros)


def w4a8(label: str, size: int, *, is_given: bool = False) -> Numbers:
    """Return the numbers of a weight of 4 bits in groups of `size` columns, and an x of int8."""
    return Numbers(f"{label} {size}", DYNAMIC, is_given=is_given, group_size=size)
