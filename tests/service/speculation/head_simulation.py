"""Simulated steps of requests whose drafts a head makes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from npuserve.service.speculation.predicted_drafts import PredictedDrafts
from npuserve.service.speculation.request_drafter import RequestDrafter
from npuserve.service.speculation.speculator import Candidate, Speculator, StepTokens

OVERLAP = 0.05
"""Share of a step of decode rows that the overlap saves."""


class MachineNoise:
    """Noise of a small machine that others use, as measured: work of a kind is slow at first, one of fourteen steps
    takes up to twice as long, others deviate by 12 %, and the machine's speed drifts."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._drift = 0.0
        self._kinds = set[object]()

    def factor(self, kind: object) -> float:
        """Return the measured seconds of work of a kind, relative to its seconds on a quiet and warm machine."""
        self._drift = 0.97 * self._drift + 0.03 * self._chance.uniform(-1.0, 1.0)
        cold = 1.0 if kind in self._kinds else 1.2
        self._kinds.add(kind)
        spike = self._chance.uniform(1.0, 2.0) if self._chance.random() < 1 / 14 else 1.0
        return cold * spike * math.exp(self._drift) * self._chance.uniform(0.88, 1.12)


class HeadSimulation:
    """Steps of requests whose drafts a head makes alone. A right draft is 1, as all tokens are.

    draft, keep: seconds of a draft after each row, and of the head's keys and values. A step without drafts takes one.
    slope: seconds of each further token of a step.
    noise: largest relative deviation of measured seconds.
    machine: noise of measured seconds instead; None for `noise`.
    recomputes: a row with a rejected draft is computed again.
    measured: the seconds of the head are measured in one of so many steps.
    prompt_share: the head's seconds for a token of a prompt, relative to `slope`.
    steps: whether each step computed the head.
    made: tokens of the answers.
    seconds, baseline: without noise.
    """

    def __init__(
        self, rows: int, draft: float, *, keep: float = 0.03, slope: float = 0.02, noise: float = 0.0,
        machine: MachineNoise | None = None, recomputes: bool = False, measured: int = 1, prompt_share: float = 0.04,
    ) -> None:
        self.speculator = Speculator("auto", recomputes=recomputes, depth=3)
        self.chance = random.Random(0)
        self._machine = machine
        self._recomputes = recomputes
        self.steps: list[bool] = []
        self.made = 0
        self.seconds = self.baseline = 0.0
        self._rows, self._draft, self._keep, self._slope, self._noise = rows, draft, keep, slope, noise
        self._measured, self._prompt_share = measured, prompt_share
        self.begin_answers()

    @property
    def relative(self) -> float:
        """Seconds relative to overlapped steps without a head."""
        return self.seconds / self.baseline

    def begin_answers(self) -> None:
        """Replace all requests."""
        rates = self.speculator.predicted_rates
        self._drafters = [RequestDrafter(None, PredictedDrafts(3, rates)) for _ in range(self._rows)]
        self._uncomputed = [1] * self._rows  # known tokens of the next row of each request

    def prompt_step(self, tokens: int, seconds: float) -> None:
        """Compute a chunk of a prompt alone, in `seconds` without the head."""
        depth = self.speculator.head_depth()
        of_head = 0.0 if depth is None else self._prompt_share * seconds
        self.seconds += seconds + of_head
        self.baseline += seconds
        known = self._known(of_head, depth)
        self.speculator.mixed_step_applied(
            StepTokens(1, tokens), 0, seconds + of_head, depth=depth, head_seconds=known)

    def step(self, is_right: Callable[[], bool], prompt: int = 0) -> None:
        """Compute a step of all requests, and so many tokens of a prompt. is_right: whether the next draft is."""
        speculator, rows = self.speculator, self._rows
        load = StepTokens(rows, sum(self._uncomputed))
        candidates = [Candidate(drafter, 100, known)
                      for drafter, known in zip(self._drafters, self._uncomputed, strict=True)]
        depth = speculator.head_depth()
        counts = [0] * rows
        if speculator.waits:
            counts = speculator.choose(candidates, load, 512, is_beside_prompts=prompt > 0)
        waits = speculator.waits
        drafted = [drafter.drafts(count, has_head=speculator.drafts_of_head)[1]
                   for drafter, count in zip(self._drafters, counts, strict=True)]
        num_drafts = sum(map(len, drafted))
        computed = load.tokens + num_drafts
        taken = 0
        for number, (drafter, drafts) in enumerate(zip(self._drafters, drafted, strict=True)):
            accepted = [*drafts, 0].index(0)
            drafter.extend([1] * (accepted + 1), 1)
            taken += accepted + 1
            is_undone = self._recomputes and accepted < len(drafts)
            self._uncomputed[number] = self._uncomputed[number] + accepted + 1 if is_undone else 1
            if depth:
                drafter.replace_predicted([int(is_right()) for _ in range(depth)])
        of_head = 0.0
        if depth is not None:
            of_head = self._keep + self._draft * depth + self._prompt_share * self._slope * prompt
        plain = self._seconds_of(computed + prompt) + (OVERLAP if waits else 0.0)
        self.seconds += plain + of_head
        if self._machine is None:
            of_head *= self._noise_factor()
            took = plain * self._noise_factor() + of_head
        else:
            factor = self._machine.factor(computed)
            of_head *= factor * self._machine.factor(f"head, {depth}")
            took = plain * factor + of_head
        self.baseline += self._slope * prompt + taken / rows * self._seconds_of(rows)
        self.made += taken
        known = self._known(of_head, depth)
        if prompt:
            speculator.mixed_step_applied(
                StepTokens(rows + 1, computed + prompt, num_drafts), taken - rows, took, depth=depth,
                head_seconds=known)
        else:
            speculator.step_applied(
                StepTokens(rows, computed, num_drafts), taken, took, is_overlapped=not waits, depth=depth,
                head_seconds=known)
        if not waits:
            speculator.review(candidates, load, 512, is_beside_prompts=prompt > 0)

    def _seconds_of(self, tokens: int) -> float:
        """Return the seconds of a step."""
        return 1 + self._slope * tokens

    def _known(self, of_head: float, depth: int | None) -> float | None:
        """Return the seconds of the head if this step measures them."""
        self.steps.append(depth is not None)
        return of_head if depth is not None and len(self.steps) % self._measured == 0 else None

    def _noise_factor(self) -> float:
        return self.chance.uniform(1 - self._noise, 1 + self._noise)
