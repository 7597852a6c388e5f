"""Drafts of one request that the model's head for multi-token prediction (MTP) or a smaller model made."""

from __future__ import annotations

from collections.abc import Sequence

from npuserve.service.speculation.acceptance import NUM_CLASSES, AcceptanceRates

FIRST_RATES_BY_DEPTH = (0.7, 0.65, *[0.6] * (NUM_CLASSES - 2))
"""Probability that the draft of each depth is right if those before it are, before anything was measured."""
AGE_BY_DEPTH = 0.99
"""Weight of earlier drafts of a depth at each new one of any: drafts that are deeper than usual are seldom measured."""


class PredictedDrafts:
    """Latest drafts, which are compared with the tokens that follow.

    depth: most tokens that are drafted at a time.
    rates: the server's acceptance rates by depth.
    """

    __slots__ = ("_depth", "_drafts", "_num_right", "_rates")

    def __init__(self, depth: int, rates: AcceptanceRates) -> None:
        self._depth = depth
        self._rates = AcceptanceRates(rates)
        self._drafts: list[int] = []
        self._num_right = 0  # of the latest drafts, before those that are left

    def extend(self, token_ids: Sequence[int]) -> None:
        """Compare tokens of the answer with the drafts. Those before a wrong one were right; the others are dropped."""
        for token_id in token_ids:
            if not self._drafts:
                return
            is_right = self._drafts.pop(0) == token_id
            self._num_right += 1
            self._rates.record(self._num_right, is_right)
            if not is_right:
                self._drafts.clear()

    def replace(self, drafts: Sequence[int]) -> None:
        """Take drafts that follow the request's last token."""
        self._drafts = list(drafts)
        self._num_right = 0

    def gains(self, count: int) -> list[float]:
        """Return the probability that a 1st, 2nd, ... draft is accepted, for at most `count` drafts.

        Without drafts, those that could be made count.
        """
        depths = range(self._num_right, self._num_right + len(self._drafts)) if self._drafts else range(self._depth)
        gains: list[float] = []
        gain = 1.0
        for depth in depths[:count]:
            gain *= self._rates.rate(depth + 1)
            gains.append(gain)
        return gains

    @property
    def eager_drafts(self) -> int:
        """Number of drafts that are computed whatever they cost."""
        return len(self._drafts)

    def drafts(self, count: int) -> list[int]:
        """Return at most `count` drafts."""
        return self._drafts[:count]
