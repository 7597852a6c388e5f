"""What the Ascend implementations share.

They call torch_npu's fused operators, each named in its kernel's file with the kernel's golden function. Nothing here
imports torch_npu before the first call, so that the implementations are registered on every machine.
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

from npuserve.kernels.registry import Adapter, Kernel, moved

FRACTAL_NZ = 29
"""A matrix in tiles of 16 rows, as the cube unit reads int8 weights (aclFormat of acl_base.h)."""

BLOCK = 128
"""Tokens of a KV-cache block, or a multiple of it: fused attention takes no other blocks for chunks of prompts."""

LEVELS = 127.0
"""By which a dynamic scale's largest magnitude is divided (documentation of aclnnDynamicQuantV2)."""

SWIGLU_ROW = 7232
"""Numbers of gate and up together that npu_dequant_swiglu_quant takes at most, in multiples of 64 (documentation of
aclnnDequantSwigluQuantV2, constraints on A2 and A3)."""

LABEL = "ascend"


class _Module:
    """A module that is imported when something of it is first asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found


torch_npu: Any = _Module("torch_npu")


def cached_head_dim(head_dim: int) -> int:
    """Numbers of a head in the KV cache: fused attention over a paged cache takes heads of 128 or 192 (documentation
    of FusedInferAttentionScore, constraints of layout TND). Smaller heads are padded with zeros, which change neither
    scores nor sums."""
    return 128 if head_dim <= 128 else 192


def padded(heads: Tensor, head_dim: int) -> Tensor:
    """heads [..., D] -> [..., head_dim], zeros after the first D."""
    return heads if heads.shape[-1] == head_dim else F.pad(heads, (0, head_dim - heads.shape[-1]))


@cache
def causal_mask(device: torch.device) -> Tensor:
    """[2048, 2048] int8, 1 where a query must not look: the one mask of fused attention's sparse_mode 3, for queries
    and contexts of any length."""
    return torch.ones(2048, 2048, dtype=torch.int8).triu_(1).to(device)


_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def table_as(table: Tensor, dtype: torch.dtype) -> Tensor:
    """A table that never changes, in another dtype: made once and kept for as long as the table lives."""
    if table.dtype == dtype:
        return table
    made = _tables.get(table)
    if made is None or made.dtype != dtype:
        made = _tables[table] = table.to(dtype)
    return made  # type: ignore[no-any-return]


@cache
def one_group(tokens: int, device: torch.device) -> Tensor:
    """[1] int64: as many tokens, for operators that take them by groups, where there is one."""
    return torch.full((1,), tokens, dtype=torch.int64, device=device)


def fractal_nz(weight: Tensor) -> Tensor:
    """weight [N, K] int8 on the device -> [K, N] in FRACTAL_NZ, as npu_quant_matmul reads it fastest."""
    torch.npu.config.allow_internal_format = True
    return torch_npu.npu_format_cast(weight.t().contiguous(), FRACTAL_NZ)  # type: ignore[no-any-return]


def to_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors, and dataclasses of tensors, on the device."""
    return moved(args, "npu")


def to_host(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`to_device` undone."""
    return moved(args, "cpu")


def implementation(
    kernel: Kernel[..., Any], adapt: Adapter = to_device, restore: Adapter = to_host
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as the kernel's on Ascend; see `Kernel.implementation`."""
    return kernel.implementation(LABEL, adapt=adapt, restore=restore)
