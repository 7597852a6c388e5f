"""Threads that wake for a moment, beside others that compute for long.

Linux gives a thread that wakes the core at once only if what runs there has had its slice, some 1 to 3 ms, or if the
thread that wakes has asked for a shorter one (EEVDF, Linux 6.12: sched_setattr(2), sched_runtime of SCHED_OTHER). It
gets no more of the processor by that, only sooner.

With the core a thread gets the rest of its slice undisturbed, unless one with a shorter slice wakes there. So a thread
asks for as long as what it wakes for takes: if less, those whom it wakes take the core in the midst of it, each time.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SECONDS = 0.0001
"""The shortest that Linux takes."""
ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""size, sched_policy, sched_flags, sched_nice, sched_priority, sched_runtime, sched_deadline, sched_period."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}


def ask_for_it(seconds: float = SECONDS) -> bool:
    """For the calling thread, and for those that it starts from now on; 0 for the system's own. False where the system
    has no such thing; one that is older than it takes the call and changes nothing."""
    number = _SET_ATTRIBUTES.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    attributes = ATTRIBUTES.pack(
        ATTRIBUTES.size, os.SCHED_OTHER, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, int(seconds * 1e9), 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
