"""CPU backend: one thread runs the queue of steps; the kernels that it calls are complete when the call returns."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, Generic

import torch

from npuserve.kernels.int4 import Grouping, Int4, PackedInt4
from npuserve.kernels.native import LANES, Arena, NotRecordable, Program, layout, library, record, unavailable_text
from npuserve.kernels.native import available as built
from npuserve.kernels.native.arena import can_populate, populate
from npuserve.kernels.native.choice import CpuKernels, CpuKernelSettings, choose
from npuserve.kernels.native.packed import NIBBLES_MULTIPLE, Matrix, PackedWeight, packed_words
from npuserve.kernels.registry import GOLDEN, HostSpan, Span
from npuserve.npu import control_group
from npuserve.npu.backends.base import (
    DEFAULT_SETTINGS,
    Backend,
    BackendError,
    Captured,
    CaptureError,
    DeviceSettings,
    Event,
    Pending,
    RowLengths,
    T,
)
from npuserve.npu.backends.cache_layout import CacheLayout
from npuserve.npu.backends.capabilities import Capabilities
from npuserve.npu.backends.memory import DeviceMemory, free_host_memory
from npuserve.npu.backends.weight_layout import WeightLayout
from npuserve.npu.notices import Notice

_TORCH_THREADS = torch.get_num_threads()
"""torch's default, read before anything sets it: environment variables may define it."""

_MAX_EXIT_SECONDS = 60.0
"""Maximum time for which the interpreter's exit waits for running kernels."""

CACHE_DIVISOR = 4
"""A cache of unset size takes a quarter of the free memory: other processes run on the host."""
MAX_CACHE_BYTES = 4 << 30
"""Maximum of a cache of unset size: its pages must be cleared."""


class CompletedEvent:
    """Event of a device whose work is complete when it is queued."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


class Task(Generic[T]):
    """Work for the queue's thread, which calls `run` and then `release`.

    `wait` blocks other threads until the release. The queue's thread gets the result of an earlier task at once.
    """

    __slots__ = ("_error", "_pending", "_result", "_thread", "_work")

    def __init__(self, work: Callable[[], T]):
        self._work: Callable[[], T] | None = work
        self._error: BaseException | None = None
        self._thread = 0
        self._pending = threading.Lock()
        self._pending.acquire()

    def run(self) -> None:
        assert self._work
        self._thread = threading.get_ident()
        try:
            self._result = self._work()
        except BaseException as error:  # `wait` raises it
            self._error = error
        self._work = None

    def release(self) -> None:
        self._pending.release()

    def wait(self) -> T:
        if threading.get_ident() != self._thread:
            with self._pending:
                pass
        if self._error:
            raise self._error
        return self._result

    def done(self) -> bool:
        return not self._pending.locked()


class Queue:
    """Thread that runs tasks in order until it receives None. `live`: queues whose thread has started.

    A task is released only when the next task reaches its kernels, which need no interpreter lock (`Backend.deliver`),
    or when the queue is empty. If it were released earlier, the thread that waits for the step would take the
    interpreter lock, and the kernels of the next step would start only after that thread's own work.
    """

    live: ClassVar[weakref.WeakSet[Queue]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        self._unreleased: Task[Any] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread."""
        self.thread = threading.Thread(target=self.run_tasks, name="npuserve-cpu", daemon=True)
        self.live.add(self)
        self.thread.start()

    def close(self) -> None:
        """End the thread after its current task. Waiting tasks are dropped."""
        self._closed = True
        self.tasks.put(None)

    @torch.inference_mode()
    def run_tasks(self) -> None:
        """Run the tasks of the queue until it is closed. This is the thread's work."""
        while True:
            if self.tasks.empty():
                self.release()
            task = self.tasks.get()
            if task is None or self._closed:
                self.release()
                return
            task.run()
            self.release()
            self._unreleased = task
            del task  # so that its result is freed when the task is released, not when the next one arrives

    def release(self) -> None:
        """Release the previous task if it is not released yet. Call it only from the thread."""
        if self._unreleased:
            self._unreleased.release()
            self._unreleased = None


@atexit.register
def _finish() -> None:
    """Wait for the running kernels, since the interpreter frees the memory that they use when it exits."""
    queues = list(Queue.live)
    for queue in queues:
        queue.close()
    for queue in queues:
        if queue.thread is not None:
            queue.thread.join(_MAX_EXIT_SECONDS)


class CapturedProgram:
    """Program of the native kernels, which can run any number of its rows."""

    def __init__(self, program: Program, largest: int):
        self._program = program
        self.largest = largest

    def size(self, rows: int) -> int:
        return rows

    def replay(
        self, rows: int, context_lens: Sequence[int], cu_seqlens: Sequence[int] = (), further: Sequence[RowLengths] = ()
    ) -> torch.Tensor:
        return self._program.replay(rows)

    def replay_timed(
        self, rows: int, context_lens: Sequence[int]
    ) -> tuple[torch.Tensor, list[tuple[str, float]]]:
        return self._program.replay_timed(rows)


class HostMemory(DeviceMemory):
    """Memory of the host.

    ranks: ranks of this machine, which share it.
    arena: gives out memory for the native kernels; None for torch's own.
    """

    def __init__(self, ranks: int, arena: Arena | None):
        self._ranks = ranks
        self._arena = arena

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype) if self._arena is None else self._arena.empty(shape, dtype)

    def available(self) -> int:
        return free_host_memory() // self._ranks

    def cache_share(self, free: int) -> int:
        """Return the part of `free` for a cache whose size is not set."""
        return min(free // CACHE_DIVISOR, MAX_CACHE_BYTES)

    @property
    def fresh_is_zero(self) -> bool:
        return self._arena is not None and can_populate()

    def populate(self, tensor: torch.Tensor) -> None:
        if self.fresh_is_zero:
            populate(tensor)

    @contextmanager
    def sharing(self, file: int, *, filled: bool) -> Iterator[bool]:
        if self._arena is None or not _shares(file, filled):
            yield False
            return
        arena = self._arena
        self._arena = Arena(file)
        try:
            yield True
        finally:
            self._arena = arena


class NativeWeights(WeightLayout):
    """Weights in the panels that the native kernels read."""

    def allocate(self, n: int, k: int, dtype: torch.dtype) -> Matrix:
        return PackedWeight.allocate(n, k, dtype, memory=self._empty)

    def nbytes(self, n: int, k: int, dtype: torch.dtype) -> int:
        return 4 * packed_words(n, k, dtype)

    def allocate_nibbles(self, n: int, k: int) -> Matrix:
        if k % NIBBLES_MULTIPLE:
            return super().allocate_nibbles(n, k)
        return PackedWeight.allocate_nibbles(n, k, self._empty)

    def nibbles_bytes(self, n: int, k: int) -> int:
        if k % NIBBLES_MULTIPLE:
            return super().nibbles_bytes(n, k)
        return 4 * packed_words(n, k, torch.int8, nibbles=True)

    def allocate_int4(self, n: int, k: int, grouping: Grouping) -> Int4:
        return PackedInt4.allocate(n, k, grouping, self._empty)

    def int4_bytes(self, n: int, k: int, grouping: Grouping) -> int:
        return grouping.packed_bytes(n, k)


class NativeCache(CacheLayout):
    """KV cache as the native kernels read it."""

    def shapes(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes = num_blocks, block_size, kv_heads, head_dim, dtype
        return layout.key_shape(*sizes), layout.value_shape(*sizes)

    def scale_shape(self, num_blocks: int, block_size: int, kv_heads: int) -> tuple[int, ...]:
        return layout.scale_shape(num_blocks, block_size, kv_heads)

    def read(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return layout.read_slots(keys, values, slots, head_dim)

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, new_keys: torch.Tensor,
        new_values: torch.Tensor,
    ) -> None:
        layout.write_slots(keys, values, slots, new_keys, new_values)


class CpuBackend(Backend):
    """CPU backend.

    native: use the C++ kernels, which read weights and KV cache in their own layouts; False: use the golden functions.
        Only the native kernels are deterministic: sums in torch's GEMMs may depend on the number of rows.
    capabilities: those of the class by default, or those of a device that the golden functions stand for.
    """

    name = "cpu"
    capabilities = Capabilities(
        dtypes=("float32", "bfloat16"), vocabulary_tile=64, int8_zeros=True, int4=True, w4a8=True, experts=True,
        block_size=128, cache_dtypes=(torch.int8,), fixed_state=True, collectives="gloo",
        shares_memory=True)

    def __init__(
        self, native: bool = built(), settings: DeviceSettings = DEFAULT_SETTINGS,
        capabilities: Capabilities | None = None,
    ) -> None:
        super().__init__(settings, replace(
            capabilities or type(self).capabilities, deterministic=native, rounds_draft_head=native,
            block_multiple=LANES if native else 1))
        self.device = torch.device("cpu")
        self.kernels = self.name if native else GOLDEN
        self._is_native = native
        self.memory = HostMemory(settings.place[1], Arena() if native else None)
        self.weights = NativeWeights(self.memory.empty) if native else WeightLayout(self.memory.empty)
        self.cache = NativeCache() if native else CacheLayout()
        self._queue = Queue()
        self.threads = settings.threads or max(1, min(_TORCH_THREADS, usable_cores()) // settings.place[1])
        self._set_up_thread: Callable[[], None] = lambda: None  # first task of the thread
        if settings.threads is not None:
            self._set_up_threads()

    @classmethod
    def available(cls) -> bool:
        return True

    @classmethod
    def preflight(cls, *, captures: bool, ranks: int = 1) -> Sequence[Notice]:
        return [] if built() else [Notice("warning", "kernels", unavailable_text())]

    def _set_up_threads(self) -> None:
        """Set the threads of this process to those of the settings: the kernels', torch's and the queue's."""
        everywhere = self._cores()
        pinned: list[int] = []
        if self._is_native:
            # With one core per thread each thread is pinned. Otherwise Linux may keep two threads on one core for
            # milliseconds while the other core is idle, after other processes have run on both. Fewer threads are not
            # pinned: servers that share the cores of a node would all choose the same ones.
            if 1 < self.threads == len(everywhere) or (self.settings.place[1] > 1 and self.threads >= len(everywhere)):
                pinned = [everywhere[i % len(everywhere)] for i in range(self.threads)]
            library().set_threads(self.threads, pinned)
        # Little work is left to torch beside native kernels, and its threads would compete for the cores.
        of_torch = 1 if self._is_native else self.threads
        torch.set_num_threads(of_torch)
        self._set_up_thread = partial(_set_up_thread, of_torch, pinned[:1] or everywhere)

    def _cores(self) -> list[int]:
        """Return the cores of this rank: its part of the cores that this process may use."""
        cores = sorted(os.sched_getaffinity(0))
        rank, size = self.settings.place
        each = max(1, len(cores) // size)
        return cores[rank * each % len(cores):][:each]

    def choose_kernels(self, wanted: CpuKernelSettings, inputs: int) -> CpuKernels | None:
        if not self._is_native:
            for name, value in (("cpu_gemm", wanted.gemm), ("cpu_weights", wanted.weights)):
                if value != "auto":
                    raise BackendError(f"{name}: {value!r} needs the native CPU kernels, which are not installed; "
                                       "only auto is possible")
            return None
        try:
            return self.enqueue(partial(choose, wanted, inputs)).wait()  # measured on the thread that computes steps
        except ValueError as error:
            raise BackendError(str(error)) from None

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def enqueue(self, work: Callable[[], T]) -> Pending[T]:
        if self._queue.thread is None:
            self._queue.start()
            weakref.finalize(self, self._queue.tasks.put, None)
            self._queue.tasks.put(Task(self._set_up_thread))
        task = Task(work)
        self._queue.tasks.put(task)
        return task

    def fetch(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Event:
        buffer.copy_(tensor)
        return CompletedEvent()

    def deliver(self) -> None:
        if threading.current_thread() is self._queue.thread:
            self._queue.release()

    def span(self) -> Span:
        return HostSpan()

    def synchronize(self) -> None:
        self.enqueue(lambda: None).wait()

    def capture(
        self, step: Callable[[int], torch.Tensor], largest: int, *, decode: bool, buckets: Sequence[int] = ()
    ) -> Captured | None:
        if not self._is_native:
            return None
        try:
            return CapturedProgram(record(lambda: step(largest)), largest)
        except NotRecordable as error:
            raise CaptureError(f"the step cannot be recorded: {error}") from error


BACKEND = CpuBackend


def _set_up_thread(threads: int, cpus: Sequence[int]) -> None:
    """Set torch's number of threads and the affinity of the calling thread."""
    torch.set_num_threads(threads)
    with suppress(OSError):  # forbidden in some sandboxes
        os.sched_setaffinity(0, cpus)


def _shares(file: int, filled: bool) -> bool:
    """Return False if the system cannot map a file with large pages, without which steps would be slower."""
    try:
        if not filled:
            os.ftruncate(file, 0)
        Arena(file).empty((1,), torch.uint8)
    except (MemoryError, OSError):
        return False
    return True


def usable_cores() -> int:
    """Return the number of cores that this process may use, by affinity and control group quota."""
    return max(1, min([len(os.sched_getaffinity(0)), *control_group.core_quotas()]))
