"""Form of a weight: how its numbers are stored, in which form it takes its inputs, and its products by backend.

A form is one file: `FloatWeight` here, int8 and float8 in quantized_weight.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native
from npuserve.kernels.ascend_groups import Groups
from npuserve.kernels.native.packed import (
    Matrix,
    PackedWeight,
    dense,
    first_row,
    packed_of,
    rows_of,
    tensor_of,
    unpack_call,
    unplanned,
    write,
)
from npuserve.kernels.quantized import Quantized, Scheme
from npuserve.kernels.registry import to_host


class Parts(NamedTuple):
    """Tensors of a weight: (values - zero) * scale; None for 1 and 0."""

    values: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None


class WeightForm:
    """Weight [N, K] of a linear layer, or table of N embeddings, in one form.

    dtype: dtype of products, and of rows of an embedding table.
    inputs: quantization scheme of the activations; None for floats.
    """

    __slots__ = ()  # no ABC, since `isinstance` takes six times as long for one

    dtype: torch.dtype
    inputs: Scheme | None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(N, K), before `prepare_for_ascend`."""

    @abstractmethod
    def __len__(self) -> int:
        """Return N."""

    # Storage

    @property
    @abstractmethod
    def number_dtype(self) -> torch.dtype:
        """Dtype of the stored numbers."""

    @abstractmethod
    def write(self, first: int, rows: Tensor) -> None:
        """Write the checkpoint's `rows` [m, K] to rows [first, first + m). Raises ValueError for invalid numbers."""

    @abstractmethod
    def write_rounded(self, first: int, rows: Tensor) -> None:
        """Write `rows` [m, K] of floats, rounded to the nearest numbers of the form."""

    @abstractmethod
    def repeat_first(self, first: int) -> None:
        """Fill rows [first, N) with row 0."""

    @property
    def unplanned_bytes(self) -> int:
        """Bytes beyond those that `WeightLayout.nbytes` plans."""
        return 0

    @property
    def unplanned_reads(self) -> int:
        """Bytes that a product reads beyond those that `WeightLayout.nbytes` plans."""
        return 0

    @abstractmethod
    def part(self, first: int, count: int) -> WeightForm:
        """Return rows [first, first + count) of a weight whose numbers are a tensor."""

    # Costs

    @property
    @abstractmethod
    def operand_dtype(self) -> torch.dtype:
        """Dtype whose peak of operations bounds the products."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes to read of one row of an embedding table."""

    # Golden functions

    @abstractmethod
    def linear(self, x: Tensor | Quantized, bias: Tensor | None) -> Tensor:
        """Multiply as the kernel `linear`."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [m] int64 as [m, K] of `dtype`, rounded once."""

    # CPU

    @abstractmethod
    def packed(self) -> WeightForm:
        """Return a copy for the native kernels of a weight whose numbers are a tensor."""

    @abstractmethod
    def native_op(self, name: str) -> str:
        """Return the name of the native op for weights of this form."""

    @abstractmethod
    def native_product(
        self, name: str, x: Tensor | Quantized, tensors: Sequence[Tensor | None], more: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> list[native.Call]:
        """Return the calls of a native product.

        tensors: bias and outputs, which follow x and the weight.
        more: tensors after those of the form.
        sizes: T, K, N and further sizes.
        """

    @abstractmethod
    def native_rows(self, ids: Tensor, out: Tensor) -> native.Call:
        """Return the call that copies rows `ids` [m] int64 to out [m, K]."""

    # Ascend

    def for_ascend(self, *, table: bool, experts: int = 0) -> WeightForm:
        """Return the weight in the layout of Ascend's operators.

        table: its rows are read as embeddings too.
        experts: number of the experts whose matrices are its rows, for `ascend_grouped`; 0 for one matrix.
        """
        return self

    def from_ascend(self) -> WeightForm:
        """Undo `for_ascend`."""
        return self

    def prepare_for_ascend(self, *, table: bool, experts: int = 0) -> None:
        """Change the layout to that of `for_ascend` in place, so that the numbers are never in memory twice."""
        return

    @abstractmethod
    def ascend_linear(self, x: Tensor | Quantized, bias: Tensor | None) -> Tensor:
        """Multiply on Ascend, by a weight laid out by `for_ascend`, whose dtype is float16 or bfloat16."""

    def ascend_swiglu(self, x: Tensor | Quantized, bias: Tensor | None, scheme: Scheme | None) -> Quantized | None:
        """Compute `linear_swiglu` in fused operators; None where there are none."""
        return None

    @abstractmethod
    def ascend_grouped(self, x: Tensor | Quantized, groups: Groups) -> Tensor:
        """Multiply rows x [R, K] by the matrices of their experts: [R, N of an expert]."""

    def ascend_grouped_swiglu(
        self, x: Tensor | Quantized, groups: Groups, scheme: Scheme | None
    ) -> Quantized | None:
        """Compute `experts_swiglu` of ordered rows in one operator; None where there is none."""
        return None

    @abstractmethod
    def ascend_rows(self, ids: Tensor) -> Tensor:
        """Return rows of a table laid out by `for_ascend`."""

    # CUDA

    @property
    @abstractmethod
    def parts(self) -> Parts:
        """Tensors of the weight. Raises TypeError for packed numbers."""

    @abstractmethod
    def cuda_input(self, x: Tensor | Quantized) -> Tensor | Quantized:
        """Return x as the products on CUDA take it."""

    @property
    def fused_form(self) -> tuple[int, float] | None:
        """FORM and levels in `decoder_layers.cu`; None for a weight that it does not take."""
        return None

    @property
    def cuda_launches(self) -> ModuleType | None:
        """Module with the functions of `launch_linear` for this form; None for `launch_linear`, which takes `parts`."""
        return None


@dataclass(slots=True, eq=False)
class FloatWeight(WeightForm):
    """Weight of floats. `form_of` returns it for a matrix."""

    values: Matrix
    dtype: torch.dtype
    inputs: Scheme | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __len__(self) -> int:
        return self.values.shape[0]

    @property
    def number_dtype(self) -> torch.dtype:
        return self.dtype

    def write(self, first: int, rows: Tensor) -> None:
        write(self.values, first, rows)

    write_rounded = write

    def repeat_first(self, first: int) -> None:
        write(self.values, first, first_row(self.values).expand(len(self) - first, -1))

    def part(self, first: int, count: int) -> FloatWeight:
        return FloatWeight(tensor_of(self.values)[first : first + count], self.dtype)

    @property
    def unplanned_bytes(self) -> int:
        return unplanned(self.values)[0]

    @property
    def unplanned_reads(self) -> int:
        return unplanned(self.values)[1]

    @property
    def operand_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * self.dtype.itemsize

    def linear(self, x: Tensor | Quantized, bias: Tensor | None) -> Tensor:
        return F.linear(floats_of(x), dense(self.values), bias)

    def rows(self, ids: Tensor) -> Tensor:
        return rows_of(self.values, ids)

    def packed(self) -> FloatWeight:
        return FloatWeight(PackedWeight.pack(tensor_of(self.values)), self.dtype)

    def native_op(self, name: str) -> str:
        return packed_of(self.values).op(name)

    def native_product(
        self, name: str, x: Tensor | Quantized, tensors: Sequence[Tensor | None], more: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> list[native.Call]:
        packed = packed_of(self.values)
        return [(packed.op(name), self.dtype, [floats_of(x), packed.words, *tensors, *more], sizes)]

    def native_rows(self, ids: Tensor, out: Tensor) -> native.Call:
        return unpack_call(self.values, ids, out)

    def ascend_linear(self, x: Tensor | Quantized, bias: Tensor | None) -> Tensor:
        return F.linear(floats_of(x), tensor_of(self.values), bias)

    def ascend_grouped(self, x: Tensor | Quantized, groups: Groups) -> Tensor:
        values = tensor_of(self.values)
        matrices = values.view(len(groups.tokens), -1, values.shape[1])
        return groups.multiply(floats_of(x), matrices.transpose(1, 2))

    def ascend_rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, tensor_of(self.values))

    @property
    def parts(self) -> Parts:
        return Parts(tensor_of(self.values))

    def cuda_input(self, x: Tensor | Quantized) -> Tensor:
        return floats_of(x)

    @property
    def fused_form(self) -> tuple[int, float] | None:
        takes = self.dtype == torch.bfloat16 and tensor_of(self.values).is_contiguous()
        return (0, 1.0) if takes else None


def floats_of(x: Tensor | Quantized) -> Tensor:
    """Return x. Raises TypeError for quantized activations."""
    if isinstance(x, Quantized):
        raise TypeError("x is quantized, the weight is not")
    return x


Weight = Matrix | WeightForm
"""Weight or embedding table as kernels take it."""


def form_of(weight: Weight) -> WeightForm:
    """Return the weight's form, by which kernels compute; a matrix is a weight of floats."""
    return weight if isinstance(weight, WeightForm) else FloatWeight(weight, weight.dtype)


# Adapters of cases, whose second argument is the weight


def packed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a case's arguments for the native kernels: the weight packed, and int8 x with its sums."""
    x, weight, *rest = args
    if isinstance(x, Quantized):
        x = replace(x, sums=x.values.sum(dim=1, dtype=torch.int32))
    return x, form_of(weight).packed(), *rest


def to_ascend(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a case's arguments as the Ascend implementations take them."""
    x, weight, *rest = ascend.to_device(args)
    return x, form_of(weight).for_ascend(table=False), *rest


def to_ascend_table(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments on Ascend of a case whose weight is an embedding table."""
    ids, table, *rest = ascend.to_device(args)
    return ids, form_of(table).for_ascend(table=True), *rest


def from_ascend(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Undo `to_ascend` and `to_ascend_table`."""
    x, weight, *rest = to_host(args)
    return x, form_of(weight).from_ascend(), *rest
