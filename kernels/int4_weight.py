"""Weights of 4 bits in groups, whose products take activations of floats (W4A16), or of int8 (W4A8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.ascend_groups import Groups
from npuserve.kernels.ascend_int4 import AscendInt4
from npuserve.kernels.int4 import SCALE_TYPES, Int4, PackedInt4, PlainInt4, dequantized, rounded, to_words
from npuserve.kernels.quantize import native_quantize, quantize
from npuserve.kernels.quantized import Quantized, Scheme
from npuserve.kernels.weight import Parts, WeightForm, floats_of


@dataclass(slots=True, eq=False)
class Int4Weight(WeightForm):
    """Weight [N, K] of 4 bits. K is a multiple of 8.

    numbers: the weight's numbers in the form of the backend. On Ascend they are written row by row first.
    dtype: dtype of products.
    inputs: dynamic and symmetric scheme of int8 activations, for a weight without zero points; None for floats.

    A product is computed as if the weight were dequantized to float32. It is no embedding table.
    """

    numbers: Int4 | AscendInt4
    dtype: torch.dtype
    inputs: Scheme | None = None

    @property
    def written(self) -> Int4:
        """The numbers before `prepare_for_ascend`."""
        if isinstance(self.numbers, AscendInt4):
            raise TypeError("weight: laid out for Ascend, where nothing is written to it")
        return self.numbers

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape

    def __len__(self) -> int:
        return self.numbers.shape[0]

    @property
    def number_dtype(self) -> torch.dtype:
        return torch.uint8

    def write(self, first: int, rows: Tensor) -> None:
        """Write rows of codes [m, K] uint8. The caller writes the scales and zero points to `numbers`."""
        self.written.write(first, to_words(rows))

    def write_rounded(self, first: int, rows: Tensor) -> None:
        grouping = self.written.grouping
        if grouping.zeros:
            raise TypeError("weight: floats are rounded to symmetric numbers only")
        numbers = rounded(rows.float(), grouping.size, grouping.scales)
        self.written.write(first, numbers.words)
        self.written.write_scale(first, numbers.scale)

    def repeat_first(self, first: int) -> None:
        ids = torch.zeros(len(self) - first, dtype=torch.int64)
        row = self.written.rows(ids)
        self.written.write(first, row.words)
        self.written.write_scale(first, row.scale)
        if row.zero is not None:
            self.written.write_zero(first, row.zero)

    def part(self, first: int, count: int) -> Int4Weight:
        return replace(self, numbers=self.numbers.rows(torch.arange(first, first + count)))

    @property
    def operand_dtype(self) -> torch.dtype:
        return self.dtype if self.inputs is None else torch.int8

    @property
    def row_bytes(self) -> int:
        return self.numbers.nbytes // len(self)

    def linear(self, x: Tensor | Quantized, bias: Tensor | None) -> Tensor:
        given = self._input(x)
        if isinstance(given, Quantized):
            given = given.values.double() * given.scale.double().unsqueeze(1)
        out = F.linear(given.double(), dequantized(self.numbers).double())
        return (out if bias is None else out + bias).to(self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return dequantized(self.numbers, ids).to(self.dtype)

    def packed(self) -> Int4Weight:
        assert isinstance(self.numbers, PlainInt4)
        return replace(self, numbers=PackedInt4.pack(self.numbers))

    def native_op(self, name: str) -> str:
        return f"{name}_int4" if self.inputs is None else f"{name}_int4_int8"

    def native_product(
        self, name: str, x: Tensor | Quantized, tensors: Sequence[Tensor | None], more: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> list[native.Call]:
        if not isinstance(self.numbers, PackedInt4):
            raise TypeError("weight: not packed for the native kernels")
        grouping = self.numbers.grouping
        form = [*sizes, *[0] * (5 - len(sizes)), grouping.size, grouping.code]
        if self.inputs is None:
            return [(self.native_op(name), self.dtype, [floats_of(x), self.numbers.packed, *tensors, *more], form)]
        calls: list[native.Call] = []
        if not isinstance(x, Quantized):
            x, call = native_quantize(x, self.inputs)
            calls.append(call)
        pointers = [x.values, self.numbers.packed, *tensors, x.scale, *more]
        return [*calls, (self.native_op(name), self.dtype, pointers, form)]

    def native_rows(self, ids: Tensor, out: Tensor) -> NoReturn:
        raise TypeError("table: an embedding table has no numbers of 4 bits")

    def for_ascend(self, *, table: bool, experts: int = 0) -> Int4Weight:
        assert isinstance(self.numbers, PlainInt4)
        return replace(self, numbers=AscendInt4.pack(self.numbers, self.dtype, experts))

    def from_ascend(self) -> Int4Weight:
        return replace(self, numbers=self.numbers.rows(torch.arange(len(self))))

    def prepare_for_ascend(self, *, table: bool, experts: int = 0) -> None:
        self.numbers = self.for_ascend(table=table, experts=experts).numbers

    def ascend_linear(self, x: Tensor | Quantized, bias: Tensor | None) -> Tensor:
        return self._ascend_numbers.product(floats_of(x), bias)

    def ascend_grouped(self, x: Tensor | Quantized, groups: Groups) -> Tensor:
        return self._ascend_numbers.grouped_product(floats_of(x), groups)

    @property
    def _ascend_numbers(self) -> AscendInt4:
        assert isinstance(self.numbers, AscendInt4)
        if self.inputs is not None:
            raise TypeError("weight: weights of 4 bits take no int8 activations on Ascend")
        return self.numbers

    def ascend_rows(self, ids: Tensor) -> NoReturn:
        raise TypeError("table: an embedding table has no numbers of 4 bits")

    @property
    def parts(self) -> Parts:
        raise TypeError("weight: numbers of 4 bits are not a tensor")

    def cuda_input(self, x: Tensor | Quantized) -> Tensor:
        if self.inputs is not None:
            raise TypeError("weight: weights of 4 bits take no int8 activations on CUDA")
        return floats_of(x)

    def _input(self, x: Tensor | Quantized) -> Tensor | Quantized:
        """Return x as a product takes it: floats, or int8 by `inputs`."""
        if self.inputs is None:
            return floats_of(x)
        return x if isinstance(x, Quantized) else quantize(x, self.inputs)


def int4_of(
    weight: Tensor, size: int, dtype: torch.dtype, *, zeros: bool = False, inputs: Scheme | None = None
) -> Int4Weight:
    """Round weight [N, K] as a case's argument. zeros: with zero points of -8 to 8. inputs: as of the weight."""
    numbers = rounded(weight, size, dtype if dtype in SCALE_TYPES else torch.bfloat16)
    if zeros:
        shape = numbers.scale.shape
        zero = (torch.arange(shape.numel()) * 5 % 17 - 8).to(torch.int8).view(shape)
        numbers = replace(numbers, grouping=replace(numbers.grouping, zeros=True), zero=zero)
    return Int4Weight(numbers, dtype, inputs)
