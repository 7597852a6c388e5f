"""The KV cache: keys and values of all requests in blocks. Who owns which block is the block manager's business."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from npuserve.npu.backends.base import Backend
from npuserve.npu.model_config import ModelConfig


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, backend: Backend) -> int:
    """Bytes of one block over all layers, keys and values."""
    shapes = backend.cache_shapes(1, block_size, config.num_kv_heads, config.head_dim, dtype)
    return config.num_layers * sum(map(math.prod, shapes)) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """Per layer (keys, values), each of its shape of `Backend.cache_shapes`.

    The last `Backend.padding_blocks` blocks are beyond the `num_blocks` that are given to requests.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, backend: Backend
    ) -> KVCache:
        """Written, not only reserved: the memory is taken now or never, and no step meets its page faults. Zeros,
        since what is not a number must not come out of a slot that nobody wrote."""
        blocks = num_blocks + backend.padding_blocks
        shapes = backend.cache_shapes(blocks, block_size, config.num_kv_heads, config.head_dim, dtype)
        layers = tuple(
            (backend.empty(shapes[0], dtype), backend.empty(shapes[1], dtype)) for _ in range(config.num_layers))
        with ThreadPoolExecutor(backend.threads) as pool:  # it is the system that takes its time with new pages
            list(pool.map(Tensor.zero_, chain.from_iterable(layers)))
        backend.synchronize()
        return cls(layers)
