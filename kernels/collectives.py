"""Kernels of tensor parallelism: sums and concatenations over the ranks, and the tables that the ranks divide by rows.

Megatron-LM's division (https://arxiv.org/abs/1909.08053): each rank computes a part of every layer, and two sums a
layer join the parts. Sums are in the order of the ranks, so that they are the same on each rank and in each run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.embedding import embedding
from npuserve.kernels.greedy import greedy
from npuserve.kernels.linear import argmax_calls, linear
from npuserve.kernels.registry import Case, kernel
from npuserve.kernels.weight import Weight, from_ascend, packed, to_ascend, to_ascend_table

Choose = Callable[[Tensor, int], Tensor]
"""Function with the arguments of `greedy`."""


def _only(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


def _same(x: Tensor) -> Tensor:
    return x


MIN_SAVED_BYTES = 3 << 20
"""Least bytes that each rank must save for a sum by two collectives in place of one (`divides_sum`).

They take 9 µs at 360 GB/s, which is NVLink's 450 GB/s as far as collectives reach it. A collective of few bytes takes
about 8 µs there. Neither was measured here.
"""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Group of the processes that compute a model together, as one of them sees it.

    rank: number of this process, from 0.
    size: number of processes.

    All ranks call the three collectives in the same order, with equal shapes. On a device they queue work and do not
    block the host, so that a graph may contain them.

    gather: returns the tensors of all ranks in rank order, [size, ...].
    exchange: divides the numbers of x into `size` equal parts. Returns this rank's part of each rank's x, in rank
        order: [size, numbers of x / size].
    reduce: returns the sum of the ranks' x as the device's library adds them. May overwrite x.

    region: [RANK_LINE_BYTES * size + 2 * size * capacity] uint8, zeroed memory that all ranks map, for the native
        kernels (native/rows/ranks.cpp). None: the kernels call `gather`.
    capacity: bytes of a rank's slot in the region, the maximum of a tensor.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[Tensor], Tensor] = _only
    exchange: Callable[[Tensor], Tensor] = _only
    reduce: Callable[[Tensor], Tensor] = _same
    region: Tensor | None = None
    capacity: int = 0


ALONE = Ranks()


def divides_sum(x: Tensor, size: int) -> bool:
    """Return True if each rank adds a part of the sum of the ranks' x, and the sums are then gathered.

    Each rank then sends 2 (size - 1) / size times the bytes of x; a gather of all x sends size - 1 times the bytes. The
    sum is the same.
    """
    return x.numel() % size == 0 and x.nbytes * (size - 1) * (size - 2) >= MIN_SAVED_BYTES * size


def region_bytes(size: int, capacity: int) -> int:
    """Return the bytes of a region of `size` ranks."""
    return size * (native.CONSTANTS["RANK_LINE_BYTES"] + 2 * capacity)


def _matrix_case(rows: int, width: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Ranks]:
        return torch.randn(rows, width, generator=generator).to(dtype), ALONE

    return Case(f"{rows}x{width}", make, benchmark)


_MATRICES = [_matrix_case(1, 8), _matrix_case(5, 33), *(_matrix_case(t, 1024, True) for t in (1, 32, 512))]


@kernel("all_reduce", cases=_MATRICES)
def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum [T, H] of the ranks' x [T, H], added in float32 and rounded once."""
    parts = ranks.gather(x)
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


@kernel("all_gather", cases=_MATRICES)
def all_gather(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the ranks' x [T, W] beside each other: [T, size * W]."""
    return torch.cat(tuple(ranks.gather(x)), dim=-1)


def _table_case(
    tokens: int, vocabulary: int, hidden: int, first: int, count: int, benchmark: bool = False
) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        ids = torch.randint(vocabulary, (tokens,), generator=generator)
        return ids, torch.randn(count, hidden, generator=generator).to(dtype), first, count

    return Case(f"{tokens}x{hidden} {first}+{count}", make, benchmark)


@kernel("embedding_shard", cases=[
    _table_case(7, 20, 8, 0, 11), _table_case(40, 30, 33, 16, 9),
    *(_table_case(t, 151936, 1024, 75968, 75968, True) for t in (1, 32, 512))])
def embedding_shard(ids: Tensor, table: Weight, first: int, count: int) -> Tensor:
    """Return the rows of ids [T] int64 in a table of the ids [first, first + count): [T, H]; zeros for other ids.

    table: [V, H], V >= count.
    """
    return _rows_inside(ids, table, first, count, embedding)


def _rows_inside(ids: Tensor, table: Weight, first: int, count: int, rows_of: Callable[..., Tensor]) -> Tensor:
    """Return the result of `embedding_shard`. rows_of: the kernel `embedding`."""
    inside = (ids >= first) & (ids < first + count)
    return rows_of(torch.where(inside, ids - first, 0), table).masked_fill(~inside.unsqueeze(1), 0)


def _argmax_case(rows: int, k: int, vocabulary: int, padding: int, first: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        x = torch.randn(rows, k, generator=generator).to(dtype)
        weight = (torch.randn(vocabulary + padding, k, generator=generator) * k**-0.5).to(dtype)
        weight[vocabulary:] = 3 * weight[0]
        return x, weight, None, vocabulary, first, ALONE

    return Case(f"{rows}x{k}x{vocabulary}+{padding} from {first}", make, benchmark)


@kernel("linear_argmax_shard", cases=[
    _argmax_case(1, 8, 7, 0, 0), _argmax_case(5, 32, 101, 27, 128),
    *(_argmax_case(rows, 1024, 75968, 0, 75968, True) for rows in (1, 8, 32))])
def linear_argmax_shard(
    x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, first: int, ranks: Ranks
) -> Tensor:
    """Return the argmax over all ranks' columns of `linear`: ids [R, 1] int64; x [R, K], weight [Vp, K].

    vocabulary: number of this rank's columns that count, from the first on.
    first: id of the first column. Ids ascend with the rank; they are below 2^24.
    """
    return _argmax_of(linear(x, weight, bias), vocabulary, first, ranks)


def _argmax_of(logits: Tensor, vocabulary: int, first: int, ranks: Ranks, choose: Choose = greedy) -> Tensor:
    """Return the argmax over all ranks' logits [R, Vp], as `linear_argmax_shard`. choose: the kernel `greedy`."""
    ids = choose(logits, vocabulary) if vocabulary else logits.new_zeros(len(logits), 1, dtype=torch.int64)
    best = logits.gather(1, ids).to(torch.float32).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if not vocabulary:
        best.fill_(-torch.inf)
    pairs = ranks.gather(torch.cat([best, (ids + first).to(torch.float32)], dim=1))  # [size, R, 2]
    best, ids = pairs[:, :, 0], pairs[:, :, 1]
    # The smallest of the best ids, without argmax: not every device returns the first of equal numbers.
    return torch.where(best == best.amax(dim=0), ids, torch.inf).amin(dim=0).unsqueeze(1).to(torch.int64)


def _with_region(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the ranks of a case, the last argument, a region of their own."""
    capacity = 8 * max(arg.numel() for arg in args if isinstance(arg, Tensor))
    memory = native.library().allocate(region_bytes(1, capacity))
    return *args[:-1], Ranks(region=memory, capacity=capacity)


def _collective(kernel: str, x: Tensor, out: Tensor, ranks: Ranks) -> list[native.Call]:
    """Return the ops of a collective. Raises ValueError for an x that is larger than a slot."""
    region, (rows, width) = ranks.region, x.shape
    if x.nbytes > ranks.capacity:
        raise ValueError(f"{rows} rows of {width} numbers take {x.nbytes} bytes; a rank's slot has {ranks.capacity}")
    n = [rows, width, ranks.rank, ranks.size, ranks.capacity]
    return [("rank_share", x.dtype, [x, region], n), ("rank_arrive", torch.uint8, [region], n),
            (kernel, x.dtype, [region, out], n)]


@native.implementation(all_reduce, adapt=_with_region)
def _(x: Tensor, ranks: Ranks) -> Tensor:
    if ranks.region is None:
        return all_reduce(x, ranks)
    out = native.empty(*x.shape, dtype=x.dtype)
    native.call("all_reduce", *_collective("rank_sum", x, out, ranks))
    return out


@native.implementation(all_gather, adapt=_with_region)
def _(x: Tensor, ranks: Ranks) -> Tensor:
    if ranks.region is None:
        return all_gather(x, ranks)
    out = native.empty(len(x), ranks.size * x.shape[1], dtype=x.dtype)
    native.call("all_gather", *_collective("rank_concatenate", x, out, ranks))
    return out


@native.implementation(embedding_shard)
def _(ids: Tensor, table: Weight, first: int, count: int) -> Tensor:
    local = native.empty(len(ids), dtype=torch.int64)
    native.call("embedding_shard", ("local_ids", torch.int64, [ids, local], [len(ids), first, count]))
    out = embedding.implementations["cpu"].function(local, table)
    native.call("embedding_shard", ("zero_outside", out.dtype, [ids, out], [*out.shape, first, count]))
    return out


@native.implementation(linear_argmax_shard, adapt=lambda args: _with_region(packed(args)))
def _(x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, first: int, ranks: Ranks) -> Tensor:
    if ranks.region is None:
        return _argmax_of(linear.implementations["cpu"].function(x, weight, bias), vocabulary, first, ranks)
    ids = native.empty(len(x), 1, dtype=torch.int64)
    pairs = native.empty(len(x), 2, dtype=torch.float32)
    native.call("linear_argmax_shard",
                *argmax_calls(x, weight, bias, vocabulary, ids, pairs=pairs, first=first),
                *_collective("rank_argmax", pairs, ids, ranks))
    return ids


ascend.implementation(all_gather)(all_gather.golden)
triton.implementation(all_gather)(all_gather.golden)


@ascend.implementation(all_reduce)
def _(x: Tensor, ranks: Ranks) -> Tensor:
    """Add by HCCL, in one task of the device, and overwrite x. HCCL names neither the order nor the precision."""
    return ranks.reduce(x)


@triton.implementation(all_reduce)
def _(x: Tensor, ranks: Ranks) -> Tensor:
    """Add in the order of the ranks, all numbers on each rank, or a part on each (`divides_sum`)."""
    from npuserve.kernels.triton import launch_rows

    if not divides_sum(x, ranks.size):
        return launch_rows.rank_sum(ranks.gather(x))
    part = launch_rows.rank_sum(ranks.exchange(x).unsqueeze(1))
    return ranks.gather(part).view(x.shape)


@ascend.implementation(embedding_shard, adapt=to_ascend_table, restore=from_ascend)
def _(ids: Tensor, table: Weight, first: int, count: int) -> Tensor:
    return _rows_inside(ids, table, first, count, embedding.implementations[ascend.LABEL].function)


@triton.implementation(embedding_shard)
def _(ids: Tensor, table: Weight, first: int, count: int) -> Tensor:
    return _rows_inside(ids, table, first, count, embedding.implementations[triton.LABEL].function)


@ascend.implementation(linear_argmax_shard, adapt=to_ascend, restore=from_ascend)
def _(x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, first: int, ranks: Ranks) -> Tensor:
    logits = linear.implementations[ascend.LABEL].function(x, weight, bias)
    return _argmax_of(logits, vocabulary, first, ranks, greedy.implementations[ascend.LABEL].function)


@triton.implementation(linear_argmax_shard)
def _(x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, first: int, ranks: Ranks) -> Tensor:
    logits = linear.implementations[triton.LABEL].function(x, weight, bias)
    return _argmax_of(logits, vocabulary, first, ranks, greedy.implementations[triton.LABEL].function)
