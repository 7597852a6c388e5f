"""The CPU: work is done when a call returns, so streams and events are nearly nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from npuserve.kernels.native import LANES, Arena, library, record
from npuserve.kernels.native import available as built
from npuserve.kernels.native.layout import key_shape, value_shape
from npuserve.kernels.native.packed import PackedWeight, Weight, packed_words
from npuserve.kernels.registry import GOLDEN, HostSpan, Span
from npuserve.npu.backends.base import Backend, BackendError, Captured, Event

_TORCH_THREADS = torch.get_num_threads()
"""What torch would take, before anyone sets it: the environment may say so."""

_CGROUP = Path("/sys/fs/cgroup")


class Done:
    """An event of a device whose work is done when it is queued."""

    def wait(self) -> None:
        return


class CpuBackend(Backend):
    """native: with the kernels in C++, which read weights and KV cache in their own layouts; without them, the golden
    functions serve. Those are torch's own matrix products, whose sums may depend on the number of rows: only the native
    kernels are deterministic."""

    name = "cpu"
    dtypes = ("float32", "bfloat16")
    vocabulary_tile = 64
    block_size = 16

    def __init__(self, native: bool = built()) -> None:
        self.device = torch.device("cpu")
        self.kernels = self.name if native else GOLDEN
        self.deterministic = native
        self._arena = Arena() if native else None
        self.block_multiple = LANES if native else 1
        self.threads = self._threads(0)

    @classmethod
    def available(cls) -> bool:
        return True

    def set_threads(self, count: int) -> None:
        self.threads = self._threads(count)
        if self._arena is None:
            torch.set_num_threads(self.threads)
        else:
            library().set_threads(self.threads)
            torch.set_num_threads(1)  # what is left to it is small, and its threads would be in the way

    def _threads(self, count: int) -> int:
        return count or min(_TORCH_THREADS, usable_cores())

    def weight(self, n: int, k: int, dtype: torch.dtype) -> Weight:
        if self._arena is None:
            return super().weight(n, k, dtype)
        return PackedWeight(self._arena.zeros((packed_words(n, k, dtype),), torch.int32), n, k, dtype)

    def weight_bytes(self, n: int, k: int, dtype: torch.dtype) -> int:
        return super().weight_bytes(n, k, dtype) if self._arena is None else 4 * packed_words(n, k, dtype)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return super().empty(shape, dtype) if self._arena is None else self._arena.zeros(shape, dtype)

    def cache_shapes(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes = num_blocks, block_size, kv_heads, head_dim, dtype
        return super().cache_shapes(*sizes) if self._arena is None else (key_shape(*sizes), value_shape(*sizes))

    def memory_available(self) -> int:
        return min([_meminfo_available(), *_cgroup_rooms(_CGROUP)])

    def kv_cache_share(self, free: int) -> int:
        """A quarter, for others live here too, and at most 4 GiB, which a start must write."""
        return min(free // 4, 4 << 30)

    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        if asked == "auto":
            return "bfloat16" if checkpoint == "bfloat16" else "float32"
        if asked not in self.dtypes:
            raise BackendError(f"dtype: {asked!r} is not one of auto, {', '.join(self.dtypes)}")
        return asked

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self) -> Event:
        return Done()

    def span(self) -> Span:
        return HostSpan()

    def synchronize(self) -> None:
        return

    def capture(self, step: Callable[[], torch.Tensor]) -> Captured | None:
        return record(step) if self._arena is not None else None


BACKEND = CpuBackend


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _words(_CGROUP / "cpu.max")  # version 2: "<microseconds or max> <period>"
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    quota, period = _words(_CGROUP / "cpu/cpu.cfs_quota_us"), _words(_CGROUP / "cpu/cpu.cfs_period_us")
    if quota and period and int(quota[0]) > 0:
        cores = min(cores, -(-int(quota[0]) // int(period[0])))
    return max(cores, 1)


def _meminfo_available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _cgroup_rooms(root: Path) -> list[int]:
    """What the control group (version 2, version 1) still leaves, file cache that can be dropped counting as free."""
    rooms = []
    for limit, usage, stat, cache in (
        (root / "memory.max", root / "memory.current", root / "memory.stat", "inactive_file"),
        (
            root / "memory/memory.limit_in_bytes",
            root / "memory/memory.usage_in_bytes",
            root / "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limits, used = _words(limit), _words(usage)
        if limits and used and limits[0].isdigit():
            words = _words(stat)
            droppable = int(words[words.index(cache) + 1]) if cache in words else 0
            rooms.append(max(int(limits[0]) - int(used[0]) + droppable, 0))
    return rooms


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
