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
