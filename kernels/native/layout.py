"""Layout of the KV cache for the native kernels.

Per layer, with w numbers to a word and Dp the head's size rounded up to a panel:

    keys    [blocks, Hkv, block_size / 16, D / w, 16, w]
    values  [blocks, Hkv, block_size / w, Dp, w]
    scales  [blocks, Hkv, block_size]                of either, in an int8 cache
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.native.binding import CONSTANTS, LANES


def per_word(dtype: torch.dtype) -> int:
    """Return the numbers of a cache's dtype that make one word of a product.

    A word is 32 bits of floats, or two int8, which are multiplied by two int16.
    """
    return CONSTANTS["INT8_CACHE_PER_WORD"] if dtype == torch.int8 else CONSTANTS["WORD_BYTES"] // dtype.itemsize


def key_shape(blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of the keys. block_size: a multiple of 16; head_dim: even."""
    w = per_word(dtype)
    return blocks, kv_heads, block_size // LANES, head_dim // w, LANES, w


def value_shape(blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of the values; arguments as for `key_shape`."""
    w = per_word(dtype)
    return blocks, kv_heads, block_size // w, -(-head_dim // LANES) * LANES, w


def scale_shape(blocks: int, block_size: int, kv_heads: int) -> tuple[int, ...]:
    """Return the shape of the scales of keys or values in an int8 cache."""
    return blocks, kv_heads, block_size


def block_size(keys: Tensor) -> int:
    """Return the tokens of a block."""
    return keys.shape[2] * LANES


def pack_keys(keys: Tensor) -> Tensor:
    """Copy keys [blocks, block_size, Hkv, D] to this layout."""
    blocks, size, heads, dim = keys.shape
    w = per_word(keys.dtype)
    return keys.view(blocks, size // LANES, LANES, heads, dim // w, w).permute(0, 3, 1, 4, 2, 5).contiguous()


def unpack_keys(keys: Tensor) -> Tensor:
    """Copy keys of this layout to [blocks, block_size, Hkv, D]."""
    blocks, heads, panels, words, _, w = keys.shape
    return keys.permute(0, 2, 4, 1, 3, 5).reshape(blocks, panels * LANES, heads, words * w)


def pack_values(values: Tensor) -> Tensor:
    """Copy values [blocks, block_size, Hkv, D] to this layout."""
    blocks, size, heads, dim = values.shape
    w = per_word(values.dtype)
    words = values.view(blocks, size // w, w, heads, dim).permute(0, 3, 1, 4, 2)
    return F.pad(words, (0, 0, 0, -dim % LANES)).contiguous()


def unpack_values(values: Tensor, head_dim: int) -> Tensor:
    """Copy values of this layout to [blocks, block_size, Hkv, head_dim]."""
    blocks, heads, words, _, w = values.shape
    return values[..., :head_dim, :].permute(0, 2, 4, 1, 3).reshape(blocks, words * w, heads, head_dim)


def read_slots(keys: Tensor, values: Tensor, slots: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Copy the keys and values, each [n, Hkv, D], of slots [n] int64 (block * block_size + offset)."""
    w = keys.shape[-1]
    block, offset = slots // block_size(keys), slots % block_size(keys)
    read_keys = keys[block, :, offset // LANES, :, offset % LANES].flatten(2)
    return read_keys, values[block, :, offset // w, :head_dim, offset % w]


def write_slots(keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """Write new_keys, new_values [n, Hkv, D] to slots [n] int64, the inverse of `read_slots`."""
    w = keys.shape[-1]
    block, offset = slots // block_size(keys), slots % block_size(keys)
    keys[block, :, offset // LANES, :, offset % LANES] = new_keys.unflatten(-1, (-1, w))
    values[block, :, offset // w, : new_values.shape[-1], offset % w] = new_values
