"""Bit masks of logits on CUDA. PDL: see dependent.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mask_logits_kernel(
    logits, bits, mask_of_row, vocabulary, words, stride: tl.int64, PART: tl.constexpr, PDL: tl.constexpr,
):
    """Apply `mask_logits` to logits [rows, >= vocabulary] in place. Only masked logits are written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_of_row + row).to(tl.int64)
    if mask >= 0:
        columns = tl.program_id(1) * PART + tl.arange(0, PART)
        inside = columns < vocabulary
        word = tl.load(bits + mask * words + columns // 32, mask=inside, other=-1)
        banned = ((word >> (columns % 32)) & 1) == 0
        tl.store(logits + row * stride + columns, float("-inf"), mask=inside & banned)
