"""Collectives of several ranks through one region, each rank a thread here, compared with the golden functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.collectives import (
    Ranks,
    all_gather,
    all_reduce,
    linear_argmax_shard,
    region_bytes,
)
from npuserve.kernels.linear import linear_argmax
from npuserve.kernels.native.packed import PackedWeight
from npuserve.kernels.registry import Kernel

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
CAPACITY = 1 << 18


def function(kernel: Kernel[..., Any]) -> Callable[..., Tensor]:
    return kernel.implementations["cpu"].function


def on_ranks(size: int, work: Callable[[int, Ranks], Any]) -> list[Any]:
    """Return the result of each rank's work."""
    region = native.library().allocate(region_bytes(size, CAPACITY))
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = work(rank, Ranks(rank, size, region=region, capacity=CAPACITY))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])  # the library runs four programs at once
def test_collectives_equal_golden_functions_again_and_again(size: int, dtype: torch.dtype) -> None:
    """Collectives of different sizes follow each other, so that a slot that is overwritten too early shows."""
    generator = torch.Generator().manual_seed(size)
    shapes = [(1 + 7 * i % 20, 40 + i) for i in range(40)]
    parts = [[torch.randn(*shape, generator=generator).to(dtype) for _ in range(size)] for shape in shapes]

    def work(rank: int, ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
        return [(function(all_reduce)(x[rank], ranks), function(all_gather)(x[rank], ranks)) for x in parts]

    for made in on_ranks(size, work):
        for x, (total, beside) in zip(parts, made, strict=True):
            golden = Ranks(0, size, gather=lambda _, x=x: torch.stack(x))  # type: ignore[misc]
            assert torch.equal(total, all_reduce(x[0], golden))
            assert torch.equal(beside, all_gather(x[0], golden))


def test_linear_argmax_shard_takes_the_first_of_equal_values_of_any_rank() -> None:
    hidden = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(3 * 64, 16, generator=torch.Generator().manual_seed(2))
    weight[128:] = weight[:64]  # each value of the first rank occurs on the third too
    weight[170:] = 50 * weight[0]  # padding

    def work(rank: int, ranks: Ranks) -> Tensor:
        own = PackedWeight.pack(weight[64 * rank : 64 * rank + 64])
        return function(linear_argmax_shard)(hidden, own, None, 42 if rank == 2 else 64, 64 * rank, ranks)

    wanted = linear_argmax(hidden, weight, None, 170)
    assert int(wanted.max()) < 128
    assert all(torch.equal(ids, wanted) for ids in on_ranks(3, work))


def test_collective_beyond_the_capacity_is_refused() -> None:
    region = native.library().allocate(region_bytes(1, 64))
    with pytest.raises(ValueError, match="take 128 bytes; a rank's slot has 64"):
        function(all_reduce)(torch.zeros(4, 8), Ranks(region=region, capacity=64))
