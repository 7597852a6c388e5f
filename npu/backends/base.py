"""Interface between devices and the rest of the server: the methods that runner, loader and memory plan call.

Each device's backend module defines one subclass of `Backend` and assigns it to `BACKEND`. No code outside this folder
and the kernel implementations refers to a device by name.

`Backend` starts the device, compares models and settings with it, queues work and captures steps. What does not change
is in `Capabilities`. Its parts own the memory (`DeviceMemory`), the layout of weights and KV cache in it
(`WeightLayout`, `CacheLayout`), and the meaning of errors (`DeviceErrors`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch

from npuserve.kernels.kv_cache import setting_of
from npuserve.kernels.native.choice import CpuKernels, CpuKernelSettings
from npuserve.kernels.registry import Span
from npuserve.npu.backends.cache_layout import CacheLayout
from npuserve.npu.backends.capabilities import Capabilities
from npuserve.npu.backends.device_profiler import DeviceProfiler
from npuserve.npu.backends.faults import DeviceErrors
from npuserve.npu.backends.memory import DeviceMemory
from npuserve.npu.backends.weight_layout import WeightLayout
from npuserve.npu.notices import Notice


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


RowLengths = tuple[Sequence[int], Sequence[int]]
"""Context lengths of a batch's rows, and cumulative tokens of the rows from 0 on."""

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Event(Protocol):
    """Marker in the device's queue."""

    def wait(self) -> None:
        """Block until the work queued before the marker is complete. Raises the device's error if that work failed."""

    def done(self) -> bool:
        """Return True if `wait` would not block."""


class SideCopies(Protocol):
    """Copies of device memory to and from host memory beside the steps. Call both within enqueued work.

    Each source is copied to its target. The returned event covers all of them.
    """

    def to_host(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Event:
        """Copy to host buffers what steps whose results are on the host have written.

        The copy does not wait for steps in flight. Work that is enqueued later waits for the copy.
        """

    def to_device(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], is_first: bool
    ) -> Event:
        """Copy from host buffers, after all earlier calls. Work that is enqueued later does not wait.

        is_first: copy after all work enqueued so far. False for a further part of a load, whose targets were unused
            when its first part was enqueued.
        """


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
        self, rows: int, context_lens: Sequence[int], cu_seqlens: Sequence[int] = (), further: Sequence[RowLengths] = ()
    ) -> torch.Tensor:
        """Run the step. Return the first `rows` rows of its output, [rows, ...], valid until the next replay.

        context_lens: lengths of all size(rows) rows, for devices whose attention reads lengths from the host.
        cu_seqlens: cumulative tokens of the rows from 0 on. Read only by a step captured for any batch.
        further: lengths of the batches that the step computes after this one, each with as many rows.
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

    place: (number of this rank on this machine, from 0; number of ranks on it). Unless `Capabilities.shares_memory`,
        each rank uses the visible device with its number.
    threads: host threads for the device's work; 0: all cores that this process may use; None: as the process has them.
    state_dtype: dtype of the states of linear attention; "auto": see `Capabilities.state_dtypes`.
    decode_buckets: row counts of the captured decode steps; () for the device's own choice.
    capture_mode: whether steps are captured.
    capture_chunks: steps with chunks of prompts are captured too, where the device captures decode steps separately.
    int8_levels: replaces `Capabilities.int8_levels`; 0 for the device's own.
    """

    place: tuple[int, int] = (0, 1)
    threads: int | None = None
    state_dtype: str = "auto"
    decode_buckets: tuple[int, ...] = ()
    capture_mode: CaptureMode = "auto"
    capture_chunks: bool = True
    int8_levels: float = 0.0


DEFAULT_SETTINGS = DeviceSettings()


ROUNDED_STATES = (", since a state that is rounded after every token, so that answers do not depend on chunks, "
                  "loses more than the activations do")
"""Why a device whose answers do not depend on chunks has no state in bfloat16."""


class Backend(ABC):
    """A device.

    name: name of the device in settings and messages.
    kernels: label of its kernel implementations in the registry.
    own_kernels: kernel -> function in place of its registered implementation, chosen when the device was opened.
    capabilities: what it computes, and its limits. The class has those of the newest device, a backend its own.
    errors: errors of its software, and what they mean.
    memory, weights, cache: its memory, and the layout of weights and KV cache in it.
    settings: how the device is used.
    device: torch's device of its tensors.
    threads: number of host threads for the device's work.
    """

    name: ClassVar[str]
    errors: ClassVar[DeviceErrors] = DeviceErrors()
    kernels: str
    own_kernels: Mapping[str, Callable[..., Any]] = {}
    capabilities: Capabilities
    memory: DeviceMemory
    weights: WeightLayout
    cache: CacheLayout
    settings: DeviceSettings
    device: torch.device
    threads: int

    def __init__(self, settings: DeviceSettings = DEFAULT_SETTINGS, capabilities: Capabilities | None = None) -> None:
        """Take the settings. Raises BackendError for a `DeviceSettings.state_dtype` that the kernels do not support.

        capabilities: where they differ from those of the class.
        """
        own = capabilities or type(self).capabilities
        if settings.state_dtype not in ("auto", *own.state_dtypes):
            raise BackendError(f"state_dtype: {settings.state_dtype!r} is not possible on {self.name}"
                               f"{ROUNDED_STATES if settings.state_dtype == 'bfloat16' else ''}; possible are auto, "
                               f"{', '.join(own.state_dtypes)}")
        self.settings = settings
        self.capabilities = replace(own, int8_levels=settings.int8_levels or own.int8_levels)

    @classmethod
    @abstractmethod
    def available(cls) -> bool:
        """Return True if this machine has the device and its software."""

    @classmethod
    def unavailable(cls) -> str:
        """Return why the device is not `available` and how to fix it, in one sentence."""
        return f"{cls.name} not available on this machine"

    @classmethod
    def preflight(cls, *, captures: bool, ranks: int = 1) -> Sequence[Notice]:
        """Check versions, environment variables and the host, whether or not the device can be started.

        captures: steps are to be captured.
        ranks: number of ranks that share a model.
        """
        return ()

    def choose_kernels(self, wanted: CpuKernelSettings, inputs: int) -> CpuKernels | None:
        """Choose the CPU kernels of this process as `choice.choose` does; None if the device uses none.

        Call it before any weight is loaded or planned. Raises BackendError for settings that this machine does not
        support.
        """
        return None

    def bind_threads(self) -> str:
        """Bind this process's threads to processors near the device. Return what was done, as a sentence; "": nothing.

        Call it when all threads exist.
        """
        return ""

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        """Return the dtype for a setting, "auto" or a name, and the checkpoint's dtype. Raises BackendError."""
        if requested == "auto":
            return checkpoint if checkpoint in self.capabilities.dtypes else self.capabilities.dtypes[0]
        if requested not in (possible := (*self.capabilities.dtypes, *self.capabilities.explicit_dtypes)):
            raise BackendError(f"dtype: {requested!r} is not one of auto, {', '.join(possible)}")
        return requested

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the states of linear attention beside activations of `dtype`."""
        chosen = self.settings.state_dtype
        if chosen == "auto":
            first = self.capabilities.state_dtypes[0]
            chosen = first if getattr(torch, first) == dtype else "float32"
        return getattr(torch, chosen)  # type: ignore[no-any-return]

    def cache_dtype(self, requested: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the KV cache for activations of `dtype`: `dtype` for "auto", or that of a setting.

        Raises BackendError if it is not supported.
        """
        possible = {"auto": dtype} | {setting_of(cached): cached for cached in self.capabilities.cache_dtypes}
        if requested not in possible:
            named = f"possible are {', '.join(possible)}" if len(possible) > 1 else "only auto is possible"
            raise BackendError(f"kv_cache_dtype: {requested!r} is not possible on {self.name}; {named}")
        return possible[requested]

    def check_heads(self, head_dim: int, rotary_dim: int | None = None) -> None:
        """Raise BackendError for a head size, or rotated numbers of a head, that the kernels do not support."""
        return

    def check_experts(self, experts: int, top_k: int) -> None:
        """Raise BackendError for a mixture of experts that the kernels do not support.

        experts: number on a rank. top_k: number that compute a token.
        """
        return

    def check_ranks(self, size: int) -> None:
        """Raise BackendError if `size` ranks cannot share a model."""
        if size > 1 and not self.capabilities.collectives:
            raise BackendError(f"tensor_parallel_size: {size} is not possible on {self.name}; possible is 1")

    def communicator_bytes(self, size: int) -> int:
        """Estimate the bytes of device memory that `collectives` takes for `size` ranks, before they are joined."""
        return 0

    def lacks_operator(self, kernel: str, sizes: Sequence[int], dtype: torch.dtype) -> bool:
        """Return True if the kernel's implementation computes these sizes without the device's operator.

        That counts as a fallback.

        sizes: of `Layer.operator_sizes`. dtype: of the activations.
        """
        return False

    def reads_host_lengths(self, kernel: str, sizes: Sequence[int], dtype: torch.dtype) -> bool:
        """Return True if the kernel reads lengths of rows on the host, so that steps with chunks are not captured.

        sizes, dtype: as in `lacks_operator`.
        """
        return False

    def operator_bytes(self, kernel: str, sizes: Sequence[int], rows: int, tokens: int, itemsize: int) -> int:
        """Return the bytes that a kernel's operators take beside its inputs and outputs, in a step of `rows` rows.

        sizes: of `Layer.operator_sizes`. itemsize: bytes of a number of the activations.
        """
        return 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a large, long-lived tensor on the device."""
        return self.memory.empty(shape, dtype)

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

    def side_copies(self) -> SideCopies:
        """Return copies on queues of their own. Only for devices that have `Capabilities.offloads`."""
        raise NotImplementedError

    @abstractmethod
    def span(self) -> Span:
        """Start a time span on the device's clock."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all queued work is complete."""

    def profiler(self, folder: Path) -> DeviceProfiler | None:
        """Start the device's profiler once all queued work is complete. None: the runner times the kernels itself.

        folder: an empty folder for its files.

        Raises ImportError, OSError or RuntimeError if it does not start.
        """
        return None

    def captures_chunks(self, cache_dtype: torch.dtype) -> bool:
        """Return True if steps with chunks are captured, over a KV cache of this dtype."""
        return self.settings.capture_chunks

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

    @property
    def lengths_updater(self) -> str:
        """Name of what updates the lengths of captured attention; "" if attention reads none from the host."""
        return ""

    def take_lengths_lags(self) -> Sequence[float]:
        """Return the seconds from each replay's launch to the end of its update of lengths, since the last call."""
        return ()
