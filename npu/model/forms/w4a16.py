"""Matrices of numbers of 4 bits in groups (W4A16), from checkpoints of compressed-tensors, AWQ and GPTQ.

The tensors of a module [N, K] have its numbers in int32 words of 8, along one of the dimensions:

    compressed-tensors  weight_packed [N, K / 8], weight_scale [N, groups], weight_zero_point [N / 8, groups]
    AWQ                 qweight [K, N / 8],       scales [groups, N],       qzeros [groups, N / 8]
    GPTQ                qweight [K / 8, N],       scales [groups, N],       qzeros [groups, N / 8], g_idx [K]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from npuserve.kernels.int4 import SHIFTS, WORD_CODES, Grouping, Int4, PlainInt4, to_codes, to_words
from npuserve.kernels.int4_weight import Int4Weight
from npuserve.kernels.weight import form_of
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.families.config_json import ModelError
from npuserve.npu.model.forms.matrix import AllocatedWeight, FormChange, StoredForm, StoredMatrix, name_of
from npuserve.npu.model.forms.targets import (
    FLOATS,
    INT32,
    INTEGERS,
    Put,
    Target,
    Targets,
    put_after,
    put_ranges,
    target_of_rows,
)
from npuserve.npu.model.layers.shard import Rows, Span
from npuserve.npu.quantization.w4a16 import GROUPS, W4A16, Packing

CONVERTED_AT_ONCE = 1 << 20
"""Numbers converted to floats at a time."""

IN_ORDER = tuple(range(WORD_CODES))
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7
"""Place in a word, in numbers of 4 bits, of each of 8 successive numbers."""

SCALE_ERROR = 2.0**-24
"""Maximum rounding error of a stored scale: that of float16 for numbers below 2**-13."""


def grouping_of(scheme: W4A16) -> Grouping:
    """Return the form in which groups are stored. A row with one scale repeats it for each 128 columns."""
    return Grouping(scheme.group or max(GROUPS), getattr(torch, scheme.scales), zeros=not scheme.symmetric)


@dataclass(frozen=True, slots=True)
class StoredInt4(StoredForm):
    """Numbers of 4 bits, or floats where the backend does not multiply these.

    experts: number of the experts whose matrices are the rows; 0 for one matrix.
    """

    scheme: W4A16
    experts: int = 0

    def refusal(self, rows: int, inputs: int, dtype: torch.dtype, backend: Backend) -> str:
        """Return the result of `WeightLayout.int4_refusal`."""
        return backend.weights.int4_refusal(rows, inputs, grouping_of(self.scheme), dtype, self.experts)

    def nbytes(self, rows: int, inputs: int, dtype: torch.dtype, backend: Backend) -> int:
        if self.refusal(rows, inputs, dtype, backend):
            return ConvertedInt4(self.scheme).nbytes(rows, inputs, dtype, backend)
        return backend.weights.int4_bytes(rows, inputs, grouping_of(self.scheme))

    def allocate(self, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> AllocatedWeight:
        if self.refusal(matrix.rows, matrix.inputs, dtype, backend):
            return ConvertedInt4(self.scheme).allocate(matrix, dtype, backend)
        numbers = backend.weights.allocate_int4(matrix.rows, matrix.inputs, grouping_of(self.scheme))
        targets: Targets = {}
        first = 0
        for name, rows in matrix.parts.items():
            targets |= Part(name, self.scheme, rows, matrix.columns, numbers, first).targets(biased=matrix.biased)
            first += rows.size
        return AllocatedWeight(Int4Weight(numbers, dtype), targets)

    def check(self, name: str, columns: Span) -> None:
        check_columns(self.scheme, name, columns)

    def change(self, part: str, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> FormChange | None:
        refusal = self.refusal(matrix.rows, matrix.inputs, dtype, backend)
        return _change_to_floats(refusal, dtype) if refusal else None

    @property
    def golden_copies(self) -> int:
        return 2  # in float64, and in float32 of which it is made


@dataclass(frozen=True, slots=True)
class ConvertedInt4(StoredForm):
    """Floats of the dtype of the activations, converted from numbers of 4 bits while loading."""

    scheme: W4A16

    def nbytes(self, rows: int, inputs: int, dtype: torch.dtype, backend: Backend) -> int:
        return backend.weights.nbytes(rows, inputs, dtype)

    def allocate(self, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> AllocatedWeight:
        weight = form_of(backend.weights.allocate(matrix.rows, matrix.inputs, dtype))
        targets: Targets = {}
        first = 0
        for name, rows in matrix.parts.items():
            conversion = Conversion(self.scheme, rows.size, matrix.columns, partial(put_after, weight.write, first))
            targets |= Part(name, self.scheme, rows, matrix.columns, conversion, 0).targets(biased=matrix.biased)
            first += rows.size
        return AllocatedWeight(weight, targets)

    def check(self, name: str, columns: Span) -> None:
        check_columns(self.scheme, name, columns)

    def change(self, part: str, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> FormChange | None:
        return _change_to_floats(
            "have columns in the order of their activations (desc_act), which no kernel multiplies"
            if self.scheme.act_order else f"have 4 bits, which {backend.name} does not multiply", dtype)

    @property
    def is_float(self) -> bool:
        return True


def _change_to_floats(reason: str, dtype: torch.dtype) -> FormChange:
    return FormChange(f"{reason}: they were converted to {name_of(dtype)}", 4, 8 * dtype.itemsize)


def check_columns(scheme: W4A16, name: str, columns: Span) -> None:
    """Raise ModelError for columns of a rank that are not whole words and, in order, whole groups."""
    size = WORD_CODES if scheme.act_order else scheme.group or WORD_CODES
    if columns.whole % WORD_CODES:
        raise ModelError(f"config.json: quantization_config: {name} has {columns.whole} inputs; supported in 4 bits: a "
                         f"multiple of {WORD_CODES}")
    if columns.size < columns.whole and (columns.first % size or columns.size % size):
        raise ModelError(
            f"config.json: quantization_config: groups of {size} columns of {name} are divided between ranks; "
            f"supported: a tensor_parallel_size that gives each rank a multiple of {size} of {columns.whole} columns")


@dataclass(slots=True)
class Conversion:
    """Numbers of a part that become floats when the last codes are written, after its scales and zero points.

    rows: of the part on this rank; columns: as in `StoredMatrix`.
    put: takes the floats.
    group_of: group of each column of this rank (g_idx); None if they are in order.

    The methods are those of `PlainInt4`.
    """

    scheme: W4A16
    rows: int
    columns: Span
    put: Put
    group_of: Tensor | None = None
    _numbers: PlainInt4 | None = None
    _left: int = 0

    @property
    def grouping(self) -> Grouping:
        return grouping_of(self.scheme)

    def write_scale(self, first: int, scale: Tensor, group: int = 0) -> None:
        self._allocated().write_scale(first, scale, group)

    def write_zero(self, first: int, zero: Tensor, group: int = 0) -> None:
        self._allocated().write_zero(first, zero, group)

    def write(self, first: int, words: Tensor, column: int = 0) -> None:
        self._allocated().write(first, words, column)
        self._left -= words.numel()
        if not self._left:
            self._convert()

    def _allocated(self) -> PlainInt4:
        if self._numbers is None:
            words = torch.zeros(self.rows, self.columns.size // WORD_CODES, dtype=torch.int32)
            shape = self.rows, self.grouping.groups(self.columns.whole if self.scheme.act_order else self.columns.size)
            zero = torch.zeros(shape, dtype=torch.int8) if self.grouping.zeros else None
            self._numbers = PlainInt4(self.grouping, words, torch.zeros(shape, dtype=self.grouping.scales), zero)
            self._left = words.numel()
        return self._numbers

    def _convert(self) -> None:
        numbers = self._allocated()
        if self.scheme.act_order and self.group_of is None:
            raise ValueError("has no g_idx, though config.json says desc_act")
        group_of = self.group_of
        if group_of is None:
            group_of = torch.arange(self.columns.size) // self.grouping.size
        step = max(1, CONVERTED_AT_ONCE // self.columns.size)
        for row in range(0, self.rows, step):
            part = slice(row, row + step)
            levels = to_codes(numbers.words[part]).float() - 8
            if numbers.zero is not None:
                levels -= numbers.zero[part].float()[:, group_of]
            self.put(row, levels * numbers.scale[part].float()[:, group_of])
        self._numbers = None


@dataclass(frozen=True, slots=True)
class Part:
    """Module of the checkpoint that is a part of a stacked matrix, and where its numbers are written.

    name: of the module.
    rows, columns: of this shard, as in `StoredMatrix`.
    numbers: written to; first: the part's first row there.
    """

    name: str
    scheme: W4A16
    rows: Span | Rows
    columns: Span
    numbers: Int4 | Conversion
    first: int

    def targets(self, *, biased: bool) -> Targets:
        """Return the targets of the module's numbers, scales and zero points. biased: the matrix has biases."""
        targets = PACKINGS[self.scheme.packing](self)
        if not biased:  # tools of GPTQ write biases of 0 for all modules
            targets[f"{self.name}.bias"] = Target(_put_no_bias, ((self.rows.whole,),), 0, required=False)
        return targets

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(first row, rows) of the module that this shard has."""
        return self.rows.ranges if isinstance(self.rows, Rows) else ((self.rows.first, self.rows.size),)

    @property
    def groups(self) -> Span:
        """Groups of the checkpoint that this shard's columns are in."""
        if (size := self.scheme.group) is None:
            return Span.all(1)
        whole = -(-self.columns.whole // size)
        if self.scheme.act_order:
            return Span.all(whole)
        return Span(self.columns.first // size, -(-self.columns.size // size), whole)

    def taken(self, values: Tensor) -> Tensor:
        """Return this shard's columns of values [m, N], transposed."""
        return torch.cat([values[:, first : first + size] for first, size in self.ranges], dim=1).t()

    def put_words(self, row: int, words: Tensor) -> None:
        """Put words [m, K / 8] in the order of columns."""
        self.numbers.write(self.first + row, _in_our_order(words))

    def put_scale(self, row: int, scale: Tensor, group: int = 0) -> None:
        """Put scales [m, groups] of rows, from group `group` on."""
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError("scales must be numbers above 0")
        stored = scale.to(self.numbers.grouping.scales)
        if not torch.allclose(stored.float(), scale.float(), rtol=0, atol=SCALE_ERROR):
            raise ValueError(
                f"has scales that {name_of(stored.dtype)} rounds; set dtype in config.json to that of this tensor")
        self.numbers.write_scale(self.first + row, self._repeated(stored), group)

    def put_zero(self, row: int, zero: Tensor, group: int = 0) -> None:
        """Put zero points [m, groups] of rows, less 8."""
        if self.scheme.symmetric:
            if bool(zero.any()):
                raise ValueError("has zero points, though config.json says that the quantization is symmetric")
            return
        self.numbers.write_zero(self.first + row, self._repeated(zero.to(torch.int8)), group)

    def _repeated(self, values: Tensor) -> Tensor:
        """Return the values of stored groups. A single one of a row stands for all."""
        if self.scheme.group is not None:
            return values
        return values.expand(-1, self.numbers.grouping.groups(self.columns.size))


def _put_no_bias(_: int, piece: Tensor) -> None:
    if bool(piece.any()):
        raise ValueError("is not 0, though models of this family have no bias here")


def _in_our_order(words: Tensor) -> Tensor:
    """Return words whose number i is at bit 4 i with it at bit SHIFTS[i]."""
    ordered = words & 15
    for i in range(1, WORD_CODES):
        ordered |= (words >> 4 * i & 15) << SHIFTS[i]
    return ordered


def _unpacked(words: Tensor, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """Return codes [m, 8 n] uint8 of words [m, n]. order: place of each code in its word."""
    return torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in order], dim=-1).flatten(1)


def compressed_tensors(part: Part) -> Targets:
    """Return the targets of a module in the format `pack-quantized`."""
    n = part.rows.whole
    k = part.columns.whole
    groups = part.groups
    words = Span(*(size // WORD_CODES for size in part.columns))

    def put_zero(row: int, piece: Tensor) -> None:
        zeros = _unpacked(piece.t()).t().to(torch.int8) - 8  # words along N
        put_ranges(part.put_zero, part.ranges, row * WORD_CODES, zeros)

    def put_shape(_: int, piece: Tensor) -> None:
        if piece.tolist() != [n, k]:
            raise ValueError(f"is {piece.tolist()}, not {[n, k]} as in config.json")

    targets = {
        f"{part.name}.weight_packed": target_of_rows(
            part.put_words, part.rows, ((n, words.whole),), 4 * part.rows.size * words.size, INT32, columns=words),
        f"{part.name}.weight_scale": _early(target_of_rows(
            part.put_scale, part.rows, ((n, groups.whole),), 2 * part.rows.size * groups.size, columns=groups)),
        f"{part.name}.weight_shape": Target(put_shape, ((2,),), 0, INTEGERS, required=False),
    }
    if not part.scheme.symmetric:
        shape = -(-n // WORD_CODES), groups.whole
        targets[f"{part.name}.weight_zero_point"] = Target(
            put_zero, (shape,), part.rows.size * groups.size, INT32, early=True, columns=groups)
    return targets


def awq(part: Part) -> Targets:
    """Return the targets of a module of AWQ (GEMM)."""
    n = part.rows.whole
    k = part.columns

    def put_words(row: int, piece: Tensor) -> None:
        codes = part.taken(_unpacked(piece, AWQ_ORDER))
        part.numbers.write(part.first, to_words(codes), row)

    return _of_groups(part, AWQ_ORDER, zero=0) | {
        f"{part.name}.qweight": Target(
            put_words, ((k.whole, n // WORD_CODES),), k.size * part.rows.size // 2, INT32, rows=k)}


def gptq(part: Part, zero: int = 1) -> Targets:
    """Return the targets of a module of GPTQ. zero: what the stored zero points lack."""
    n = part.rows.whole
    k = part.columns
    words = Span(*(size // WORD_CODES for size in k))

    def put_words(row: int, piece: Tensor) -> None:
        part.numbers.write(part.first, _in_our_order(part.taken(piece)), row * WORD_CODES)

    def put_order(row: int, piece: Tensor) -> None:
        numbers = part.numbers
        groups = piece.long()
        if bool(((groups < 0) | (groups >= part.groups.whole)).any()):
            raise ValueError("names groups that the checkpoint does not have")
        if isinstance(numbers, Conversion) and part.scheme.act_order:
            earlier = [] if numbers.group_of is None else [numbers.group_of]
            numbers.group_of = torch.cat([*earlier, groups])
        elif not torch.equal(groups, (torch.arange(len(piece)) + row + k.first) // (part.scheme.group or k.whole)):
            raise ValueError("does not have the columns in order, though config.json says desc_act: false")

    return _of_groups(part, IN_ORDER, zero=zero) | {
        f"{part.name}.qweight": Target(
            put_words, ((words.whole, n),), k.size * part.rows.size // 2, INT32, rows=words),
        f"{part.name}.g_idx": Target(
            put_order, ((k.whole,),), 0, INTEGERS, required=part.scheme.act_order, early=True, rows=k)}


PACKINGS: dict[Packing, Callable[[Part], Targets]] = {
    "compressed-tensors": compressed_tensors, "awq": awq, "gptq": gptq, "gptq_v2": partial(gptq, zero=0)}


def _of_groups(part: Part, order: tuple[int, ...], zero: int) -> Targets:
    """Return the targets of scales and zero points in rows of groups.

    order: place of a zero point in its word.
    zero: what the stored zero points lack.
    """
    n = part.rows.whole
    groups = part.groups

    def put_scale(group: int, piece: Tensor) -> None:
        part.put_scale(0, part.taken(piece), group)

    def put_zero(group: int, piece: Tensor) -> None:
        part.put_zero(0, part.taken(_unpacked(piece, order)).to(torch.int8) + (zero - 8), group)

    size = part.rows.size * groups.size
    return {
        f"{part.name}.scales": Target(put_scale, ((groups.whole, n),), 2 * size, FLOATS, early=True, rows=groups),
        f"{part.name}.qzeros": Target(
            put_zero, ((groups.whole, n // WORD_CODES),), size, INT32, early=True, rows=groups)}


def _early(target: Target) -> Target:
    """Return a target that is put before the numbers."""
    return replace(target, early=True)
