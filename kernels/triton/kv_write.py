"""Norm, rotary embedding and cache write on CUDA, for caches of floats, int8 or float8_e4m3fn.

One token is divided among several multiprocessors. qk_norm_rope_kv_write.py is the version for Ascend.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npuserve.kernels.triton.qk_norm_rope_kv_write import scaled


@triton.jit
def kv_write_kernel(
    qkv, q_gamma, k_gamma, cos_sin, positions, slot_mapping, k_cache, v_cache, k_scale, v_scale, q_out,
    eps, qkv_stride: tl.int64,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST: tl.constexpr,
    REST_BLOCK: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):
    """Run the kernel qk_norm_rope_kv_write.

    k_scale, v_scale: [B, block_size, KV_HEADS] bfloat16 of quantized caches, or None.
    HALF: half of the rotated numbers of a head. REST: its other numbers.
    HALF_BLOCK, REST_BLOCK: the smallest powers of two that are at least HALF and REST.
    HEADS: a power of two. A program processes HEADS heads of a token. The programs of a token process its queries,
        then its keys, then its values.
    """
    DIM: tl.constexpr = 2 * HALF + REST
    Q_GROUPS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0) // (Q_GROUPS + 2 * KV_GROUPS)
    group = tl.program_id(0) % (Q_GROUPS + 2 * KV_GROUPS)
    # Data copied by the host, and constant data, may be read before the previous kernel ends.
    slot = tl.load(slot_mapping + token)
    places = tl.arange(0, HALF_BLOCK)
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + places
    cos = tl.load(angles, mask=places < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=places < HALF, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    source = qkv + token * qkv_stride
    if group < Q_GROUPS:
        a, b, rest, offsets, inside, beside, kept = _rotated_heads(
            source, q_gamma, eps, cos, sin, group * HEADS, Q_HEADS, HALF, HALF_BLOCK, REST, REST_BLOCK, HEADS)
        target = q_out + token.to(tl.int64) * (Q_HEADS * DIM)
        tl.store(target + offsets, a.to(q_out.dtype.element_ty), mask=inside)
        tl.store(target + offsets + HALF, b.to(q_out.dtype.element_ty), mask=inside)
        if REST > 0:
            tl.store(target + beside, rest.to(q_out.dtype.element_ty), mask=kept)
    elif slot >= 0:
        if group < Q_GROUPS + KV_GROUPS:
            first = (group - Q_GROUPS) * HEADS
            a, b, rest, offsets, inside, beside, kept = _rotated_heads(
                source + Q_HEADS * DIM, k_gamma, eps, cos, sin, first, KV_HEADS, HALF, HALF_BLOCK, REST, REST_BLOCK,
                HEADS)
            dtype = qkv.dtype.element_ty
            _store(a.to(dtype), b.to(dtype), rest.to(dtype), offsets, inside, beside, kept, k_cache, k_scale, slot,
                   first, KV_HEADS, HALF, REST, HEADS)
        else:
            first = (group - Q_GROUPS - KV_GROUPS) * HEADS
            v_a, v_b, v_rest, offsets, inside, beside, kept = _heads(
                source + (Q_HEADS + KV_HEADS) * DIM, first, KV_HEADS, HALF, HALF_BLOCK, REST, REST_BLOCK, HEADS)
            _store(v_a, v_b, v_rest, offsets, inside, beside, kept, v_cache, v_scale, slot, first, KV_HEADS, HALF, REST,
                   HEADS)


@triton.jit
def _heads(
    source, first, COUNT: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST: tl.constexpr,
    REST_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):
    """Load heads from `first` on: both halves of their rotated numbers, and the others.

    Returns the halves [HEADS, HALF_BLOCK] and the others [HEADS, REST_BLOCK], the offsets and mask of the first halves,
    and those of the others. REST 0: the others, with offsets and mask, are those of the first halves.
    """
    DIM: tl.constexpr = 2 * HALF + REST
    heads = first + tl.arange(0, HEADS)
    places = tl.arange(0, HALF_BLOCK)
    offsets, inside = heads[:, None] * DIM + places[None, :], (heads[:, None] < COUNT) & (places[None, :] < HALF)
    a = tl.load(source + offsets, mask=inside, other=0.0)
    b = tl.load(source + HALF + offsets, mask=inside, other=0.0)
    rest, beside, kept = a, offsets, inside
    if REST > 0:
        others = tl.arange(0, REST_BLOCK)
        beside = heads[:, None] * DIM + 2 * HALF + others[None, :]
        kept = (heads[:, None] < COUNT) & (others[None, :] < REST)
        rest = tl.load(source + beside, mask=kept, other=0.0)
    return a, b, rest, offsets, inside, beside, kept


@triton.jit
def _rotated_heads(
    source, gamma, eps, cos, sin, first,
    COUNT: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Return the results of `_heads`, the numbers in float32, normalized if there is a gamma, and rotated."""
    a, b, rest, offsets, inside, beside, kept = _heads(
        source, first, COUNT, HALF, HALF_BLOCK, REST, REST_BLOCK, HEADS)
    a, b, rest = a.to(tl.float32), b.to(tl.float32), rest.to(tl.float32)
    if gamma is not None:
        places = tl.arange(0, HALF_BLOCK)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / (2 * HALF + REST) + eps)
        a = scaled(a, scale, tl.load(gamma + places, mask=places < HALF, other=0.0))
        b = scaled(b, scale, tl.load(gamma + HALF + places, mask=places < HALF, other=0.0))
        if REST > 0:
            others = tl.arange(0, REST_BLOCK)
            rest = scaled(rest, scale, tl.load(gamma + 2 * HALF + others, mask=others < REST, other=0.0))
    return (a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :], rest, offsets, inside, beside,
            kept)


@triton.jit
def _store(
    a, b, rest, offsets, inside, beside, kept, cache, scales, slot, first, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, HEADS: tl.constexpr,
):
    """Write heads as of `_heads` to the cache. Quantization is bit-identical to `quantize_heads`."""
    target = cache + slot * (KV_HEADS * (2 * HALF + REST))
    if scales is not None:
        a, b, rest = a.to(tl.float32), b.to(tl.float32), rest.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        if REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        INT8: tl.constexpr = cache.dtype.element_ty == tl.int8
        LARGEST: tl.constexpr = 127.0 if INT8 else 448.0
        exact = tl.div_rn(largest, tl.full((HEADS,), LARGEST, tl.float32))
        above = ((exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16) << 16
        scale = tl.where(exact > 0, above.to(tl.float32, bitcast=True), 1.0)
        heads = first + tl.arange(0, HEADS)
        tl.store(scales + slot * KV_HEADS + heads, scale.to(tl.bfloat16), mask=heads < KV_HEADS)
        a, b = _rounded(a, scale, INT8), _rounded(b, scale, INT8)
        if REST > 0:
            rest = _rounded(rest, scale, INT8)
    tl.store(target + offsets, a.to(cache.dtype.element_ty), mask=inside)
    tl.store(target + offsets + HALF, b.to(cache.dtype.element_ty), mask=inside)
    if REST > 0:
        tl.store(target + beside, rest.to(cache.dtype.element_ty), mask=kept)


@triton.jit
def _rounded(x, scale, INT8: tl.constexpr):
    """Return x / scale, rounded to int8 or float8e4nv, ties to even, in float32.

    Floats near 1.5 * 2**23 are 1 apart, and near 1.5 * 2**14 as far as float8e4nv below 2**-6. The conversion of the
    result is exact, since Triton's interpreter does not round to nearest float8e4nv.
    """
    quotients = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if INT8:
        return tl.clamp(quotients + 12582912.0 - 12582912.0, -127.0, 127.0)
    bits = quotients.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(quotients) < 0.015625, quotients + 24576.0 - 24576.0, normal)
