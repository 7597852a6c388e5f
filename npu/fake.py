"""A runner without a device: each token is the one before it plus one, so that a reader computes answers by hand.

    prompt [5, 6]  ->  7, 8, 9, ...          modulo the vocabulary

It keeps the promises of `Runner`: it must have met a request before its rows come, and forgets the ended ones.
"""

from __future__ import annotations

import time

from npuserve.npu.step import Step, StepResult, TokenLogprobs


class FakeRunner:
    """delay: seconds that each step takes on the "device". It checks what a real runner relies on, and raises
    AssertionError where the engine breaks it."""

    def __init__(self, vocabulary: int = 1000, delay: float = 0.0):
        self.vocabulary = vocabulary
        self.delay = delay
        self.known: dict[int, int | None] = {}

    def launch(self, step: Step) -> tuple[Step, float]:
        for request_id in step.ended:
            assert request_id in self.known, f"request {request_id} ended and was never met"
            del self.known[request_id]
        for new in step.new:
            assert new.request_id not in self.known, f"request {new.request_id} is met twice"
            self.known[new.request_id] = new.sampling.logprobs
        assert all(row.request_id in self.known for row in step.rows), "a row of a request that was never met"
        return step, time.perf_counter()

    def collect(self, handle: tuple[Step, float]) -> StepResult:
        step, launched = handle
        time.sleep(max(0.0, self.delay - (time.perf_counter() - launched)))
        sampled = {row.request_id: (row.token_ids[-1] + 1) % self.vocabulary for row in step.rows if row.samples}
        reports = {key: TokenLogprobs(token, -1.0, 1, [token], [-1.0])
                   for key, token in sampled.items() if self.known[key] is not None}
        return StepResult(sampled, reports, {}, self.delay)
