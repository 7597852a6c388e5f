"""Launches of the stand-ins for the Triton kernels of linear attention (ops/fused_delta.cpp), as launch_ascend's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from npuserve.kernels import ascend_delta
from npuserve.kernels.ascend_delta import DeltaLaunches
from npuserve.kernels.attention import AttentionMetadata
from npuserve.npu.emulator.build import operator_library
from npuserve.npu.emulator.fused_heads import DTYPES


def causal_conv_silu(
    x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata, state_slots: Tensor
) -> Tensor:
    """Submit conv_silu_kernel. Raises RuntimeError."""
    taps = ascend_delta.taps_of(weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _submit("conv_silu", (x, taps, state, *_rows(metadata, state_slots), out),
            (len(x), len(state_slots), x.shape[1], len(taps), len(state), x.stride(0), DTYPES[x.dtype]))
    return out


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, forget: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Submit delta_gates_kernel. Raises RuntimeError."""
    decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(b.shape, dtype=b.dtype, device=a.device)
    _submit("delta_gates", (a, b, a_log, dt_bias, forget, decay, beta),
            (*a.shape, a.stride(0), b.stride(0), DTYPES[a.dtype]))
    return decay, beta


def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, metadata: AttentionMetadata,
    state_slots: Tensor, key_heads: int, eps: float,
) -> Tensor:
    """Submit delta_rule_kernel. Raises RuntimeError."""
    value_heads, key_dim, value_dim = state.shape[1:]
    out = torch.empty(len(qkv), value_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    _submit("delta_rule", (qkv, a, b, a_log, dt_bias, state, *_rows(metadata, state_slots), out),
            (len(qkv), len(state_slots), key_heads, value_heads, key_dim, value_dim, len(state), qkv.stride(0),
             a.stride(0), b.stride(0), DTYPES[qkv.dtype], DTYPES[state.dtype]), eps)
    return out


def gated_rms_norm(x: Tensor, z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Submit gated_rms_norm_kernel. Raises RuntimeError."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _submit("gated_rms_norm", (x, z, gamma, out),
            (*x.shape, len(gamma), x.stride(0), z.stride(0), DTYPES[x.dtype], DTYPES[gamma.dtype]), eps)
    return out


LAUNCHES = DeltaLaunches(causal_conv_silu, delta_gates, gated_delta_rule, gated_rms_norm)


def _rows(metadata: AttentionMetadata, state_slots: Tensor) -> tuple[Tensor, ...]:
    assert state_slots.dtype == torch.int64
    return metadata.context_lens, metadata.cu_seqlens_q, state_slots


def _submit(name: str, tensors: Sequence[Tensor | None], numbers: Sequence[int], eps: float | None = None) -> None:
    """Submit one task to the current stream, as triton-ascend launches a kernel."""
    pointers = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    function = getattr(operator_library(), f"emu_{name}")
    more = () if eps is None else (ctypes.c_double(eps),)
    if code := function(pointers, (ctypes.c_int64 * len(numbers))(*numbers), *more, stream):
        raise RuntimeError(f"{name}_kernel: error code is {code}")
