"""The KV cache in the order in which the native kernels read it.

Per layer, with w numbers to a word of 32 bits and Dp the head's size rounded up to a panel:

    keys    [blocks, Hkv, block_size / 16, D / w, 16, w]
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
    return blocks, kv_heads, block_size // LANES, head_dim // w, LANES, w


def value_shape(blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    w = PER_WORD[dtype]
    return blocks, kv_heads, block_size // w, -(-head_dim // LANES) * LANES, w


def block_size(keys: Tensor) -> int:
    return keys.shape[2] * LANES


def pack_keys(keys: Tensor) -> Tensor:
    """[blocks, block_size, Hkv, D] -> a copy in the native order; as the three below, for tests and comparisons."""
    blocks, size, heads, dim = keys.shape
    w = PER_WORD[keys.dtype]
    return keys.view(blocks, size // LANES, LANES, heads, dim // w, w).permute(0, 3, 1, 4, 2, 5).contiguous()


def unpack_keys(keys: Tensor) -> Tensor:
    blocks, heads, panels, words, lanes, w = keys.shape
    return keys.permute(0, 2, 4, 1, 3, 5).reshape(blocks, panels * lanes, heads, words * w)


def pack_values(values: Tensor) -> Tensor:
    blocks, size, heads, dim = values.shape
    w = PER_WORD[values.dtype]
    words = values.view(blocks, size // w, w, heads, dim).permute(0, 3, 1, 4, 2)
    return F.pad(words, (0, 0, 0, -dim % LANES)).contiguous()


def unpack_values(values: Tensor, head_dim: int) -> Tensor:
    blocks, heads, words, _, w = values.shape
    return values[..., :head_dim, :].permute(0, 2, 4, 1, 3).reshape(blocks, words * w, heads, head_dim)
