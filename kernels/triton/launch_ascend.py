"""Launches of the Triton kernels that serve Ascend: checks of arguments, and division into blocks and programs.

CUDA uses another kernel for QK-norm, rotation and cache write, which occupies more multiprocessors than there are
tokens, and kernels for states in another layout for the convolution and the rule (launch_gated_delta.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels import ascend_delta
from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.triton.ascend_delta import conv_silu_kernel, delta_gates_kernel, delta_rule_kernel
from npuserve.kernels.triton.common import (
    INT32,
    check,
    check_groups,
    check_rows,
    check_rule,
    matrix,
    power,
    rotary_dim,
    within,
)
from npuserve.kernels.triton.qk_norm_rope_kv_write import qk_norm_rope_kv_write_kernel
from npuserve.kernels.triton.rows import gated_rms_norm_kernel

PROGRAMS = 65535
"""Maximum programs of a launch on Ascend."""

BLOCK = 2048
"""Elements of a token that a program processes at a time."""

CONVOLUTION = 1024
"""Channels of a token that the convolution processes at a time; with 8 tokens at a time an eighth of them."""

TILE = 8
"""Tokens that the convolution and the gates process at a time."""

STATE = 4096
"""Numbers of a state that the rule processes at a time."""


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


def causal_conv_silu(
    x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata, state_slots: Tensor
) -> Tensor:
    """Launch the kernel `causal_conv_silu`; slots are not range-checked. Raises ValueError.

    state: memory of [slots, C, K - 1], which holds [slots, K - 1, C].
    """
    matrix("x", x, x.device)
    tokens, channels = x.shape
    within("columns of x", channels, 1, INT32 // 16)
    if weight.dim() != 2 or weight.shape[1] < 2:
        raise ValueError(f"weight: {list(weight.shape)} is not [channels, at least 2]")
    count = weight.shape[1]
    check("state", state, (len(state), channels, count - 1), (x.dtype,), x.device)
    taps = ascend_delta.taps_of(weight)
    check("weight", taps, (count, channels), (torch.float32,), x.device)
    rows = check_rows(metadata.context_lens, metadata.cu_seqlens_q, state_slots, x.device)
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    tile = 1 if ascend_delta.has_single_tokens(tokens, metadata) else TILE
    block = min(CONVOLUTION // tile, power(channels))
    conv_silu_kernel[(min(rows * -(-channels // block), PROGRAMS),)](
        x=x, taps=taps, state=state, context_lens=metadata.context_lens, cu_seqlens=metadata.cu_seqlens_q,
        state_slots=state_slots, out=out, tokens=tokens, rows=rows, x_stride=x.stride(0), CHANNELS=channels,
        TAPS=count, TILE=tile, BLOCK=block, EARLIER=power(count - 1))
    return out


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, forget: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of the gates of `gated_delta_rule`. Raises ValueError.

    forget: [T, 1] float32, added to a token's decays; None for none.

    Returns the logarithms of the decays [T, Hv] float32, and sigmoid(b).
    """
    matrix("a", a, a.device)
    matrix("b", b, a.device)
    tokens, heads = a.shape
    if b.shape != a.shape or b.dtype != a.dtype:
        raise ValueError(f"b: {list(b.shape)} {b.dtype} is not as a, {list(a.shape)} {a.dtype}")
    for name, tensor in (("a_log", a_log), ("dt_bias", dt_bias)):
        check(name, tensor, (heads,), (torch.float32,), a.device)
    if forget is not None:
        check("forget", forget, (tokens, 1), (torch.float32,), a.device)
    decay = torch.empty(tokens, heads, dtype=torch.float32, device=a.device)
    beta = torch.empty(tokens, heads, dtype=b.dtype, device=a.device)
    delta_gates_kernel[(min(-(-tokens // TILE), PROGRAMS),)](
        a=a, b=b, a_log=a_log, dt_bias=dt_bias, forget=forget, decay=decay, beta=beta, tokens=tokens,
        a_stride=a.stride(0), b_stride=b.stride(0), HEADS=heads, BLOCK=power(heads), TILE=TILE)
    return decay, beta


def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, metadata: AttentionMetadata,
    state_slots: Tensor, key_heads: int, eps: float,
) -> Tensor:
    """Launch the kernel `gated_delta_rule`, which advances the rows token by token; slots are not range-checked.

    state: memory of [slots, Hv, Dk, Dv], which holds [slots, Hv, Dv, Dk].
    eps: of the norm of queries and keys.

    Raises ValueError.
    """
    check_rule(qkv, a, b, a_log, dt_bias, state, key_heads)
    tokens = len(qkv)
    value_heads, key_dim, value_dim = state.shape[1:]
    rows = check_rows(metadata.context_lens, metadata.cu_seqlens_q, state_slots, qkv.device)
    out = torch.empty(tokens, value_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    keys = power(key_dim)
    block = min(max(1, STATE // keys), power(value_dim))
    within("programs", rows * value_heads * -(-value_dim // block), 1, INT32)
    delta_rule_kernel[(min(rows * value_heads * -(-value_dim // block), PROGRAMS),)](
        qkv=qkv, a=a, b=b, a_log=a_log, dt_bias=dt_bias, state=state, context_lens=metadata.context_lens,
        cu_seqlens=metadata.cu_seqlens_q, state_slots=state_slots, out=out, tokens=tokens, rows=rows, eps=eps,
        qkv_stride=qkv.stride(0), a_stride=a.stride(0), b_stride=b.stride(0), KEY_HEADS=key_heads,
        VALUE_HEADS=value_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, BLOCK_K=keys, BLOCK_V=block)
    return out


def gated_rms_norm(x: Tensor, z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Launch the kernel `gated_rms_norm`. Raises ValueError."""
    groups = check_groups(x, z, gamma, BLOCK)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power(len(gamma))
    together = min(max(1, BLOCK // block), power(groups))
    blocks = -(-groups // together)
    within("programs of a row", blocks, 1, PROGRAMS)
    for first in range(0, len(x), PROGRAMS // blocks):
        part = slice(first, first + PROGRAMS // blocks)
        gated_rms_norm_kernel[(len(x[part]), blocks)](
            x=x[part], z=z[part], gamma=gamma, out=out[part], groups=groups, size=len(gamma), x_stride=x.stride(0),
            z_stride=z.stride(0), eps=eps, GROUPS=together, BLOCK=block, PDL=False)
    return out
