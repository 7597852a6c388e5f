"""What was measured of steps and answers, and what follows for who waits: when the first token may come, whether a
deadline can be met, and when to try again. All estimates are 0 or None until something was measured."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npuserve.service.scheduling.sequence import Sequence

LATEST = 0.1
"""The weight of the latest sample in a moving average."""
LEAST_MARGIN = 0.02
RETRY = 0.1, 30.0
"""Seconds: the least and the most after which a refused client is asked to try again."""


class Pace:
    """Moving averages of how long steps and answers take. Times are seconds.

    budget: maximum number of tokens in a step.
    answer: tokens of an answer. seat: time that an answer computes. gap: time between two tokens of a request.
    """

    def __init__(self, budget: int):
        self._budget = budget
        self._light = 0.0  # a step of decode rows, or with few prompt tokens
        self._token = 0.0  # each token of a step whose prompt tokens fill at least a quarter of the budget
        self._promised = 0.0  # when the last one who was refused is to try again
        self.gap = 0.0
        self.seat = 0.0
        self.answer = 0.0

    def step(self, decodes: int, prompts: int, seconds: float) -> None:
        """Record the duration of a step of `decodes` decode rows and `prompts` tokens in prefill chunks."""
        if self._is_prefill(prompts):
            self._token = _average(self._token, seconds / (decodes + prompts))
        else:
            self._light = _average(self._light, seconds)
        if decodes:
            self.gap = _average(self.gap, seconds)

    def answered(self, seconds: float, tokens: int) -> None:
        """A request ended by itself, after computing for so long."""
        self.seat = _average(self.seat, seconds)
        self.answer = _average(self.answer, tokens)

    def seconds(self, tokens: int) -> float:
        """Estimate the time to compute `tokens` prompt tokens."""
        if not self._token:
            return self._light
        return max(self._light, self._token * tokens) if tokens else 0.0

    def step_seconds(self, decodes: int, prompts: int) -> float:
        """Estimate the duration of a step; the arguments are those of `step`."""
        return self.seconds(decodes + prompts) if self._is_prefill(prompts) else self._light

    @property
    def margin(self) -> float:
        """The time before its deadline at which a request ends, so that its last message arrives before the deadline.
        Follows the measured gap."""
        return max(LEAST_MARGIN, 2 * self.gap)

    def first_token_seconds(self, sequence: Sequence, before: int = 0) -> float:
        """Estimate the time to a request's first token; 0 if that token exists or is being sampled.

        before: tokens that are computed before its own.
        """
        if sequence.num_generated_tokens or sequence.num_pending_tokens:
            return 0.0
        return self.seconds(before + sequence.num_uncomputed_tokens)

    def last_moment(self, sequence: Sequence, before: int = 0) -> float:
        """Return when a request must end because of its deadline, infinity if it has none. With tokens: a margin before
        the deadline. Without: when its first token can no longer arrive in time. before: as in first_token_seconds.
        """
        deadline = sequence.request.deadline
        if deadline is None:
            return math.inf
        if sequence.num_generated_tokens:
            return deadline - self.margin
        return deadline - max(LEAST_MARGIN, self.first_token_seconds(sequence, before))

    def due(self, sequence: Sequence) -> float:
        """Return the moment to set in `Deadlines`, infinity without a deadline. The margin is not part of it."""
        deadline = sequence.request.deadline
        return math.inf if deadline is None else deadline - self.first_token_seconds(sequence)

    def _is_prefill(self, prompts: int) -> bool:
        """Whether prompt tokens determine a step's duration, whatever the number of decode rows beside them."""
        return prompts * 4 >= self._budget

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
    """Order in which requests are checked against their deadlines.

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
        moment = self._moments.pop(id, None)
        if moment is not None:
            del self._order[bisect_left(self._order, (moment, id))]

    def next(self, margin: float) -> float | None:
        """Return when the next request is due; None if there is none."""
        return self._order[0][0] - margin if self._order else None

    def due(self, now: float, margin: float) -> list[int]:
        """Return the requests that are due, the earliest first."""
        return [id for _, id in self._order[: bisect_right(self._order, (now + margin, math.inf))]]
