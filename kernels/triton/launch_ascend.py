"""Launch of the Triton kernel that serves Ascend: checks of arguments, and division into blocks and programs.

CUDA uses another kernel for it, which occupies more multiprocessors than there are tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels.triton.common import INT32, check, matrix, power, rotary_dim, within
from npuserve.kernels.triton.qk_norm_rope_kv_write import qk_norm_rope_kv_write_kernel

PROGRAMS = 65535
"""Maximum programs of a launch on Ascend."""

BLOCK = 2048
"""Elements of a token that a program processes at a time."""


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
            check(name, gamma, (head_dim,), (qkv.dtype, torch.float32), qkv.device)
    rotary = rotary_dim("cos_sin", cos_sin, head_dim, qkv.device)
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        check(name, tensor, (tokens,), (torch.int64,), qkv.device)
    q = torch.empty(tokens, num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        half_block, rest_block = power(rotary // 2), power(max(1, head_dim - rotary))
        qk_norm_rope_kv_write_kernel[(min(tokens, PROGRAMS),)](
            qkv=qkv, q_gamma=q_gamma, k_gamma=k_gamma, cos_sin=cos_sin, positions=positions, slot_mapping=slot_mapping,
            k_cache=k_cache, v_cache=v_cache, q_out=q, tokens=tokens, eps=eps,
            qkv_stride=qkv.stride(0), q_stride=q.stride(0),
            Q_HEADS=num_q_heads, KV_HEADS=kv_heads, HALF=rotary // 2, HALF_BLOCK=half_block, REST=head_dim - rotary,
            REST_BLOCK=rest_block,
            HEADS=min(max(1, BLOCK // max(half_block, rest_block)), power(max(num_q_heads, kv_heads))))
    return q
