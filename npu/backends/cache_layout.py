"""Layout of the KV cache on a device, as its kernels read it."""

from __future__ import annotations

import torch


class CacheLayout:
    """KV cache in plain tensors: each token of a block has the heads one after the other."""

    def shapes(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a layer's keys and of its values, num_blocks first.

        If prompts are computed on another device, slots are laid out as here; heads may be padded.
        """
        shape = (num_blocks, block_size, kv_heads, head_dim)
        return shape, shape

    def scale_shape(self, num_blocks: int, block_size: int, kv_heads: int) -> tuple[int, ...]:
        """Return the shape of the scales of a quantized cache's keys, which is also that of its values' scales."""
        return num_blocks, block_size, kv_heads

    def dequantized_bytes(self, context: int, block_size: int, kv_heads: int, head_dim: int) -> int:
        """Return the bytes in which the kernels hold contexts of up to `context` tokens of a quantized cache."""
        return 0

    def read(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of a layer's keys and values at `slots` [n] int64, each [n, kv_heads, head_dim]."""
        return keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, new_keys: torch.Tensor,
        new_values: torch.Tensor,
    ) -> None:
        """Write new_keys and new_values [n, kv_heads, head_dim] to `slots` [n] int64, as `read` reads them."""
        keys.flatten(0, 1)[slots] = new_keys
        values.flatten(0, 1)[slots] = new_values
