"""Matrices of numbers of 4 bits in groups, for int8 activations (W4A8), from checkpoints of compressed-tensors.

The tensors of a module [N, K]: weight [N, K] int8, of -8 to 7, and weight_scale [N, groups].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from npuserve.kernels.int4_weight import Int4Weight
from npuserve.kernels.quantized import Scheme
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.forms.matrix import AllocatedWeight, StoredForm, StoredMatrix
from npuserve.npu.model.forms.targets import INT8, target_of_rows
from npuserve.npu.model.forms.w4a16 import Part, check_columns, grouping_of
from npuserve.npu.model.layers.shard import Span
from npuserve.npu.quantization.w4a8 import W4A8


@dataclass(frozen=True, slots=True)
class StoredInt4Int8(StoredForm):
    """Numbers of 4 bits, for int8 activations."""

    scheme: W4A8

    def nbytes(self, rows: int, inputs: int, dtype: torch.dtype, backend: Backend) -> int:
        return backend.weights.int4_bytes(rows, inputs, grouping_of(self.scheme.weights))

    def allocate(self, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> AllocatedWeight:
        numbers = backend.weights.allocate_int4(matrix.rows, matrix.inputs, grouping_of(self.scheme.weights))
        weight = Int4Weight(numbers, dtype, Scheme(levels=backend.capabilities.int8_levels))
        targets = matrix.number_targets(partial(_put_levels, weight), 1, INT8)
        first = 0
        for name, rows in matrix.parts.items():
            part = Part(name, self.scheme.weights, rows, matrix.columns, numbers, first)
            groups = part.groups
            targets[f"{name}.weight_scale"] = target_of_rows(
                part.put_scale, rows, ((rows.whole, groups.whole),), 2 * rows.size * groups.size, columns=groups)
            first += rows.size
        return AllocatedWeight(weight, targets)

    def check(self, name: str, columns: Span) -> None:
        check_columns(self.scheme.weights, name, columns)

    @property
    def golden_copies(self) -> int:
        return 2  # in float64, and in float32 of which it is made


def _put_levels(weight: Int4Weight, row: int, levels: Tensor) -> None:
    if bool(((levels < -8) | (levels > 7)).any()):
        raise ValueError("has numbers that are not from -8 to 7, though config.json says num_bits: 4")
    weight.write(row, (levels + 8).to(torch.uint8))
