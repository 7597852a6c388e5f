"""Keys or values of the KV cache as kernels take them: in the dtype of the activations, or quantized to a byte."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npuserve.kernels.native import layout
from npuserve.kernels.quantized import FLOAT8, FLOAT8_MAX, Quantized

Cache = Tensor | Quantized
"""[B, block_size, Hkv, D]. A quantized cache has values in int8 or float8_e4m3fn, and scale [B, block_size, Hkv], one
for each token and head, in bfloat16 or, where the device's operators need it, in float32."""

QUANTIZED = {"int8": torch.int8, "fp8": FLOAT8}
"""Setting -> dtype of the values of a quantized cache."""

LARGEST = {torch.int8: 127.0, FLOAT8: FLOAT8_MAX}
"""Dtype of the values -> the largest magnitude."""


def setting_of(dtype: torch.dtype) -> str:
    """Return the setting of a cache with values of this dtype; "auto" if it is not quantized."""
    return next((name for name, quantized in QUANTIZED.items() if quantized == dtype), "auto")


def quantize_heads(x: Tensor, scales: torch.dtype = torch.bfloat16, values: torch.dtype = torch.int8) -> Quantized:
    """Quantize x [..., D], each [D] with its own scale.

    scales: dtype of the scales, bfloat16 or float32.
    values: dtype of the values, int8 or float8_e4m3fn.

    The scale is the largest magnitude divided by that of the dtype, rounded up to bfloat16 if that is its dtype, so
    that nothing is clipped. A scale of 0 becomes 1. The quotients `x / scale` are rounded to nearest, ties to even.
    """
    wide, largest = x if x.dtype == torch.float64 else x.float(), LARGEST[values]
    exact = (wide.abs().amax(dim=-1) / largest).float()
    scale = torch.where(exact > 0, exact if scales == torch.float32 else rounded_up(exact), 1.0)
    quotients = wide / scale.unsqueeze(-1)
    rounded = quotients.round() if values == torch.int8 else quotients
    return Quantized(rounded.clamp(-largest, largest).to(values), scale)


def quantized_as(name: str, caches: Tensor) -> tuple[Cache, Cache]:
    """Return keys and values of a case. name: of `QUANTIZED`, or "". caches: [2, ...]."""
    keys, values = caches
    if not name:
        return keys, values
    return quantize_heads(keys, values=QUANTIZED[name]), quantize_heads(values, values=QUANTIZED[name])


def rounded_up(scale: Tensor) -> Tensor:
    """Round a scale in float32, which is not negative, up to bfloat16."""
    return ((scale.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def block_size(cache: Cache) -> int:
    return (cache.values if isinstance(cache, Quantized) else cache).shape[1]


def read(cache: Cache, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cache[index] in `dtype`; quantized values are multiplied by their scales in that dtype."""
    if isinstance(cache, Tensor):
        return cache[index]
    return cache.values[index].to(dtype) * cache.scale[index].to(dtype).unsqueeze(-1)


def write(cache: Cache, slots: Tensor, heads: Tensor) -> None:
    """Write heads [n, Hkv, D] to slots [n] int64 (block * block_size + offset)."""
    if isinstance(cache, Tensor):
        cache.flatten(0, 1)[slots] = heads
        return
    new = quantize_heads(heads, cache.scale.dtype, cache.values.dtype)
    cache.values.view(torch.int8).flatten(0, 1)[slots] = new.values.view(torch.int8)  # devices index no float8
    cache.scale.flatten(0, 1)[slots] = new.scale.to(cache.scale.dtype)


def native_parts(keys: Cache, values: Cache) -> tuple[str, tuple[Tensor, Tensor], list[Tensor]]:
    """Return the suffix of the native ops that take such a cache, its numbers, and its scales, [] without scales."""
    if isinstance(keys, Quantized) and isinstance(values, Quantized):
        return "_int8", (keys.values, values.values), [keys.scale, values.scale]
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    return "", (keys, values), []


def pack_keys(keys: Cache) -> Cache:
    """Copy keys to the native layout. This function and the next three serve tests and comparisons."""
    return _reorder(keys, layout.pack_keys)


def unpack_keys(keys: Cache) -> Cache:
    """Copy keys of the native layout to [blocks, block_size, Hkv, D]."""
    return _reorder(keys, layout.unpack_keys)


def pack_values(values: Cache) -> Cache:
    """Copy values to the native layout."""
    return _reorder(values, layout.pack_values)


def unpack_values(values: Cache, head_dim: int) -> Cache:
    """Copy values of the native layout to [blocks, block_size, Hkv, head_dim]."""
    return _reorder(values, lambda numbers: layout.unpack_values(numbers, head_dim))


def _reorder(cache: Cache, numbers: Callable[[Tensor], Tensor]) -> Cache:
    if isinstance(cache, Quantized):
        return Quantized(numbers(cache.values), cache.scale.transpose(1, 2).contiguous())
    return numbers(cache)
