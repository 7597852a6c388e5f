"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native
from npuserve.kernels.native.packed import PackedWeight, Weight
from npuserve.kernels.registry import Case, kernel


def _case(tokens: int, vocabulary: int, hidden: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (tokens,), generator=generator)
        return ids, torch.randn(vocabulary, hidden, generator=generator).to(dtype)

    return Case(f"{tokens}x{hidden}", make, benchmark)


@kernel("embedding", cases=[_case(1, 3, 8), _case(5, 17, 33), *(_case(t, 151936, 1024, True) for t in (1, 32, 512))])
def embedding(ids: Tensor, table: Weight) -> Tensor:
    """ids [T] int64 below V, table [V, H] -> [T, H]."""
    return table.rows(ids) if isinstance(table, PackedWeight) else F.embedding(ids, table)


@native.implementation(embedding)
def _(ids: Tensor, table: Weight) -> Tensor:
    out = native.empty(len(ids), table.shape[1], dtype=table.dtype)
    if isinstance(table, PackedWeight):
        native.call("embedding", ("unpack", table.dtype, [table.words, out, ids], [*out.shape]))
    else:
        native.call("embedding", ("embedding", table.dtype, [ids, table, out], [*out.shape]))
    return out


@ascend.implementation(embedding)
def _(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table)
