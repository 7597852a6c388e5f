"""A stand-in for `torch.cuda` on a machine without a GPU: Triton's interpreter runs the kernels on the CPU's tensors.

It is strict where a GPU is, so that a mistake shows as wrong data or an error:

- What is handed to the current stream is done at once. A copy on any other stream is done when an event after it is
  waited for, or was asked for `QUERIES` times; until then its destination holds rubbish.
- A graph is its step, run again for each replay. Its output holds rubbish once a graph of the same pool is replayed.
- Nothing in a graph may ask the device for a number.

It proves calls and numbers, not speed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npuserve.kernels import triton
from npuserve.npu.backends.cpu import CpuBackend

log = logging.getLogger(__name__)

QUERIES = 2
"""How often a copy that is not waited for is said to be under way."""

MOST_BYTES = 4 << 30
"""Of the emulated device's memory."""

_aten = torch.ops.aten
_WAITS = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default,
          _aten._unique2.default, _aten.is_nonzero.default}
"""Operators for whose results the host waits."""

_active = False


def active() -> bool:
    return _active


def activate() -> None:
    """For the whole process, and for good. ImportError without triton."""
    global _active
    triton.interpret()
    if not _active:
        log.warning("emulated CUDA: proves calls and numbers, not speed")
    _active = True


class Stream:
    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.taken = self.done = 0
        _streams.add(self)

    def put(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.taken += 1

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def run(self, until: int) -> None:
        """Until so many of all pieces of work are done."""
        while self.done < until:
            self.done += 1
            self.queue.popleft()()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._timing = enable_timing
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream, self._after, self._asked, self._time = stream, stream.taken, 0, time.perf_counter()

    def synchronize(self) -> None:
        if self._stream is None:
            raise RuntimeError("emulated CUDA: an event is waited for that nobody recorded")
        self._stream.run(self._after)

    def query(self) -> bool:
        assert self._stream is not None
        self._asked += 1
        if self._asked > QUERIES:
            self.synchronize()
        return self._stream.done >= self._after

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        if not (self._timing and end._timing):
            raise RuntimeError("emulated CUDA: events of which the time is asked must be made with enable_timing")
        return (end._time - self._time) * 1000


class _Elsewhere(TorchDispatchMode):
    """Copies in its body are queued on a stream."""

    def __init__(self, on: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on = on

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not _aten.copy_.default:
            raise RuntimeError(f"emulated CUDA: {function} on a stream that takes copies alone")
        to, source = args[:2]
        _spoil(to)
        self._on.put(torch.inference_mode()(lambda: to.copy_(source)))
        return to


class _Captured(TorchDispatchMode):
    """Nothing in its body waits for the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _WAITS:
            raise RuntimeError(f"emulated CUDA: operation not permitted when stream is capturing: {function}")
        return function(*args, **(kwargs or {}))


_streams: WeakSet[Stream] = WeakSet()
_current: Stream | None = None


def set_stream(own: Stream) -> None:
    global _current
    _current = own


def stream(own: Stream) -> AbstractContextManager[Any]:
    return nullcontext() if own is _current else _Elsewhere(own)


def synchronize() -> None:
    for each in list(_streams):
        each.run(each.taken)


def graph_pool_handle() -> list[Tensor]:
    """What replays have left."""
    return []


def record(work: Callable[[], Tensor], stream: Stream, pool: list[Tensor]) -> Callable[[], Tensor]:
    """As `cuda_graphs.record`. Nothing is run before the first replay."""
    kept: Tensor | None = None

    def replay() -> Tensor:
        nonlocal kept
        with _Captured():  # type: ignore[no-untyped-call]
            output = work()
        while pool:
            _spoil(pool.pop())
        kept = output.clone() if kept is None else kept.copy_(output)
        pool.append(kept)
        return kept

    return replay


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return min(CpuBackend().memory_available() // 2, MOST_BYTES), MOST_BYTES


def memory_reserved(device: Any = None) -> int:
    return 0


def memory_allocated(device: Any = None) -> int:
    return 0


def get_device_name(device: Any = None) -> str:
    return "emulated"


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
