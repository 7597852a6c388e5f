"""How fast a client is told that its calls are refused.

A refusal costs a front end about a millisecond, and a client needs a few bytes for the next one. So refusals of one
address are answered at most `rate` times a second, after a burst, and the call that is refused waits until then: it
holds its place among the streams of its connection, which are limited. Calls that are served are never delayed.

The rule is the generic cell rate algorithm (ITU-T I.371) with delay in place of loss.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

BURST = 100
"""Refusals that are answered at once."""
MAX_SECONDS = 5.0
"""Longest delay of a refusal."""
MAX_ADDRESSES = 4096
"""Addresses that are remembered."""


class RefusalPace:
    """rate: refusals of an address a second, in the long run; 0: no limit."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic):
        self._interval = 1 / rate if rate else 0.0
        self._clock = clock
        self._due: OrderedDict[str, float] = OrderedDict()  # address -> when its next refusal is due at this rate

    def delay(self, address: str) -> float:
        """Return the seconds that one more refusal of this address is to wait."""
        if not self._interval:
            return 0.0
        now = self._clock()
        due = max(self._due.pop(address, now), now) + self._interval
        wait = min(MAX_SECONDS, max(0.0, due - now - BURST * self._interval))
        self._due[address] = min(due, now + MAX_SECONDS + BURST * self._interval)
        if len(self._due) > MAX_ADDRESSES:
            self._due.popitem(last=False)
        return wait
