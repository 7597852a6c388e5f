"""Calls of the Triton kernels of the gated delta net: checks of arguments, and division into programs.

Lengths are read on the device, so that a captured step serves rows of any lengths. Lengths on the host only leave out
launches that have no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from npuserve.kernels import triton
from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.triton.causal_conv_silu import causal_conv_silu_kernel
from npuserve.kernels.triton.common import (
    INT32,
    check,
    check_rows,
    check_rule,
    matrix,
    power,
    shared_memory,
    within,
)
from npuserve.kernels.triton.dependent import dependent
from npuserve.kernels.triton.gated_delta_rule import chunk_products_kernel, chunk_states_kernel, recurrent_kernel

FEW = 16
"""Maximum tokens of a row that is advanced token by token: a chunk takes about as long as that many tokens."""

CHANNELS = 256
"""Channels of a program of the convolution for a decode row; tiles of a chunk have 16 tokens and half as many."""

COLUMNS = 32
"""Columns of a head's state that a program of the rule holds."""

_STAGED = 113 << 10
"""Bytes of shared memory of two chunks in flight: two programs of a multiprocessor of Hopper have them."""


def options(kernel: str, dtype: torch.dtype, shared: int) -> dict[str, int]:
    """Return the warps and pipeline stages of a kernel of the rule.

    shared: bytes of shared memory that a program may take. Ada has 99 KiB, with which one chunk is in flight.
    """
    exact = dtype == torch.float32
    if kernel == "chunk_states_kernel":
        return {"num_warps": 4, "num_stages": 1 if exact or shared < _STAGED else 2}
    return {"num_warps": 8 if exact and kernel == "chunk_products_kernel" else 4, "num_stages": 1}


def causal_conv_silu(
    x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata, state_slots: Tensor
) -> Tensor:
    """Launch the kernel `causal_conv_silu`; slots are not range-checked. Raises ValueError."""
    matrix("x", x, x.device)
    tokens, channels = x.shape
    if weight.dim() != 2 or weight.shape[1] < 2:
        raise ValueError(f"weight: {list(weight.shape)} is not [channels, at least 2]")
    taps = weight.shape[1]
    within("columns of x", channels, 1, INT32 // 16)
    check("weight", weight, (channels, taps), (x.dtype,), x.device)
    check("state", state, (len(state), channels, taps - 1), (x.dtype,), x.device)
    rows = check_rows(metadata.context_lens, metadata.cu_seqlens_q, state_slots, x.device)
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if tokens and rows:
        one_each = metadata.has_one_query_each(tokens)
        tile, block = (1, CHANNELS) if one_each else (16, CHANNELS // 2)
        tiles = rows if one_each else tokens // tile + min(rows, tokens) + 1
        block = min(block, power(channels))
        causal_conv_silu_kernel[(tiles, -(-channels // block))](
            x, weight, state, metadata.context_lens, metadata.cu_seqlens_q, state_slots, out, tokens, rows, channels,
            x.stride(0), TAPS=taps, ROWS=0 if one_each else _capacity(rows), TILE=tile, BLOCK=block,
            **dependent(x))
    return out if rows else out.zero_()


def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, metadata: AttentionMetadata,
    state_slots: Tensor, key_heads: int, eps: float, few: int = FEW, chunk: int = 0,
) -> Tensor:
    """Launch the kernels of `gated_delta_rule`; slots are not range-checked.

    eps: of the norm of queries and keys.
    few: maximum tokens of a row that is advanced token by token.
    chunk: tokens of a chunk, 16, 32 or 64; 0 for the largest whose products fit the registers.

    Raises ValueError.
    """
    check_rule(qkv, a, b, a_log, dt_bias, state, key_heads)
    tokens, (value_heads, key_dim, value_dim) = len(qkv), state.shape[1:]
    rows = check_rows(metadata.context_lens, metadata.cu_seqlens_q, state_slots, qkv.device)
    out = torch.empty(tokens, value_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens or not rows:
        return out.zero_()

    one_each = metadata.has_one_query_each(tokens)
    lengths = [end - begin for begin, end in pairwise(metadata.host_cu_seqlens_q)]
    sizes = {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim, "BLOCK_K": power(max(16, key_dim))}
    strides = {"qkv_stride": qkv.stride(0), "a_stride": a.stride(0), "b_stride": b.stride(0)}
    block = min(COLUMNS, power(max(16, value_dim)))
    programs = value_heads * -(-value_dim // block)
    within("programs", rows * programs, 1, INT32)
    shared = shared_memory(qkv.device)
    if one_each or not lengths or min(lengths) <= few or sum(lengths) < tokens:
        recurrent_kernel[(rows * programs,)](
            qkv, a, b, a_log, dt_bias, state, metadata.context_lens, metadata.cu_seqlens_q, state_slots, out, tokens,
            rows, few, eps, **strides, **sizes, VALUE_DIM=value_dim, BLOCK_V=block, ONE_EACH=one_each,
            **options("recurrent_kernel", qkv.dtype, shared), **dependent(qkv))
    chunk = chunk or (32 if qkv.dtype == torch.float32 else 64)
    long_rows, chunks = chunk_bounds(tokens, rows, lengths, few, chunk)
    if not one_each and chunks:
        exact = {"CHUNK": chunk, "ROWS": _capacity(rows), "WIDE": triton.DEVICE == "cpu"}
        inverses, products = torch.empty(
            2, chunks, value_heads, chunk, chunk, dtype=qkv.dtype, device=qkv.device).unbind()
        factors = torch.empty(chunks, value_heads, 3, chunk, dtype=torch.float32, device=qkv.device)
        chunk_products_kernel[(chunks, value_heads)](
            qkv, a, b, a_log, dt_bias, metadata.cu_seqlens_q, inverses, products, factors, rows, few + 1, eps,
            **strides, **sizes, **exact, **options("chunk_products_kernel", qkv.dtype, shared), **dependent(qkv))
        chunk_states_kernel[(long_rows * programs,)](
            qkv, inverses, products, factors, state, metadata.context_lens, metadata.cu_seqlens_q, state_slots, out,
            rows, few + 1, qkv.stride(0), **sizes, **exact, VALUE_DIM=value_dim, BLOCK_V=block,
            **options("chunk_states_kernel", qkv.dtype, shared), **dependent(qkv))
    return out


def chunk_bounds(tokens: int, rows: int, lengths: Sequence[int], few: int, chunk: int) -> tuple[int, int]:
    """Return bounds of the number of rows of more than `few` tokens, and of their chunks.

    lengths: of all rows; empty if the host does not know them.
    """
    if lengths:
        long = [length for length in lengths if length > few]
        return len(long), sum(-(-length // chunk) for length in long)
    most = min(rows, tokens // (few + 1))
    return most, tokens // chunk + most if most else 0


def _capacity(rows: int) -> int:
    """Return a power of two that is at least `rows`: one for all steps of a server, since each is compiled."""
    return max(256, power(rows))
