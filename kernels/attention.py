"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.kv_cache import (
    Cache,
    block_size,
    native_parts,
    pack_keys,
    pack_values,
    quantize_heads,
    read,
    unpack_keys,
    unpack_values,
)
from npuserve.kernels.native import CONSTANTS, LANES, layout
from npuserve.kernels.quantized import Int8
from npuserve.kernels.registry import Case, kernel

INT8_TOLERANCE = 3e-4
"""Tolerance of results over an int8 cache: implementations may multiply queries and weights in int16."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Positions of each row's queries and keys, the same for all layers of a step.

    block_tables: [R, maxB] int32, the row's blocks in order. Entries beyond its context are not read.
    context_lens: [R] int32, the row's tokens in the cache, including this step's tokens.
    cu_seqlens_q: [R + 1] int32. The queries of row r are [cu_seqlens_q[r], cu_seqlens_q[r + 1]).
        They are the last tokens of its context.
    host_context_lens, host_cu_seqlens_q: copies of these lengths on the host. Empty in a step captured for rows of
        any lengths, which reads the lengths on the device only.
    """

    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    host_context_lens: list[int]
    host_cu_seqlens_q: list[int]

    @classmethod
    def from_lengths(
        cls, block_tables: Tensor, context_lens: Sequence[int], query_lens: Sequence[int]
    ) -> AttentionMetadata:
        """Build the metadata from lengths on the host; tensors are created on the device of `block_tables`."""
        cu_seqlens_q = list(accumulate(query_lens, initial=0))
        device = block_tables.device
        return cls(
            block_tables,
            torch.tensor(context_lens, dtype=torch.int32, device=device),
            torch.tensor(cu_seqlens_q, dtype=torch.int32, device=device),
            list(context_lens),
            cu_seqlens_q,
        )


def _case(
    rows: list[tuple[int, int]],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    benchmark: bool = False,
    int8: bool = False,
) -> Case:
    """Return a case. rows: (queries, context) of each row."""

    def make(
        generator: torch.Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Cache, Cache, AttentionMetadata, float]:
        width = -(-max(context for _, context in rows) // block_size)
        block_tables = torch.randperm(len(rows) * width, generator=generator).int().view(len(rows), width)
        tokens = sum(queries for queries, _ in rows)
        q = torch.randn(tokens, q_heads, head_dim, generator=generator).to(dtype)
        shape = (2, len(rows) * width, block_size, kv_heads, head_dim)
        caches = torch.randn(shape, generator=generator).to(dtype)
        k_cache, v_cache = map(quantize_heads, caches) if int8 else caches
        metadata = AttentionMetadata.from_lengths(block_tables, [c for _, c in rows], [n for n, _ in rows])
        return q, k_cache, v_cache, metadata, head_dim**-0.5

    queries, contexts = ("+".join(map(str, sorted(set(x)))) for x in zip(*rows, strict=True))
    name = f"{len(rows)} rows {queries} of {contexts} {q_heads}/{kv_heads}x{head_dim}{' int8' if int8 else ''}"
    return Case(name, make, benchmark, head_dim, int8, tolerance=INT8_TOLERANCE if int8 else 0.0)


@kernel(
    "paged_attention",
    cases=[
        _case([(1, 1)], 4, 4, 8),
        _case([(1, 17), (5, 5), (3, 20), (1, 33)], 6, 2, 16),
        _case([(7, 31), (1, 5)], 3, 1, 10, block_size=32),
        _case([(70, 70), (1, 300), (33, 290)], 6, 3, 64),
        _case([(1, 700)], 4, 1, 16),
        _case([(1, 130), (5, 40), (1, 7)], 4, 2, 128),
        *(_case([(1, 512)] * rows, 16, 8, 128, benchmark=True) for rows in (1, 8, 32)),
        _case([(512, 512)], 16, 8, 128, benchmark=True),
        _case([(512, 4096)], 16, 8, 128, benchmark=True),
        _case([(1, 8192)], 16, 8, 128, 128, benchmark=True),
        _case([(1, 17), (5, 5), (3, 20), (1, 33)], 6, 2, 16, int8=True),
        _case([(7, 31), (1, 5)], 3, 1, 10, block_size=32, int8=True),
        _case([(70, 70), (1, 300), (33, 290)], 6, 3, 64, int8=True),
        _case([(1, 700)], 4, 1, 16, int8=True),
        _case([(1, 130), (5, 40), (1, 7)], 4, 2, 128, int8=True),
        *(_case([(1, 512)] * rows, 16, 8, 128, benchmark=True, int8=True) for rows in (1, 32)),
        _case([(512, 4096)], 16, 8, 128, benchmark=True, int8=True),
        _case([(1, 8192)], 16, 8, 128, 128, benchmark=True, int8=True),
    ],
)
def paged_attention(q: Tensor, k_cache: Cache, v_cache: Cache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Compute causal attention of rows with any number of queries over the blocks of each row.

    q: [T, Hq, D].
    k_cache, v_cache: [B, block_size, Hkv, D], both in q's dtype or both int8. Hq is a multiple of Hkv. They already
        hold this step's keys and values.

    Returns [T, Hq D], 0 for queries of no row. Softmax and sums are in float32. The results of a row do not depend on
    the other rows.
    """
    output = torch.zeros_like(q)
    wide = torch.promote_types(q.dtype, torch.float32) if isinstance(k_cache, Int8) else q.dtype
    starts = metadata.host_cu_seqlens_q
    for row, context in enumerate(metadata.host_context_lens):
        tokens = slice(starts[row], starts[row + 1])
        blocks = metadata.block_tables[row, : -(-context // block_size(k_cache))]
        keys, values = (
            read(cache, blocks, wide).flatten(0, 1)[:context].transpose(0, 1) for cache in (k_cache, v_cache))
        output[tokens] = _attend(q[tokens].to(wide).transpose(0, 1), keys, values, scale).transpose(0, 1)
    return output.flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend with queries q [Hq, n, D], the last n tokens of k and v [Hkv, context, D]; return [Hq, n, D]."""
    (q_heads, n, head_dim), (kv_heads, context) = q.shape, k.shape[:2]
    if 1 < n == context:
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True)
        return out[0]
    # The query heads that share a KV head become further queries of it, so that its keys are read once.
    group = q_heads // kv_heads
    mask = None
    if n > 1:
        places = torch.arange(context, device=q.device)
        mask = (places <= places[context - n :, None]).repeat(group, 1)
    shared = q.reshape(1, kv_heads, group * n, head_dim)
    return F.scaled_dot_product_attention(shared, k[None], v[None], attn_mask=mask, scale=scale).view(q.shape)


def _pack(args: tuple[Any, ...]) -> tuple[Any, ...]:
    q, keys, values, metadata, scale = args
    return q, pack_keys(keys), pack_values(values), metadata, scale


def _unpack(args: tuple[Any, ...]) -> tuple[Any, ...]:
    q, keys, values, metadata, scale = args
    return q, unpack_keys(keys), unpack_values(values, q.shape[-1]), metadata, scale


@native.implementation(paged_attention, adapt=_pack, restore=_unpack)
def _(q: Tensor, k_cache: Cache, v_cache: Cache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Compute flash attention by splits (Dao et al. 2022, arXiv:2205.14135).

    k_cache, v_cache: in the layout of `layout`.

    Splits are merged as in Flash-Decoding (Dao et al. 2023). Softmax weights are rounded to q's dtype. Over an int8
    cache, weights and queries are rounded to int16 with one scale per row.
    """
    tokens, q_heads, dim = q.shape
    kind, (keys, values), scales = native_parts(k_cache, v_cache)
    block_size, kv_heads = layout.block_size(keys), keys.shape[1]
    rows, stride = metadata.block_tables.shape
    out = native.empty(tokens, q_heads * dim, dtype=q.dtype)
    if metadata.host_cu_seqlens_q and metadata.host_cu_seqlens_q[-1] < tokens:
        out.zero_()
    # Rows with one query each are split if there are too few heads to occupy all threads.
    items = min(rows, -(-CONSTANTS["ATTENTION_UNITS_PER_THREAD"] * native.library().threads // kv_heads))
    splits = -(-stride * block_size // CONSTANTS["ATTENTION_SPLIT"])
    plan = native.kept(rows + 2, dtype=torch.int32)
    partial = native.empty(items * splits * q_heads * (-(-dim // LANES) + 1) * LANES, dtype=torch.float32)
    merged = [metadata.context_lens, metadata.cu_seqlens_q, out, plan, partial]
    p = [q, keys, values, metadata.block_tables, *merged, *scales]
    n = [tokens, rows, q_heads, kv_heads, dim, block_size, stride, items]
    native.call(
        "paged_attention", (f"attention{kind}", q.dtype, p, n, [scale]),
        ("attention_merge", q.dtype, [None, None, None, None, *merged], n, [scale]))
    return out


def _in_large_blocks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert blocks to a size that is a multiple of `ascend.BLOCK`; each row gets its own blocks, in order."""
    q, keys, values, metadata, scale = args
    wide = ascend.cached_head_dim(q.shape[-1])
    caches = [ascend.padded(cache, wide) for cache in (keys, values)]
    if keys.shape[1] % ascend.BLOCK:
        tables, tail = metadata.block_tables, (*keys.shape[2:-1], wide)
        slots = [cache[tables.long()].flatten(1, 2) for cache in caches]
        width = -(-slots[0].shape[1] // ascend.BLOCK)
        beyond = width * ascend.BLOCK - slots[0].shape[1]
        caches = [F.pad(cache, (0, 0, 0, 0, 0, beyond)).view(-1, ascend.BLOCK, *tail) for cache in slots]
        metadata = replace(metadata, block_tables=torch.arange(len(tables) * width).int().view(len(tables), width))
    return ascend.to_device((q, *caches, metadata, scale))


def _with_own_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    q, keys, values, metadata, scale = ascend.to_host(args)
    return q, keys[..., : q.shape[-1]], values[..., : q.shape[-1]], metadata, scale


@ascend.implementation(paged_attention, adapt=_in_large_blocks, restore=_with_own_heads)
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Run fused attention in its variable-length layout (TND): one call for decode rows and chunks.

    k_cache, v_cache: [B, block_size, Hkv, `ascend.cached_head_dim`(D)], block_size a multiple of `ascend.BLOCK`.

    The operator takes the lengths from the host. A captured graph keeps the lengths of its capture until
    `NPUGraph.update` replaces them (keyword actual_seq_lengths_kv).
    """
    tokens, q_heads, own = q.shape
    blocks, block_size, kv_heads, dim = k_cache.shape
    ends = metadata.host_cu_seqlens_q[1:]
    out, _ = torch_npu.npu_fused_infer_attention_score(
        ascend.padded(q[: ends[-1]], dim),
        k_cache.view(blocks, block_size, kv_heads * dim),
        v_cache.view(blocks, block_size, kv_heads * dim),
        atten_mask=ascend.causal_mask(q.device),
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=metadata.host_context_lens,
        block_table=metadata.block_tables,
        num_heads=q_heads,
        scale=scale,
        input_layout="TND",
        num_key_value_heads=kv_heads,
        sparse_mode=3,
        block_size=block_size,
    )
    out = out.view(-1, q_heads, dim)[..., :own].reshape(-1, q_heads * own)
    return out if len(out) == tokens else torch.cat([out, out.new_zeros(tokens - len(out), q_heads * own)])


@triton.implementation(paged_attention)
def _(q: Tensor, k_cache: Cache, v_cache: Cache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Read all lengths on the device.

    Only the lengths on the host show that each row has one query, which saves a launch. A step captured with one query
    per row must be replayed with one query per row.
    """
    from npuserve.kernels.triton import launch_attention

    starts = metadata.host_cu_seqlens_q
    one_each = len(q) == len(metadata.context_lens) and starts == list(range(len(q) + 1))
    return launch_attention.paged_attention(
        q, k_cache, v_cache, metadata.block_tables, metadata.context_lens, metadata.cu_seqlens_q, scale, one_each)
