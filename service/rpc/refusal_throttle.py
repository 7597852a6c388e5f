"""Throttle of error replies, by client address.

A refused call costs a front end about a millisecond, and much more if its message is large, while a client needs little
to send the next one. After a burst, an address therefore gets at most `rate` refusals a second, and its refused calls
use at most MAX_WORK_SHARE of a core. A refused call waits for its reply and meanwhile occupies one of its connection's
concurrent streams, whose number is limited. Calls that are served are never delayed.

The algorithm is GCRA (generic cell rate algorithm, ITU-T I.371) with delay in place of loss.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar

BURST = 100
"""Refusals of one address that are sent without delay."""
MAX_SECONDS = 5.0
"""Maximum delay of a refusal."""
MAX_WORK_SHARE = 0.05
"""Share of a core for the work on refused calls of one address."""
MAX_ADDRESSES = 4096
"""Addresses with state; the least recently refused one is evicted first."""

work_seconds: ContextVar[float] = ContextVar("work_seconds", default=0.0)
"""CPU time spent so far on the message of the current task's call."""


def add_work(seconds: float) -> None:
    """Add CPU time to the current task's call."""
    work_seconds.set(work_seconds.get() + seconds)


class RefusalThrottle:
    """Throttle of the refusals of one server.

    rate: sustained refusals a second of one address; 0: no limit.
    clock: returns monotonic seconds.
    """

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic):
        self._interval = 1 / rate if rate else 0.0
        self._clock = clock
        self._due: OrderedDict[str, float] = OrderedDict()  # address -> theoretical arrival time of its next refusal

    def delay(self, address: str, work: float = 0.0) -> float:
        """Count one more refusal of the address, and return the seconds by which to delay it.

        work: CPU seconds spent on the call.
        """
        if not self._interval:
            return 0.0
        now = self._clock()
        due = max(self._due.pop(address, now), now) + max(self._interval, work / MAX_WORK_SHARE)
        wait = min(MAX_SECONDS, max(0.0, due - now - BURST * self._interval))
        self._due[address] = min(due, now + MAX_SECONDS + BURST * self._interval)
        if len(self._due) > MAX_ADDRESSES:
            self._due.popitem(last=False)
        return wait
