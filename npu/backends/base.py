"""The one seam for devices: what the runner, the loader and the memory plan ask of a device.

A module of this package holds one subclass and names it `BACKEND`. Nothing outside this package and the kernels'
implementations knows a device by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import ClassVar, Protocol, TypeVar

import torch

from npuserve.kernels.native.choice import CpuKernels, Wanted
from npuserve.kernels.native.packed import Matrix
from npuserve.kernels.quantized import Int8Weight
from npuserve.kernels.registry import Span
from npuserve.npu.quantization import W8A8


class BackendError(ValueError):
    """The device that was asked for cannot be had; the message names those that can."""


class Fault(Enum):
    """What is to be done about an error of the device at run time.

    In each case the requests that the engine has end as unavailable, with the time after which to ask again, and the
    engine process leaves. It is started again after the first two; after the last, the server ends. The exit codes
    are in service/ipc/child.py. No step is launched anew in place: what a part of it has sampled, counted and
    written is there.
    """

    RETRYABLE = "retryable"
    """A resource was short or something took too long: the same work may succeed."""
    ENGINE = "engine"
    """What the process has on the device is lost."""
    NODE = "node"
    """The device, its driver or its links are at fault: starting again there is no help."""


T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Event(Protocol):
    """A mark in the device's queue of work."""

    def wait(self) -> None:
        """Return once the work before the mark is done. Raises what the device has to say against it."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""


class Pending(Protocol[Result]):
    """Work that was handed to the device's queue."""

    def wait(self) -> Result:
        """What the work returned, once it has: its kernels are queued then, or done. Raises what it raised."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""


class Captured(Protocol):
    """A step as one dispatch, for any number of rows from 1 to `largest`."""

    @property
    def largest(self) -> int: ...

    def size(self, rows: int) -> int:
        """Rows that a replay for `rows` of them computes: the batch must be padded to so many, at most `largest`. Of a
        step that was captured for any batch, these are tokens; its rows are all that the buffers have."""

    def replay(self, rows: int, context_lens: Sequence[int]) -> torch.Tensor:
        """What the step returns, of its first `rows` rows: [rows, ...], until the next replay.

        context_lens: of all size(rows) rows, on the host, for devices whose attention takes lengths from there.
        """

    def replay_timed(
        self, rows: int, context_lens: Sequence[int]
    ) -> tuple[torch.Tensor, list[tuple[str, float]]] | None:
        """Also (kernel, seconds) of each kernel call. None, and nothing was run, where a replay cannot be taken apart:
        whoever wants the times then calls the kernels one by one."""


class Backend(ABC):
    """A device and its habits.

    dtypes: of weights and activations that it computes in, by preference. vocabulary_tile: the LM head's rows are
    padded to a multiple of it. block_size: tokens of a KV-cache block if nobody asks for another. block_multiple: what
    that must be a multiple of. kernels: the label of its kernels. deterministic: a row's numbers depend neither on the
    batch nor on chunking. threads: of the host, for the device's work. padding_blocks: KV-cache blocks beyond those
    that are given to requests, the first of them for the rows that pad a captured batch; 0 where captured steps take
    batches as they are. decode_buckets: rows of the decode steps that are captured; () for the device's own choice.
    sampling_bytes: what `sample` takes for a logit.
    compiles: kernels are compiled at their first call with arguments of a kind, which takes seconds.
    int8_levels: of the schemes by which activations become int8 (`quantized.Scheme`).
    int8_cache: the kernels take a KV cache in int8, too. int8_zeros: they take zero points of int8.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]
    vocabulary_tile: ClassVar[int]
    block_size: ClassVar[int]
    int8_cache: ClassVar[bool] = False
    int8_zeros: ClassVar[bool] = False
    block_multiple: int = 1
    padding_blocks: int = 0
    compiles: bool = False
    decode_buckets: tuple[int, ...] = ()
    sampling_bytes: int = 0
    int8_levels: float = 127.5
    kernels: str
    deterministic: bool
    threads: int
    device: torch.device

    @classmethod
    @abstractmethod
    def available(cls) -> bool:
        """True if this machine has the device and the software for it."""

    @classmethod
    def unavailable(cls) -> str:
        """Why it is not `available`, and what to do about it; one sentence."""
        return f"{cls.name} not available on this machine"

    @classmethod
    def emulate(cls, relax: Sequence[str] = ()) -> None:
        """Put an emulator in the device's place, for the whole process. relax: names of what it may accept beyond what
        the device does. Raises BackendError where there is no emulator, or none can be had here."""
        raise BackendError(f"emulate: there is no emulator of {cls.name}")

    @classmethod
    def fault(cls, error: BaseException) -> Fault | None:
        """What is to be done about an error at run time; None if it is none of this device's."""
        return None

    @abstractmethod
    def set_threads(self, count: int) -> None:
        """Host threads for the device's work; 0 takes what this process may use."""

    def choose_kernels(self, wanted: Wanted, inputs: int) -> CpuKernels | None:
        """Choose what the kernels of this process run on, as `choice.choose` does; None where a device has no such
        choice. Call it after `set_threads` and before anything is loaded or planned.

        Raises BackendError for settings that this machine cannot do.
        """
        return None

    @abstractmethod
    def memory_available(self) -> int:
        """Bytes that this process may still take on the device."""

    @abstractmethod
    def kv_cache_share(self, free: int) -> int:
        """Of `free` bytes, those that the KV cache may take where nobody says how many."""

    @abstractmethod
    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        """The name of one of `dtypes`, for "auto" or a name, and the checkpoint's. Raises BackendError."""

    def weight(self, n: int, k: int, dtype: torch.dtype) -> Matrix:
        """Storage for a linear weight [n, k] or a table of n embeddings, to be filled with `packed.write`."""
        return torch.empty(n, k, dtype=dtype, device=self.device)

    def weight_bytes(self, n: int, k: int, dtype: torch.dtype) -> int:
        """What `weight` takes, once arranged."""
        return n * k * dtype.itemsize

    def check_int8(self, scheme: W8A8) -> None:
        """Raises BackendError for a quantization that the kernels do not compute."""
        wrong = [name for name, symmetric in (
            ("weights", scheme.symmetric), ("input_activations", scheme.symmetric_inputs)) if not symmetric]
        if wrong and not self.int8_zeros:
            raise BackendError(
                f"quantization_config: {' and '.join(wrong)} with zero points (symmetric: false) are not possible on "
                f"{self.name}, whose products of int8 take none; possible is symmetric: true")

    def arrange(self, weight: Int8Weight, *, table: bool) -> None:
        """Bring an int8 weight, which holds all its numbers now, into the form that the kernels read, in place. table:
        embeddings are read from it too."""
        return

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Storage on the device for what is large and stays."""
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def sharing(self, file: int, *, filled: bool) -> AbstractContextManager[bool]:
        """Inside, what `weight` and `empty` give out lies in an open file in memory, which outlives this process.
        filled: another process did so, asked for the same things in the same order, and what they hold is to be found
        again; otherwise the file begins anew. Gives False where that cannot be, and changes nothing then."""
        return nullcontext(False)

    def cache_dtype(self, asked: str, dtype: torch.dtype) -> torch.dtype:
        """Of a KV cache beside activations of `dtype`, for "auto", which is that, or "int8". Raises BackendError."""
        if asked == "auto":
            return dtype
        if asked != "int8" or not self.int8_cache:
            raise BackendError(
                f"kv_cache_dtype: {asked!r} is not possible on {self.name}; possible are auto"
                f"{', int8' if self.int8_cache else ' alone'}")
        return torch.int8

    def cache_shapes(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a layer's keys and its values, as the kernels take them; num_blocks comes first. A device whose prompts
        are computed elsewhere has slots as below, their heads padded or not."""
        shape = (num_blocks, block_size, kv_heads, head_dim)
        return shape, shape

    def scale_shape(self, num_blocks: int, block_size: int, kv_heads: int) -> tuple[int, ...]:
        """Of the scales of an int8 cache's keys, and of its values."""
        return num_blocks, block_size, kv_heads

    def read_cache(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of a layer's keys and values at slots [n] int64: each [n, kv_heads, head_dim]."""
        return keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]

    def write_cache(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, new_keys: torch.Tensor,
        new_values: torch.Tensor,
    ) -> None:
        """What `read_cache` then reads: new_keys, new_values [n, kv_heads, head_dim]."""
        keys.flatten(0, 1)[slots] = new_keys
        values.flatten(0, 1)[slots] = new_values

    def check_heads(self, head_dim: int) -> None:
        """Raises BackendError for attention heads of a size that the kernels do not take."""
        return

    @abstractmethod
    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor in host memory from which a copy to the device need not be waited for."""

    @abstractmethod
    def enqueue(self, work: Callable[[], T]) -> Pending[T]:
        """Have `work` done after all that was enqueued before: the kernels that it calls go to the device's queue in
        that order. A device with a queue of its own calls it at once; another hands it to a thread. It runs in torch's
        inference mode."""

    @abstractmethod
    def fetch(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Event:
        """Copy a tensor of the device to a `host_buffer` of its shape and dtype. Call it within enqueued work.

        What is copied is what the work queued so far makes of the tensor; work queued later may write it anew or take
        its memory, and does not wait longer than it must. Copies arrive in order: the event is that of all of them.
        """

    @abstractmethod
    def span(self) -> Span:
        """Begins a stretch of time on the device's clock."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return once all queued work is done."""

    def capture(self, step: Callable[[int], torch.Tensor], largest: int, *, decode: bool) -> Captured | None:
        """A step as one dispatch; None if the device has no such thing for these batches.

        step: calls the kernels of a batch of so many rows, at most `largest`, which lies in memory that stays where it
        is for as long as the result is used; the numbers in it are those of a harmless batch until then. decode: each
        row is one token of a request of its own; otherwise rows are the tokens of any batch.
        """
        return None
