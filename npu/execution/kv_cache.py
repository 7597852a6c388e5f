"""KV cache: keys and values of all requests in blocks. The block manager assigns the blocks to requests."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from npuserve.kernels.kv_cache import LARGEST, Cache
from npuserve.kernels.quantized import Quantized
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.progress import reporting


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, backend: Backend) -> int:
    """Return the bytes of one block: keys and values of all layers, with the scales of a quantized cache."""
    heads = config.local.num_kv_heads
    shapes = backend.cache_shapes(1, block_size, heads, config.head_dim, dtype)
    of_layer = sum(map(math.prod, shapes)) * dtype.itemsize
    if dtype in LARGEST:
        scales = backend.scale_shape(1, block_size, heads)
        of_layer += 2 * math.prod(scales) * backend.scale_dtype.itemsize
    return config.num_layers * of_layer


@dataclass(frozen=True, slots=True)
class KVCache:
    """(keys, values) per layer, in the shapes of `Backend.cache_shapes`; quantized ones with scales.

    The last `Backend.padding_blocks` blocks are not given to requests.
    """

    layers: tuple[tuple[Cache, Cache], ...]

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, backend: Backend
    ) -> KVCache:
        """Allocate a cache of zeros, showing progress on stderr.

        Writing all pages now keeps page faults out of the steps and shows at start if memory is short. Zeros keep NaN
        out of slots that were never written.

        dtype: dtype of the activations, or of a quantized cache's values.
        """
        blocks, heads = num_blocks + backend.padding_blocks, config.local.num_kv_heads
        shapes = backend.cache_shapes(blocks, block_size, heads, config.head_dim, dtype)

        def empty(shape: tuple[int, ...]) -> Cache:
            numbers = backend.empty(shape, dtype)
            if dtype not in LARGEST:
                return numbers
            scales = backend.scale_shape(blocks, block_size, heads)
            return Quantized(numbers, backend.empty(scales, backend.scale_dtype))

        made = cls(tuple((empty(shapes[0]), empty(shapes[1])) for _ in range(config.num_layers)))
        total, done = sum(tensor.nbytes for tensor in made.tensors), 0
        # Writing new pages takes long: the kernel clears them.
        with reporting("zeroing the KV cache") as progress, ThreadPoolExecutor(backend.threads) as pool:
            for tensor in pool.map(Tensor.zero_, made.tensors):
                done += tensor.nbytes
                progress(done, total)
        backend.synchronize()
        return made

    @property
    def plain(self) -> list[tuple[Tensor, Tensor]]:
        """Return the layers of a cache that is not quantized."""
        return [(keys, values) for keys, values in self.layers
                if isinstance(keys, Tensor) and isinstance(values, Tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors layer by layer: keys and their scales, values and their scales."""
        return [tensor for cache in chain.from_iterable(self.layers)
                for tensor in ([cache.values, cache.scale] if isinstance(cache, Quantized) else [cache])]
