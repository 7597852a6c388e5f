"""Token embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.native.packed import PackedWeight, dense
from npuserve.kernels.quantize import from_nz, weight_of
from npuserve.kernels.quantized import QuantizedWeight, Scheme, Weight, packed
from npuserve.kernels.registry import Case, kernel


def _case(tokens: int, vocabulary: int, hidden: int, benchmark: bool = False, int8: str = "") -> Case:
    """Return a case. int8: "" for a table of floats, "int8" for an int8 table, "zeros" for one with zero points."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Weight]:
        ids = torch.randint(vocabulary, (tokens,), generator=generator)
        table = torch.randn(vocabulary, hidden, generator=generator)
        return ids, weight_of(table, generator, dtype, Scheme(symmetric=int8 != "zeros")) if int8 else table.to(dtype)

    return Case(f"{tokens}x{hidden}{int8 and ' ' + int8}", make, benchmark, zeros=int8 == "zeros")


@kernel(
    "embedding",
    cases=[
        *(_case(*shape, int8=int8) for int8 in ("", "int8", "zeros") for shape in ((1, 3, 8), (5, 17, 33))),
        *(_case(t, 151936, 1024, True, int8) for int8 in ("", "int8") for t in (1, 32, 512)),
    ],
)
def embedding(ids: Tensor, table: Weight) -> Tensor:
    """Return rows `ids` [T] int64 (below V) of table [V, H]: [T, H]. Rows of an int8 table are in its `dtype`."""
    return F.embedding(ids, table) if isinstance(table, Tensor) else table.rows(ids)


def _pack_int8(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return packed(args) if isinstance(args[1], QuantizedWeight) else args


@native.implementation(embedding, adapt=_pack_int8)
def _(ids: Tensor, table: Weight) -> Tensor:
    out = native.empty(len(ids), table.shape[1], dtype=table.dtype)
    if isinstance(table, QuantizedWeight):
        assert isinstance(table.values, PackedWeight)
        call: native.Call = (
            "embedding_int8", table.dtype, [ids, table.values.words, out, table.scale, table.zero], [*out.shape])
    elif isinstance(table, PackedWeight):
        call = table.unpack(ids, out)
    else:
        call = ("embedding", table.dtype, [ids, table, out], [*out.shape])
    native.call("embedding", call)
    return out


def transposed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move arguments to Ascend. The second is a table, whose int8 values become [H, V]."""
    ids, table, *more = ascend.to_device(args)
    if isinstance(table, QuantizedWeight):
        table = replace(table, values=dense(table.values).t())
    return ids, table, *more


@ascend.implementation(embedding, adapt=transposed, restore=from_nz)
def _(ids: Tensor, table: Weight) -> Tensor:
    """Look up an int8 table whose values are [H, V], a view of [V, H]. Zero points are not supported."""
    if not isinstance(table, QuantizedWeight):
        return F.embedding(ids, dense(table))
    if table.zero is not None:
        raise ValueError("zero: on Ascend an int8 table has no zeros")
    scale = F.embedding(ids, table.scale.unsqueeze(1))
    return (F.embedding(ids, dense(table.values).t()).to(scale.dtype) * scale).to(table.dtype)


@triton.implementation(embedding)
def _(ids: Tensor, table: Weight) -> Tensor:
    """Look up a table; the values of an int8 table are [V, H]."""
    from npuserve.kernels.triton import launch_rows

    return launch_rows.embedding(ids, dense(table) if isinstance(table, PackedWeight) else table)
