"""The KV cache: keys and values of all requests in blocks. Who owns which block is the block manager's business."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from npuserve.npu.model_config import ModelConfig


def block_bytes(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Bytes of one block over all layers, keys and values. itemsize: of one number."""
    return 2 * config.num_layers * block_size * config.kv_size * itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """Per layer (keys, values), each [num_blocks, block_size, Hkv, D]."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Written, not only reserved: the memory is taken now or never, and no step meets its page faults. Zeros,
        since what is not a number must not come out of a slot that nobody wrote."""
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)

        def tensor() -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).zero_()

        return cls(tuple((tensor(), tensor()) for _ in range(config.num_layers)))
