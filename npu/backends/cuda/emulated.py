"""Substitute for `torch.cuda` on a machine without a GPU: Triton's interpreter runs the kernels on CPU tensors.

It is as strict as a GPU, so that a mistake yields wrong data or an error:

- Work on the current stream runs at once, also its waits for events. A copy on another stream runs when an event
  recorded after it is waited for or was queried more than `MAX_QUERIES` times. Before that its destination holds NaN or
  the smallest integer.
- A graph reruns its step for each replay. Its output is overwritten with NaN or the smallest integer once a graph of
  the same pool is replayed.
- A graph must not copy a number from the device.

It proves calls and numbers, not speed.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npuserve.npu.backends.cpu import CpuBackend

MAX_QUERIES = 2
"""Number of queries that report a copy as incomplete if nothing waits for it."""

MAX_BYTES = 4 << 30
"""Bytes of the emulated device's memory."""

MAX_DEVICES = 8
"""Number of emulated devices, one for each process of a group. They share the CPU's memory."""

_aten = torch.ops.aten
_WAITS = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default,
          _aten._unique2.default, _aten.is_nonzero.default}
"""Operators that block the host until the device is done."""


class Stream:
    """Queue of work. taken, done: number of items queued and run so far."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.taken = self.done = 0
        _streams.add(self)

    def put(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.taken += 1

    def wait_event(self, event: Event) -> None:
        if self is _current:
            event.synchronize()
        else:
            self.put(event.synchronize)

    def run(self, until: int) -> None:
        """Run items until `until` items are done."""
        while self.done < until:
            self.done += 1
            self.queue.popleft()()


class Event:
    """Marker in a stream's queue."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing = enable_timing
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream = stream
        self._after = stream.taken
        self._queries = 0
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        if self._stream is None:
            raise RuntimeError("emulated CUDA: wait for an event that was not recorded")
        self._stream.run(self._after)

    def query(self) -> bool:
        assert self._stream is not None
        self._queries += 1
        if self._queries > MAX_QUERIES:
            self.synchronize()
        return self._stream.done >= self._after

    def elapsed_time(self, end: Event) -> float:
        """Return the time between two events in milliseconds."""
        if not (self._timing and end._timing):
            raise RuntimeError("emulated CUDA: elapsed_time needs events created with enable_timing")
        return (end._time - self._time) * 1000


class _OnStream(TorchDispatchMode):
    """Mode that queues copies on a stream and refuses other operators."""

    def __init__(self, on: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on = on

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not _aten.copy_.default:
            raise RuntimeError(f"emulated CUDA: {function} on a stream that accepts only copies")
        to, source = args[:2]
        _spoil(to)
        self._on.put(torch.inference_mode()(lambda: to.copy_(source)))
        return to


class _Capturing(TorchDispatchMode):
    """Mode that refuses operators that block on the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _WAITS:
            raise RuntimeError(f"emulated CUDA: operation not permitted when stream is capturing: {function}")
        return function(*args, **(kwargs or {}))


_is_recorded = False
_streams: WeakSet[Stream] = WeakSet()
_current: Stream | None = None


def set_stream(new: Stream) -> None:
    global _current
    _current = new


def stream(new: Stream) -> AbstractContextManager[Any]:
    return nullcontext() if new is _current else _OnStream(new)


def synchronize() -> None:
    for each in list(_streams):
        each.run(each.taken)


def graph_pool_handle() -> list[Tensor]:
    """Return an empty pool; it holds the outputs of replays."""
    return []


def record(work: Callable[[], Tensor], stream: Stream, pool: list[Tensor]) -> Callable[[], Tensor]:
    """Return a replay function as `graphs.record` does. `work` first runs at the first replay.

    That of the first graph of a process also runs now: to read the kernels' sources takes seconds, which must not count
    as time of a step.
    """
    global _is_recorded
    if not _is_recorded:
        work()
        _is_recorded = True
    kept: Tensor | None = None

    def replay() -> Tensor:
        nonlocal kept
        with _Capturing():  # type: ignore[no-untyped-call]
            output = work()
        while pool:
            _spoil(pool.pop())
        kept = output.clone() if kept is None else kept.copy_(output)
        pool.append(kept)
        return kept

    return replay


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return min(CpuBackend().memory.available() // 2, MAX_BYTES), MAX_BYTES


def device_count() -> int:
    """Return the number of devices in CUDA_VISIBLE_DEVICES; MAX_DEVICES without the variable."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return MAX_DEVICES if visible is None else len([name for name in visible.split(",") if name.strip()])


def memory_reserved(device: Any = None) -> int:
    return 0


def memory_allocated(device: Any = None) -> int:
    return 0


def reset_peak_memory_stats(device: Any = None) -> None:
    return


def max_memory_reserved(device: Any = None) -> int:
    return 0


def empty_cache() -> None:
    return


def get_device_name(device: Any = None) -> str:
    return "emulated"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return the compute capability of Hopper."""
    return 9, 0


def _spoil(tensor: Tensor) -> None:
    """Fill a tensor with NaN or the smallest integer."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
