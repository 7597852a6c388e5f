"""Matrices of int8 or float8 numbers with scales (W8A8), and static scales of their inputs."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from npuserve.kernels.native.packed import Matrix
from npuserve.kernels.quantized import FLOAT8, FLOAT8_DYNAMIC, FLOAT8_GROUPED, Scheme
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.families.config_json import ModelError
from npuserve.npu.model.forms.floats import float_targets
from npuserve.npu.model.forms.matrix import AllocatedWeight, StoredForm, StoredMatrix
from npuserve.npu.model.forms.targets import (
    FLOAT8S,
    INT8,
    SINGLE,
    Target,
    Targets,
    put_ranges,
    put_scales,
    target_of_rows,
    zeros_target,
)
from npuserve.npu.model.layers.shard import Rows, Span
from npuserve.npu.quantization.w8a8 import BLOCK, W8A8

MAX_INPUTS = 1 << 15
"""Maximum K of an int8 weight, so that the sums of its products fit an int32."""


def form_of_scheme(scheme: W8A8) -> StoredForm:
    """Return the form that stores the scheme."""
    if scheme.blocks:
        return Float8Blocks(scheme)
    return Float8(scheme) if scheme.float8 else Int8(scheme)


@dataclass(frozen=True, slots=True)
class _Numbers8(StoredForm):
    """Numbers of 8 bits with scales by row."""

    scheme: W8A8

    @property
    @abstractmethod
    def number_dtype(self) -> torch.dtype: ...

    def number_bytes(self, rows: int, inputs: int, backend: Backend) -> int:
        """Return the bytes of the numbers of a matrix."""
        return backend.weights.nbytes(rows, inputs, self.number_dtype)

    @abstractmethod
    def row_bytes(self, inputs: int) -> int:
        """Return the bytes of a row's scales and sums."""

    @abstractmethod
    def dynamic_inputs(self, backend: Backend) -> Scheme:
        """Return the scheme of inputs that are quantized by token."""

    @abstractmethod
    def empty_weight(self, matrix: StoredMatrix, inputs: Scheme, dtype: torch.dtype, backend: Backend
                     ) -> QuantizedWeight:
        """Return an uninitialized weight."""

    @abstractmethod
    def targets(self, matrix: StoredMatrix, weight: QuantizedWeight) -> Targets:
        """Return the targets of numbers and scales."""

    def nbytes(self, rows: int, inputs: int, dtype: torch.dtype, backend: Backend) -> int:
        scheme = self.scheme
        static_bytes = 0
        if not scheme.dynamic:  # the scale of inputs in 32 bits, and as large a zero point
            static_bytes = 4 if scheme.symmetric_inputs else 8
        return self.number_bytes(rows, inputs, backend) + static_bytes + rows * self.row_bytes(inputs)

    def allocate(self, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> AllocatedWeight:
        inputs = self.dynamic_inputs(backend)
        scheme = self.scheme
        if scheme.dynamic:
            weight = self.empty_weight(matrix, inputs, dtype, backend)
            return AllocatedWeight(weight, self.targets(matrix, weight))
        zero = None if scheme.symmetric_inputs else backend.empty((1,), torch.int32)
        inputs = replace(inputs, scale=backend.empty((1,), torch.float32), zero=zero)
        weight = self.empty_weight(matrix, inputs, dtype, backend)
        parts = len(matrix.parts)
        static = StaticInputs(inputs, torch.empty(parts), torch.zeros(parts).int())
        return AllocatedWeight(weight, self.targets(matrix, weight) | static.targets(matrix.parts), static.merge)

    def stacked_with(self, other: StoredForm) -> StoredForm | None:
        return self if self == other and self.scheme.dynamic else None  # scales by row, and no range of inputs to merge

    @property
    def golden_copies(self) -> int:
        return 1 if self.scheme.symmetric else 2  # zero points make a second copy


@dataclass(frozen=True, slots=True)
class Int8(_Numbers8):
    """int8 numbers, with a scale for each row."""

    @property
    def number_dtype(self) -> torch.dtype:
        return torch.int8

    def row_bytes(self, inputs: int) -> int:
        return 8 if self.scheme.symmetric else 12

    def dynamic_inputs(self, backend: Backend) -> Scheme:
        return Scheme(symmetric=self.scheme.symmetric_inputs, levels=backend.capabilities.int8_levels)

    def empty_numbers(self, matrix: StoredMatrix, backend: Backend) -> Matrix:
        """Return uninitialized numbers."""
        return backend.weights.allocate(matrix.rows, matrix.inputs, torch.int8)

    def empty_weight(self, matrix: StoredMatrix, inputs: Scheme, dtype: torch.dtype, backend: Backend
                     ) -> QuantizedWeight:
        rows = matrix.rows
        return QuantizedWeight(
            self.empty_numbers(matrix, backend), backend.empty((rows,), torch.float32),
            None if self.scheme.symmetric else backend.empty((rows,), torch.int32), backend.empty((rows,), torch.int32),
            inputs, dtype)

    def targets(self, matrix: StoredMatrix, weight: QuantizedWeight) -> Targets:
        return matrix.number_targets(weight.write, 1, INT8) | _scale_targets(matrix.parts, self.scheme, weight)

    def check(self, name: str, columns: Span) -> None:
        if columns.size > MAX_INPUTS:
            raise ModelError(f"config.json: quantization_config: {name} has {columns.size} inputs; supported: up to "
                             f"{MAX_INPUTS} in int8")


@dataclass(frozen=True, slots=True)
class RoundedInt8(Int8):
    """int8 numbers of a matrix that the checkpoint has in floats, which are rounded while loading."""

    converted: Mapping[str, W8A8] = field(default_factory=dict)

    def targets(self, matrix: StoredMatrix, weight: QuantizedWeight) -> Targets:
        return float_targets(matrix, weight.write_rounded, 1, weight.dtype, self.converted)


@dataclass(frozen=True, slots=True)
class Float8(_Numbers8):
    """float8 numbers (e4m3), with a scale for each row."""

    @property
    def number_dtype(self) -> torch.dtype:
        return FLOAT8

    def row_bytes(self, inputs: int) -> int:
        return 4

    def dynamic_inputs(self, backend: Backend) -> Scheme:
        return FLOAT8_DYNAMIC

    def empty_weight(self, matrix: StoredMatrix, inputs: Scheme, dtype: torch.dtype, backend: Backend
                     ) -> QuantizedWeight:
        shape = inputs.scale_shape(matrix.rows, matrix.inputs)
        scale = backend.empty((math.prod(shape),), torch.float32).view(shape[::-1]).t()
        return QuantizedWeight(
            backend.weights.allocate(matrix.rows, matrix.inputs, FLOAT8), scale, None, None, inputs, dtype)

    def targets(self, matrix: StoredMatrix, weight: QuantizedWeight) -> Targets:
        return matrix.number_targets(weight.write, 1, FLOAT8S) | _scale_targets(matrix.parts, self.scheme, weight)


@dataclass(frozen=True, slots=True)
class Float8Blocks(Float8):
    """float8 numbers with a scale for each block of BLOCK rows and columns, stored as scales of rows."""

    def row_bytes(self, inputs: int) -> int:
        return 4 * -(-inputs // BLOCK)

    def dynamic_inputs(self, backend: Backend) -> Scheme:
        return FLOAT8_GROUPED

    def targets(self, matrix: StoredMatrix, weight: QuantizedWeight) -> Targets:
        return matrix.number_targets(weight.write, 1, FLOAT8S) | _block_scale_targets(matrix, self.scheme, weight)

    def check(self, name: str, columns: Span) -> None:
        if columns.size < columns.whole and columns.size % BLOCK:
            raise ModelError(
                f"config.json: quantization_config: blocks of {BLOCK} columns of {name} are divided between ranks; "
                f"supported: a tensor_parallel_size that gives each rank a multiple of {BLOCK} of {columns.whole} "
                "columns")


def _scale_targets(parts: Mapping[str, Span | Rows], scheme: W8A8, weight: QuantizedWeight) -> Targets:
    targets: Targets = {}
    first = 0
    for name, rows in parts.items():
        part = slice(first, first + rows.size)
        n = rows.whole
        shapes, taken = (((n,), (n, 1)), rows) if scheme.per_channel else (SINGLE, None)

        def into(numbers: Tensor, part: slice = part) -> Tensor:
            return numbers[part] if scheme.per_channel else numbers[part].unsqueeze(0)

        targets[f"{name}.{scheme.scale_name}"] = target_of_rows(
            partial(put_scales, into(weight.scale)), taken, shapes, 4 * rows.size)
        targets[f"{name}.weight_zero_point"] = zeros_target(
            None if weight.zero is None else into(weight.zero), shapes, taken)
        first += rows.size
    return targets


def _block_scale_targets(matrix: StoredMatrix, scheme: W8A8, weight: QuantizedWeight) -> Targets:
    targets: Targets = {}
    first = 0
    columns = matrix.columns
    for name, rows in matrix.parts.items():
        into = weight.scale[first : first + rows.size]
        shape = -(-rows.whole // BLOCK), -(-columns.whole // BLOCK)
        targets[f"{name}.{scheme.scale_name}"] = Target(
            partial(_put_block_scales, into, rows.ranges, columns.first // BLOCK), (shape,), into.nbytes)
        first += rows.size
    return targets


def _put_block_scales(
    into: Tensor, ranges: tuple[tuple[int, int], ...], column: int, row: int, piece: Tensor
) -> None:
    """Write scales of blocks to the scales of rows.

    into: [rows, groups] of this shard: the rows of `ranges`, from the block of columns `column` on.
    row: first row of blocks in `piece`.
    """
    each = piece.repeat_interleave(BLOCK, dim=0)[:, column : column + into.shape[1]]
    put_ranges(partial(put_scales, into), ranges, row * BLOCK, each)


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Static input scheme of a fused layer, and the checkpoint's values for its parts.

    scales: [parts] float32.
    zeros: [parts] int32; 0 without zero points.
    """

    scheme: Scheme
    scales: Tensor
    zeros: Tensor

    def targets(self, parts: Mapping[str, Span | Rows]) -> Targets:
        """Return the targets of the checkpoint's scales and zero points."""
        targets: Targets = {}
        for index, name in enumerate(parts):
            scale, zero = (numbers[index : index + 1] for numbers in (self.scales, self.zeros))
            targets[f"{name}.input_scale"] = Target(partial(put_scales, scale), SINGLE, scale.nbytes)
            targets[f"{name}.input_zero_point"] = zeros_target(None if self.scheme.zero is None else zero, SINGLE)
        return targets

    def merge(self) -> bool:
        """Set the scheme to the range of all parts, as vLLM does (compressed_tensors_w8a8_int8).

        Return True if the parts differ.
        """
        assert self.scheme.scale is not None
        agree = len(set(zip(self.scales.tolist(), self.zeros.tolist(), strict=True))) == 1
        scale = self.scales[:1]
        zero = self.zeros[:1]
        if not agree and self.scheme.zero is None:
            scale = self.scales.amax().reshape(1)
        elif not agree:
            lows, highs = ((self.scales * (edge - self.zeros)) for edge in (-128, 127))
            scale = ((highs.amax() - lows.amin()) / 255).reshape(1)
            zero = (-128 - lows.amin() / scale).round().int()
        self.scheme.scale.copy_(scale)
        if self.scheme.zero is not None:
            self.scheme.zero.copy_(zero)
        return not agree
