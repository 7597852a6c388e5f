"""Attributes of Linux processes and threads: memory, death with the parent, core dumps, adoption of orphaned processes,
and the scheduler's slices. Start and end of processes for the data of clients.

Other systems lack prctl(2) and sched_setattr(2); there the functions that call them do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import weakref
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_SET_DEATH_SIGNAL, _GET_DUMPABLE, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 3, 4, 36
"""Operations of prctl(2)."""
SLICE_SECONDS = 0.0001
"""Minimum slice that Linux accepts."""
SLICE_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""Layout of struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
KEPT_VARIABLES = frozenset({
    "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUTF8", "TMPDIR", "TZ"})
"""Environment variables that a process for the data of clients inherits. Other ones may hold secrets."""


def start_for_clients(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process for the data of clients, with pipes as stdin and stdout. Raises OSError."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, close its pipes and wait for its end."""
    process.kill()
    process.communicate()


class LineProcess:
    """Process for the data of clients that answers lines of its stdin by lines of its stdout, for one thread at a time.

    It is killed when this object is garbage-collected.

    command: the program and its arguments.
    start: the first line, without its newline.
    Raises OSError.
    """

    def __init__(self, command: Sequence[str], start: bytes):
        self.popen = start_for_clients(command)
        self.end = weakref.finalize(self, kill, self.popen)
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `read` shows
            self._write(start)

    def read(self) -> bytes:
        """Return the next line; without its newline if the process died."""
        assert self.popen.stdout
        return self.popen.stdout.readline()

    def call(self, line: bytes) -> bytes:
        """Send a line, given without its newline, and return the reply as `read`."""
        try:
            self._write(line)
        except BrokenPipeError:
            return b""
        return self.read()

    def _write(self, line: bytes) -> None:
        assert self.popen.stdin
        self.popen.stdin.write(line + b"\n")
        self.popen.stdin.flush()


def read_start() -> dict[str, Any]:
    """Prepare this process, which `LineProcess` started, and return the JSON value of its first line.

    The line has the key "dumpable", as for `set_dumpable`. The kernel ends this process by the signals of `limit_time`,
    and by SIGPIPE once its parent has ended. SIGINT and SIGTERM, which are sent to all processes of the server, are
    ignored: the parent ends this one.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    start: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    set_dumpable(start["dumpable"])
    return start


def write_line(line: bytes) -> None:
    """Write a line, given without its newline, to the parent's `LineProcess`."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def limit_time(seconds: float, max_wall_ratio: float) -> None:
    """Let the kernel end this process after `seconds` of processor time, or `max_wall_ratio` times as much real time.

    0: not at all. The handlers of SIGPROF and SIGALRM must be the default ones.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, max_wall_ratio * seconds)


def memory_bytes(pid: int | str = "self") -> tuple[int, int]:
    """Return the bytes of address space and of resident memory of a process. Raises OSError if it does not exist."""
    size, resident, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return size * resource.getpagesize(), resident * resource.getpagesize()


def limit_growth(max_bytes: int) -> None:
    """Limit this process's address space to its present size and `max_bytes`, until the next call of this function."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes()[0] + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


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
