"""Norm, rotary embedding and cache write, one token at a time.

Compiled by Triton for CUDA and by triton-ascend for Ascend. A program processes every n-th token, so that the grid is
independent of the number of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def qk_norm_rope_kv_write_kernel(
    qkv, q_gamma, k_gamma, cos_sin, positions, slot_mapping, k_cache, v_cache, q_out,
    tokens, eps, qkv_stride: tl.int64, q_stride: tl.int64,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST: tl.constexpr,
    REST_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):
    """Run the kernel qk_norm_rope_kv_write.

    HALF: half of the rotated numbers of a head. REST: its other numbers.
    HALF_BLOCK, REST_BLOCK: the smallest powers of two that are at least HALF and REST.
    HEADS: a power of two, heads processed at a time."""
    DIM: tl.constexpr = 2 * HALF + REST
    places = tl.arange(0, HALF_BLOCK)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        angles = cos_sin + tl.load(positions + token) * (2 * HALF) + places
        cos = tl.load(angles, mask=places < HALF, other=0.0)
        sin = tl.load(angles + HALF, mask=places < HALF, other=0.0)
        q = qkv + token * qkv_stride
        _rotate_heads(q, q_gamma, eps, cos, sin, q_out + token * q_stride, Q_HEADS, HALF, HALF_BLOCK, REST,
                      REST_BLOCK, HEADS)
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            size: tl.constexpr = KV_HEADS * DIM
            k = q + Q_HEADS * DIM
            _rotate_heads(k, k_gamma, eps, cos, sin, k_cache + slot * size, KV_HEADS, HALF, HALF_BLOCK, REST,
                          REST_BLOCK, HEADS)
            for start in range(0, size, HEADS * HALF_BLOCK):
                x = start + tl.arange(0, HEADS * HALF_BLOCK)
                tl.store(v_cache + slot * size + x, tl.load(k + size + x, mask=x < size), mask=x < size)


@triton.jit
def _rotate_heads(
    source, gamma, eps, cos, sin, target,
    COUNT: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Normalize COUNT heads [COUNT, 2 HALF + REST] of `source` if there is a gamma, rotate the first 2 HALF numbers,
    and store the heads in `target`."""
    DIM: tl.constexpr = 2 * HALF + REST
    places = tl.arange(0, HALF_BLOCK)
    for start in range(0, COUNT, HEADS):
        heads = start + tl.arange(0, HEADS)
        offsets = heads[:, None] * DIM + places[None, :]
        inside = (heads[:, None] < COUNT) & (places[None, :] < HALF)
        if REST > 0:
            others = tl.arange(0, REST_BLOCK)
            beside = heads[:, None] * DIM + 2 * HALF + others[None, :]
            kept = (heads[:, None] < COUNT) & (others[None, :] < REST)
            rest = tl.load(source + beside, mask=kept, other=0.0).to(tl.float32)
        a = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + HALF + offsets, mask=inside, other=0.0).to(tl.float32)
        if gamma is not None:
            squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
            if REST > 0:
                squares += tl.sum(rest * rest, 1)
            dtype: tl.constexpr = source.dtype.element_ty
            scale = tl.rsqrt(squares / DIM + eps)
            a = scaled(a, scale, tl.load(gamma + places, mask=places < HALF, other=0.0), dtype)
            b = scaled(b, scale, tl.load(gamma + HALF + places, mask=places < HALF, other=0.0), dtype)
            if REST > 0:
                rest = scaled(rest, scale, tl.load(gamma + 2 * HALF + others, mask=others < REST, other=0.0), dtype)
        first, second = a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :]
        tl.store(target + offsets, first.to(target.dtype.element_ty), mask=inside)
        tl.store(target + HALF + offsets, second.to(target.dtype.element_ty), mask=inside)
        if REST > 0:
            tl.store(target + beside, rest.to(target.dtype.element_ty), mask=kept)


@triton.jit
def scaled(x, scale, gamma, dtype: tl.constexpr):
    """Return x [HEADS, n] float32 times scale [HEADS] times gamma [n].

    The result is rounded to `dtype`, and so is the first product unless gamma is in another dtype.
    """
    x = x * scale[:, None]
    if gamma.dtype == dtype:
        x = x.to(dtype).to(tl.float32)
    return (x * gamma.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
