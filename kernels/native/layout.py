"""The KV cache in the order in which the native kernels read it.

Per layer, with w numbers to a word of 32 bits and Dp the head's size rounded up to a panel:

    keys    [blocks, Hkv, D / w, block_size, w]
    values  [blocks, Hkv, block_size / w, Dp, w]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.native import LANES
from npuserve.kernels.native.packed import PER_WORD


def key_shape(blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """block_size: a multiple of 16; head_dim: even."""
    w = PER_WORD[dtype]
    return blocks, kv_heads, head_dim // w, block_size, w


def value_shape(blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    w = PER_WORD[dtype]
    return blocks, kv_heads, block_size // w, -(-head_dim // LANES) * LANES, w


def block_size(keys: Tensor) -> int:
    return keys.shape[3]


def pack_keys(keys: Tensor) -> Tensor:
    """[blocks, block_size, Hkv, D] -> a copy in the native order; as the three below, for tests and comparisons."""
    blocks, size, heads, dim = keys.shape
    w = PER_WORD[keys.dtype]
    return keys.view(blocks, size, heads, dim // w, w).permute(0, 2, 3, 1, 4).contiguous()


def unpack_keys(keys: Tensor) -> Tensor:
    blocks, heads, words, size, w = keys.shape
    return keys.permute(0, 3, 1, 2, 4).reshape(blocks, size, heads, words * w)


def pack_values(values: Tensor) -> Tensor:
    blocks, size, heads, dim = values.shape
    w = PER_WORD[values.dtype]
    words = values.view(blocks, size // w, w, heads, dim).permute(0, 3, 1, 4, 2)
    return F.pad(words, (0, 0, 0, -dim % LANES)).contiguous()


def unpack_values(values: Tensor, head_dim: int) -> Tensor:
    blocks, heads, words, _, w = values.shape
    return values[..., :head_dim, :].permute(0, 2, 4, 1, 3).reshape(blocks, words * w, heads, head_dim)


def read_slots(keys: Tensor, values: Tensor, slots: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values at slots [n] int64, block * block_size + offset: each [n, Hkv, D]."""
    w = keys.shape[-1]
    block, offset = slots // block_size(keys), slots % block_size(keys)
    return keys[block, :, :, offset].flatten(2), values[block, :, offset // w, :head_dim, offset % w]


def write_slots(keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """What `read_slots` then reads: new_keys, new_values [n, Hkv, D]."""
    w = keys.shape[-1]
    block, offset = slots // block_size(keys), slots % block_size(keys)
    keys[block, :, :, offset] = new_keys.unflatten(-1, (-1, w))
    values[block, :, offset // w, : new_values.shape[-1], offset % w] = new_values
