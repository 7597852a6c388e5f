"""A runner without a device: each token is the previous one plus one, so answers are easy to predict.

    prompt [5, 6]  ->  7, 8, 9, ...          modulo the vocabulary

It behaves like `Runner`: steps run one after the other, each for `delay` seconds, and a step may be launched while the
one before it runs.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from npuserve.npu.model.config import ModelConfig
from npuserve.npu.step import PENDING, NewRequest, Row, Step, StepResult, TokenLogprobs
from tests.support.fake_grammar import first_allowed


@dataclass(slots=True)
class _Known:
    """A request. tokens: prompt and answer, including the tokens that steps in flight sample.

    is_constrained: a row was; forced tokens may follow.
    is_discarded: the token sampled last is not in `tokens`.
    """

    request: NewRequest
    tokens: list[int]
    is_constrained: bool = False
    is_discarded: bool = False


class FakeRunner:
    """Runner that counts upwards. Raises AssertionError if the engine violates an assumption of the real runner.

    vocabulary: number of token ids.
    delay: duration of each step in seconds.
    block_size: tokens of a block of the scheduler's block manager.
    """

    def __init__(self, vocabulary: int = 1000, delay: float = 0.0, block_size: int = 64):
        self.vocabulary = vocabulary
        self.delay = delay
        self._block_size = block_size
        self._known: dict[int, _Known] = {}
        self._sampled: dict[int, list[int]] = {}  # tokens of the step that was launched last, by request
        self._flying: deque[StepResult] = deque()
        self._unsampled: list[Row] = []  # constrained rows of the step that was launched last
        self._free_at = 0.0  # end of all launched steps

    def launch(self, step: Step) -> tuple[StepResult, float]:
        for request_id in step.ended:
            assert request_id in self._known, f"request {request_id} ended and was never announced"
            del self._known[request_id]
        for new in step.new:
            assert new.request_id not in self._known, f"request {new.request_id} is announced twice"
            self._known[new.request_id] = _Known(new, [*new.prompt_ids, *new.output_ids])
        assert len(self._flying) < 2, "a third step in flight"
        assert not self._unsampled, "a launch before the step was sampled"
        self._check_blocks(step.rows)
        result = StepResult({}, {}, {}, self.delay)
        for row in step.rows:
            self._compute(row, result)
        if step.rows:
            self._sampled = result.token_ids
        self._flying.append(result)
        self._free_at = max(time.perf_counter(), self._free_at) + self.delay
        return result, self._free_at

    def sample(self, handle: tuple[StepResult, float], masks: Mapping[int, npt.NDArray[np.int32]]) -> None:
        assert self._unsampled, "a step without constrained rows is sampled"
        assert handle[0] is self._flying[-1], "a step is sampled that was not launched last"
        assert masks.keys() <= {row.request_id for row in self._unsampled}
        for row in self._unsampled:
            self._known[row.request_id].is_discarded = row.request_id not in masks
            if row.request_id in masks:
                self._sample_along(row, handle[0], [*np.atleast_2d(masks[row.request_id])])
            else:
                handle[0].token_ids[row.request_id] = [0] * row.samples
        self._unsampled = []

    def ready(self, handle: tuple[StepResult, float]) -> bool:
        return time.perf_counter() >= handle[1]

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        result, done = handle
        assert result is not self._flying[-1] or not self._unsampled, "a step is collected that was not sampled"
        assert result is self._flying.popleft(), "steps are collected in the order of their launch"
        time.sleep(max(0.0, done - time.perf_counter()))
        return result

    def next_token(self, request_id: int, tokens: list[int], prompt_tokens: int) -> int:
        """Return the token that follows `tokens`, the prompt and the answer so far."""
        return (tokens[-1] + 1) % self.vocabulary

    def _compute(self, row: Row, result: StepResult) -> None:
        name = f"request {row.request_id}"
        assert row.request_id in self._known, f"a row of {name}, which was never announced"
        known, end = self._known[row.request_id], row.start + len(row.token_ids)
        drafts = row.token_ids[len(row.token_ids) - row.samples + 1 :] if row.samples > 1 else []
        end -= len(drafts)
        token_ids = row.token_ids[: end - row.start]
        if row.token_ids == [PENDING]:
            assert row.request_id in self._sampled, f"{name}: the step before has sampled no token for it"
            assert row.samples, f"{name}: a pending token, and nothing is sampled"
            if known.is_discarded:  # of a request whose matcher has failed
                known.tokens.append(0)
        elif token_ids != known.tokens[row.start : end]:
            before = known.tokens[row.start : -1]  # the others are forced, in place of the token sampled last
            assert known.is_constrained, f"{name}: tokens of another request"
            assert token_ids[: len(before)] == before, f"{name}: tokens of another request"
            known.tokens[row.start :] = token_ids
        if row.samples or not known.is_constrained:
            is_last = end == len(known.tokens)
            assert bool(row.samples) == is_last, f"{name}: samples before its last token, or not at it"
        assert row.samples or not row.is_constrained
        known.is_constrained |= row.is_constrained
        if row.is_constrained:
            self._unsampled.append(row)
        elif row.samples:
            self._sample_along(row, result, [None] * row.samples)

    def _sample_along(self, row: Row, result: StepResult, masks: list[npt.NDArray[np.int32] | None]) -> None:
        """Sample the tokens of a row: 0 after a wrong draft. masks: one for each; None for none."""
        drafts = row.token_ids[len(row.token_ids) - row.samples + 1 :]
        tokens = self._known[row.request_id].tokens
        self._sample(row.request_id, result, masks[0])
        for draft, mask in zip(drafts, masks[1:], strict=True):
            if draft != tokens[-1]:
                break
            self._sample(row.request_id, result, mask)
        result.token_ids[row.request_id] += [0] * (row.samples - len(result.token_ids[row.request_id]))

    def _sample(self, request_id: int, result: StepResult, mask: npt.NDArray[np.int32] | None = None) -> None:
        known = self._known[request_id]
        token = self.next_token(request_id, known.tokens, len(known.request.prompt_ids))
        token = first_allowed(token, self.vocabulary, mask)
        known.tokens.append(token)
        result.token_ids.setdefault(request_id, []).append(token)
        if known.request.sampling.logprobs is not None:
            result.logprobs.setdefault(request_id, []).append(TokenLogprobs(token, -1.0, 1, [token], [-1.0]))

    def _check_blocks(self, rows: list[Row]) -> None:
        holders = Counter(block for row in rows for block in row.block_ids)
        for row in rows:
            end, size = row.start + len(row.token_ids), self._block_size
            assert len(row.block_ids) == -(-end // size), f"request {row.request_id}: wrong number of blocks"
            for block in row.block_ids[row.start // size :]:
                assert holders[block] == 1, f"request {row.request_id} writes to block {block} of another request"


class ServedRunner(FakeRunner):
    """Runner of an engine process, for `npuserve.service.engine.process.build_engine`: without weights and torch.

    folder: folder of a model, whose config.json is read.
    kv_cache_memory: bytes of a KV cache of 16-bit values; 0 for 4096 blocks.
    """

    dtype_name = cache_dtype = "float32"
    backend_name = "cpu"
    deterministic = True
    shared_weights = cpu_kernels = host_blocks = None
    min_forced = 0
    num_slots = 0
    max_drafts = 64

    def __init__(self, folder: Path, delay: float, block_size: int = 0, kv_cache_memory: int = 0):
        self.config = config = ModelConfig.from_folder(folder)
        self.block_size = block_size or 16
        self.max_model_len = config.context_length
        self.parameters = config.num_parameters
        block_bytes = 2 * 2 * config.num_layers * config.attention.kv_size * self.block_size
        self.num_blocks = kv_cache_memory // block_bytes or 4096
        super().__init__(config.vocab_size, delay, self.block_size)
