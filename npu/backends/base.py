"""Interface between devices and the rest of the server: the methods that runner, loader and memory plan call.

Each device's backend module defines one subclass of `Backend` and assigns it to `BACKEND`. No code outside this folder
and the kernel implementations refers to a device by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeVar

import torch

from npuserve.kernels.int4 import Grouping, Int4, PlainInt4
from npuserve.kernels.kv_cache import setting_of
from npuserve.kernels.native.choice import CpuKernels, CpuKernelSettings
from npuserve.kernels.native.packed import Matrix
from npuserve.kernels.registry import Span
from npuserve.kernels.sample import Filters
from npuserve.kernels.weight import WeightForm
from npuserve.npu.backends.device_profiler import DeviceProfiler
from npuserve.npu.notices import Notice
from npuserve.npu.quantization.scheme import WeightScheme


class BackendError(ValueError):
    """The requested device is not available; the message names the devices that are."""


CaptureMode = Literal["auto", "on", "decoder", "off"]
"""Use of captured steps. auto: steps run kernel by kernel if they cannot be captured. on: that is an error. decoder: as
auto, and the sampler, which not all devices capture, runs kernel by kernel."""


class CaptureError(BackendError):
    """Steps cannot be captured; the message gives the cause and advice.

    next_mode: mode in which another process may use the device.
    """

    next_mode: CaptureMode = "off"


class Fault(Enum):
    """Required reaction to a device error at run time.

    In each case the engine process exits. After RETRYABLE and ENGINE the supervisor restarts it, and the front ends
    submit its requests again; after NODE the server exits. service/processes/child.py defines the exit codes. A failed
    step is never repeated in place, because part of it has already sampled, counted and written.
    """

    RETRYABLE = "retryable"
    """A resource was exhausted or an operation timed out; the same work may succeed on retry."""
    ENGINE = "engine"
    """The process's state on the device is lost."""
    NODE = "node"
    """The device, its driver or its interconnect is defective; a restart on this node does not help."""


T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Event(Protocol):
    """Marker in the device's queue."""

    def wait(self) -> None:
        """Block until the work queued before the marker is complete. Raises the device's error if that work failed."""

    def done(self) -> bool:
        """Return True if `wait` would not block."""


class Pending(Protocol[Result]):
    """Work handed to the device's queue."""

    def wait(self) -> Result:
        """Return the result of the work once its kernels are queued or complete. Raises the exception of the work."""

    def done(self) -> bool:
        """Return True if `wait` would not block."""


class Captured(Protocol):
    """Step captured as one dispatch, for any number of rows from 1 to `largest`."""

    @property
    def largest(self) -> int: ...

    def size(self, rows: int) -> int:
        """Return the number of rows that a replay for `rows` rows computes, at most `largest`.

        The batch must be padded to it. For a step captured for any batch, the unit is tokens, and all rows of the
        buffers are computed.
        """

    def replay(
        self, rows: int, context_lens: Sequence[int], cu_seqlens: Sequence[int] = ()
    ) -> torch.Tensor:
        """Run the step. Return the first `rows` rows of its output, [rows, ...], valid until the next replay.

        context_lens: lengths of all size(rows) rows, for devices whose attention reads lengths from the host.
        cu_seqlens: cumulative tokens of the rows from 0 on. Read only by a step captured for any batch.
        """

    def replay_timed(
        self, rows: int, context_lens: Sequence[int]
    ) -> tuple[torch.Tensor, list[tuple[str, float]]] | None:
        """Run the step and return its output and (kernel, seconds) of each kernel call.

        Return None without running anything if a replay cannot be split into kernels; call the kernels one by one
        instead.
        """


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """How a device is used. Nothing of it changes once the device is open.

    place: (number of this rank on this machine, from 0; number of ranks on it). Unless `Backend.shares_memory`, each
        rank uses the visible device with its number.
    decode_buckets: row counts of the captured decode steps; () for the device's own choice.
    capture_mode: whether steps are captured.
    capture_chunks: steps with chunks of prompts are captured too, where the device captures decode steps separately.
    int8_levels: replaces `Backend.int8_levels`; 0 for the device's own.
    """

    place: tuple[int, int] = (0, 1)
    decode_buckets: tuple[int, ...] = ()
    capture_mode: CaptureMode = "auto"
    capture_chunks: bool = True
    int8_levels: float = 0.0


DEFAULT_SETTINGS = DeviceSettings()


class Backend(ABC):
    """A device and its properties.

    name: name of the device in settings and messages.
    dtypes: dtypes of weights and activations that "auto" keeps from a checkpoint; the first one replaces any other.
    explicit_dtypes: further dtypes, which are used only if they are requested by name.
    vocabulary_tile: the LM head's rows are padded to a multiple of it.
    block_size: default number of tokens per KV-cache block.
    block_multiple: a block size must be a multiple of it.
    max_block_size: largest number of tokens per KV-cache block.
    kernels: label of its kernel implementations in the registry.
    deterministic: a row's numbers depend neither on the batch nor on chunking.
    threads: host threads for the device's work.
    host_lengths: attention reads lengths from the host. A step captured for any batch then has one row more than a
        batch can have. The last row takes the padding tokens.
    shares_memory: the ranks of one machine use the same memory and cores, and can share a region for collectives.
    collectives: backend of torch.distributed that communicates the device's tensors between ranks; "" for one rank.
    reduces: this backend also adds the ranks' tensors, in place. False: the kernels gather and add them.
    settings: how the device is used.

    sampling_bytes: bytes per logit that the `sample` kernel allocates.
    compiles: kernels are compiled at the first call with a new kind of arguments, which takes seconds.
    int8_levels: quantization levels of dynamic int8 activations (`quantized.Scheme`).
    sampler_filters: filters of the captured steps that contain the kernels `penalize` and `sample`, which then copy
        nothing to the host. Ascending, up to ANY; () if a captured step cannot contain them.
    cache_dtypes: dtypes of a quantized KV cache that the kernels support.
    state_dtypes: dtypes of the states of linear attention that the kernels support, first the one for which they are
        made.
    chosen_state_dtype: the setting, one of them or "auto".
    scale_dtype: dtype of the scales of a quantized KV cache.
    fixed_state: the kernels support layers with a fixed state, such as linear attention.
    experts: the kernels support mixtures of experts.
    int8_zeros: the kernels support int8 zero points.
    float8: the kernels support float8 weights and activations.
    int4: the kernels support weights of 4 bits.
    measures_memory: the KV cache takes what `excess_bytes` of a warm-up step leaves; False: what a prediction leaves.
    int4_rows: rows of such a weight are a multiple of it.
    w4a8: the kernels multiply weights of 4 bits by int8 activations.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]
    explicit_dtypes: ClassVar[tuple[str, ...]] = ()
    vocabulary_tile: ClassVar[int]
    block_size: ClassVar[int]
    int8_zeros: ClassVar[bool] = False
    block_multiple: int = 1
    max_block_size: int = 1024
    host_lengths: bool = False
    shares_memory: bool = False
    collectives: str = ""
    reduces: bool = False
    settings: DeviceSettings
    compiles: bool = False
    sampler_filters: tuple[Filters, ...] = ()
    sampling_bytes: int = 0
    int8_levels: float = 127.5
    float8: bool = False
    int4: bool = False
    int4_rows: int = 1
    w4a8: bool = False
    fixed_state: bool = False
    experts: bool = False
    measures_memory: bool = False
    cache_dtypes: tuple[torch.dtype, ...] = ()
    state_dtypes: tuple[str, ...] = ("float32",)
    chosen_state_dtype: str = "auto"
    scale_dtype: torch.dtype = torch.bfloat16
    kernels: str
    deterministic: bool
    threads: int
    device: torch.device

    def __init__(self, settings: DeviceSettings = DEFAULT_SETTINGS) -> None:
        self.settings = settings
        if settings.int8_levels:
            self.int8_levels = settings.int8_levels

    @property
    def padding_blocks(self) -> int:
        """Extra KV-cache blocks that no request gets, for the padding of captured steps; 0 if they need no padding."""
        return 0

    @classmethod
    @abstractmethod
    def available(cls) -> bool:
        """Return True if this machine has the device and its software."""

    @classmethod
    def unavailable(cls) -> str:
        """Return why the device is not `available` and how to fix it, in one sentence."""
        return f"{cls.name} not available on this machine"

    @classmethod
    def fault(cls, error: BaseException) -> Fault | None:
        """Return the reaction to an error at run time; None if this device did not cause it."""
        return None

    @classmethod
    def preflight(cls, *, captures: bool, ranks: int = 1) -> Sequence[Notice]:
        """Check versions, environment variables and the host, whether or not the device can be started.

        captures: steps are to be captured.
        ranks: number of ranks that share a model.
        """
        return ()

    @classmethod
    def explain(cls, error: BaseException) -> str:
        """Return the meaning of a device error and advice, for a log line; "" if there is none."""
        return ""

    @classmethod
    def explain_code(cls, code: int) -> str:
        """Return name, meaning and advice of an error code of the device's software; "" for an unknown one."""
        return ""

    @classmethod
    def is_capture_error(cls, error: BaseException) -> bool:
        """Return True for an error at run time that does not occur without captured steps."""
        return False

    @abstractmethod
    def set_threads(self, count: int) -> None:
        """Set the number of host threads for the device's work; 0: all cores that this process may use."""

    def choose_kernels(self, wanted: CpuKernelSettings, inputs: int) -> CpuKernels | None:
        """Choose the CPU kernels of this process as `choice.choose` does; None if the device uses none.

        Call it after `set_threads` and before any weight is loaded or planned. Raises BackendError for settings that
        this machine does not support.
        """
        return None

    @abstractmethod
    def memory_available(self) -> int:
        """Return the bytes of device memory that this process can still allocate."""

    def excess_bytes(self, work: Callable[[], None]) -> int:
        """Run `work`, and return the bytes by which its peak of device memory exceeds the memory that it leaves taken.

        Only for devices that have `measures_memory`.
        """
        raise NotImplementedError

    def wait_for_memory(self) -> None:  # noqa: B027 - a device without memory of its own has nothing to wait for
        """Wait while memory of ended processes returns to the device, before its free memory is planned."""

    def bind_threads(self) -> str:
        """Bind this process's threads to processors near the device. Return what was done, as a sentence; "": nothing.

        Call it when all threads exist.
        """
        return ""

    @abstractmethod
    def kv_cache_share(self, free: int) -> int:
        """Return the default size of the KV cache in bytes if `free` bytes are free."""

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        """Return the dtype for a setting, "auto" or a name, and the checkpoint's dtype. Raises BackendError."""
        if requested == "auto":
            return checkpoint if checkpoint in self.dtypes else self.dtypes[0]
        if requested not in (possible := (*self.dtypes, *self.explicit_dtypes)):
            raise BackendError(f"dtype: {requested!r} is not one of auto, {', '.join(possible)}")
        return requested

    def weight(self, n: int, k: int, dtype: torch.dtype) -> Matrix:
        """Allocate a linear weight [n, k] or a table of n embeddings, to be filled with `packed.write`."""
        return torch.empty(n, k, dtype=dtype, device=self.device)

    def weight_bytes(self, n: int, k: int, dtype: torch.dtype) -> int:
        """Return the bytes of a `weight`, after `prepare_weight`."""
        return n * k * dtype.itemsize

    def int4_weight(self, n: int, k: int, grouping: Grouping) -> Int4:
        """Allocate the numbers of a linear weight [n, k] of 4 bits."""
        return PlainInt4.allocate(n, k, grouping, partial(torch.zeros, device=self.device))

    def int4_bytes(self, n: int, k: int, grouping: Grouping) -> int:
        """Return the bytes of an `int4_weight`, after `prepare_weight`."""
        return grouping.plain_bytes(n, k)

    def int4_refusal(self, n: int, k: int, grouping: Grouping, dtype: torch.dtype) -> str:
        """Return why the kernels do not multiply activations of `dtype` by an `int4_weight`, after "layers"; "" if they
        do. Such weights become floats while loading."""
        return ""

    def check_scheme(self, scheme: WeightScheme) -> None:
        """Raise BackendError for a quantization scheme that the kernels do not support."""
        if refusal := scheme.refusal(self):
            raise BackendError(f"quantization_config: {refusal}")

    def prepare_weight(self, weight: WeightForm, *, table: bool) -> None:
        """Convert a completely written weight in place to the layout that the kernels read.

        table: the embedding kernel reads it too.
        """
        return

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a large, long-lived tensor on the device."""
        return torch.empty(*shape, dtype=dtype, device=self.device)

    @property
    def fresh_is_zero(self) -> bool:
        """True if `empty` returns zeros outside `sharing`, whose pages `populate` maps."""
        return False

    def populate(self, tensor: torch.Tensor) -> None:  # noqa: B027 - most devices have no pages to map
        """Map the pages of a tensor in the device's memory, whose contents do not change. Safe in any thread.

        Raises MemoryError.
        """

    def sharing(self, file: int, *, filled: bool) -> AbstractContextManager[bool]:
        """Allocate weights and large tensors within the context in an open memory file, which outlives this process.

        filled: the file holds the weights of another process that made the same allocations in the same order, and they
            are reused; False: the file is overwritten.
        Yields False, and changes nothing, if the backend does not support this.
        """
        return nullcontext(False)

    def choose_state_dtype(self, requested: str) -> None:
        """Set the dtype of the states of linear attention: "auto" or a name.

        Raises BackendError for a dtype that the kernels do not support. Where answers must not depend on chunks, a
        state in bfloat16 would have to be rounded after every token.
        """
        possible = "auto", *self.state_dtypes
        if requested not in possible:
            reason = (", since a state that is rounded after every token, so that answers do not depend on chunks, "
                      "loses more than the activations do") if requested == "bfloat16" else ""
            raise BackendError(f"state_dtype: {requested!r} is not possible on {self.name}{reason}; possible are "
                               f"{', '.join(possible)}")
        self.chosen_state_dtype = requested

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the states of linear attention beside activations of `dtype`."""
        chosen = self.default_state_dtype(dtype) if self.chosen_state_dtype == "auto" else self.chosen_state_dtype
        return getattr(torch, chosen)  # type: ignore[no-any-return]

    def default_state_dtype(self, dtype: torch.dtype) -> str:
        """Return the name of the dtype of states that "auto" stands for."""
        return self.state_dtypes[0]

    def cache_dtype(self, requested: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the KV cache for activations of `dtype`: `dtype` for "auto", or that of a setting.

        Raises BackendError if it is not supported.
        """
        possible = {"auto": dtype} | {setting_of(cached): cached for cached in self.cache_dtypes}
        if requested not in possible:
            named = f"possible are {', '.join(possible)}" if len(possible) > 1 else "only auto is possible"
            raise BackendError(f"kv_cache_dtype: {requested!r} is not possible on {self.name}; {named}")
        return possible[requested]

    def cache_shapes(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a layer's keys and of its values as the kernels read them, num_blocks first.

        If prompts are computed on another device, slots are laid out as here; heads may be padded.
        """
        shape = (num_blocks, block_size, kv_heads, head_dim)
        return shape, shape

    def scale_shape(self, num_blocks: int, block_size: int, kv_heads: int) -> tuple[int, ...]:
        """Return the shape of the scales of a quantized cache's keys, which is also that of its values' scales."""
        return num_blocks, block_size, kv_heads

    def lacks_operator(self, kernel: str, sizes: Sequence[int], dtype: torch.dtype) -> bool:
        """Return True if the kernel's implementation computes these sizes without the device's operator.

        That counts as a fallback, and steps with chunks are not captured.

        sizes: of `Layer.operator_sizes`. dtype: of the activations.
        """
        return False

    def operator_bytes(self, kernel: str, sizes: Sequence[int], rows: int, tokens: int, itemsize: int) -> int:
        """Return the bytes that a kernel's operators take beside its inputs and outputs, in a step of `rows` rows.

        sizes: of `Layer.operator_sizes`. itemsize: bytes of a number of the activations.
        """
        return 0

    def captures_chunks(self, cache_dtype: torch.dtype) -> bool:
        """Return True if steps with chunks are captured, over a KV cache of this dtype."""
        return self.settings.capture_chunks

    def dequantized_bytes(self, context: int, block_size: int, kv_heads: int, head_dim: int) -> int:
        """Return the bytes in which the kernels hold contexts of up to `context` tokens of a quantized cache."""
        return 0

    def read_cache(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of a layer's keys and values at `slots` [n] int64, each [n, kv_heads, head_dim]."""
        return keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]

    def write_cache(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, new_keys: torch.Tensor,
        new_values: torch.Tensor,
    ) -> None:
        """Write new_keys and new_values [n, kv_heads, head_dim] to `slots` [n] int64, as `read_cache` reads them."""
        keys.flatten(0, 1)[slots] = new_keys
        values.flatten(0, 1)[slots] = new_values

    def check_heads(self, head_dim: int, rotary_dim: int | None = None) -> None:
        """Raise BackendError for a head size, or rotated numbers of a head, that the kernels do not support."""
        return

    def check_ranks(self, size: int) -> None:
        """Raise BackendError if `size` ranks cannot share a model."""
        if size > 1 and not self.collectives:
            raise BackendError(f"tensor_parallel_size: {size} is not possible on {self.name}; possible is 1")

    def communicator_bytes(self, size: int) -> int:
        """Estimate the bytes of device memory that `collectives` takes for `size` ranks, before they are joined."""
        return 0

    @abstractmethod
    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialized host tensor that can be copied to the device asynchronously."""

    @abstractmethod
    def enqueue(self, work: Callable[[], T]) -> Pending[T]:
        """Run `work` after all work enqueued before; the kernels that it calls enter the device's queue in that order.

        Devices with a queue of their own call `work` at once, others hand it to a thread. It runs in torch's inference
        mode.
        """

    def deliver(self) -> None:  # noqa: B027 - a device whose work is queued at once has delivered it
        """Let threads that wait for earlier work continue. Enqueued work calls it right before its kernels."""

    def copy_all(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source to its target on the device. Call it within enqueued work."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    @abstractmethod
    def fetch(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Event:
        """Copy a device tensor to a `host_buffer` of its shape and dtype. Call it within enqueued work.

        The copy holds the tensor's value after all work queued so far. Later work may overwrite or free the tensor.
        Copies complete in order: the returned event covers all copies up to this one.
        """

    @abstractmethod
    def span(self) -> Span:
        """Start a time span on the device's clock."""

    @property
    def lengths_updater(self) -> str:
        """Name of what updates the lengths of captured attention; "" if attention reads none from the host."""
        return ""

    def take_lengths_lags(self) -> Sequence[float]:
        """Return the seconds from each replay's launch to the end of its update of lengths, since the last call."""
        return ()

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all queued work is complete."""

    def profiler(self, folder: Path) -> DeviceProfiler | None:
        """Start the device's profiler once all queued work is complete. None: the runner times the kernels itself.

        folder: an empty folder for its files.

        Raises ImportError, OSError or RuntimeError if it does not start.
        """
        return None

    def capture(
        self, step: Callable[[int], torch.Tensor], largest: int, *, decode: bool, buckets: Sequence[int] = ()
    ) -> Captured | None:
        """Capture a step as one dispatch. Return None if the device cannot capture these batches.

        step: calls the kernels of a batch with the given number of rows, at most `largest`.
        decode: each row is one token of a different request. False: any batch.
        buckets: row counts of decode steps; () for those of the settings.

        The batch's memory must stay at its address while the result is in use. During the capture it must hold a
        harmless batch. Raises CaptureError if the device refuses.
        """
        return None
