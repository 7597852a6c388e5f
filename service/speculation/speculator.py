"""Choice of the number of drafts of each step, and of steps that overlap instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from npuserve.service.speculation.acceptance import AcceptanceRates
from npuserve.service.speculation.head_switch import MIN_RATIO, HeadSwitch
from npuserve.service.speculation.predicted_drafts import AGE_BY_DEPTH, FIRST_RATES_BY_DEPTH
from npuserve.service.speculation.shared_answers import SharedAnswers
from npuserve.service.speculation.step_costs import Seconds, StepCosts

Mode = Literal["auto", "suffix", "mtp", "model"]

MAX_STEP_DRAFTS = 64
"""Most drafts of a step."""
MAX_ROW_DRAFTS = 15
"""Most drafts of a row."""
RATIO_WEIGHT = 0.3
"""Weight of the latest step in the expected speed."""
MAX_LOSS = 0.01
"""Share of the time that steps with drafts may lose."""
MAX_BALANCE_STEPS = 20.0
"""Most gain that is kept against later losses, in overlapped steps, beside that for prompts (PROMPT_WEIGHT)."""
PROMPT_WEIGHT = 0.001
"""Weight of the latest step in the head's seconds of recent prompts. As much gain is kept for later prompts, which the
head computes before their answers can gain by it."""
FIRST_BALANCE_STEPS = 3.0
"""Losses that are allowed before anything was gained."""
MAX_DEBT_STEPS = 2.0
"""Losses beyond the balance at which the rows no longer wait. They wait again once the debt is paid."""
MIN_OVERLAPPED = 4
"""Overlapped steps of a number of rows that are measured before others are compared with them."""
MAX_WAITING = 256
"""Steps in which the rows wait, after which MIN_OVERLAPPED steps overlap, so that their seconds are known."""
MAX_DRAFTING_SHARE = 0.003
"""Share of the time for drafting above which failed searches and reviews pause longer."""
SHORT_PAUSE, LONG_PAUSE = 1, 16
"""Tokens between two failed searches of a request, and overlapped steps between two reviews."""
SHARE_SECONDS = 2.0
"""Seconds over which the share is averaged."""
MIN_PROBE_STEPS, MAX_PROBE_STEPS = 2, 64
"""Waiting steps with fewer predicted drafts than `depth` between two that compute all possible ones, so that their
acceptance and seconds are known: at first, and at most. They double each time."""
DEPTH_STEPS = 16
"""Waiting steps after which one draft less is predicted, if fewer are computed."""
MAX_HEAD_SHARE = 0.8
"""Largest share of a step's seconds for its head. The host may collect a step late and the next one in time, so that
the seconds between both are fewer than those of the head on the device."""
FIRST_TRIAL_STEPS = 1.0
"""Losses that are allowed for the first trial of the head, in overlapped steps."""


class DraftSource(Protocol):
    """Drafts of a request."""

    def gains(self, count: int, *, has_head: bool = True) -> list[float]:
        """Return the probability that a 1st, 2nd, ... draft is accepted, for at most `count` drafts worth a row.

        has_head: drafts of the model's head count.
        """

    def num_predicted(self, count: int) -> int:
        """Return how many of its first `count` drafts a head or a smaller model predicted."""

    @property
    def eager_drafts(self) -> int:
        """Number of drafts that are computed whatever they cost."""


class Candidate(NamedTuple):
    """Row that may have drafts.

    limit: most of them.
    known: tokens of the row before its drafts.
    """

    drafter: DraftSource
    limit: int
    known: int = 1


class StepTokens(NamedTuple):
    """Decode rows of a step.

    tokens: number of tokens that they compute.
    drafts: number of drafts among these.
    """

    rows: int
    tokens: int
    drafts: int = 0


class Speculator:
    """Drafts of all requests of a server. For one thread; without a clock.

    mode: "suffix" drafts whatever is found in text, "mtp" what the model's head predicts, and "model" what a smaller
        model does; "auto" drafts what is expected to save time, of text and head.
    recomputes: a row with a rejected draft is computed again, since the model has a fixed state.
    depth: most tokens that the model's head or a smaller model drafts after a row; 0 without these.
    waits: the next step is planned only when no step is in flight.
    shared: ended answers.
    rates, predicted_rates: acceptance of all requests, of drafts from text and of predicted ones.
    expected_ratio: expected speed with drafts, relative to overlapped steps without the head.
    head: whether steps compute the head, with "auto"; None if there is none, or if all steps do.
    drafts_of_head: what `choose` returned last may be drafts of the head.
    drafting_seconds: time of searches and choices since the start.
    """

    def __init__(self, mode: Mode, *, recomputes: bool = False, depth: int = 0) -> None:
        self.mode: Mode = mode
        self.depth = depth
        self._recomputes = recomputes
        self.waits = mode != "auto"
        self.shared = SharedAnswers()
        self.rates = AcceptanceRates()
        self.predicted_rates = AcceptanceRates(first=FIRST_RATES_BY_DEPTH, age=AGE_BY_DEPTH)
        self.costs = StepCosts()
        self.expected_ratio = 1.0
        self.drafting_seconds = 0.0
        self.drafts_of_head = depth > 0
        self._baseline: float | None = None  # seconds of the latest overlapped step of decode rows, on average
        self._worth = 0.0  # seconds that an accepted draft saved when prompts were last computed beside
        self._balance: float | None = None  # seconds that drafts have saved, less those they have lost; bounded
        self._prompt_seconds = 0.0  # those of the head for prompts of about the last 1 / PROMPT_WEIGHT steps
        self._overlapped = 0  # overlapped steps since the rows last waited
        self._unreviewed = 0  # steps since the last review
        self._waiting = 0  # waiting steps since as many overlapped ones were measured
        self.head = HeadSwitch(self.predicted_rates) if mode == "auto" and depth else None
        self._unpredicted = 0  # waiting steps since the head drafted as many tokens as it can
        self._probe_steps = 0  # such steps before the next one
        self._is_probe = False  # the next step whose head drafted as many tokens as it can computes them all
        self._used_depth = float(depth)  # most predicted drafts of a row in recent waiting steps
        self._share_seconds = 0.0  # recent seconds of steps, and of drafting
        self._share_drafting = 0.0

    @property
    def has_head(self) -> bool:
        """Whether the next steps compute the head or the smaller model."""
        return self.depth > 0 if self.head is None else self.head.is_on

    @property
    def max_pause(self) -> int:
        """Most tokens of a drafter between two failed searches, and most steps between two reviews."""
        is_expensive = self._share_drafting > MAX_DRAFTING_SHARE * self._share_seconds
        return LONG_PAUSE if is_expensive else SHORT_PAUSE

    def choose(
        self, candidates: Sequence[Candidate], load: StepTokens, budget: int, *, is_beside_prompts: bool = False
    ) -> list[int]:
        """Return the number of drafts of each candidate in the next step, which is planned when none is in flight.

        load: decode rows of the step without drafts, the candidates among them.
        budget: most drafts of the step.
        is_beside_prompts: the step may compute prompts, too.
        """
        budget = min(budget, MAX_STEP_DRAFTS)
        if self.mode != "auto":
            return self._all_drafts(candidates, budget)
        counts = self._review(candidates, load, budget, is_beside_prompts=is_beside_prompts)
        if not self.waits:
            return [0] * len(candidates)
        if not is_beside_prompts:
            predicted = (drafter.num_predicted(count) if self.drafts_of_head else 0
                         for (drafter, _, _), count in zip(candidates, counts, strict=True))
            self._used_depth = max(self._used_depth - 1 / DEPTH_STEPS, *predicted, 1)
            if self._is_probe and self.drafts_of_head:
                possible = self._predicted_drafts(candidates, budget)
                if max(possible) == self.depth:
                    counts = possible
                    self._is_probe = False
            self._waiting += 1
            if self._waiting >= MAX_WAITING:
                self._stop_waiting()
        return counts

    def review(
        self, candidates: Sequence[Candidate], load: StepTokens, budget: int, *, is_beside_prompts: bool = False
    ) -> None:
        """Decide whether the next steps wait, from what their drafts would be. Called between overlapped steps.

        Parameters as of `choose`.
        """
        self._unreviewed = 0
        if self.mode == "auto":
            self._review(candidates, load, min(budget, MAX_STEP_DRAFTS), is_beside_prompts=is_beside_prompts)

    @property
    def is_review_due(self) -> bool:
        """Whether `review` is worth its time after this step."""
        return self.mode == "auto" and self._unreviewed >= self.max_pause

    def step_applied(
        self, load: StepTokens, tokens: int, seconds: float, *, is_overlapped: bool, depth: int | None = None,
        head_seconds: float | None = None,
    ) -> None:
        """Record a step of decode rows alone.

        tokens: tokens that it yielded.
        seconds: since the step before was applied.
        is_overlapped: it was planned while the step before was in flight.
        depth: number of tokens that the head drafted after each row; None if it was not computed.
        head_seconds: time of the head; None if it was not measured.
        """
        if is_overlapped:
            self._overlapped += 1
        head_seconds = self._head_seconds(depth, head_seconds, seconds)
        self._count_step()
        taken = self.costs.record(load.tokens, seconds - head_seconds, is_overlapped=is_overlapped)
        keep = max(0.0, 1.0 - seconds / SHARE_SECONDS)
        self._share_seconds = self._share_seconds * keep + seconds
        self._share_drafting *= keep
        baseline = self.costs.overlapped_seconds(load.rows)
        if baseline is not None:
            self._baseline = baseline
            gain = MAX_LOSS * taken
            if self.waits or load.drafts:
                gain = tokens / load.rows * baseline - taken
            self._add_gain(gain - (self.head.costs.seconds_of(depth) if self.head and depth is not None else 0.0))

    def mixed_step_applied(
        self, load: StepTokens, accepted: int, seconds: float, *, depth: int | None = None,
        head_seconds: float | None = None,
    ) -> None:
        """Record a step that computed prompts beside decode rows, or prompts alone.

        load: all rows of the step.
        accepted: number of its drafts that were accepted.
        seconds: since the step before was applied.
        depth, head_seconds: see `step_applied`.
        """
        num_prompt_tokens = max(1, load.tokens - load.rows - load.drafts)
        head_seconds = self._head_seconds(depth, head_seconds, seconds, num_prompt_tokens)
        self._count_step()
        self.costs.record_mixed(load.tokens, seconds - head_seconds)
        self._prompt_seconds += head_seconds
        gain = MAX_LOSS * seconds
        if self.waits or load.drafts:
            gain = accepted * self._worth - load.drafts * self.costs.mixed_token_seconds
        self._add_gain(gain - head_seconds)

    def _count_step(self) -> None:
        """Count a step of any kind."""
        self._unreviewed += 1
        self._prompt_seconds *= 1.0 - PROMPT_WEIGHT
        if self.head is not None:
            self.head.count_step(waits=self.waits)

    def _add_gain(self, seconds: float) -> None:
        """Change the balance. Stop a head that the balance does not pay for."""
        if self._baseline is None:
            return
        if self._balance is None:
            first_trial_steps = 0.0 if self.head is None else FIRST_TRIAL_STEPS
            self._balance = (FIRST_BALANCE_STEPS + first_trial_steps) * self._baseline
        max_balance = MAX_BALANCE_STEPS * self._baseline + self._prompt_seconds
        self._balance = min(self._balance + seconds, max_balance)
        if self.head is not None and self._balance < -MAX_DEBT_STEPS * self._baseline:
            self.head.stop()

    def _head_seconds(
        self, depth: int | None, measured: float | None, seconds: float, num_prompt_tokens: int = 0
    ) -> float:
        """Return the seconds of the head in a step, after recording them if they were measured.

        num_prompt_tokens: tokens of prompts, all of which the head computes.
        """
        if depth is None or self.head is None:
            return 0.0
        if measured is not None:
            self.head.costs.record(depth, measured, num_prompt_tokens)
        else:
            measured = self.head.costs.seconds_of(depth, num_prompt_tokens)
        return min(measured, MAX_HEAD_SHARE * seconds)

    def head_depth(self) -> int | None:
        """Return the number of tokens that a head or a smaller model drafts after each row of the next step.

        With "auto" no more than recent steps have computed; None if the head is stopped.
        """
        if self.head is None:
            return self.depth
        if not self.head.is_on:
            return None
        if not self.waits:
            return int(self.head.is_on_trial)
        depth = math.ceil(self._used_depth)
        if depth < self.depth and self._unpredicted >= self._probe_steps:
            self._is_probe = True
            self._probe_steps = min(max(2 * self._probe_steps, MIN_PROBE_STEPS), MAX_PROBE_STEPS)
            self._unpredicted = 0
            return self.depth
        self._unpredicted += depth < self.depth
        return depth

    def add_drafting(self, seconds: float) -> None:
        """Record the time of searches and choices."""
        self.drafting_seconds += seconds
        self._share_drafting += seconds

    def _review(
        self, candidates: Sequence[Candidate], load: StepTokens, budget: int, *, is_beside_prompts: bool
    ) -> list[int]:
        """Return the best number of drafts of each candidate, and update whether steps wait."""
        baseline = self.costs.overlapped_seconds(load.rows)
        if baseline is None and self.waits:
            self._stop_waiting()
        if baseline is None or not (self.waits or is_beside_prompts or self._overlapped >= MIN_OVERLAPPED):
            return [0] * len(candidates)
        best = self._best_beside_prompts if is_beside_prompts else self._best
        choice = best(candidates, load, budget, baseline, has_head=False)
        if self.head is not None and self.head.is_on:
            with_head = best(candidates, load, budget, baseline, has_head=True)
            if self.head.judge(with_head.ratio / max(choice.ratio, 1.0)):
                self.expected_ratio = with_head.ratio
            if self.head.is_on and (self.waits or not self.head.is_on_trial):
                choice = with_head
        elif self.head is not None:
            cost = self.head.trial_cost()
            if cost is not None and (self._balance or 0.0) >= min(cost, MAX_BALANCE_STEPS * baseline):
                self.costs.forget_few()
                self.head.begin_trial()
        self.drafts_of_head = choice.has_head
        self.expected_ratio += RATIO_WEIGHT * (choice.ratio - self.expected_ratio)
        balance = self._balance or 0.0
        if self.waits:
            if self.expected_ratio < 1.0 or balance < -MAX_DEBT_STEPS * baseline:
                self._stop_waiting()
        elif self.expected_ratio >= MIN_RATIO and balance >= 0.0:
            self.waits = True
            self._waiting = 0
            self._used_depth = float(self._first_depth(load.rows))
        return choice.counts

    def _first_depth(self, rows: int) -> int:
        """Return the number of drafts of the head with the most tokens a second, if all rows have as many."""
        if self.head is None:
            return self.depth
        gains = np.cumprod([self.predicted_rates.rate(depth + 1) for depth in range(self.depth)])
        computed = rows * np.arange(2.0, self.depth + 2)
        seconds = self.costs.waiting_seconds_of(computed) + np.array(self.head.costs.seconds_by_depth(self.depth)[1:])
        return 1 + int(((1.0 + np.cumsum(gains)) / seconds).argmax())

    def _predicted_drafts(self, candidates: Sequence[Candidate], budget: int) -> list[int]:
        """Return the number of all predicted drafts of each candidate, within the limits."""
        counts: list[int] = []
        for drafter, limit, _ in candidates:
            most = drafter.num_predicted(min(limit, self.depth, budget))
            counts.append(len(drafter.gains(most)))
            budget -= counts[-1]
        return counts

    def _stop_waiting(self) -> None:
        self.waits = False
        self._overlapped = 0
        self._waiting = 0

    def _drafts(self, candidates: Sequence[Candidate], budget: int, *, has_head: bool) -> list[_Draft]:
        """Return the possible drafts of a step, the most probable first. Those of a row become less probable."""
        drafts: list[_Draft] = []
        for place, (drafter, limit, known) in enumerate(candidates):
            before = 1.0
            most = min(limit, MAX_ROW_DRAFTS)
            is_predicted = has_head and drafter.num_predicted(most) > 0
            for number, gain in enumerate(drafter.gains(most, has_head=has_head)):
                again = (number + known) * (before - gain) if self._recomputes else 0.0
                drafts.append(_Draft(gain, again, place, number + 1 if is_predicted else 0))
                before = gain
        drafts.sort(reverse=True)
        del drafts[max(0, budget) :]
        return drafts

    def _best(
        self, candidates: Sequence[Candidate], load: StepTokens, budget: int, baseline: float, *, has_head: bool
    ) -> _Choice:
        """Return the choice with the most tokens a second in a step of decode rows alone.

        Tokens that will be computed again count in the step that drafts, not in the next one. So does the time in which
        the head drafts as deep as the step computes its drafts.
        """
        drafts = self._drafts(candidates, budget, has_head=has_head)
        costs = self._head_costs(drafts, has_head=has_head)
        if not drafts:
            ratio = baseline / (self.costs.seconds_of(load.rows) + float(costs[0]))
            return _Choice([0] * len(candidates), ratio, has_head)
        computed = np.cumsum([0.0, *(1.0 + draft.again for draft in drafts)])
        seconds = self.costs.waiting_seconds_of(load.rows + computed) + costs
        tokens = load.rows + np.cumsum([0.0, *(draft.gain for draft in drafts)])
        speeds = tokens / seconds
        best = int(speeds.argmax())
        ratio = float(speeds[best]) * baseline / load.rows
        return _Choice(_counts(drafts[:best], len(candidates)), ratio, has_head)

    def _best_beside_prompts(
        self, candidates: Sequence[Candidate], load: StepTokens, budget: int, baseline: float, *, has_head: bool
    ) -> _Choice:
        """Return the drafts that are worth their time in a step with prompts.

        There each token takes the same time, and an accepted one saves what it takes in a step of decode rows. The
        ratio is 1 plus what is saved, relative to such a step. The head's seconds for prompts are not counted: the
        balance bounds them.
        """
        token_seconds = self.costs.mixed_token_seconds
        self._worth = worth = baseline / load.rows
        if token_seconds == 0.0:
            return _Choice([0] * len(candidates), 1.0, has_head)
        drafts = self._drafts(candidates, budget, has_head=has_head)
        gap = max(0.0, self.costs.seconds_of(load.rows) - baseline)
        gains = [draft.gain * worth - (1.0 + draft.again) * token_seconds for draft in drafts]
        saved = np.cumsum([-gap, *gains]) - self._head_costs(drafts, has_head=has_head)
        best = int(saved.argmax())
        return _Choice(_counts(drafts[:best], len(candidates)), 1.0 + float(saved[best]) / baseline, has_head)

    def _head_costs(self, drafts: Sequence[_Draft], *, has_head: bool) -> Seconds:
        """Return the head's seconds in a step of decode rows that computes none, the first, the first two, ... drafts.

        While rows wait, the head drafts one token at least.
        """
        if self.head is None or not has_head:
            return np.zeros(len(drafts) + 1)
        depths = np.maximum.accumulate([1, *(draft.depth for draft in drafts)])
        return np.array(self.head.costs.seconds_by_depth(self.depth))[depths]

    @staticmethod
    def _all_drafts(candidates: Sequence[Candidate], budget: int) -> list[int]:
        """Return the eager drafts of each candidate, within the limits. Rows share the budget equally."""
        share = max(1, budget // max(1, len(candidates)))
        counts: list[int] = []
        for drafter, limit, _ in candidates:
            count = min(drafter.eager_drafts, limit, MAX_ROW_DRAFTS, share, max(0, budget))
            budget -= count
            counts.append(count)
        return counts


class _Draft(NamedTuple):
    """Possible draft.

    gain: probability that it is accepted.
    again: expected tokens that are computed again because of it.
    place: of its candidate.
    depth: number of drafts of the head up to this one; 0 if others made it.
    """

    gain: float
    again: float
    place: int
    depth: int


class _Choice(NamedTuple):
    """Drafts of a step.

    counts: number of drafts of each candidate.
    ratio: expected speed, relative to overlapped steps.
    has_head: the drafts may be those of the head.
    """

    counts: list[int]
    ratio: float
    has_head: bool


def _counts(drafts: Sequence[_Draft], candidates: int) -> list[int]:
    """Return the number of drafts of each candidate."""
    counts = [0] * candidates
    for draft in drafts:
        counts[draft.place] += 1
    return counts
