"""Calls of the Triton kernels that lower for Ascend: checks of arguments, and division into blocks and programs.

CUDA uses other kernels for these, which occupy more multiprocessors than there are rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npuserve.kernels.triton.common import INT32, check, matrix, power, within
from npuserve.kernels.triton.qk_norm_rope_kv_write import qk_norm_rope_kv_write_kernel
from npuserve.kernels.triton.sample_embed import sample_embed_kernel

PROGRAMS = 65535
"""Maximum programs of a launch on Ascend."""

BLOCK = 2048
"""Elements of a row or a token that a program processes at a time. Ascend's unified buffer cannot hold four times as
many for sampling."""

_SHAPING = {
    "temperature": (torch.float32,),
    "top_k": (torch.int64,),
    "top_p": (torch.float32,),
    "min_p": (torch.float32,),
    "uniform": (torch.float64, torch.float32),
}


def greedy(logits: Tensor, vocabulary: int) -> Tensor:
    """Launch the kernel `greedy`. Raises ValueError."""
    return _choose(logits, vocabulary, None, ())[0]


def sample(logits: Tensor, vocabulary: int, *shaping: Tensor) -> Tensor:
    """Launch the kernel `sample`.

    shaping: temperature, top_k, top_p, min_p and uniform, each [R]. A row with a temperature of 0 is greedy. With
        `uniform` in float32 nothing is computed in float64, which Ascend's vector cores lack. The borders of filters
        and draws then move by some 1e-6 of the mass.

    Raises ValueError.
    """
    return _choose(logits, vocabulary, None, shaping)[0]


def sample_embed(logits: Tensor, vocabulary: int, table: Tensor, *shaping: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids [R, 1] int64 of `greedy`, or of `sample` with a shaping, and their rows [R, H] of table
    [>= vocabulary, H]. Raises ValueError."""
    ids, embedded = _choose(logits, vocabulary, table, shaping)
    assert embedded is not None
    return ids, embedded


def _choose(
    logits: Tensor, vocabulary: int, table: Tensor | None, shaping: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    matrix("logits", logits, logits.device)
    rows = len(logits)
    within("rows of logits", rows, 0, INT32 - PROGRAMS)
    named: dict[str, Tensor | None] = dict.fromkeys(_SHAPING)
    if len(shaping) not in (0, len(_SHAPING)):
        raise ValueError(f"shaping: {len(shaping)} tensors are not {', '.join(_SHAPING)}")
    for (name, dtypes), tensor in zip(_SHAPING.items(), shaping, strict=False):
        check(name, tensor, (rows,), dtypes, logits.device)
        named[name] = tensor
    uniform = named["uniform"]
    double = uniform is not None and uniform.dtype == torch.float64
    if uniform is not None and not double:
        named["uniform"] = uniform.clamp(max=1 - 2**-24)
    # float32 counts exactly up to 2**24.
    most = INT32 - BLOCK if uniform is None or double else 2**24
    within("vocabulary", vocabulary, 1, min(logits.shape[1], most))

    ids = torch.empty(rows, 1, dtype=torch.int64, device=logits.device)
    embedded = None
    if table is not None:
        matrix("table", table, logits.device)
        within("rows of table", len(table), vocabulary, INT32)
        within("columns of table", table.shape[1], 1, INT32 - BLOCK)
        embedded = torch.empty(rows, table.shape[1], dtype=table.dtype, device=table.device)
    if rows:
        sample_embed_kernel[(min(rows, PROGRAMS),)](
            logits=logits, **named, table=table, ids=ids, embedded=embedded,
            rows=rows, vocabulary=vocabulary, hidden=0 if table is None else table.shape[1],
            logits_stride=logits.stride(0), table_stride=0 if table is None else table.stride(0),
            embedded_stride=0 if embedded is None else embedded.stride(0), DOUBLE=double, BLOCK=BLOCK)
    return ids, embedded


def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_gamma: Tensor | None,
    k_gamma: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_q_heads: int,
) -> Tensor:
    """Launch the kernel `qk_norm_rope_kv_write`; positions and slots are not range-checked. Raises ValueError."""
    matrix("qkv", qkv, qkv.device)
    if k_cache.dim() != 4:
        raise ValueError(f"k_cache: {list(k_cache.shape)} is not [blocks, block_size, KV heads, head_dim]")
    tokens, width = qkv.shape
    kv_heads, head_dim = k_cache.shape[2:]
    within("tokens of qkv", tokens, 0, INT32 - PROGRAMS)
    within("columns of qkv", width, 1, INT32 // 4)
    within("num_q_heads", num_q_heads, 1, width)
    if head_dim % 2 or not 2 <= head_dim <= 2 * BLOCK:
        raise ValueError(f"k_cache: heads of {head_dim} are not even, from 2 to {2 * BLOCK}")
    if width != (num_q_heads + 2 * kv_heads) * head_dim:
        raise ValueError(f"qkv: {width} columns are not ({num_q_heads} + 2 * {kv_heads}) heads of {head_dim}")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check(name, tensor, k_cache.shape, (qkv.dtype,), qkv.device)
    for name, gamma in (("q_gamma", q_gamma), ("k_gamma", k_gamma)):
        if gamma is not None:
            check(name, gamma, (head_dim,), (qkv.dtype,), qkv.device)
    check("cos_sin", cos_sin, (len(cos_sin), head_dim), (torch.float32,), qkv.device)
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        check(name, tensor, (tokens,), (torch.int64,), qkv.device)
    q = torch.empty(tokens, num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        half_block = power(head_dim // 2)
        qk_norm_rope_kv_write_kernel[(min(tokens, PROGRAMS),)](
            qkv=qkv, q_gamma=q_gamma, k_gamma=k_gamma, cos_sin=cos_sin, positions=positions, slot_mapping=slot_mapping,
            k_cache=k_cache, v_cache=v_cache, q_out=q, tokens=tokens, eps=eps,
            qkv_stride=qkv.stride(0), q_stride=q.stride(0),
            Q_HEADS=num_q_heads, KV_HEADS=kv_heads, HALF=head_dim // 2, HALF_BLOCK=half_block,
            HEADS=min(BLOCK // half_block, power(max(num_q_heads, kv_heads))))
    return q
