"""The KV cache in the order in which the native kernels read it.

Per layer, with w numbers to a word and Dp the head's size rounded up to a panel:

    keys    [blocks, Hkv, block_size / 16, D / w, 16, w]
    values  [blocks, Hkv, block_size / w, Dp, w]
    scales  [blocks, Hkv, block_size]                of either, in an int8 cache
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.kv_cache import Cache
from npuserve.kernels.native import LANES
from npuserve.kernels.quantized import Int8

PER_WORD = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 2}
"""Numbers that a product takes as one word: 32 bits of the activations' dtype, or two int8, which meet two int16."""


def key_shape(blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """block_size: a multiple of 16; head_dim: even."""
    w = PER_WORD[dtype]
    return blocks, kv_heads, block_size // LANES, head_dim // w, LANES, w


def value_shape(blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    w = PER_WORD[dtype]
    return blocks, kv_heads, block_size // w, -(-head_dim // LANES) * LANES, w


def scale_shape(blocks: int, block_size: int, kv_heads: int) -> tuple[int, ...]:
    return blocks, kv_heads, block_size


def block_size(keys: Tensor) -> int:
    return keys.shape[2] * LANES


def parts(keys: Cache, values: Cache) -> tuple[str, tuple[Tensor, Tensor], list[Tensor]]:
    """What completes the names of ops that take such a cache, its numbers, and its scales if it has such."""
    if isinstance(keys, Int8) and isinstance(values, Int8):
        return "_int8", (keys.values, values.values), [keys.scale, values.scale]
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    return "", (keys, values), []


def pack_keys(keys: Cache) -> Cache:
    """[blocks, block_size, Hkv, D] -> a copy in the native order; as the three below, for tests and comparisons."""
    return _reordered(keys, _pack_keys)


def unpack_keys(keys: Cache) -> Cache:
    return _reordered(keys, _unpack_keys)


def pack_values(values: Cache) -> Cache:
    return _reordered(values, _pack_values)


def unpack_values(values: Cache, head_dim: int) -> Cache:
    return _reordered(values, lambda numbers: _unpack_values(numbers, head_dim))


def _reordered(cache: Cache, numbers: Callable[[Tensor], Tensor]) -> Cache:
    if isinstance(cache, Int8):
        return Int8(numbers(cache.values), cache.scale.transpose(1, 2).contiguous())
    return numbers(cache)


def _pack_keys(keys: Tensor) -> Tensor:
    blocks, size, heads, dim = keys.shape
    w = PER_WORD[keys.dtype]
    return keys.view(blocks, size // LANES, LANES, heads, dim // w, w).permute(0, 3, 1, 4, 2, 5).contiguous()


def _unpack_keys(keys: Tensor) -> Tensor:
    blocks, heads, panels, words, _, w = keys.shape
    return keys.permute(0, 2, 4, 1, 3, 5).reshape(blocks, panels * LANES, heads, words * w)


def _pack_values(values: Tensor) -> Tensor:
    blocks, size, heads, dim = values.shape
    w = PER_WORD[values.dtype]
    words = values.view(blocks, size // w, w, heads, dim).permute(0, 3, 1, 4, 2)
    return F.pad(words, (0, 0, 0, -dim % LANES)).contiguous()


def _unpack_values(values: Tensor, head_dim: int) -> Tensor:
    blocks, heads, words, _, w = values.shape
    return values[..., :head_dim, :].permute(0, 2, 4, 1, 3).reshape(blocks, words * w, heads, head_dim)


def read_slots(keys: Tensor, values: Tensor, slots: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values at slots [n] int64, block * block_size + offset: each [n, Hkv, D]."""
    w = keys.shape[-1]
    block, offset = slots // block_size(keys), slots % block_size(keys)
    read_keys = keys[block, :, offset // LANES, :, offset % LANES].flatten(2)
    return read_keys, values[block, :, offset // w, :head_dim, offset % w]


def write_slots(keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """What `read_slots` then reads: new_keys, new_values [n, Hkv, D]."""
    w = keys.shape[-1]
    block, offset = slots // block_size(keys), slots % block_size(keys)
    keys[block, :, offset // LANES, :, offset % LANES] = new_keys.unflatten(-1, (-1, w))
    values[block, :, offset // w, : new_values.shape[-1], offset % w] = new_values
