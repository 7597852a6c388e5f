"""Sampled ids of one step as input of the next step, without a copy to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.registry import Case, kernel


def _take_case(tokens: int, rows: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ids = torch.randint(-rows, 1000, (tokens,), generator=generator)
        ids[::3] = torch.randint(-rows, 0, (len(ids[::3]),), generator=generator)
        return ids, torch.randint(1000, (rows,), generator=generator)

    return Case(f"{tokens} of {rows}", make, benchmark)


@kernel("take_ids", cases=[_take_case(1, 1), _take_case(70, 9), *(_take_case(t, 256, True) for t in (1, 32, 512))],
        dtypes=(torch.float32,))
def take_ids(ids: Tensor, last: Tensor) -> Tensor:
    """Return ids [T] int64 with each negative id replaced by last[-1 - id]; last: [R] int64."""
    return torch.where(ids < 0, last[(-1 - ids).clamp(min=0)], ids)


@native.implementation(take_ids)
def _(ids: Tensor, last: Tensor) -> Tensor:
    out = native.empty(len(ids), dtype=torch.int64)
    native.call("take_ids", ("take_ids", torch.int64, [ids, last, out], [len(ids)]))
    return out


def _keep_case(rows: int, width: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ids = torch.randint(1000, (rows, width), generator=generator)
        return ids, torch.randint(1000, (rows,), generator=generator)

    return Case(f"{rows}x{width}", make, benchmark)


@kernel("keep_ids", cases=[_keep_case(3, 1), _keep_case(70, 8), *(_keep_case(r, 1, True) for r in (1, 32, 256))],
        dtypes=(torch.float32,))
def keep_ids(ids: Tensor, last: Tensor) -> None:
    """Copy the first column of ids [R, W] int64 to last [R] int64."""
    last.copy_(ids[:, 0])


@native.implementation(keep_ids)
def _(ids: Tensor, last: Tensor) -> None:
    native.call("keep_ids", ("keep_ids", torch.int64, [ids, last], [*ids.shape]))


@triton.implementation(take_ids)
def _(ids: Tensor, last: Tensor) -> Tensor:
    from npuserve.kernels.triton import launch_rows

    return launch_rows.take_ids(ids, last)


@triton.implementation(keep_ids)
def _(ids: Tensor, last: Tensor) -> None:
    from npuserve.kernels.triton import launch_rows

    launch_rows.keep_ids(ids, last)


ascend.implementation(take_ids)(take_ids.golden)
ascend.implementation(keep_ids)(keep_ids.golden)
