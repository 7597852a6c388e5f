"""Base of devices with streams, over the torch module that serves them (torch.cuda, torch.npu).

Steps run in order on one stream. Results for the host are copied on a second stream, concurrently with the next step.
The host waits for these copies only. Evicted blocks and states are saved to host memory and loaded from it on two
further streams, so that a save does not wait for the loads before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic

import torch

from npuserve.kernels.registry import Span
from npuserve.npu.backends.base import Backend, BackendError, DeviceSettings, Event, Pending, T
from npuserve.npu.backends.cache_layout import CacheLayout
from npuserve.npu.backends.capabilities import Capabilities
from npuserve.npu.backends.memory import DeviceMemory
from npuserve.npu.backends.weight_layout import WeightLayout

log = logging.getLogger(__name__)

MIN_HELD_BYTES = 4 << 30
"""Less memory is held by drivers, and by the contexts of this process."""
MIN_RISE_BYTES = 16 << 20
"""Free memory that rises by less in a second does not rise."""
CACHE_PERCENT = 90
"""Part of the free memory that a cache of unset size takes. The rest is for graphs, operator workspaces and
fragmentation of the pools."""
QUIET_SECONDS = 5
MAX_RELEASE_SECONDS = 60
"""The memory of a killed process returns late: within 50 s on an NPU
(https://github.com/vllm-project/vllm-ascend/issues/7412)."""


class QueuedWork(Generic[T]):
    """Work whose kernels are in the stream's queue."""

    __slots__ = ("_result",)

    def __init__(self, result: T):
        self._result = result

    def wait(self) -> T:
        return self._result

    def done(self) -> bool:
        return True


class HostCopy:
    """Copy between device and host in progress.

    staged: what the copy needs, kept until the copy is complete.
    events: returned to `pool` then; the last one marks the end of the copy.
    reach: waits for an event.
    """

    __slots__ = ("_events", "_pool", "_reach", "_staged")

    def __init__(self, staged: object, events: list[Any], pool: list[Any], reach: Callable[[Any], None]):
        self._staged: object | None = staged
        self._events = events
        self._pool = pool
        self._reach = reach

    def wait(self) -> None:
        if self._staged is not None:
            self._reach(self._events[-1])
            self._pool.extend(self._events)
            self._staged = None

    def done(self) -> bool:
        return self._staged is None or bool(self._events[-1].query())


class StreamCopies:
    """Copies beside the steps of a backend: see `SideCopies`.

    streams, main, pool, reach: of the backend. saves, loads: streams of the copies.
    """

    def __init__(self, streams: Any, main: Any, pool: list[Any], reach: Callable[[Any], None]):
        self._streams = streams
        self._main = main
        self._pool = pool
        self._reach = reach
        self.saves = streams.Stream()
        self.loads = streams.Stream()

    def to_host(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> HostCopy:
        saved = self._take_event()
        passed = self._take_event()
        self._copy(self.saves, targets, sources)
        saved.record(self.saves)
        self._main.wait_event(saved)
        passed.record(self._main)  # `saved` may be recorded again only then
        return HostCopy([targets, sources], [saved, passed], self._pool, self._reach)

    def to_device(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], is_first: bool
    ) -> HostCopy:
        events = [self._take_event()]
        if is_first:
            begin = self._take_event()
            begin.record(self._main)  # steps in flight may use the blocks for their previous owners
            self.loads.wait_event(begin)
            events.insert(0, begin)
        self._copy(self.loads, targets, sources)
        events[-1].record(self.loads)
        return HostCopy([targets, sources], events, self._pool, self._reach)

    def _take_event(self) -> Any:
        return self._pool.pop() if self._pool else self._streams.Event()

    def _copy(self, stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with self._streams.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)


class DeviceSpan:
    """Time span between two events of `pool`; `read` returns them to the pool."""

    __slots__ = ("_events", "_pool", "_stream")

    def __init__(self, streams: Any, pool: list[tuple[Any, Any]], stream: Any):
        self._pool = pool
        self._stream = stream
        self._events = pool.pop() if pool else tuple(streams.Event(enable_timing=True) for _ in range(2))
        self._events[0].record(stream)

    def stop(self) -> None:
        self._events[1].record(self._stream)

    def read(self) -> float:
        begin, end = self._events
        seconds = float(begin.elapsed_time(end)) / 1000
        self._pool.append(self._events)
        return seconds


class StreamMemory(DeviceMemory):
    """Memory of a device with streams. streams: see `StreamBackend`."""

    def __init__(self, streams: Any, device: torch.device):
        self._streams = streams
        self._device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(*shape, dtype=dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            wanted = torch.Size(shape).numel() * dtype.itemsize >> 20
            raise BackendError(
                f"device: no {wanted} MiB of device memory are left of {self.available() >> 20} MiB that are "
                "free: a smaller kv_cache_memory, max_num_batched_tokens or decode_buckets takes less") from error

    def available(self) -> int:
        free: int = self._streams.mem_get_info(self._device)[0]
        cached: int = self._streams.memory_reserved(self._device) - self._streams.memory_allocated(self._device)
        return free + cached

    def wait(self) -> None:
        """Wait until the free memory has not risen for QUIET_SECONDS, at most MAX_RELEASE_SECONDS.

        Return at once if others hold little memory.
        """
        held = self._held_by_others()
        if held < MIN_HELD_BYTES:
            return
        log.info("other processes hold %.1f GiB of the device's memory: waiting until it rises no more", held / 2**30)
        quiet_seconds = 0
        for _ in range(MAX_RELEASE_SECONDS):
            time.sleep(1.0)
            now_held = self._held_by_others()
            quiet_seconds = 0 if now_held < held - MIN_RISE_BYTES else quiet_seconds + 1
            held = min(held, now_held)
            if held < MIN_HELD_BYTES or quiet_seconds == QUIET_SECONDS:
                return

    def _held_by_others(self) -> int:
        """Return the bytes of the device's memory that are neither free nor in this process's pools."""
        return taken_bytes(self._streams, self._device) - int(self._streams.memory_reserved(self._device))

    def cache_share(self, free: int) -> int:
        """Return the part of `free` for a cache whose size is not set."""
        return free * CACHE_PERCENT // 100


class StreamBackend(Backend):
    """Backend on top of a torch device module.

    streams: the module; its device must be set and available.
    side_streams: streams of copies.
    """

    pinned = True
    """Host buffers are allocated in pinned memory."""

    def __init__(
        self, streams: Any, device: torch.device, settings: DeviceSettings, capabilities: Capabilities
    ) -> None:
        super().__init__(settings, capabilities)
        self.device = device
        self.memory = StreamMemory(streams, device)
        self.weights = WeightLayout(self.memory.empty)
        self.cache = CacheLayout()
        self.threads = settings.threads or 1
        self._streams = streams
        self._stream = streams.Stream()
        self._copies = streams.Stream()
        self.side_streams: list[Any] = [self._copies]
        self._pool = streams.graph_pool_handle()
        streams.set_stream(self._stream)
        self._spans: list[tuple[Any, Any]] = []
        self._events: list[Any] = []

    @classmethod
    def available(cls) -> bool:
        return not cls.unavailable()

    @staticmethod
    def check_count(place: tuple[int, int], count: int, visible: str) -> None:
        """Raise BackendError if there are fewer devices than ranks of this machine.

        count: number of devices.
        visible: variable that selects them.
        """
        if place[1] > max(count, 1):
            raise BackendError(
                f"tensor_parallel_size: {place[1]} ranks of this host need as many devices, and {count} "
                f"{'is' if count == 1 else 'are'} visible here ({visible}); possible is 1 to {max(count, 1)} a host")

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=self.pinned)

    def enqueue(self, work: Callable[[], T]) -> Pending[T]:
        with self._streams.stream(self._stream), torch.inference_mode():
            return QueuedWork(work())

    def fetch(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Event:
        staged = tensor.clone(memory_format=torch.contiguous_format)
        begin, end = events = [self._events.pop() if self._events else self._streams.Event() for _ in range(2)]
        begin.record(self._stream)
        self._copies.wait_event(begin)
        with self._streams.stream(self._copies):
            buffer.copy_(staged, non_blocking=True)
        end.record(self._copies)
        return HostCopy(staged, events, self._events, self.reach)

    def side_copies(self) -> StreamCopies:
        copies = StreamCopies(self._streams, self._stream, self._events, self.reach)
        self.side_streams += [copies.saves, copies.loads]
        return copies

    def reach(self, event: Any) -> None:
        """Wait until the device has reached an event of `streams`. Raises RuntimeError if work before it failed."""
        event.synchronize()

    def span(self) -> Span:
        return DeviceSpan(self._streams, self._spans, self._stream)

    def synchronize(self) -> None:
        self._streams.synchronize()


def taken_bytes(streams: Any, device: torch.device) -> int:
    """Return the bytes of the device's memory that are not free."""
    free, total = streams.mem_get_info(device)
    return int(total - free)
