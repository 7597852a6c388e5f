"""A runner without a device: each token is the one before it plus one, so that a reader computes answers by hand.

    prompt [5, 6]  ->  7, 8, 9, ...          modulo the vocabulary

It keeps the promises of `Runner`, and is slow where a device is: steps take their time one after the other, and a step
may be launched while the one before it runs.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass

from npuserve.npu.step import PENDING, NewRequest, Row, Step, StepResult, TokenLogprobs


@dataclass(slots=True)
class _Known:
    """tokens: prompt and answer, what steps in flight sample included."""

    request: NewRequest
    tokens: list[int]


class FakeRunner:
    """delay: seconds that each step takes on the "device". block_size: of the scheduler's block manager.

    It checks what a real runner relies on, and raises AssertionError where the engine breaks it.
    """

    def __init__(self, vocabulary: int = 1000, delay: float = 0.0, block_size: int = 64):
        self.vocabulary = vocabulary
        self.delay = delay
        self._block_size = block_size
        self._known: dict[int, _Known] = {}
        self._sampled: dict[int, int] = {}  # by the step that was launched last
        self._flying: deque[StepResult] = deque()
        self._free_at = 0.0  # when the device is done with all that was launched

    def launch(self, step: Step) -> tuple[StepResult, float]:
        for request_id in step.ended:
            assert request_id in self._known, f"request {request_id} ended and was never met"
            del self._known[request_id]
        for new in step.new:
            assert new.request_id not in self._known, f"request {new.request_id} is met twice"
            self._known[new.request_id] = _Known(new, [*new.prompt_ids, *new.output_ids])
        assert len(self._flying) < 2, "a third step in flight"
        self._check_blocks(step.rows)
        result = StepResult({}, {}, {}, self.delay)
        for row in step.rows:
            self._compute(row, result)
        if step.rows:
            self._sampled = result.token_ids
        self._flying.append(result)
        self._free_at = max(time.perf_counter(), self._free_at) + self.delay
        return result, self._free_at

    def ready(self, handle: tuple[StepResult, float]) -> bool:
        return time.perf_counter() >= handle[1]

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        result, done = handle
        assert result is self._flying.popleft(), "steps are collected in the order of their launch"
        time.sleep(max(0.0, done - time.perf_counter()))
        return result

    def _compute(self, row: Row, result: StepResult) -> None:
        name = f"request {row.request_id}"
        assert row.request_id in self._known, f"a row of {name}, which was never met"
        known, end = self._known[row.request_id], row.start + len(row.token_ids)
        if row.token_ids == [PENDING]:
            assert row.request_id in self._sampled, f"{name}: the step before has sampled no token of it"
            assert row.samples, f"{name}: its last token, and nothing is sampled"
        else:
            assert row.token_ids == known.tokens[row.start : end], f"{name}: not its own tokens"
        assert row.samples == (end == len(known.tokens)), f"{name}: samples before its last token, or not at it"
        if row.samples:
            token = (known.tokens[-1] + 1) % self.vocabulary
            known.tokens.append(token)
            result.token_ids[row.request_id] = token
            if known.request.sampling.logprobs is not None:
                result.logprobs[row.request_id] = TokenLogprobs(token, -1.0, 1, [token], [-1.0])

    def _check_blocks(self, rows: list[Row]) -> None:
        holders = Counter(block for row in rows for block in row.block_ids)
        for row in rows:
            end, size = row.start + len(row.token_ids), self._block_size
            assert len(row.block_ids) == -(-end // size), f"request {row.request_id}: blocks for more or less"
            for block in row.block_ids[row.start // size :]:
                assert holders[block] == 1, f"request {row.request_id} writes to block {block}, which another has, too"
