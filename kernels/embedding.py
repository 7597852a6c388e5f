"""Token embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.quantized import Scheme
from npuserve.kernels.quantized_weight import weight_of
from npuserve.kernels.registry import Case, kernel
from npuserve.kernels.weight import Weight, form_of, from_ascend, packed, to_ascend_table


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
    return form_of(table).rows(ids)


def _pack_int8(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args if isinstance(args[1], Tensor) else packed(args)


@native.implementation(embedding, adapt=_pack_int8)
def _(ids: Tensor, table: Weight) -> Tensor:
    out = native.empty(len(ids), table.shape[1], dtype=table.dtype)
    native.call("embedding", form_of(table).native_rows(ids, out))
    return out


@ascend.implementation(embedding, adapt=to_ascend_table, restore=from_ascend)
def _(ids: Tensor, table: Weight) -> Tensor:
    """Look up an int8 table whose values are [H, V], a view of [V, H]. Zero points are not supported."""
    return form_of(table).ascend_rows(ids)


@triton.implementation(embedding)
def _(ids: Tensor, table: Weight) -> Tensor:
    """Look up a table; the values of an int8 table are [V, H]."""
    from npuserve.kernels.triton import launch_rows

    return launch_rows.embedding(ids, table)
