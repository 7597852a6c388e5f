"""State of all requests on the device, by layer: paged blocks of keys and values, and slots of fixed size.

The scheduler assigns blocks and slots to requests. A request has blocks for its tokens, and one slot if the model has a
layer of fixed state. A row that begins at position 0 begins with a state of zeros, whatever its slot holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from npuserve.kernels.kv_cache import LARGEST, Cache
from npuserve.kernels.quantized import Quantized
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.layer import Counts, Fixed, Paged, State
from npuserve.npu.model.progress import reporting


class KeysAndValues(NamedTuple):
    """State of a layer whose state is `Paged`, in the shapes of `CacheLayout.shapes`; quantized ones have scales."""

    keys: Cache
    values: Cache


class Slots(tuple[Tensor, ...]):
    """State of a layer whose state is `Fixed`: tensors [slots, ...]."""

    __slots__ = ()


LayerState = KeysAndValues | Slots | Tensor | None


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, backend: Backend) -> int:
    """Return the bytes of one block: keys and values of all layers, with the scales of a quantized cache. Those of the
    MTP head and of a smaller model that drafts are among them."""
    nbytes = sum(_paged_bytes(layer.state, block_size, dtype, backend) for layer in config.local_layers
                 if isinstance(layer.state, Paged))
    others = (other for other in (config.predictor, config.draft) if other is not None)
    return nbytes + sum(block_bytes(other, block_size, dtype, backend) for other in others)


def slot_bytes(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    """Return the bytes of one slot: the fixed states of all layers. dtype: of the activations."""
    return sum(math.prod(shape) * _dtype(name, dtype, backend).itemsize
               for layer in config.local_layers if isinstance(state := layer.state, Fixed)
               for shape, name in zip(state.shapes, state.dtypes, strict=True))


def _paged_bytes(state: Paged, block_size: int, dtype: torch.dtype, backend: Backend) -> int:
    shapes = backend.cache.shapes(1, block_size, state.heads, state.head_dim, dtype)
    nbytes = sum(map(math.prod, shapes)) * dtype.itemsize
    if dtype in LARGEST:
        scales = backend.cache.scale_shape(1, block_size, state.heads)
        nbytes += 2 * math.prod(scales) * backend.capabilities.scale_dtype.itemsize
    return nbytes


def _dtype(name: str, model: torch.dtype, backend: Backend) -> torch.dtype:
    return model if name == "model" else backend.state_dtype(model)


def _tensors(cache: Cache) -> list[Tensor]:
    return [cache.values, cache.scale] if isinstance(cache, Quantized) else [cache]


@dataclass(frozen=True, slots=True)
class StateStore:
    """State of each block of the model.

    states: in the order of `ModelWeights.blocks`.
    all_counters: the counters of all layers, one after the other; None without any.

    The last `Capabilities.padding_blocks` blocks are not given to requests; nor is the last slot if there are such
    blocks.
    """

    states: tuple[LayerState, ...]
    all_counters: Tensor | None = None

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, backend: Backend,
        num_slots: int = 0, model_dtype: torch.dtype | None = None,
    ) -> StateStore:
        """Allocate a store of zeros, which keep NaN out of slots that were never written.

        Memory that is not zero yet is cleared, with progress on stderr. Otherwise `PagePopulation` maps its pages.

        dtype: dtype of keys and values: that of the activations, or of a quantized cache's values.
        num_slots: slots for requests; 0 without layers of fixed state.
        model_dtype: dtype of the activations; None for `dtype`.
        """
        blocks = num_blocks + backend.capabilities.padding_blocks
        slots = num_slots + (1 if backend.capabilities.padding_blocks else 0)

        def cache(state: Paged, shape: tuple[int, ...]) -> Cache:
            numbers = backend.empty(shape, dtype)
            if dtype not in LARGEST:
                return numbers
            scales = backend.cache.scale_shape(blocks, block_size, state.heads)
            return Quantized(numbers, backend.empty(scales, backend.capabilities.scale_dtype))

        def of_layer(state: State) -> LayerState:
            if isinstance(state, Paged):
                shapes = backend.cache.shapes(blocks, block_size, state.heads, state.head_dim, dtype)
                return KeysAndValues(cache(state, shapes[0]), cache(state, shapes[1]))
            if isinstance(state, Fixed):
                return Slots(backend.empty((slots, *shape), _dtype(name, model_dtype or dtype, backend))
                             for shape, name in zip(state.shapes, state.dtypes, strict=True))
            return next(counters) if isinstance(state, Counts) else None

        layers = config.local_layers
        sizes = [layer.state.size for layer in layers if isinstance(layer.state, Counts)]
        all_counters = backend.empty((sum(sizes),), torch.int64) if sizes else None
        counters = iter(() if all_counters is None else all_counters.split(sizes))
        store = cls(tuple(of_layer(layer.state) for layer in layers), all_counters)
        if not backend.memory.fresh_is_zero:
            store._clear(backend)
        return store

    def _clear(self, backend: Backend) -> None:
        total = sum(tensor.nbytes for tensor in self.tensors)
        done = 0
        # Writing new pages takes long: the kernel clears them.
        with reporting("zeroing the KV cache") as progress, ThreadPoolExecutor(backend.threads) as pool:
            for tensor in pool.map(Tensor.zero_, self.tensors):
                done += tensor.nbytes
                progress(done, total)
        backend.synchronize()

    @property
    def paged(self) -> list[KeysAndValues]:
        """Return the keys and values of each layer that has them."""
        return [state for state in self.states if isinstance(state, KeysAndValues)]

    @property
    def plain(self) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of a cache that is not quantized."""
        return [(keys, values) for keys, values in self.paged
                if isinstance(keys, Tensor) and isinstance(values, Tensor)]

    @property
    def fixed(self) -> list[Tensor]:
        """Return the tensors [slots, ...] of fixed state."""
        return [tensor for state in self.states if isinstance(state, Slots) for tensor in state]

    @property
    def counters(self) -> list[Tensor]:
        """Return the counters of each layer that has any."""
        return [state for state in self.states if isinstance(state, Tensor)]

    def count(self, more: Sequence[Tensor]) -> None:
        """Add to the counters of all layers that have any, in their order."""
        assert self.all_counters is not None
        self.all_counters.add_(torch.cat(list(more)))

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors layer by layer: keys and their scales, values and their scales."""
        states = [(state,) if isinstance(state, Tensor) else state or () for state in self.states]
        return [tensor for state in states for cache in state for tensor in _tensors(cache)]

    @property
    def paged_tensors(self) -> list[Tensor]:
        """Return the tensors [blocks, ...] of keys and values, layer by layer as `tensors`."""
        return [tensor for state in self.paged for cache in state for tensor in _tensors(cache)]

    def copy_slots(self, copies: Sequence[tuple[int, int]], backend: Backend) -> None:
        """Queue copies of slots, in order. copies: (source, target)."""
        tensors = self.fixed
        for source, target in copies:
            backend.copy_all([tensor[target] for tensor in tensors], [tensor[source] for tensor in tensors])
