"""Prefetch into the L2 cache, for kernels that begin before the previous one ends (dependent.py)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_l2(pointers, nbytes):
    """Prefetch nbytes from each of the pointers; both are multiples of 16."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,r", [pointers.to(tl.int64), nbytes],
        dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def cache_to_l2(
    k_cache, v_cache, table, head, start, stop,
    KV_HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr,
):
    """Prefetch keys and values [start, min(start + COUNT, stop)) of a head into the L2 cache.

    The last of them may not be written yet, which does no harm: the L2 cache is the one that all writes reach.
    """
    NBYTES: tl.constexpr = D * (k_cache.dtype.element_ty.primitive_bitwidth // 8)
    if NBYTES % 16 == 0:
        keys = tl.minimum(start + tl.arange(0, COUNT), stop - 1)
        blocks = tl.load(table + keys // SIZE)
        places = (blocks.to(tl.int64) * SIZE + keys % SIZE) * KV_HEADS + head
        to_l2(k_cache + places * D, tl.full((), NBYTES, tl.int32))
        to_l2(v_cache + places * D, tl.full((), NBYTES, tl.int32))
