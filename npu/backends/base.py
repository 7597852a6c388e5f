"""The one seam for devices: what the runner, the loader and the memory plan ask of a device.

A module of this package holds one subclass and names it `BACKEND`. Nothing outside this package and the kernels'
implementations knows a device by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

import torch

from npuserve.kernels.native.packed import Weight
from npuserve.kernels.registry import Span


class BackendError(ValueError):
    """The device that was asked for cannot be had; the message names those that can."""


class Event(Protocol):
    """A mark in the device's queue of work, at what was queued when it was made."""

    def wait(self) -> None:
        """Return once the work before the mark is done."""


class Captured(Protocol):
    """A step that was captured at its largest size."""

    def replay(self, tokens: int) -> torch.Tensor:
        """What the step returns, of its first `tokens` rows: [tokens, ...], until the next replay."""

    def replay_timed(self, tokens: int) -> tuple[torch.Tensor, list[tuple[str, float]]]:
        """Also (kernel, seconds) of each kernel call."""


class Backend(ABC):
    """A device and its habits.

    dtypes: of weights and activations that it computes in, by preference. vocabulary_tile: the LM head's rows are
    padded to a multiple of it. block_size: tokens of a KV-cache block if nobody asks for another. block_multiple: what
    that must be a multiple of. kernels: the label of its kernels. deterministic: a row's numbers depend neither on the
    batch nor on chunking. threads: of the host, for the device's work.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]
    vocabulary_tile: ClassVar[int]
    block_size: ClassVar[int]
    block_multiple: int = 1
    kernels: str
    deterministic: bool
    threads: int
    device: torch.device

    @classmethod
    @abstractmethod
    def available(cls) -> bool:
        """True if this machine has the device and the software for it."""

    @abstractmethod
    def set_threads(self, count: int) -> None:
        """Host threads for the device's work; 0 takes what this process may use."""

    @abstractmethod
    def memory_available(self) -> int:
        """Bytes that this process may still take on the device."""

    @abstractmethod
    def kv_cache_share(self, free: int) -> int:
        """Of `free` bytes, those that the KV cache may take where nobody says how many."""

    @abstractmethod
    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        """The name of one of `dtypes`, for "auto" or a name, and the checkpoint's. Raises BackendError."""

    def weight(self, n: int, k: int, dtype: torch.dtype) -> Weight:
        """Storage for a linear weight [n, k] or a table of n embeddings, to be filled with `packed.write`."""
        return torch.empty(n, k, dtype=dtype, device=self.device)

    def weight_bytes(self, n: int, k: int, dtype: torch.dtype) -> int:
        """What `weight` takes."""
        return n * k * dtype.itemsize

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Storage on the device for what is large and stays."""
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def cache_shapes(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a layer's keys and its values, as the kernels take them; num_blocks comes first."""
        shape = (num_blocks, block_size, kv_heads, head_dim)
        return shape, shape

    @abstractmethod
    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor in host memory from which a copy to the device need not be waited for."""

    @abstractmethod
    def stream(self) -> AbstractContextManager[None]:
        """Inside, work goes to the queue of the engine's steps."""

    @abstractmethod
    def event(self) -> Event:
        """A mark at the end of what `stream`'s queue holds now."""

    @abstractmethod
    def span(self) -> Span:
        """Begins a stretch of time on the device's clock."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return once all queued work is done."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Captured | None:
        """The kernels that `step` calls, as one dispatch; None if the device has no such thing. What `step` reads must
        stay where it is for as long as the result is used."""
        return None
