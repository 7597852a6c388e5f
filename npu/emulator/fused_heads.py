"""Launch of the stand-in for the Triton kernel qk_norm_rope_kv_write (ops/fused_heads.cpp), as launch_ascend's."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from npuserve.npu.emulator.build import operator_library

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 27}
"""aclDataType."""


def launch(
    qkv: Tensor, q_gamma: Tensor | None, k_gamma: Tensor | None, eps: float, cos_sin: Tensor, positions: Tensor,
    slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor, num_q_heads: int,
) -> Tensor:
    """Submit one task to the current stream, as triton-ascend launches a kernel. Raises RuntimeError."""
    tokens, (kv_heads, dim) = len(qkv), k_cache.shape[2:]
    q = torch.empty(tokens, num_q_heads, dim, dtype=qkv.dtype, device=qkv.device)
    tensors = (qkv, q_gamma, k_gamma, cos_sin, positions, slot_mapping, k_cache, v_cache, q)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors[1:])
    pointers = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
    numbers = (ctypes.c_int64 * 9)(
        tokens, num_q_heads, kv_heads, dim, len(cos_sin), k_cache.shape[0] * k_cache.shape[1], qkv.stride(0),
        DTYPES[qkv.dtype], cos_sin.shape[1])
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    if code := operator_library().emu_fused_heads(pointers, numbers, ctypes.c_double(eps), stream):
        raise RuntimeError(f"qk_norm_rope_kv_write_kernel: error code is {code}")
    return q
