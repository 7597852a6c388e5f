"""Linux process attributes: death with the parent, core dumps, and the adoption of orphaned processes.

Other systems lack prctl(2); there every function does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

_SET_DEATH_SIGNAL, _GET_DUMPABLE, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 3, 4, 36
"""Operations of prctl(2)."""
KEPT_VARIABLES = frozenset({
    "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUTF8", "TMPDIR", "TZ"})
"""Environment variables that a process for the data of clients inherits. Other ones may hold secrets."""


def kept_environment() -> dict[str, str]:
    """Return the variables of KEPT_VARIABLES that are set."""
    return {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}


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


class OrphanReaper:
    """Reaper of adopted processes that have ended. It leaves the process's own children to their owners."""

    def __init__(self) -> None:
        self._zombies: frozenset[int] = frozenset()

    def reap(self, own: Collection[int]) -> int:
        """Reap orphans that were zombies at the previous call too, and return their number. Call it about once a
        second.

        own: process ids that are never reaped.

        A process that is still a zombie at the second call is not waited for by another thread.
        """
        before, reaped = self._zombies, 0
        self._zombies = frozenset(_zombie_children()).difference(own)
        for pid in self._zombies & before:
            with contextlib.suppress(ChildProcessError):
                reaped += os.waitpid(pid, os.WNOHANG)[0] == pid
        return reaped


def _zombie_children() -> list[int]:
    """Return the process ids of this process's children that ended and were not waited for."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in (thread / "children").read_text().split()]
    return [pid for pid in found if _state(pid) == "Z"]


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
