"""Float8 weights of a checkpoint that become floats while loading, for devices that do not multiply float8."""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.npu.quantization import BLOCK, W8A8


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
