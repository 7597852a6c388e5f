"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
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
    read,
    unpack_keys,
    unpack_values,
)
from npuserve.kernels.native import CONSTANTS, LANES, layout
from npuserve.kernels.quantized import Quantized
from npuserve.kernels.registry import Case, kernel, to_host

CACHE_TOLERANCE = 3e-4
"""Tolerance of results over a quantized cache: implementations may multiply queries and weights in int16."""

GATHERED_TOKENS = 4096
"""Tokens of an int8 cache that the Ascend implementation dequantizes at once, more only for one longer row."""


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

    def has_one_query_each(self, queries: int) -> bool:
        """Return True if the host knows that each row has one of the step's queries, and each query a row."""
        return queries == len(self.context_lens) and self.host_cu_seqlens_q == list(range(queries + 1))


def _case(
    rows: list[tuple[int, int]],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    benchmark: bool = False,
    cached: str = "",
) -> Case:
    """Return a case. rows: (queries, context) of each row. cached: of `QUANTIZED`, "" if the cache is not quantized."""

    def make(
        generator: torch.Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Cache, Cache, AttentionMetadata, float]:
        width = -(-max(context for _, context in rows) // block_size)
        block_tables = torch.randperm(len(rows) * width, generator=generator).int().view(len(rows), width)
        tokens = sum(queries for queries, _ in rows)
        q = torch.randn(tokens, q_heads, head_dim, generator=generator).to(dtype)
        shape = (2, len(rows) * width, block_size, kv_heads, head_dim)
        caches = torch.randn(shape, generator=generator).to(dtype)
        k_cache, v_cache = quantized_as(cached, caches)
        metadata = AttentionMetadata.from_lengths(block_tables, [c for _, c in rows], [n for n, _ in rows])
        return q, k_cache, v_cache, metadata, head_dim**-0.5

    queries, contexts = ("+".join(map(str, sorted(set(x)))) for x in zip(*rows, strict=True))
    name = f"{len(rows)} rows {queries} of {contexts} {q_heads}/{kv_heads}x{head_dim}{cached and f' {cached}'}"
    return Case(name, make, benchmark, head_dim, QUANTIZED.get(cached), tolerance=CACHE_TOLERANCE if cached else 0.0)


@kernel(
    "paged_attention",
    cases=[
        _case([(1, 1)], 4, 4, 8),
        _case([(1, 17), (5, 5), (3, 20), (1, 33)], 6, 2, 16),
        _case([(7, 31), (1, 5)], 3, 1, 10, block_size=32),
        _case([(70, 70), (1, 300), (33, 290)], 6, 3, 64),
        _case([(1, 700)], 4, 1, 16),
        _case([(1, 130), (5, 40), (1, 7)], 4, 2, 128),
        _case([(1, 130), (5, 40), (1, 7)], 8, 2, 256),
        _case([(33, 290), (1, 300)], 6, 1, 256),
        _case([(1, 70), (2, 9)], 2, 2, 256),
        *(_case([(1, 512)] * rows, 16, 8, 128, benchmark=True) for rows in (1, 8, 32)),
        *(_case([(1, 512)] * rows, 16, 4, 256, benchmark=True) for rows in (1, 32)),
        _case([(512, 4096)], 16, 4, 256, benchmark=True),
        _case([(512, 512)], 16, 8, 128, benchmark=True),
        _case([(512, 4096)], 16, 8, 128, benchmark=True),
        _case([(1, 8192)], 16, 8, 128, 128, benchmark=True),
        *(case for cached in QUANTIZED for case in (
            _case([(1, 17), (5, 5), (3, 20), (1, 33)], 6, 2, 16, cached=cached),
            _case([(7, 31), (1, 5)], 3, 1, 10, block_size=32, cached=cached),
            _case([(70, 70), (1, 300), (33, 290)], 6, 3, 64, cached=cached),
            _case([(1, 700)], 4, 1, 16, cached=cached),
            _case([(1, 130), (5, 40), (1, 7)], 4, 2, 128, cached=cached),
            _case([(1, 130), (5, 40), (1, 7)], 8, 2, 256, cached=cached),
            _case([(1, 70), (2, 9)], 2, 2, 256, cached=cached),
            *(_case([(1, 512)] * rows, 16, 8, 128, benchmark=True, cached=cached) for rows in (1, 32)),
            _case([(512, 4096)], 16, 8, 128, benchmark=True, cached=cached),
            _case([(1, 8192)], 16, 8, 128, 128, benchmark=True, cached=cached))),
    ],
)
def paged_attention(q: Tensor, k_cache: Cache, v_cache: Cache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Compute causal attention of rows with any number of queries over the blocks of each row.

    q: [T, Hq, D].
    k_cache, v_cache: [B, block_size, Hkv, D], both in q's dtype or both quantized. Hq is a multiple of Hkv. They
        already hold this step's keys and values.

    Returns [T, Hq D], 0 for queries of no row. Softmax and sums are in float32. The results of a row do not depend on
    the other rows.
    """
    output = torch.zeros_like(q)
    wide = torch.promote_types(q.dtype, torch.float32) if isinstance(k_cache, Quantized) else q.dtype
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
    plan = torch.empty(rows + 2, dtype=torch.int32)  # written before the calls of a program run
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
    tables, size = metadata.block_tables, block_size(keys)
    width = -(-tables.shape[1] * size // ascend.BLOCK)

    def in_rows(cache: Tensor) -> Tensor:
        slots = cache[tables.long()].flatten(1, 2)
        beyond = [0, 0] * (slots.dim() - 2) + [0, width * ascend.BLOCK - slots.shape[1]]
        return F.pad(slots, beyond).view(-1, ascend.BLOCK, *slots.shape[2:])

    def on_device(cache: Cache) -> Cache:
        regroup = in_rows if size % ascend.BLOCK else lambda cache: cache
        if isinstance(cache, Quantized):
            return ascend.by_head(Quantized(regroup(cache.values), regroup(cache.scale)))
        return ascend.padded(regroup(cache), ascend.stored_head_dim(cache.shape[-1]))

    caches = on_device(keys), on_device(values)
    if size % ascend.BLOCK:
        metadata = replace(metadata, block_tables=torch.arange(len(tables) * width).int().view(len(tables), width))
    return ascend.to_device((q, *caches, metadata, scale))


def _with_own_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    q, keys, values, metadata, scale = to_host(args)

    def as_given(cache: Cache) -> Cache:
        if isinstance(cache, Quantized):
            made = ascend.by_token(cache)
            return Quantized(made.values[..., : q.shape[-1]], made.scale)
        return cache[..., : q.shape[-1]]

    return q, as_given(keys), as_given(values), metadata, scale


@ascend.implementation(paged_attention, adapt=_in_large_blocks, restore=_with_own_heads)
def _(q: Tensor, k_cache: Cache, v_cache: Cache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Run fused attention in its variable-length layout (TND): one call for decode rows and chunks.

    k_cache, v_cache: [B, block_size, Hkv, `ascend.stored_head_dim`], block_size a multiple of `ascend.BLOCK`; or
        int8 as by `ascend.by_head`, which `_attend_int8` serves.

    The operator takes the lengths from the host. A captured graph keeps the lengths of its capture until
    `NPUGraph.update` replaces them (keyword actual_seq_lengths_kv).
    """
    tokens, q_heads, own = q.shape
    ends = metadata.host_cu_seqlens_q[1:]
    if isinstance(k_cache, Quantized) and isinstance(v_cache, Quantized):
        out = _attend_int8(q[: ends[-1]], k_cache, v_cache, metadata, scale)
    else:
        assert isinstance(k_cache, Tensor)
        assert isinstance(v_cache, Tensor)
        keys, values = (cache.flatten(2) for cache in (k_cache, v_cache))
        out = _attend_rows(
            ascend.padded(q[: ends[-1]], k_cache.shape[-1]), keys, values, metadata.block_tables, ends,
            metadata.host_context_lens, scale, k_cache.shape[2])
    out = out.view(-1, q_heads, out.shape[-1])[..., :own].reshape(-1, q_heads * own)
    return out if len(out) == tokens else torch.cat([out, out.new_zeros(tokens - len(out), q_heads * own)])


def _attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, ends: list[int], contexts: list[int], scale: float,
    kv_heads: int,
) -> Tensor:
    """Attend with q [T, Hq, D], whose rows end at `ends`.

    keys, values: [B, block_size, Hkv D], or [B, Hkv, block_size, D] for a D of `ascend.HEAD_DIM`.
    tables: [R, maxB] int32.

    Heads above `ascend.HEAD_DIM` are supported only with more query heads than KV heads. Where there are as many,
    each query head is given twice.
    """
    is_doubled = q.shape[2] > ascend.HEAD_DIM and q.shape[1] == kv_heads
    queries = q.unsqueeze(2).expand(-1, -1, 2, -1).flatten(1, 2) if is_doubled else q
    out, _ = torch_npu.npu_fused_infer_attention_score(
        queries,
        keys,
        values,
        atten_mask=ascend.causal_mask(q.device),
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=contexts,
        block_table=tables,
        num_heads=queries.shape[1],
        scale=scale,
        input_layout="TND",
        num_key_value_heads=kv_heads,
        sparse_mode=3,
        block_size=keys.shape[-2],
    )
    return out[:, ::2] if is_doubled else out  # type: ignore[no-any-return]


def _attend_int8(
    q: Tensor, k_cache: Quantized, v_cache: Quantized, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Attend over an int8 cache, laid out as by `ascend.by_head`.

    Leading rows of one query are one call of fused attention, which multiplies by the scales (antiquant mode 5: per
    token and head, in blocks). The mode takes one query a row and not the layout TND. Therefore the blocks of the other
    rows are dequantized into a temporary cache in q's dtype, for as many rows at once as `GATHERED_TOKENS` allows.
    """
    _, kv_heads, size, dim = k_cache.values.shape
    starts, contexts = metadata.host_cu_seqlens_q, metadata.host_context_lens
    q, singles = ascend.padded(q, dim), _leading_singles(starts)
    parts: list[Tensor] = []
    if singles:
        out, _ = torch_npu.npu_fused_infer_attention_score(
            q[:singles].unsqueeze(2),
            k_cache.values,
            v_cache.values,
            key_antiquant_scale=k_cache.scale,
            value_antiquant_scale=v_cache.scale,
            key_antiquant_mode=5,
            value_antiquant_mode=5,
            actual_seq_lengths_kv=contexts[:singles],
            block_table=metadata.block_tables[:singles],
            num_heads=q.shape[1],
            scale=scale,
            input_layout="BNSD",
            num_key_value_heads=kv_heads,
            block_size=size,
        )
        parts.append(out.squeeze(2))
    for first, last, width in _groups(contexts, singles, size):
        ids = metadata.block_tables[first:last, :width].flatten()
        keys, values = (_for_rows(_dequantized(cache, ids, q.dtype)) for cache in (k_cache, v_cache))
        tables = torch.arange(len(ids), dtype=torch.int32, device=q.device).view(last - first, width)
        ends = [end - starts[first] for end in starts[first + 1 : last + 1]]
        parts.append(_attend_rows(
            q[starts[first] : starts[last]], keys, values, tables, ends, contexts[first:last], scale, kv_heads))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _leading_singles(starts: list[int]) -> int:
    """Return the number of rows before the first one that has more than one query, or none."""
    return next((row for row, (a, b) in enumerate(pairwise(starts)) if b - a != 1), len(starts) - 1)


def _groups(contexts: list[int], first: int, block_size: int) -> Iterator[tuple[int, int, int]]:
    """Split rows from `first` on into groups; yield (first row, last row + 1, blocks of the longest row).

    A group has at most GATHERED_TOKENS tokens in its rows' blocks, each row counted as the longest, or one row.
    """
    width = 0
    for row in range(first, len(contexts)):
        blocks = max(1, -(-contexts[row] // block_size))
        if row > first and (row + 1 - first) * max(width, blocks) * block_size > GATHERED_TOKENS:
            yield first, row, width
            first, width = row, 0
        width = max(width, blocks)
    if first < len(contexts):
        yield first, len(contexts), width


def _dequantized(cache: Quantized, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return blocks `ids` of an int8 cache, multiplied by their scales in float32 and rounded once to `dtype`."""
    scale = cache.scale.index_select(0, ids)
    return (cache.values.index_select(0, ids) * scale.unsqueeze(-1)).to(dtype)


def _for_rows(blocks: Tensor) -> Tensor:
    """Lay blocks [B, Hkv, block_size, D] out as `_attend_rows` takes them."""
    return blocks if blocks.shape[-1] <= ascend.HEAD_DIM else blocks.transpose(1, 2).flatten(2)


def gathered_bytes(context: int, block_size: int, kv_size: int) -> int:
    """Return the bytes that chunks over an int8 cache need on Ascend beside their inputs and outputs.

    context: tokens of the longest row.
    kv_size: numbers of a token's keys.

    While values become float32 and then 2 bytes, the keys exist in 2 bytes.
    """
    tokens = max(GATHERED_TOKENS, -(-context // block_size) * block_size)
    return 8 * tokens * kv_size


@triton.implementation(paged_attention)
def _(q: Tensor, k_cache: Cache, v_cache: Cache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Read all lengths on the device.

    Only the lengths on the host show that each row has one query, which saves a launch. A step captured with one query
    per row must be replayed with one query per row.
    """
    from npuserve.kernels.triton import launch_attention

    return launch_attention.paged_attention(
        q, k_cache, v_cache, metadata.block_tables, metadata.context_lens, metadata.cu_seqlens_q, scale,
        metadata.has_one_query_each(len(q)))
