"""int8 and float8 weights (W8A8), whose products take activations in int8 or float8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.ascend_groups import MAX_FUSED_COLUMNS, Groups
from npuserve.kernels.native.packed import Matrix, PackedWeight, dense, first_row, packed_of, rows_of, tensor_of, write
from npuserve.kernels.quantize import ascend_fuses, ascend_quantize, int8_of, native_quantize, quantize
from npuserve.kernels.quantized import DYNAMIC, FLOAT8, GROUP, Quantized, Scheme
from npuserve.kernels.weight import Parts, WeightForm

ROUNDED_AT_ONCE = 1 << 17
"""Numbers rounded to int8 at a time, so that intermediate values stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight(WeightForm):
    """Quantized weight [N, K]: (values - zero) * scale by row. K of int8 is at most 32768, so that sums fit an int32.

    values: int8 or FLOAT8.
    scale: [N] float32, or [N, ceil(K / GROUP)] by columns (stride 1 between rows).
    zero: [N] int32 (-128 to 127), or None for 0.
    sums: int32, at least [N], the sum of each row's values; None for FLOAT8.
    inputs: quantization scheme of the activations.
    dtype: dtype of products, and of rows of an embedding table.
    """

    values: Matrix
    scale: Tensor
    zero: Tensor | None
    sums: Tensor | None
    inputs: Scheme
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor, scale: Tensor, dtype: torch.dtype, zero: Tensor | None = None,
           inputs: Scheme = DYNAMIC) -> QuantizedWeight:
        """Build a weight and its row sums from values [N, K]."""
        sums = values.sum(dim=1, dtype=torch.int32) if values.dtype == torch.int8 else None
        return cls(values, scale, zero, sums, inputs, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.scale)

    @property
    def is_grouped(self) -> bool:
        """True if rows have a scale for each GROUP columns."""
        return self.scale.dim() == 2

    @property
    def number_dtype(self) -> torch.dtype:
        return self.values.dtype

    def write(self, first: int, rows: Tensor) -> None:
        """Write rows of numbers, and their sums. The caller writes the scales and zero points."""
        if self.sums is not None:
            self.sums[first : first + len(rows)] = rows.sum(dim=1, dtype=torch.int32)
        elif bool((rows.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise ValueError("has numbers that are not finite (NaN)")
        write(self.values, first, rows)

    def write_rounded(self, first: int, rows: Tensor) -> None:
        for piece in rows.split(max(1, ROUNDED_AT_ONCE // rows.shape[1])):
            numbers = quantize(piece.float(), Scheme(levels=127))
            self.write(first, numbers.values)
            self.scale[first : first + len(piece)] = numbers.scale
            first += len(piece)

    def repeat_first(self, first: int) -> None:
        count = len(self) - first
        for numbers in (self.scale, self.zero, self.sums):
            if numbers is not None:
                numbers[first : first + count] = numbers[0].clone()
        write(self.values, first, first_row(self.values).expand(count, -1))

    def part(self, first: int, count: int) -> QuantizedWeight:
        rows = slice(first, first + count)
        zero, sums = (None if each is None else each[rows] for each in (self.zero, self.sums))
        return replace(self, values=tensor_of(self.values)[rows], scale=self.scale[rows], zero=zero, sums=sums)

    @property
    def operand_dtype(self) -> torch.dtype:
        return torch.int8  # as fast as float8

    @property
    def row_bytes(self) -> int:
        parts = self.values, self.scale, self.zero, self.sums, self.inputs.scale, self.inputs.zero
        return sum(part.nbytes for part in parts if part is not None) // self.shape[0]

    def linear(self, x: Tensor | Quantized, bias: Tensor | None) -> Tensor:
        given = x if isinstance(x, Quantized) else quantize(x, self.inputs)
        left, right = given.values.double(), dense(self.values).double()
        if given.zero is not None:
            left = left - given.zero.unsqueeze(1)
        if self.zero is not None:
            right = right - self.zero.unsqueeze(1)
        if self.is_grouped:
            out = F.linear(*(x * scale.double().repeat_interleave(GROUP, dim=1)[:, : x.shape[1]]
                             for x, scale in ((left, given.scale), (right, self.scale))))
        else:
            out = F.linear(left, right) * given.scale.double().unsqueeze(1) * self.scale.double()
        return (out if bias is None else out + bias).to(self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        whole = rows_of(self.values, ids).to(self.scale.dtype)
        if self.zero is not None:
            whole = whole - self.zero[ids].unsqueeze(1)
        return (whole * self.scale[ids].unsqueeze(1)).to(self.dtype)

    def packed(self) -> QuantizedWeight:
        return replace(self, values=PackedWeight.pack(tensor_of(self.values)))

    def native_op(self, name: str) -> str:
        return packed_of(self.values).op(f"{name}_int8")

    def native_product(
        self, name: str, x: Tensor | Quantized, tensors: Sequence[Tensor | None], more: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> list[native.Call]:
        calls: list[native.Call] = []
        if not isinstance(x, Quantized):
            x, call = native_quantize(x, self.inputs)
            calls.append(call)
        scales = x.scale, self.scale, self.sums, x.zero, self.zero, x.sums
        words = packed_of(self.values).words
        return [*calls, (self.native_op(name), self.dtype, [x.values, words, *tensors, *scales, *more], sizes)]

    def native_rows(self, ids: Tensor, out: Tensor) -> native.Call:
        words = packed_of(self.values).words
        return "embedding_int8", self.dtype, [ids, words, out, self.scale, self.zero], [*out.shape]

    def for_ascend(self, *, table: bool, experts: int = 0) -> QuantizedWeight:
        """Return the weight with values [K, N], or [E, K, N], in FRACTAL_NZ unless rows are read as embeddings too."""
        values = tensor_of(self.values)
        if table:
            return replace(self, values=values.t())
        matrices = values.view(experts, -1, values.shape[1]) if experts else values
        return replace(self, values=ascend.fractal_nz(matrices))

    def from_ascend(self) -> QuantizedWeight:
        return replace(self, values=tensor_of(self.values).transpose(-2, -1).reshape(len(self), -1))

    def prepare_for_ascend(self, *, table: bool, experts: int = 0) -> None:
        tensor_of(self.values).data = tensor_of(self.for_ascend(table=table, experts=experts).values)

    def ascend_linear(self, x: Tensor | Quantized, bias: Tensor | None) -> Tensor:
        given = self._ascend_input(x)
        out: Tensor = torch_npu.npu_quant_matmul(
            given.values, self.values, self.scale, pertoken_scale=given.scale, bias=bias, output_dtype=self.dtype)
        return out

    def ascend_swiglu(self, x: Tensor | Quantized, bias: Tensor | None, scheme: Scheme | None) -> Quantized | None:
        """Fuse the epilogue into one operator after the exact int8 product, for a dynamic scheme.

        The operator has a limit of columns, and supports a bias only with groups.
        """
        n = len(self)
        if n % 64 or not 0 < n <= ascend.SWIGLU_ROW or bias is not None or not ascend_fuses(scheme):
            return None
        given = self._ascend_input(x)
        product = torch_npu.npu_quant_matmul(given.values, self.values, self.scale, output_dtype=torch.int32)
        values, scale = torch_npu.npu_dequant_swiglu_quant(
            product, weight_scale=self.scale.unsqueeze(0), activation_scale=given.scale.unsqueeze(1),
            group_index=ascend.one_group(len(product), product.device), activate_left=True, quant_mode=1)
        return Quantized(values, scale)

    def ascend_grouped(self, x: Tensor | Quantized, groups: Groups) -> Tensor:
        """Round the scales to bfloat16 beside results in it, as the operator requires."""
        given = self._ascend_input(x)
        scale = ascend.table_as(self.scale, torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32)
        scale = scale.view(len(groups.tokens), -1)
        return groups.multiply_int8(given.values, tensor_of(self.values), given.scale, scale, self.dtype)

    def ascend_grouped_swiglu(
        self, x: Tensor | Quantized, groups: Groups, scheme: Scheme | None
    ) -> Quantized | None:
        scale = self.scale.view(len(groups.tokens), -1)
        if scale.shape[1] > MAX_FUSED_COLUMNS or not ascend_fuses(scheme):
            return None
        given = self._ascend_input(x)
        values, by = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            given.values, [tensor_of(self.values)], [scale], given.scale, groups.tokens, dequant_dtype=0,
            group_list_type=1)
        return Quantized(values, by)

    def _ascend_input(self, x: Tensor | Quantized) -> Quantized:
        given = x if isinstance(x, Quantized) else ascend_quantize(x, self.inputs)
        if given.zero is not None or self.zero is not None:
            raise ValueError("zero: on Ascend int8 activations and weights have no zeros")
        return given

    def ascend_rows(self, ids: Tensor) -> Tensor:
        if self.zero is not None:
            raise ValueError("zero: on Ascend an int8 table has no zeros")
        scale = F.embedding(ids, self.scale.unsqueeze(1))
        return (F.embedding(ids, tensor_of(self.values).t()).to(scale.dtype) * scale).to(self.dtype)

    @property
    def parts(self) -> Parts:
        return Parts(tensor_of(self.values), self.scale, self.zero)

    def cuda_input(self, x: Tensor | Quantized) -> Quantized:
        if isinstance(x, Quantized):
            return x
        given: Quantized = quantize.implementations[triton.LABEL].function(x, self.inputs)
        return given

    @property
    def fused_form(self) -> tuple[int, float] | None:
        scheme, values = self.inputs, tensor_of(self.values)
        if (self.zero is not None or not values.is_contiguous() or self.dtype != torch.bfloat16 or self.is_grouped
                or scheme.scale is not None or scheme.has_zero):
            return None
        return {torch.int8: 1, FLOAT8: 2}[values.dtype], scheme.levels


def weight_of(weight: Tensor, generator: torch.Generator, dtype: torch.dtype, inputs: Scheme = DYNAMIC
              ) -> QuantizedWeight:
    """Quantize weight [N, K] as a case's argument, by the scheme of its inputs."""
    numbers = int8_of(weight, generator, inputs)
    return QuantizedWeight.of(numbers.values, numbers.scale, dtype, numbers.zero, inputs)
