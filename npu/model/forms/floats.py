"""Matrices of floats. Parts that the checkpoint has in float8 are converted while loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from npuserve.kernels.native import LANES
from npuserve.kernels.weight import form_of
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.forms.matrix import AllocatedWeight, FormChange, StoredForm, StoredMatrix, name_of
from npuserve.npu.model.forms.targets import (
    FLOAT8S,
    FLOATS,
    SINGLE,
    Put,
    Shapes,
    Target,
    Targets,
    ignore,
    put_scales,
    zeros_target,
)
from npuserve.npu.quantization.w8a8 import BLOCK, W8A8

CONVERTED_AT_ONCE = 1 << 20
"""Numbers converted from float8 to floats at a time."""


@dataclass(frozen=True, slots=True)
class Floats(StoredForm):
    """Floats of the dtype of the activations, plain or compact."""

    converted: Mapping[str, W8A8] = field(default_factory=dict)

    def nbytes(self, rows: int, inputs: int, dtype: torch.dtype, backend: Backend) -> int:
        return backend.weights.nbytes(rows, inputs, dtype)

    def allocate(self, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> AllocatedWeight:
        weight = form_of(backend.weights.allocate(matrix.rows, matrix.inputs, dtype))
        return AllocatedWeight(weight, float_targets(matrix, weight.write, dtype.itemsize, dtype, self.converted))

    def change(self, part: str, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> FormChange | None:
        if part not in self.converted:
            return None
        return FormChange(
            f"are float8, which {backend.name} does not multiply: they were converted to {name_of(dtype)}", 8,
            8 * dtype.itemsize,
            "npuserve quantize makes a checkpoint in int8 of this one, which takes no more than float8")

    def stacked_with(self, other: StoredForm) -> StoredForm | None:
        return Floats({**self.converted, **other.converted}) if isinstance(other, Floats) else None

    @property
    def is_float(self) -> bool:
        return True


def float_targets(
    matrix: StoredMatrix, write: Put, itemsize: int, dtype: torch.dtype, converted: Mapping[str, W8A8]
) -> Targets:
    """Return the targets of a matrix whose numbers are floats, or become floats while loading.

    write, itemsize: see `StoredMatrix.number_targets`.
    dtype: dtype of the converted parts.
    """
    targets = matrix.number_targets(write, itemsize, FLOATS)
    for name, scheme in converted.items():
        targets |= _converted_targets(name, scheme, dtype, targets[f"{name}.weight"], matrix.columns.first)
    return targets


def _converted_targets(name: str, scheme: W8A8, dtype: torch.dtype, target: Target, column: int) -> Targets:
    """Return the targets of a float8 weight that is put as floats, and of its scales.

    target, column: target of the floats, and its first column in the checkpoint.
    """
    ((rows, inputs),) = target.shapes
    if scheme.blocks:
        shapes: Shapes = ((-(-rows // BLOCK), -(-inputs // BLOCK)),)
    else:
        shapes = ((rows,), (rows, 1)) if scheme.per_channel else SINGLE
    scale = torch.empty(shapes[0])
    first = target.rows.first if target.rows else 0
    put = partial(_put_converted, target.put, scheme, scale, dtype, first, column)
    targets = {
        f"{name}.weight": replace(target, put=put, dtypes=FLOAT8S),
        f"{name}.{scheme.scale_name}": Target(partial(put_scales, scale), shapes, scale.nbytes, early=True),
        f"{name}.weight_zero_point": zeros_target(None, shapes),
    }
    if not scheme.dynamic:
        targets[f"{name}.input_scale"] = Target(ignore, SINGLE, 0)
        targets[f"{name}.input_zero_point"] = zeros_target(None, SINGLE)
    return targets


def converted(numbers: Tensor, scheme: W8A8, scale: Tensor, first: int = 0, column: int = 0) -> Tensor:
    """Return a part of a float8 weight as float32.

    numbers: [rows, columns] float8, from row `first` and column `column` of the weight on.
    scale: scales of the whole weight, in the checkpoint's shape.
    """
    rows, columns = numbers.shape
    scales = scale.float()
    if scheme.blocks:
        row_blocks = torch.arange(first, first + rows) // BLOCK
        column_blocks = torch.arange(column, column + columns) // BLOCK
        scales = scales[row_blocks][:, column_blocks]
    elif scheme.per_channel:
        scales = scales.reshape(-1, 1)[first : first + rows]
    return numbers.float() * scales


def _put_converted(
    put: Put, scheme: W8A8, scale: Tensor, dtype: torch.dtype, first: int, column: int, row: int, piece: Tensor,
) -> None:
    """Put rows of a float8 weight as floats. scale: of the whole weight; first, column: begin of the part in it."""
    for rows in piece.split(max(LANES, CONVERTED_AT_ONCE // piece.shape[1] // LANES * LANES)):
        floats = converted(rows, scheme, scale, first + row, column)
        if not bool(floats.to(dtype).isfinite().all()):
            raise ValueError(f"has numbers that are not finite in {str(dtype).removeprefix('torch.')}")
        put(row, floats)
        row += len(rows)
