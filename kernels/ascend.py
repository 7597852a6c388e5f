"""Helpers of the Ascend implementations.

Each kernel's file holds its implementation for Ascend beside the golden function. The implementations call the fused
operators of `torch_npu`. `torch_npu` is imported on the first call, so that every machine can register them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from npuserve.kernels.quantized import Quantized
from npuserve.kernels.registry import Adapter, Kernel, moved, to_host

FRACTAL_NZ = 29
"""Format of a matrix in tiles of 16 rows, in which the cube unit reads int8 weights (aclFormat of acl_base.h)."""

BLOCK = 128
"""Tokens of a KV-cache block, the only possible number. Over chunks of prompts, fused attention of CANN 8.5 requires a
multiple of it. Its newest documentation (aclnnFusedInferAttentionScoreV3, TND with page attention) allows no more."""

LEVELS = 127.0
"""Divisor of the largest magnitude for a dynamic scale (documentation of aclnnDynamicQuantV2)."""

SWIGLU_ROW = 7232
"""Maximum columns of gate and up together for npu_dequant_swiglu_quant, a multiple of 64 (documentation of
aclnnDequantSwigluQuantV2, constraints on A2 and A3)."""

LABEL = "ascend"

FusedHeads = Callable[..., Tensor]
"""Function with the arguments of qk_norm_rope_kv_write."""


class _Module:
    """Module that is imported when one of its attributes is first read."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found


torch_npu: Any = _Module("torch_npu")


HEAD_DIM = 128
"""Size of a head in the KV cache, to which smaller heads are padded with zeros.

In the layout TND fused attention over a paged cache supports this size with any numbers of heads (documentation of
FusedInferAttentionScore). Zeros change neither scores nor sums.
"""

MAX_HEAD_DIM = 256
"""Size of a head in the KV cache for heads above `HEAD_DIM`, which are padded to it.

Fused attention in the layout TND supports sizes up to 256 since CANN 8.5, with more query heads than KV heads and a
cache of (blocks, block size, heads * head size) (docs/ascend-audit.md, heads of 256).
"""


def stored_head_dim(head_dim: int) -> int:
    """Return the size of a head in the KV cache for a model's heads of `head_dim`."""
    return HEAD_DIM if head_dim <= HEAD_DIM else MAX_HEAD_DIM


def padded(heads: Tensor, head_dim: int) -> Tensor:
    """Pad heads [..., D] with zeros to [..., head_dim]."""
    return heads if heads.shape[-1] == head_dim else F.pad(heads, (0, head_dim - heads.shape[-1]))


@cache
def causal_mask(device: torch.device) -> Tensor:
    """Return the mask [2048, 2048] int8 of fused attention's sparse_mode 3: 1 where a query must not attend.

    It serves queries and contexts of any length.
    """
    return torch.ones(2048, 2048, dtype=torch.int8).triu_(1).to(device)


def by_head(cache: Quantized) -> Quantized:
    """Copy an int8 cache [B, block_size, Hkv, D] to the layout of the device: heads before tokens, scales in float32.

    values: [B, Hkv, block_size, `stored_head_dim`]. scale: [B, Hkv, block_size], as antiquant mode 5 of fused
    attention reads it.
    """
    values = padded(cache.values, stored_head_dim(cache.values.shape[-1]))
    return Quantized(values.transpose(1, 2).contiguous(), cache.scale.float().transpose(1, 2).contiguous())


def by_token(cache: Quantized) -> Quantized:
    """Copy an int8 cache of the device to [B, block_size, Hkv, D], with scales in float32 and D still padded."""
    return Quantized(cache.values.transpose(1, 2).contiguous(), cache.scale.transpose(1, 2).contiguous())


_slots: WeakIdKeyDictionary = WeakIdKeyDictionary()


def head_slots(slots: Tensor, cache: Quantized) -> Tensor:
    """Return the places [T * Hkv] int32 of each token's heads in an int8 cache whose first three dimensions are one.

    slots: [T], block * block_size + offset. A step makes a tensor of its own for them, which all layers share, so they
        are computed once for each tensor. Their values must not change while the tensor lives.
    """
    heads, block_size = cache.values.shape[1:3]
    made = _slots.get(slots)
    if made is None or made[0] != (heads, block_size):
        narrow = slots.int()
        first = narrow + torch.div(narrow, block_size, rounding_mode="floor") * ((heads - 1) * block_size)
        places = first.unsqueeze(1) + _head_offsets(heads, block_size, slots.device)
        made = _slots[slots] = (heads, block_size), places.flatten()
    return made[1]  # type: ignore[no-any-return]


@cache
def _head_offsets(heads: int, block_size: int, device: torch.device) -> Tensor:
    return (torch.arange(heads, dtype=torch.int32) * block_size).to(device)


_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def table_as(table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a constant table in another dtype, converted once and cached while the table lives."""
    if table.dtype == dtype:
        return table
    made = _tables.get(table)
    if made is None or made.dtype != dtype:
        made = _tables[table] = table.to(dtype)
    return made  # type: ignore[no-any-return]


_wide: WeakIdKeyDictionary = WeakIdKeyDictionary()


def keep_float32(x: Tensor, wide: Tensor) -> Tensor:
    """Return x, and keep its numbers in float32 for `in_float32` while x lives."""
    _wide[x] = wide
    return x


def in_float32(x: Tensor) -> Tensor:
    """Return activations in float32: those of `keep_float32`, or a cast, which is a launch."""
    wide = _wide.get(x)
    return x.float() if wide is None else wide


def first_true(condition: Tensor) -> Tensor:
    """Return the index of the first true number of each row of [R, N]: [R, 1] int64; N for a row without one.

    argmax does not serve: aclnnArgMax promises the same index in each call, not the first of equal numbers. int32 is
    reduced by the vector cores ([aclnnAmin](https://github.com/hicann/ops-math/blob/c41933244/math/reduce_min/op_api/aclnn_amin.cpp#L46)).
    """
    size = condition.shape[1]
    places = torch.arange(size, dtype=torch.int32, device=condition.device)
    return torch.where(condition, places, size).amin(dim=1, keepdim=True).to(torch.int64)


@cache
def one_group(tokens: int, device: torch.device) -> Tensor:
    """Return [1] int64 with the number of tokens: the group list of operators that work by groups, with one group."""
    return torch.full((1,), tokens, dtype=torch.int64, device=device)


def fractal_nz(weight: Tensor) -> Tensor:
    """Convert weight [..., N, K] int8 on the device to [..., K, N] in FRACTAL_NZ, the fastest format of products."""
    torch.npu.config.allow_internal_format = True
    return torch_npu.npu_format_cast(weight.transpose(-2, -1).contiguous(), FRACTAL_NZ)  # type: ignore[no-any-return]


def to_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move tensors, and dataclasses of tensors, to the device."""
    return moved(args, "npu")


def implementation(
    kernel: Kernel[..., Any], adapt: Adapter = to_device, restore: Adapter = to_host,
    result: Callable[[Any], Any] = lambda result: result,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the kernel's on Ascend; see `Kernel.implementation`."""
    return kernel.implementation(LABEL, adapt=adapt, restore=restore, result=result)
