"""Index of requests by deadline."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort


class Deadlines:
    """Order in which requests are checked against their deadlines. Sequence owns the deadline itself.

    A request is due `margin` seconds before the moment that was set for it. The order does not depend on the margin,
    so the margin may change at any time. Moments and `now` are seconds of the same clock.
    """

    def __init__(self) -> None:
        self._moments: dict[int, float] = {}
        self._order: list[tuple[float, int]] = []

    @property
    def ids(self) -> set[int]:
        return set(self._moments)

    def set(self, id: int, moment: float) -> None:
        """Set or replace the moment of a request; infinity removes it."""
        self.forget(id)
        if moment < math.inf:
            self._moments[id] = moment
            insort(self._order, (moment, id))

    def forget(self, id: int) -> None:
        """Remove the moment of a request. Nothing if there is none."""
        moment = self._moments.pop(id, None)
        if moment is not None:
            del self._order[bisect_left(self._order, (moment, id))]

    def next(self, margin: float) -> float | None:
        """Return when the next request is due; None if there is none."""
        return self._order[0][0] - margin if self._order else None

    def due(self, now: float, margin: float) -> list[int]:
        """Return the requests that are due, the earliest first."""
        return [id for _, id in self._order[: bisect_right(self._order, (now + margin, math.inf))]]
