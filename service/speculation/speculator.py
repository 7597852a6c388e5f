"""Choice of the number of drafts of each step, and of steps that overlap instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from npuserve.service.speculation.acceptance import AcceptanceRates
from npuserve.service.speculation.drafter import Drafter
from npuserve.service.speculation.shared_answers import SharedAnswers
from npuserve.service.speculation.step_costs import StepCosts

Mode = Literal["auto", "suffix"]

MAX_STEP_DRAFTS = 64
"""Most drafts of a step."""
MAX_ROW_DRAFTS = 15
"""Most drafts of a row."""
MIN_SUFFIX_MATCH = 2
"""Least match of a draft with `suffix`."""
MIN_RATIO = 1.03
"""Least expected speed, relative to overlapped steps, for which steps begin to wait for the step before."""
RATIO_WEIGHT = 0.3
"""Weight of the latest step in the expected speed."""
MAX_LOSS = 0.01
"""Share of the time that steps with drafts may lose."""
MAX_BALANCE_STEPS = 20.0
"""Most gain that is kept against later losses, in overlapped steps."""
FIRST_BALANCE_STEPS = 3.0
"""Losses that are allowed before anything was gained."""
MAX_DEBT_STEPS = 2.0
"""Losses beyond the balance at which the rows no longer wait. They wait again once the debt is paid."""
MIN_OVERLAPPED = 4
"""Overlapped steps of a number of rows that are measured before others are compared with them."""
MAX_WAITING = 256
"""Steps in which the rows wait, after which MIN_OVERLAPPED steps overlap, so that their seconds are known."""
MAX_DRAFTING_SHARE = 0.003
"""Share of the time for drafting above which failed searches pause longer."""
SHORT_PAUSE, LONG_PAUSE = 1, 16
"""Tokens between two failed searches."""
SHARE_SECONDS = 2.0
"""Seconds over which the share is averaged."""


class Candidate(NamedTuple):
    """Row that may have drafts. limit: most of them."""

    drafter: Drafter
    limit: int


class Speculator:
    """Drafts of all requests of a server. For one thread; without a clock.

    mode: "suffix" drafts whatever is found; "auto" drafts what is expected to save time.
    waits: the next step is planned only when no step is in flight.
    shared: ended answers.
    rates: acceptance of all requests.
    expected_ratio: expected speed with drafts, relative to overlapped steps.
    drafting_seconds: time of searches and choices since the start.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode: Mode = mode
        self.waits = mode == "suffix"
        self.shared = SharedAnswers()
        self.rates = AcceptanceRates()
        self.costs = StepCosts()
        self.expected_ratio = 1.0
        self.drafting_seconds = 0.0
        self._balance: float | None = None  # seconds that drafts have saved, less those they have lost; bounded
        self._overlapped = 0  # overlapped steps since the rows last waited
        self._waiting = 0  # waiting steps since as many overlapped ones were measured
        self._share_seconds = 0.0  # recent seconds of steps, and of drafting
        self._share_drafting = 0.0

    @property
    def max_pause(self) -> int:
        """Most tokens of a drafter between two failed searches."""
        is_expensive = self._share_drafting > MAX_DRAFTING_SHARE * self._share_seconds
        return LONG_PAUSE if is_expensive else SHORT_PAUSE

    def choose(self, candidates: Sequence[Candidate], rows: int, budget: int) -> list[int]:
        """Return the number of drafts of each candidate in the next step, which is planned when none is in flight.

        rows: decode rows of the step, the candidates among them.
        budget: most drafts of the step.
        """
        limits = [min(limit, MAX_ROW_DRAFTS) for _, limit in candidates]
        if self.mode == "suffix":
            return self._all_drafts(candidates, limits, min(budget, MAX_STEP_DRAFTS))
        counts = self._review(candidates, limits, rows, budget)
        if not self.waits:
            return [0] * len(candidates)
        self._waiting += 1
        if self._waiting >= MAX_WAITING:
            self._stop_waiting()
        return counts

    def review(self, candidates: Sequence[Candidate], rows: int, budget: int) -> None:
        """Decide whether the next steps wait, from what their drafts would be. Called between overlapped steps."""
        if self.mode == "auto":
            self._review(candidates, [min(limit, MAX_ROW_DRAFTS) for _, limit in candidates], rows, budget)

    def step_applied(self, rows: int, drafts: int, tokens: int, seconds: float, *, is_overlapped: bool) -> None:
        """Record a step of decode rows alone.

        tokens: tokens that it yielded.
        seconds: since the step before was applied.
        is_overlapped: it was planned while the step before was in flight.
        """
        if is_overlapped:
            self._overlapped += 1
        self.costs.record(rows + drafts, seconds, is_overlapped=is_overlapped)
        keep = max(0.0, 1.0 - seconds / SHARE_SECONDS)
        self._share_seconds = self._share_seconds * keep + seconds
        self._share_drafting *= keep
        baseline = self.costs.overlapped_seconds(rows)
        if baseline is None:
            return
        if self._balance is None:
            self._balance = FIRST_BALANCE_STEPS * baseline
        gain = tokens / rows * baseline - seconds if self.waits or drafts else MAX_LOSS * seconds
        self._balance = min(self._balance + gain, MAX_BALANCE_STEPS * baseline)

    def add_drafting(self, seconds: float) -> None:
        """Record the time of searches and choices."""
        self.drafting_seconds += seconds
        self._share_drafting += seconds

    def _review(
        self, candidates: Sequence[Candidate], limits: Sequence[int], rows: int, budget: int
    ) -> list[int]:
        """Return the best number of drafts of each candidate, and update whether steps wait."""
        baseline = self.costs.overlapped_seconds(rows)
        if baseline is None and self.waits:
            self._stop_waiting()
        if baseline is None or (not self.waits and self._overlapped < MIN_OVERLAPPED):
            return [0] * len(candidates)
        counts, speed = self._best(candidates, limits, rows, min(budget, MAX_STEP_DRAFTS))
        ratio = speed * baseline / rows
        self.expected_ratio += RATIO_WEIGHT * (ratio - self.expected_ratio)
        balance = self._balance or 0.0
        if self.waits:
            if self.expected_ratio < 1.0 or balance < -MAX_DEBT_STEPS * baseline:
                self._stop_waiting()
        elif self.expected_ratio >= MIN_RATIO and balance >= 0.0:
            self.waits = True
            self._waiting = 0
        return counts

    def _stop_waiting(self) -> None:
        self.waits = False
        self._overlapped = 0
        self._waiting = 0

    def _best(
        self, candidates: Sequence[Candidate], limits: Sequence[int], rows: int, budget: int
    ) -> tuple[list[int], float]:
        """Return the number of drafts of each candidate with the most tokens a second, and this speed.

        Drafts are added in the order of their probability to be accepted: each row's fall from draft to draft.
        """
        gains = [(gain, place) for place, (candidate, limit) in enumerate(zip(candidates, limits, strict=True))
                 for gain in candidate.drafter.gains(limit)]
        if not gains:
            return [0] * len(candidates), rows / self.costs.seconds_of(rows)
        gains.sort(reverse=True)
        del gains[max(0, budget) :]
        seconds = self.costs.waiting_seconds(rows, rows + len(gains))
        tokens = rows + np.concatenate(([0.0], np.cumsum([gain for gain, _ in gains])))
        speeds = tokens / seconds
        best = int(speeds.argmax())
        counts = [0] * len(candidates)
        for _, place in gains[:best]:
            counts[place] += 1
        return counts, float(speeds[best])

    @staticmethod
    def _all_drafts(candidates: Sequence[Candidate], limits: Sequence[int], budget: int) -> list[int]:
        """Return twice the length of each match, within the limits. Rows share the budget equally."""
        share = max(1, budget // max(1, len(candidates)))
        counts: list[int] = []
        for (drafter, _), limit in zip(candidates, limits, strict=True):
            length = drafter.match_length
            count = min(2 * length if length >= MIN_SUFFIX_MATCH else 0, limit, share, budget)
            budget -= count
            counts.append(count)
        return counts
