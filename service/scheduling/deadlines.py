"""Requests by deadline: which are due, and their end."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from npuserve.service.errors import DeadlineExceeded, ServeError
from npuserve.service.scheduling.latency_estimator import LatencyEstimator
from npuserve.service.scheduling.sequence import Sequence


class DroppedRequest(NamedTuple):
    """A request that the scheduler ended on its own: expired, or displaced from a full queue.

    error: None if its deadline came and it has generated tokens, which are its answer.
    """

    sequence: Sequence
    error: ServeError | None


class Deadlines:
    """Order in which requests are checked against their deadlines. Sequence owns the deadline itself.

    A request is due `LatencyEstimator.margin` seconds before the moment that was set for it. The order does not depend
    on the margin, which may change at any time. Moments and `now` are seconds of the same clock.

    tokens_in_vain: tokens computed for requests that expired without a generated token.
    """

    def __init__(self, estimator: LatencyEstimator) -> None:
        self.tokens_in_vain = 0
        self._estimator = estimator
        self._moments: dict[int, tuple[float, Sequence]] = {}
        self._order: list[tuple[float, int]] = []

    @property
    def ids(self) -> set[int]:
        return set(self._moments)

    def next(self, now: float) -> float | None:
        """Return the latest time for the next call of `Scheduler.expire`; None without deadlines.

        A request that is due, but can still meet its deadline, is late at its last moment.
        """
        due = bisect_right(self._order, (now + self._estimator.margin, math.inf))
        moments = [self._estimator.last_moment(self._moments[id][1]) for _, id in self._order[:due]]
        moments += [moment - self._estimator.margin for moment, _ in self._order[due : due + 1]]
        return min(moments, default=None)

    def set(self, sequence: Sequence) -> None:
        """Set or replace the moment of a request. One without a deadline has none."""
        self.forget(sequence.id)
        moment = self._estimator.due_moment(sequence)
        if moment < math.inf:
            self._moments[sequence.id] = moment, sequence
            insort(self._order, (moment, sequence.id))

    def forget(self, id: int) -> None:
        """Remove the moment of a request. Nothing if there is none."""
        if known := self._moments.pop(id, None):
            del self._order[bisect_left(self._order, (known[0], id))]

    def late(self, now: float) -> list[Sequence]:
        """Return the requests whose deadlines are due or cannot be met, the earliest first."""
        self._estimator.forget_stale(now)
        late: list[Sequence] = []
        for _, id in self._order[: bisect_right(self._order, (now + self._estimator.margin, math.inf))]:
            sequence = self._moments[id][1]
            if self._estimator.last_moment(sequence) > now:
                self.set(sequence)  # its first token needs less time now
            else:
                late.append(sequence)
        return late

    def drop(self, sequence: Sequence) -> DroppedRequest:
        """Return the end of a late request, which the scheduler has ended."""
        if sequence.num_generated_tokens:
            return DroppedRequest(sequence, None)
        self.tokens_in_vain += max(0, sequence.num_computed_tokens - sequence.cached_tokens)
        return DroppedRequest(sequence, DeadlineExceeded("deadline: it comes before the first token"))
