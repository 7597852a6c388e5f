"""Limits of this process's control group, by version 2 and version 1.

The limits of all ancestors of a group apply too. A process in a control group namespace sees its own group as the root;
elsewhere, as in a systemd unit, /proc/self/cgroup names the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def core_quotas() -> list[int]:
    """Return the quotas of cores, rounded up; empty without a quota."""
    quotas = [_words(group / "cpu.max") for group in _groups("")]  # "<microseconds or max> <period>"
    quotas += [_words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us") for group in _groups("cpu")]
    return [-(-int(quota[0]) // int(quota[1])) for quota in quotas if len(quota) == 2 and quota[0].isdigit()]


def free_memory() -> list[int]:
    """Return the free bytes below each limit; empty without a limit. Inactive file cache counts as free."""
    free = [_free(group, "memory.max", "memory.current", "inactive_file") for group in _groups("")]
    free += [_free(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
             for group in _groups("memory")]
    return [count for count in free if count is not None]


def _free(group: Path, limit: str, usage: str, cache: str) -> int | None:
    limits, used, stat = (_words(group / name) for name in (limit, usage, "memory.stat"))
    if not limits or not used or not limits[0].isdigit():
        return None
    droppable = int(stat[stat.index(cache) + 1]) if cache in stat else 0
    return max(int(limits[0]) - int(used[0]) + droppable, 0)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the root and of each group down to this process's. Folders may be missing.

    controller: name of a controller of version 1; "" for version 2.
    """
    root = ROOT / controller
    yield root
    for line in _lines(MEMBERSHIP):  # "<hierarchy>:<controllers>:<path>"
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(","):
            names = [name for name in path.split("/") if name]
            yield from (root.joinpath(*names[:depth]) for depth in range(1, len(names) + 1))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()
