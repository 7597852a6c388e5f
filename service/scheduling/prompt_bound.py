"""Most prompt tokens that a step computes beside streams, so that prompts do not delay the streams' tokens too much.

A step without a stream has the whole budget. Beside streams, which would take `alone` seconds without prompts, a step
takes at most about

- POOLED_SLOWDOWN * alone, if all its prompts pool: embeddings and scores have no promise about their latency,
- the target of the inter-token latency otherwise, or FIRST_TOKEN_SLOWDOWN * alone if that is more: a prompt's first
  token has a target, too.

The bounds follow the measured steps: a step of about as many prompt tokens as its bound changes the bound by the ratio
of the seconds that prompts may add to those that they added. MIN_TOKENS are always computed, so no prompt starves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

POOLED_SLOWDOWN = 1.15
"""Time of a step with prompts that pool, relative to its streams alone."""
FIRST_TOKEN_SLOWDOWN = 2.0
"""Time of a step with prompts that generate, relative to its streams alone, if the target is below."""
MIN_TOKENS = 2
"""Least prompt tokens of a step, except of one that measures its streams alone."""
FIRST_POOLED_TOKENS = 4
"""Prompt tokens that pool in a step before such steps are measured."""
MAX_MIXED_STEPS = 16
"""Steps with prompts after which one computes the streams alone, to measure it."""
MIN_CHANGE, MAX_CHANGE = 0.7, 1.1
"""Least and most factor by which one step changes a bound: single steps take very long."""
ALONE_WEIGHT = 0.25
"""Weight of the latest step in the average of steps without prompts."""


class StepBounds(NamedTuple):
    """Most prompt tokens of a step beside streams: if all prompts pool, and if one generates."""

    pooled: int
    generating: int


class PromptBound:
    """Bounds of the prompt tokens beside streams. For one thread; without a clock.

    budget: maximum number of tokens in a step.
    target_seconds: target of the inter-token latency; infinity for none.
    """

    def __init__(self, budget: int, target_seconds: float = math.inf):
        self._budget = budget
        self._target_seconds = target_seconds
        self._pooled = float(min(FIRST_POOLED_TOKENS, budget))
        self._generating = float(budget)
        self._alone = 0.0  # average of steps without prompts; 0 until one is measured
        self._mixed_steps = 0  # planned since the last step without prompts

    @property
    def generating(self) -> int:
        """Most prompt tokens of a step beside streams, if a prompt generates."""
        return round(self._generating)

    def plan(self) -> StepBounds:
        """Return the bounds of the next step, which has streams and may have prompts. 0 lets it measure streams alone.

        Prompts that generate wait for a measurement only if their bound is below the budget.
        """
        self._mixed_steps += 1
        pooled = round(self._pooled)
        if self._alone and self._mixed_steps <= MAX_MIXED_STEPS:
            return StepBounds(pooled, self.generating)
        self._mixed_steps = 0
        return StepBounds(0, 0 if self.generating < self._budget else self._budget)

    def record(self, prompts: int, seconds: float, *, pools: bool) -> None:
        """Record a step with streams.

        prompts: its prompt tokens.
        pools: all its prompts pool.
        """
        if not prompts:
            self._alone += (seconds - self._alone) * (ALONE_WEIGHT if self._alone else 1.0)
            self._mixed_steps = 0
        elif pools:
            if self._alone:
                limit = POOLED_SLOWDOWN * self._alone
                self._pooled = self._changed(self._pooled, prompts, limit, seconds)
        elif self._target_seconds < math.inf:
            limit = max(self._target_seconds, FIRST_TOKEN_SLOWDOWN * self._alone)
            self._generating = self._changed(self._generating, prompts, limit, seconds)

    def _changed(self, bound: float, prompts: int, limit: float, seconds: float) -> float:
        """Return a bound after a step; the same if the step had far fewer or more tokens, and says little about it."""
        if not bound / 2 <= prompts <= 2 * bound:
            return bound
        allowed = limit - self._alone
        added = seconds - self._alone
        change = MAX_CHANGE if added * MAX_CHANGE <= allowed else max(MIN_CHANGE, allowed / added)
        return min(max(bound * change, MIN_TOKENS), self._budget)
