"""Attributes of Linux processes and threads: memory, death with the parent, core dumps, adoption of orphaned processes,
and the scheduler's slices.

Other systems lack prctl(2) and sched_setattr(2); there the functions that call them do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

_SET_DEATH_SIGNAL = 1
_GET_DUMPABLE = 3
_SET_DUMPABLE = 4
_SET_CHILD_SUBREAPER = 36
"""Operations of prctl(2)."""
SLICE_SECONDS = 0.0001
"""Minimum slice that Linux accepts."""
SLICE_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""Layout of struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}


def memory_bytes(pid: int | str = "self") -> tuple[int, int]:
    """Return the bytes of address space and of resident memory of a process. Raises OSError if it does not exist."""
    size, resident, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return size * resource.getpagesize(), resident * resource.getpagesize()


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends.

    The parent may have died before this call. The caller must detect this itself, for example by a pipe of which only
    the parent holds the other end.
    """
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def set_dumpable(dumpable: bool) -> None:
    """Allow or forbid core files of this process, and access to its memory and environment by other processes of the
    same user. An exec of another program resets it to allowed."""
    _prctl(_SET_DUMPABLE, int(dumpable))


def is_dumpable() -> bool:
    """Return the last value of `set_dumpable`; True on systems without it."""
    return _prctl(_GET_DUMPABLE) != 0


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, as process 1 of a container is by default."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def request_slice(seconds: float = SLICE_SECONDS) -> bool:
    """Request a slice for the calling thread and for threads that it starts later. Return False if the system cannot.

    seconds: length of the slice; 0 restores the system's default.

    On Linux, a thread that wakes up does not get the core at once, unless the running thread has used its slice of
    about 1 to 3 ms. A thread that has requested a shorter slice gets the core sooner (EEVDF, Linux 6.12:
    sched_setattr(2), sched_runtime of SCHED_OTHER). It gets no more processor time. Linux before 6.12 accepts the call
    and ignores it.

    A thread runs its slice undisturbed unless a thread with a shorter slice wakes up on its core. Request a slice as
    long as the thread's own work after a wake-up: with a shorter one, the threads that it wakes would interrupt it.
    """
    number = _SET_ATTRIBUTES.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    attributes = SLICE_ATTRIBUTES.pack(
        SLICE_ATTRIBUTES.size, os.SCHED_OTHER, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, int(seconds * 1e9), 0, 0)
    return bool(_libc().syscall(number, 0, attributes, 0) == 0)


def is_hangup_ignored() -> bool:
    """Return whether this process ignores SIGHUP, which a closed terminal sends, as under nohup."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


class OrphanReaper:
    """Reaper of adopted processes that have ended. It leaves the process's own children to their owners."""

    def __init__(self) -> None:
        self._zombies: frozenset[int] = frozenset()

    def reap(self, kept: Collection[int]) -> int:
        """Reap orphans that were zombies at the previous call too, and return their number. Call it about once a
        second.

        kept: process ids that are never reaped.

        A process that is still a zombie at the second call is not waited for by another thread.
        """
        before = self._zombies
        reaped = 0
        self._zombies = frozenset(_zombie_children()).difference(kept)
        for pid in self._zombies & before:
            with contextlib.suppress(ChildProcessError):
                reaped += os.waitpid(pid, os.WNOHANG)[0] == pid
        return reaped


def _zombie_children() -> list[int]:
    """Return the process ids of this process's children that ended and were not waited for."""
    children = []
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                children += [int(pid) for pid in (thread / "children").read_text().split()]
    return [pid for pid in children if _state(pid) == "Z"]


def _state(pid: int) -> str:
    """Return the letter of a process's state in /proc; "" for a process that does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _prctl(operation: int, argument: int = 0) -> int:
    if sys.platform != "linux":
        return 1
    zero = ctypes.c_ulong(0)
    return int(_libc().prctl(ctypes.c_int(operation), ctypes.c_ulong(argument), zero, zero, zero))
