"""Balance of the experts' work, from the counters of the layers (`layers.layer.Counts`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

GROUPS = 4
"""Maximum number of groups of layers."""

WINDOW_SECONDS = 10.0
"""Minimum time between two readings of the counters."""


class ExpertBalance:
    """Reader of the counters of a model's mixtures of experts.

    counters: (number of the layer, tokens [E] int64 that each of its experts computed so far), by layer.
    now: clock, in seconds.
    """

    def __init__(
        self, counters: Sequence[tuple[int, Tensor]], now: Callable[[], float] = time.monotonic
    ):
        size = -(-len(counters) // GROUPS) or 1
        self._groups = [counters[first : first + size] for first in range(0, len(counters), size)]
        self._before = [[tokens.cpu().clone() for _, tokens in group] for group in self._groups]
        self._now = now
        self._read = now()

    def take(self) -> dict[str, float]:
        """Return the balance of each group of layers since the last reading, by the numbers of its layers as "0-11".

        It is the tokens of a layer's busiest expert divided by the mean of its experts: the largest ratio of the
        group's layers; 1 if all experts had as many tokens. Empty before WINDOW_SECONDS, and without tokens.
        """
        if not self._groups or self._now() - self._read < WINDOW_SECONDS:
            return {}
        self._read = self._now()
        found: dict[str, float] = {}
        for index, group in enumerate(self._groups):
            after = [tokens.cpu().clone() for _, tokens in group]
            counts = (torch.sub(new, old).double() for new, old in zip(after, self._before[index], strict=True))
            ratios = [float(tokens.amax() / tokens.mean()) for tokens in counts if tokens.sum() > 0]
            self._before[index] = after
            if ratios:
                found[f"{group[0][0]}-{group[-1][0]}"] = max(ratios)
        return found
