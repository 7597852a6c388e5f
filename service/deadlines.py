"""What was measured of steps and answers, and what follows for who waits: when the first token may come, whether a
deadline can be met, and when to try again. All estimates are 0 or None until something was measured."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npuserve.service.sequence import Sequence

LATEST = 0.1
"""The weight of the latest sample in a moving average."""
LEAST_MARGIN = 0.02
RETRY = 0.1, 30.0
"""Seconds: the least and the most after which a refused client is asked to try again."""


class Pace:
    """budget: tokens of a step at most. Times are seconds.

    answer: tokens that an answer has. seat: how long one computes. gap: between two tokens of a request.
    """

    def __init__(self, budget: int):
        self._budget = budget
        self._light = 0.0  # a step of few tokens: decode rows
        self._token = 0.0  # each token of a step of many: chunks of prompts
        self._promised = 0.0  # when the last one who was refused is to try again
        self.gap = 0.0
        self.seat = 0.0
        self.answer = 0.0

    def step(self, tokens: int, seconds: float, decodes: bool) -> None:
        """A step took so long."""
        if tokens * 4 >= self._budget:
            self._token = _average(self._token, seconds / tokens)
        else:
            self._light = _average(self._light, seconds)
        if decodes:
            self.gap = _average(self.gap, seconds)

    def answered(self, seconds: float, tokens: int) -> None:
        """A request ended by itself, after computing for so long."""
        self.seat = _average(self.seat, seconds)
        self.answer = _average(self.answer, tokens)

    def seconds(self, tokens: int) -> float:
        """To compute them."""
        if not self._token:
            return self._light
        return max(self._light, self._token * tokens) if tokens else 0.0

    @property
    def margin(self) -> float:
        """A request ends so long before its deadline, for its last message to arrive in time."""
        return max(LEAST_MARGIN, 2 * self.gap)

    def last_moment(self, sequence: Sequence, before: int = 0) -> float:
        """When a request must end for its deadline: a margin before it, or when its first token cannot come in time any
        more. Infinity if it has none. before: tokens that are computed before its own."""
        deadline = sequence.request.deadline
        if deadline is None:
            return math.inf
        if sequence.num_generated_tokens:
            return deadline - self.margin
        needed = 0.0 if sequence.num_pending_tokens else self.seconds(before + sequence.num_uncomputed_tokens)
        return deadline - max(LEAST_MARGIN, needed)

    def drained(self, requests: float, seats: int) -> float:
        """Until so many have ended, when so many compute."""
        return requests * self.seat / max(seats, 1)

    def retry(self, now: float, seats: int) -> float | None:
        """After how long one who is refused has the best chance. Those who are refused one after the other are told
        times that follow each other as seats become free, so that they do not all come back at once."""
        if not self.seat:
            return None
        least, most = RETRY
        free = min(max(self._promised, now) + self.drained(1, seats), now + most)
        self._promised = free
        return max(free - now, least)


def _average(before: float, sample: float) -> float:
    return before + (sample - before) * (LATEST if before else 1.0)


class Deadlines:
    """When to look at whose deadline next, by id. `now` is of the same clock as what is set."""

    def __init__(self) -> None:
        self._moments: dict[int, float] = {}
        self._order: list[tuple[float, int]] = []

    @property
    def next(self) -> float | None:
        return self._order[0][0] if self._order else None

    @property
    def ids(self) -> set[int]:
        return set(self._moments)

    def set(self, id: int, moment: float) -> None:
        """Look at it then, and not when it was set to before; never at infinity."""
        self.forget(id)
        if moment < math.inf:
            self._moments[id] = moment
            insort(self._order, (moment, id))

    def forget(self, id: int) -> None:
        moment = self._moments.pop(id, None)
        if moment is not None:
            del self._order[bisect_left(self._order, (moment, id))]

    def due(self, now: float) -> list[int]:
        """Those whose moments have come."""
        return [id for _, id in self._order[: bisect_right(self._order, (now, math.inf))]]
