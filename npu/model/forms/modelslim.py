"""Matrices of int8 numbers, and of 4 bits that become int8, in the tensors of ModelSlim.

    W8A8_DYNAMIC  weight [N, K] int8, weight_scale [N, 1], weight_offset [N, 1] of 0
    W4A8_DYNAMIC  weight [N / 2, K] int8: row i has row 2 i of the matrix in its low bits, row 2 i + 1 in its high ones;
                  weight_scale and weight_offset as above; scale_bias, which is not read
    W8A8          weight [N, K] int8, input_scale [1], input_offset [1], deq_scale [N], quant_bias [N] int32

A product of W8A8 is (q(x) · weight + quant_bias) * deq_scale. deq_scale is the weight's scale times input_scale;
quant_bias is the module's bias in these steps, less input_offset times the sum of the weight's row. Both follow from
what `QuantizedWeight` stores, so that they are only compared with it. A module with a bias has it in `bias`, too.
scale_bias follows from the weight and its scale: operators add it that read the 4 bits without their sign.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from npuserve.kernels.native.packed import Matrix
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.families.config_json import ModelError
from npuserve.npu.model.forms.matrix import AllocatedWeight, FormChange, StoredMatrix
from npuserve.npu.model.forms.targets import (
    FLOATS,
    INT8,
    INT32,
    INTEGERS,
    SINGLE,
    Put,
    Target,
    Targets,
    put_after,
    put_copy,
    put_scales,
    target_of_rows,
)
from npuserve.npu.model.forms.w8a8 import Int8, StaticInputs
from npuserve.npu.model.layers.shard import Rows, Span
from npuserve.npu.quantization.modelslim import ModelSlimW8A8

ROUNDING = 1
"""Maximum difference of a quant_bias that was rounded in float32 and the exact one."""


@dataclass(frozen=True, slots=True)
class ModelSlimInt8(Int8):
    """int8 numbers, from the tensors of ModelSlim."""

    scheme: ModelSlimW8A8

    def allocate(self, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> AllocatedWeight:
        inputs = self.dynamic_inputs(backend)
        if self.scheme.dynamic:
            weight = self.empty_weight(matrix, inputs, dtype, backend)
            return AllocatedWeight(weight, self.targets(matrix, weight))
        inputs = replace(
            inputs, scale=backend.empty((1,), torch.float32), zero=backend.empty((1,), torch.int32))
        weight = self.empty_weight(matrix, inputs, dtype, backend)
        parts = len(matrix.parts)
        static = _Static(
            StaticInputs(inputs, torch.empty(parts), torch.zeros(parts).int()), matrix, weight,
            torch.zeros(matrix.rows, dtype=torch.int32))
        return AllocatedWeight(
            weight, matrix.number_targets(weight.write, 1, INT8) | static.targets(), static.merge)

    def number_targets(self, matrix: StoredMatrix, weight: QuantizedWeight) -> Targets:
        """Return the targets of the numbers."""
        return matrix.number_targets(weight.write, 1, INT8)

    def targets(self, matrix: StoredMatrix, weight: QuantizedWeight) -> Targets:
        targets = self.number_targets(matrix, weight)
        first = 0
        for name, rows in matrix.parts.items():
            shapes = (rows.whole,), (rows.whole, 1)
            targets[f"{name}.weight_scale"] = target_of_rows(
                partial(put_scales, weight.scale[first : first + rows.size]), rows, shapes, 4 * rows.size)
            targets[f"{name}.weight_offset"] = Target(_put_no_offset, shapes, 0, FLOATS + INTEGERS, required=False)
            first += rows.size
        return targets


@dataclass(frozen=True, slots=True)
class ModelSlimInt4(ModelSlimInt8):
    """int8 numbers from -8 to 7, from tensors with two of them in a byte. In memory they take 4 bits or 8."""

    def number_bytes(self, rows: int, inputs: int, backend: Backend) -> int:
        return backend.weights.nibbles_bytes(rows, inputs)

    def empty_numbers(self, matrix: StoredMatrix, backend: Backend) -> Matrix:
        return backend.weights.allocate_nibbles(matrix.rows, matrix.inputs)

    def change(self, part: str, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> FormChange | None:
        sizes = matrix.rows, matrix.inputs
        if backend.weights.nibbles_bytes(*sizes) < backend.weights.nbytes(*sizes, torch.int8):
            return None
        return FormChange("have weights of 4 bits (W4A8_DYNAMIC), which are served as int8", 4, 8)

    def number_targets(self, matrix: StoredMatrix, weight: QuantizedWeight) -> Targets:
        targets: Targets = {}
        first = 0
        for name, rows in matrix.parts.items():
            columns = matrix.columns
            targets[f"{name}.weight"] = target_of_rows(
                partial(_put_pairs, partial(put_after, weight.write, first)), _pairs(name, rows),
                ((rows.whole // 2, columns.whole),), rows.size * columns.size, INT8, columns=columns)
            first += rows.size
        return targets


def _pairs(name: str, rows: Span | Rows) -> Span | Rows:
    """Return the rows of pairs that hold these. Raises ModelError if they begin or end within a pair."""
    if rows.whole % 2 or any(first % 2 or size % 2 for first, size in rows.ranges):
        raise ModelError(f"{name}: has an odd number of rows on a rank, and stores its rows in pairs (W4A8_DYNAMIC); "
                         "choose another tensor_parallel_size")
    halves = tuple((first // 2, size // 2) for first, size in rows.ranges)
    return Rows(halves, rows.whole // 2) if isinstance(rows, Rows) else Span(*halves[0], rows.whole // 2)


def _put_pairs(put: Put, row: int, packed: Tensor) -> None:
    """Put the two rows of each row of bytes."""
    low = (packed << 4) >> 4  # with its sign
    put(2 * row, torch.stack((low, packed >> 4), 1).flatten(0, 1))


@dataclass(frozen=True, slots=True)
class _Static:
    """Tensors of a matrix with static inputs.

    bias: [rows] int32, the quant_bias of all parts.
    """

    inputs: StaticInputs
    matrix: StoredMatrix
    weight: QuantizedWeight
    bias: Tensor

    def targets(self) -> Targets:
        targets: Targets = {}
        first = 0
        for index, (name, rows) in enumerate(self.matrix.parts.items()):
            whole = ((rows.whole,), (rows.whole, 1))
            targets[f"{name}.input_scale"] = Target(
                partial(put_scales, self.inputs.scales[index : index + 1]), SINGLE, 4, early=True)
            targets[f"{name}.input_offset"] = Target(
                partial(self._put_offset, index), SINGLE, 4, FLOATS + INTEGERS, early=True)
            targets[f"{name}.deq_scale"] = target_of_rows(
                partial(put_after, partial(self._put_scale, index), first), rows, whole, 4 * rows.size,
                FLOATS + INTEGERS)
            targets[f"{name}.quant_bias"] = target_of_rows(
                partial(put_copy, self.bias, first), rows, whole, 4 * rows.size, INT32)
            first += rows.size
        return targets

    def merge(self) -> bool:
        """Merge the parts' scales. Raises ModelError for a quant_bias that has more than offsets."""
        self._check_bias()
        return self.inputs.merge()

    def _put_offset(self, index: int, _: int, piece: Tensor) -> None:
        zero = piece.float()
        if bool((zero != zero.round()).any() | (zero < -128).any() | (zero > 127).any()):
            raise ValueError("must be a whole number in [-128, 127]")
        self.inputs.zeros[index : index + 1] = zero.int()

    def _put_scale(self, index: int, row: int, piece: Tensor) -> None:
        if piece.dtype == torch.int64:  # the bits of float32, for models in float16
            piece = piece.int().view(torch.float32)
        put_scales(self.weight.scale, row, piece / self.inputs.scales[index])

    def _check_bias(self) -> None:
        columns = self.matrix.columns
        sums = self.weight.sums
        if self.matrix.biased or columns.size < columns.whole or sums is None:
            return  # the file has the bias; other ranks have the rest of the sums
        first = 0
        for index, (name, rows) in enumerate(self.matrix.parts.items()):
            part = slice(first, first + rows.size)
            offsets = -self.inputs.zeros[index].double() * sums[part].double().cpu()
            limit = ROUNDING + offsets.abs() * 2.0**-22  # it was computed in float32
            if bool(((self.bias[part].double() - offsets).abs() > limit).any()):
                raise ModelError(
                    f"{name}.quant_bias: is not that of input_offset and weight: the module has a bias, which models "
                    "of this family have not; supported: quant_bias without")
            first += rows.size


def _put_no_offset(_: int, piece: Tensor) -> None:
    if bool(piece.any()):
        raise ValueError("is not 0: weights with offsets are not supported; supported: symmetric weights")
