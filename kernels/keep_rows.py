"""Copy of rows to memory at a fixed address, which outlives the step."""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.registry import Case, kernel


def _case(rows: int, width: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, width, generator=generator).to(dtype)
        return x, torch.zeros(rows + 3, width, dtype=dtype)

    return Case(f"{rows}x{width}", make, benchmark)


@kernel("keep_rows", cases=[_case(3, 24), _case(70, 40), *(_case(rows, 1024, True) for rows in (1, 32, 512))])
def keep_rows(x: Tensor, memory: Tensor) -> None:
    """Copy x [T, H] to the first rows of memory [N, H]."""
    memory[: len(x)].copy_(x)


@native.implementation(keep_rows)
def _(x: Tensor, memory: Tensor) -> None:
    native.call("keep_rows", ("keep_rows", x.dtype, [x, memory], [*x.shape]))


triton.implementation(keep_rows)(keep_rows.golden)
ascend.implementation(keep_rows)(keep_rows.golden)
