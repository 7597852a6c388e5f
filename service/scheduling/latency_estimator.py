"""Measured durations of steps and answers, and estimates from them: time to the first token, whether a deadline can be
met, and when a refused client may retry. All estimates are 0 or None until something was measured, and the ones of
steps again when the measurement is STALE_SECONDS old."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from npuserve.service.scheduling.prompt_bound import PromptBound
from npuserve.service.scheduling.sequence import Account, Sequence

SAMPLE_WEIGHT = 0.1
"""Weight of the latest sample in a moving average."""
STALE_SECONDS = 10.0
"""Age at which a measured duration of steps is forgotten. Refused requests have no steps, so nothing else corrects an
estimate that refuses all requests with deadlines after a slow moment."""
MIN_MARGIN_SECONDS = 0.02
MARGIN_TOKEN_GAPS = 2
"""A request with a deadline ends MIN_MARGIN_SECONDS before it, or this many gaps between tokens if they take longer."""
MIN_PREFILL_SHARE = 0.25
"""Least share of the prompt tokens that a step may have for which they determine its duration."""
MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 30.0


class _PlannedStep(NamedTuple):
    """A step in flight; the fields are the arguments of `LatencyEstimator.step_planned`."""

    planned: float
    decodes: int
    prompts: int
    has_streams: bool
    pools: bool


class LatencyEstimator:
    """Moving averages of how long steps and answers take. Times are seconds.

    budget: maximum number of tokens in a step.
    prompt_bound: bounds of the prompt tokens in a step; it gets the measured steps.
    prompt_tokens, answer_tokens: tokens of a prompt and of an answer.
    answer_seconds: time that an answer computes.
    token_gap: time between two tokens of a request.
    """

    def __init__(self, budget: int, prompt_bound: PromptBound | None = None):
        self._budget = budget
        self._prompt_bound = prompt_bound or PromptBound(budget)
        self._light = 0.0  # a step of decode rows, or with few prompt tokens
        self._token = 0.0  # each token of a step with many prompt tokens; see _is_prefill
        self._queue = Account("")  # has the retry time of the request that the full queue refused last
        self._in_flight: deque[_PlannedStep] = deque()
        self._last_applied = 0.0
        # Ends of the latest steps measured.
        self._last_light = 0.0
        self._last_prefill = 0.0
        self._last_decode = 0.0
        self.token_gap = 0.0
        self.answer_seconds = 0.0
        self.prompt_tokens = 0.0
        self.answer_tokens = 0.0

    def step_planned(
        self, decodes: int, prompts: int, now: float, *, has_streams: bool = False, pools: bool = False
    ) -> None:
        """Record that a step was planned.

        decodes, prompts: as in `record_step`.
        has_streams: the bounds of prompts beside streams apply to it.
        pools: all its prompts pool.
        """
        self._in_flight.append(_PlannedStep(now, decodes, prompts, has_streams, pools))

    def step_applied(self, now: float) -> None:
        """Record that the oldest planned step has ended. It began when it was planned or the step before it ended."""
        planned, decodes, prompts, has_streams, pools = self._in_flight.popleft()
        seconds = now - max(planned, self._last_applied)
        self.record_step(decodes, prompts, seconds)
        if has_streams:
            self._prompt_bound.record(prompts, seconds, pools=pools)
        self._last_applied = now
        if self._is_prefill(prompts):
            self._last_prefill = now
        else:
            self._last_light = now
        if decodes:
            self._last_decode = now

    def forget_stale(self, now: float) -> None:
        """Forget the durations that were not measured for STALE_SECONDS, and that no step in flight measures."""
        limit = now - STALE_SECONDS
        in_flight = self._in_flight
        if self._last_light < limit and all(self._is_prefill(step.prompts) for step in in_flight):
            self._light = 0.0
        if self._last_prefill < limit and not any(self._is_prefill(step.prompts) for step in in_flight):
            self._token = 0.0
        if self._last_decode < limit and not any(step.decodes for step in in_flight):
            self.token_gap = 0.0

    @property
    def expected_seconds(self) -> float:
        """Estimated duration of the oldest step in flight; 0 without one, or until a step was measured."""
        if not self._in_flight:
            return 0.0
        return self.step_seconds(self._in_flight[0].decodes, self._in_flight[0].prompts)

    def record_step(self, decodes: int, prompts: int, seconds: float) -> None:
        """Record the duration of a step of `decodes` decode rows and `prompts` tokens in prefill chunks."""
        if self._is_prefill(prompts):
            self._token = _average(self._token, seconds / (decodes + prompts))
        else:
            self._light = _average(self._light, seconds)
        if decodes:
            self.token_gap = _average(self.token_gap, seconds)

    def record_answer(self, seconds: float, prompt_tokens: int, tokens: int) -> None:
        """Record an answer that ended by itself, of `tokens` tokens that took `seconds` to compute."""
        self.prompt_tokens = _average(self.prompt_tokens, prompt_tokens)
        self.answer_seconds = _average(self.answer_seconds, seconds)
        self.answer_tokens = _average(self.answer_tokens, tokens)

    def prefill_seconds(self, tokens: int) -> float:
        """Estimate the time to compute `tokens` prompt tokens."""
        if not self._token:
            return self._light
        return max(self._light, self._token * tokens) if tokens else 0.0

    def step_seconds(self, decodes: int, prompts: int) -> float:
        """Estimate the duration of a step; the arguments are as in `record_step`."""
        return self.prefill_seconds(decodes + prompts) if self._is_prefill(prompts) else self._light

    def drain_seconds(self, requests: float, running: int) -> float:
        """Estimate the time until `requests` of the `running` requests have ended."""
        return requests * self.answer_seconds / max(running, 1)

    @property
    def margin(self) -> float:
        """Time before its deadline at which a request ends, so that its last message arrives before the deadline.
        Follows the measured gap between tokens."""
        return max(MIN_MARGIN_SECONDS, MARGIN_TOKEN_GAPS * self.token_gap)

    def first_token_seconds(self, sequence: Sequence, before: int = 0) -> float:
        """Estimate the time to a request's first token; 0 if that token exists or is being sampled.

        before: tokens that are computed before its own.
        """
        if sequence.num_generated_tokens or sequence.num_pending_tokens:
            return 0.0
        return self.prefill_seconds(before + sequence.num_missing_tokens)

    def last_moment(self, sequence: Sequence, before: int = 0) -> float:
        """Return when a request must end because of its deadline, infinity if it has none. With tokens: a margin before
        the deadline. Without: when its first token can no longer arrive in time. before: as in first_token_seconds.
        """
        if sequence.deadline is None:
            return math.inf
        if sequence.num_generated_tokens:
            return sequence.deadline - self.margin
        return sequence.deadline - max(MIN_MARGIN_SECONDS, self.first_token_seconds(sequence, before))

    def due_moment(self, sequence: Sequence) -> float:
        """Return the moment to set in `Deadlines`, infinity without a deadline. The margin is not part of it."""
        return math.inf if sequence.deadline is None else sequence.deadline - self.first_token_seconds(sequence)

    def retry_seconds(self, now: float, running: int, account: Account | None = None) -> float | None:
        """Return when a refused client should retry; None until an answer was measured.

        account: the client if its own limit is reached; None if the queue is full. Each limit has times of its own.

        Clients that are refused one after the other get successive times, one for each expected end of a running
        request, so that they do not all retry at once.
        """
        if not self.answer_seconds:
            return None
        limit = account or self._queue
        free = min(max(limit.promised, now) + self.drain_seconds(1, running), now + MAX_RETRY_SECONDS)
        limit.promised = free
        return max(free - now, MIN_RETRY_SECONDS)

    def _is_prefill(self, prompts: int) -> bool:
        """Return whether prompt tokens determine a step's duration, whatever the number of decode rows beside them.

        They do if they are MIN_PREFILL_SHARE of those that a step may have.
        """
        return prompts >= MIN_PREFILL_SHARE * min(self._budget, self._prompt_bound.generating)


def _average(before: float, sample: float) -> float:
    return before + (sample - before) * (SAMPLE_WEIGHT if before else 1.0)
