"""Penalties on CUDA. PDL: see dependent.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def penalize_kernel(
    logits, in_prompt, output_counts, repetition, presence, frequency,
    width, stride: tl.int64, PART: tl.constexpr, PDL: tl.constexpr,
):
    """Apply `penalize` to logits [rows, width] float32 in place."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = columns < width
    scores = tl.load(logits + row * stride + columns, mask=inside, other=0.0)
    counts = tl.load(output_counts + row * width + columns, mask=inside, other=0)
    prompt = tl.load(in_prompt + row * width + columns, mask=inside, other=0)
    penalty = tl.where((prompt != 0) | (counts > 0), tl.load(repetition + row), 1.0)
    scores = tl.where(scores > 0, tl.div_rn(scores, penalty), scores * penalty)
    scores -= tl.load(frequency + row) * counts.to(tl.float32)
    scores -= tl.where(counts > 0, tl.load(presence + row), 0.0)
    tl.store(logits + row * stride + columns, scores, mask=inside)
