"""The CPU: work is done when a call returns, so streams and events are nearly nothing."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from npuserve.kernels.registry import HostSpan, Span
from npuserve.npu.backends.base import Backend, BackendError, Event

_CGROUP = Path("/sys/fs/cgroup")


class Done:
    """An event of a device whose work is done when it is queued."""

    def wait(self) -> None:
        return


class CpuBackend(Backend):
    """deterministic is False: the matrix products are torch's own, whose sums may depend on the number of rows."""

    name = "cpu"
    dtypes = ("float32", "bfloat16")
    vocabulary_tile = 64
    block_size = 16
    deterministic = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @classmethod
    def available(cls) -> bool:
        return True

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count or min(torch.get_num_threads(), usable_cores()))

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
