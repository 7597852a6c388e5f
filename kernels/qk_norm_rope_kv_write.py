"""Norm and rotary embedding of queries and keys, and the write of keys and values to the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.kv_cache import (
    QUANTIZED,
    Cache,
    block_size,
    native_parts,
    pack_keys,
    pack_values,
    quantized_as,
    rounded_up,
    unpack_keys,
    unpack_values,
    write,
)
from npuserve.kernels.native import layout
from npuserve.kernels.norm import native_gamma, normalize
from npuserve.kernels.quantized import Quantized
from npuserve.kernels.registry import Case, kernel, to_host


def _case(
    tokens: int, q_heads: int, kv_heads: int, head_dim: int, norm: bool = True, benchmark: bool = False,
    cached: str = "", rotary_dim: int = 0, wide_gamma: bool = False,
) -> Case:
    """Return a case. rotary_dim: numbers of a head that are rotated; 0 for all. wide_gamma: gammas are in float32."""
    rotary_dim = rotary_dim or head_dim

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Cache | float | None, ...]:
        block_size = 16
        blocks = -(-tokens // block_size) + 2
        max_positions = max(64, tokens)
        qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
        kind = torch.float32 if wide_gamma else dtype
        gammas = [torch.rand(head_dim, generator=generator).add(0.5).to(kind) if norm else None for _ in "qk"]
        angles = torch.arange(max_positions)[:, None] * 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        positions = torch.randint(max_positions, (tokens,), generator=generator)
        slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
        slots[1::5] = -1
        caches = torch.randn(2, blocks, block_size, kv_heads, head_dim, generator=generator).to(dtype)
        k_cache, v_cache = quantized_as(cached, caches)
        return qkv, *gammas, 1e-6, cos_sin, positions, slots, k_cache, v_cache, q_heads

    rotated = "" if rotary_dim == head_dim else f" rotary {rotary_dim}"
    normed = "" if norm else " no norm"
    if wide_gamma:
        normed = " float32 gamma"
    in_cache = f" {cached}" if cached else ""
    name = f"{tokens}x{q_heads}/{kv_heads}x{head_dim}{rotated}{normed}{in_cache}"
    return Case(name, make, benchmark, head_dim, QUANTIZED.get(cached))


@kernel(
    "qk_norm_rope_kv_write",
    cases=[
        _case(1, 4, 2, 8),
        _case(7, 3, 1, 10, norm=False),
        _case(33, 6, 3, 16),
        _case(5, 4, 2, 128),
        _case(5, 4, 1, 256),
        _case(18, 6, 2, 256, rotary_dim=64),
        _case(7, 3, 1, 16, rotary_dim=6),
        _case(1, 4, 2, 64, norm=False, rotary_dim=32),
        _case(18, 6, 2, 256, rotary_dim=64, wide_gamma=True),
        _case(7, 3, 1, 16, rotary_dim=6, wide_gamma=True),
        *(_case(t, 16, 8, 128, benchmark=True) for t in (1, 32, 512)),
        *(_case(t, 16, 4, 256, benchmark=True, rotary_dim=64) for t in (1, 512)),
        *(case for cached in QUANTIZED for case in (
            _case(7, 3, 1, 10, norm=False, cached=cached),
            _case(33, 6, 3, 16, cached=cached),
            _case(5, 4, 2, 64, cached=cached),
            _case(5, 4, 2, 128, cached=cached),
            _case(5, 4, 1, 256, cached=cached),
            _case(18, 6, 2, 256, rotary_dim=64, cached=cached),
            _case(18, 6, 2, 256, rotary_dim=64, cached=cached, wide_gamma=True),
            _case(7, 3, 1, 16, norm=False, rotary_dim=6, cached=cached),
            *(_case(t, 16, 8, 128, benchmark=True, cached=cached) for t in (1, 512)))),
    ],
)
def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_gamma: Tensor | None,
    k_gamma: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    num_q_heads: int,
) -> Tensor:
    """Normalize queries and keys per head, rotate them by position, and write keys and values to the cache.

    qkv: [T, (Hq + 2 Hkv) D].
    q_gamma, k_gamma: [D], in qkv's dtype or float32 (`norm.normalize`), or None for models without this norm.
    cos_sin: [P, R] float32, R <= D even, cosines in the first half. The first R numbers of a head are rotated, the
        others are not.

    positions: [T] int64 below P.
    slot_mapping: [T] int64, block * block_size + offset, each at most once. Negative slots are not written.
    k_cache, v_cache: [B, block_size, Hkv, D], contiguous, written in place. For a quantized cache, `quantize_heads`
        quantizes the rounded values.

    Returns q [T, Hq, D]. Rotary embedding is in rotate-half form, as in GPT-NeoX (Su et al. 2021, arXiv:2104.09864). It
    is computed in float32 and rounded once.
    """
    kv_heads = (k_cache.values if isinstance(k_cache, Quantized) else k_cache).shape[2]
    heads = qkv.view(len(qkv), num_q_heads + 2 * kv_heads, -1)
    q, k, v = torch.split(heads, [num_q_heads, kv_heads, kv_heads], dim=1)
    if q_gamma is not None:
        q = normalize(q, q_gamma, eps)
    if k_gamma is not None:
        k = normalize(k, k_gamma, eps)

    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    write(k_cache, slots, rotate(k, cos, sin)[written])
    write(v_cache, slots, v[written])
    return rotate(q, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R numbers of heads x [..., D] by cos and sin [..., R / 2], which are broadcast.

    Computes in the wider dtype of x and cos.
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


def head_dim_of(qkv: Tensor, num_q_heads: int, kv_heads: int) -> int:
    """Return D of qkv [T, (Hq + 2 Hkv) D]."""
    return qkv.shape[1] // (num_q_heads + 2 * kv_heads)


def _pack(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return *args[:7], pack_keys(args[7]), pack_values(args[8]), args[9]


def _unpack(args: tuple[Any, ...]) -> tuple[Any, ...]:
    keys = unpack_keys(args[7])
    head_dim = (keys.values if isinstance(keys, Quantized) else keys).shape[-1]
    return *args[:7], keys, unpack_values(args[8], head_dim), args[9]


@native.implementation(qk_norm_rope_kv_write, adapt=_pack, restore=_unpack)
def _(
    qkv: Tensor,
    q_gamma: Tensor | None,
    k_gamma: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    num_q_heads: int,
) -> Tensor:
    """Write to k_cache and v_cache in the layout of `layout`."""
    kind, (keys, values), scales = native_parts(k_cache, v_cache)
    kv_heads = keys.shape[1]
    dim = head_dim_of(qkv, num_q_heads, kv_heads)
    q = native.empty(len(qkv), num_q_heads, dim, dtype=qkv.dtype)
    narrow, wide = zip(*(native_gamma(gamma, qkv.dtype) for gamma in (q_gamma, k_gamma)), strict=True)
    native.call(
        "qk_norm_rope_kv_write",
        (f"qk_norm_rope_kv_write{kind}", qkv.dtype,
         [qkv, *narrow, cos_sin, positions, slot_mapping, keys, values, q, *(scales or (None, None)), *wide],
         [len(qkv), num_q_heads, kv_heads, dim, layout.block_size(keys), cos_sin.shape[1]], [eps]))
    return q


def _with_padding(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Map each negative slot to a slot of its own in added blocks, as many as hold all tokens."""
    *others, slots, keys, values, heads = args
    size, padding = block_size(keys), len(keys) * block_size(keys)

    def grown(cache: Tensor) -> Tensor:
        return torch.cat([cache, cache.new_zeros(-(-len(slots) // size), *cache.shape[1:])])

    def on_device(cache: Cache) -> Cache:
        if isinstance(cache, Quantized):
            return ascend.by_head(Quantized(grown(cache.values), grown(cache.scale)))
        return ascend.padded(grown(cache), ascend.stored_head_dim(cache.shape[-1]))

    slots = torch.where(slots < 0, padding + torch.arange(len(slots)), slots)
    return ascend.to_device((*others, slots, on_device(keys), on_device(values), heads))


def _without_padding(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Undo `_with_padding`. Exact scales of an int8 cache are rounded up as by `quantize_heads`, and 0 becomes 1."""
    *others, slots, keys, values, heads = to_host(args)

    def as_given(cache: Cache) -> Cache:
        made = ascend.by_token(cache) if isinstance(cache, Quantized) else cache
        head_dim = head_dim_of(args[0], heads, (made.values if isinstance(made, Quantized) else made).shape[2])
        kept = len(made) - -(-len(slots) // block_size(made))
        if isinstance(made, Quantized):
            scale = torch.where(made.scale > 0, rounded_up(made.scale), 1.0)
            return Quantized(made.values[:kept, ..., :head_dim], scale[:kept])
        return made[:kept, ..., :head_dim]

    keys, values = as_given(keys), as_given(values)
    return *others, slots.masked_fill(slots >= len(keys) * block_size(keys), -1), keys, values, heads


@ascend.implementation(qk_norm_rope_kv_write, adapt=_with_padding, restore=_without_padding)
def by_operators(
    qkv: Tensor,
    q_gamma: Tensor | None,
    k_gamma: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    num_q_heads: int,
) -> Tensor:
    """Call the operators of torch_npu.

    npu_mrope rotates as many numbers of a head as the table has columns. The operators round cosines and sines to qkv's
    dtype, as transformers does, and take gamma in it. One token takes five operators. For more
    tokens the values are copied to be contiguous, and each norm covers all heads. Only npu_mrope reads the heads of its
    argument in place, by the stride of the rows
    (https://gitcode.com/cann/ops-transformer/blob/master/posembedding/rope_with_sin_cos_cache/op_host/op_api/aclnn_rope_with_sin_cos_cache.cpp).
    Any other operator copies them first.

    slot_mapping: not negative. Values to discard are written to a block that no request reads.
    k_cache, v_cache: [B, block_size, Hkv, `ascend.stored_head_dim`], or int8 as by `ascend.by_head`.
    """
    tokens = len(qkv)
    kv_heads = k_cache.values.shape[1] if isinstance(k_cache, Quantized) else k_cache.shape[2]
    dim = head_dim_of(qkv, num_q_heads, kv_heads)
    q_weight = None if q_gamma is None else ascend.table_as(q_gamma, qkv.dtype)
    k_weight = None if k_gamma is None else ascend.table_as(k_gamma, qkv.dtype)
    heads = qkv.view(tokens, -1, dim)
    q = _normed(heads, q_weight, eps, slice(num_q_heads))
    k = _normed(heads, k_weight, eps, slice(num_q_heads, num_q_heads + kv_heads))
    v = heads[:, -kv_heads:]
    q, k = torch_npu.npu_mrope(
        positions, q.flatten(1), k.flatten(1), ascend.table_as(cos_sin, qkv.dtype), dim,
        mrope_section=[0, 0, 0], rotary_mode="half")
    _write(k.view(tokens, kv_heads, dim), v.contiguous(), k_cache, v_cache, slot_mapping)
    turned: Tensor = q.view(tokens, num_q_heads, dim)
    return turned


def with_fused_heads(launch: ascend.FusedHeads) -> ascend.FusedHeads:
    """Return the implementation that launches one Triton kernel for a cache of floats with heads as in qkv.

    Another cache is written by the operators.
    """

    def write(
        qkv: Tensor, q_gamma: Tensor | None, k_gamma: Tensor | None, eps: float, cos_sin: Tensor, positions: Tensor,
        slot_mapping: Tensor, k_cache: Cache, v_cache: Cache, num_q_heads: int,
    ) -> Tensor:
        if (isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)
                and head_dim_of(qkv, num_q_heads, k_cache.shape[2]) == k_cache.shape[-1]):
            q_weight, k_weight = (
                None if gamma is None else ascend.table_as(gamma, qkv.dtype) for gamma in (q_gamma, k_gamma))
            return launch(
                qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache, num_q_heads)
        return by_operators(  # type: ignore[no-any-return]
            qkv, q_gamma, k_gamma, eps, cos_sin, positions, slot_mapping, k_cache, v_cache, num_q_heads)

    return write


def _write(k: Tensor, v: Tensor, k_cache: Cache, v_cache: Cache, slots: Tensor) -> None:
    """Write k and v [T, Hkv, D] to their slots.

    For an int8 cache each token's head is a row of npu_dynamic_quant, whose scale is the largest magnitude divided by
    127, and is written as a token of one head.
    """
    wide = ascend.stored_head_dim(k.shape[-1])
    k, v = ascend.padded(k, wide), ascend.padded(v, wide)
    if isinstance(k_cache, Quantized) and isinstance(v_cache, Quantized):
        places = ascend.head_slots(slots, k_cache)
        (k, k_scale), (v, v_scale) = (torch_npu.npu_dynamic_quant(x.view(-1, 1, wide)) for x in (k, v))
        for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)):
            torch_npu.npu_scatter_nd_update_(cache.scale.view(-1), places.unsqueeze(1), scale.view(-1))
        keys, values = (cache.values.view(-1, cache.values.shape[2], 1, wide) for cache in (k_cache, v_cache))
        torch_npu.npu_scatter_pa_kv_cache(k, v, keys, values, places, cache_mode="Norm")
        return
    torch_npu.npu_scatter_pa_kv_cache(k, v, k_cache, v_cache, slots, cache_mode="Norm")


def _normed(heads: Tensor, gamma: Tensor | None, eps: float, part: slice) -> Tensor:
    """Return the part [T, n, D] of heads [T, N, D], normalized if there is a gamma; a view for more than one token."""
    if gamma is None:
        return heads[:, part]
    if len(heads) == 1:
        return torch_npu.npu_rms_norm(heads[:, part], gamma, epsilon=eps)[0]  # type: ignore[no-any-return]
    return torch_npu.npu_rms_norm(heads, gamma, epsilon=eps)[0][:, part]  # type: ignore[no-any-return]


@triton.implementation(qk_norm_rope_kv_write)
def _(
    qkv: Tensor,
    q_gamma: Tensor | None,
    k_gamma: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    num_q_heads: int,
) -> Tensor:
    from npuserve.kernels.triton import launch_attention

    return launch_attention.qk_norm_rope_kv_write(
        qkv, q_gamma, k_gamma, eps, cos_sin, positions, slot_mapping, k_cache, v_cache, num_q_heads
    )
