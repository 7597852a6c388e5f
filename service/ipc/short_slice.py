"""Short scheduler slices for threads that run briefly next to threads that compute for long.

On Linux, a thread that wakes up does not get the core at once, unless the running thread has used its slice of about 1
to 3 ms. A thread that has requested a shorter slice gets the core sooner (EEVDF, Linux 6.12: sched_setattr(2),
sched_runtime of SCHED_OTHER). It gets no more processor time.

A thread runs its slice undisturbed unless a thread with a shorter slice wakes up on its core. Request a slice as long
as the thread's own work after a wake-up: with a shorter one, the threads that it wakes would interrupt it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SECONDS = 0.0001
"""Minimum slice that Linux accepts."""
ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""Layout of struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}


def request_slice(seconds: float = SECONDS) -> bool:
    """Request a slice for the calling thread and for threads that it starts later. Return False if the system cannot.

    seconds: length of the slice; 0 restores the system's default.

    Linux before 6.12 accepts the call and ignores it.
    """
    number = _SET_ATTRIBUTES.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    attributes = ATTRIBUTES.pack(
        ATTRIBUTES.size, os.SCHED_OTHER, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, int(seconds * 1e9), 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
