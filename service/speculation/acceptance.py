"""Share of right predictions by the length of the match that they follow from, or by the depth of a head's draft."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 20)
"""Largest match length of each class but the last, which has all longer ones."""
NUM_CLASSES = len(LENGTHS) + 1
FIRST_RATES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Rates before anything was measured."""
_DECAY = 0.98
"""Weight of the earlier predictions of a class at each new one."""
_PRIOR_WEIGHT = 2.0
"""Predictions that the rate of the prior counts for."""
_KEPT = 0.05
"""Weight of the earlier predictions after `forget`."""

CLASSES = tuple(bisect_left(LENGTHS, length) for length in range(LENGTHS[-1] + 2))
"""Class of each match length; longer ones have that of the last."""


class AcceptanceRates:
    """Decaying rates, which begin with those of `prior`, or with `first`.

    A request's rates have the server's as their prior: requests differ, and a new one is like the others.

    age: weight of the earlier predictions of the other classes at each new one: those of a class that is seldom
        predicted are old.
    num_recorded: predictions since the start.
    """

    __slots__ = ("_age", "_first", "_generation", "_prior", "_right", "_total", "num_recorded")

    def __init__(
        self, prior: AcceptanceRates | None = None, first: Sequence[float] = FIRST_RATES, age: float = 1.0
    ) -> None:
        self._prior = prior
        self._first = first
        self._age: float = age if prior is None else prior._age
        self._right = [0.0] * NUM_CLASSES
        self._total = [0.0] * NUM_CLASSES
        self._generation: int = 0 if prior is None else prior._generation
        self.num_recorded = 0

    def forget(self) -> None:
        """Let the next predictions count more than all before, also in rates whose prior this is."""
        self._generation += 1
        self._reduce(_KEPT)

    def _reduce(self, kept: float) -> None:
        self._right = [kept * right for right in self._right]
        self._total = [kept * total for total in self._total]

    def record(self, length: int, is_right: bool) -> None:
        """Count a prediction that followed from a match of `length` tokens, here and in the prior."""
        place = CLASSES[length] if length < len(CLASSES) else NUM_CLASSES - 1
        self.num_recorded += 1
        if self._prior is not None and self._generation != self._prior._generation:
            self._generation = self._prior._generation
            self._reduce(_KEPT)
        if self._age < 1.0:
            self._reduce(self._age)
        self._right[place] = self._right[place] * _DECAY + is_right
        self._total[place] = self._total[place] * _DECAY + 1.0
        if self._prior is not None:
            self._prior.record(length, is_right)

    def rate(self, length: int) -> float:
        """Return the probability that a prediction from a match of `length` tokens is right."""
        return self._rate(CLASSES[length] if length < len(CLASSES) else NUM_CLASSES - 1)

    def _rate(self, place: int) -> float:
        prior = self._first[place] if self._prior is None else self._prior._rate(place)
        return (self._right[place] + _PRIOR_WEIGHT * prior) / (self._total[place] + _PRIOR_WEIGHT)
