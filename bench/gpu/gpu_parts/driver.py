"""Requests driven through a runner without a scheduler: decode rows first, then chunks up to the step's budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from npuserve.npu.backends.base import Backend
from npuserve.npu.execution.in_flight import LaunchedStep
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.step import PENDING, NewRequest, Row, SamplingParams, Step, StepResult

_ids = count()


@dataclass
class BenchRequest:
    """A greedy request.

    want: number of tokens to sample.
    blocks: its KV-cache blocks.
    computed: number of tokens whose keys and values are cached.
    tokens: the prompt and the tokens sampled so far; PENDING for tokens in flight.
    number: of its pair of slots, if the model has a fixed state.
    continues: it continues the state in the first of these slots, which is kept, and advances the second. False: it
        begins with its prompt, and advances the first.
    """

    prompt: list[int]
    want: int
    blocks: list[int]
    computed: int = 0
    id: int = field(default_factory=lambda: next(_ids))
    tokens: list[int] = field(default_factory=list)
    number: int = 0
    continues: bool = False

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def launched(self) -> bool:
        """True if all its tokens are sampled or in flight."""
        return len(self.tokens) - len(self.prompt) >= self.want

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


@dataclass(frozen=True)
class Collected:
    """A collected step. at: time of the host's clock. rows: of the step."""

    at: float
    rows: int
    result: StepResult


class Driver:
    """Loop over steps. budget: tokens per step. depth: steps in flight."""

    def __init__(self, runner: Runner, requests: Sequence[BenchRequest], budget: int, depth: int = 2):
        self._runner, self._requests, self._budget, self._depth = runner, requests, budget, depth
        self._sent: set[int] = set()
        self._in_flight: deque[tuple[list[Row], LaunchedStep]] = deque()

    def run(self) -> Iterator[Collected]:
        """Yield each collected step until all answers are complete."""
        while True:
            while len(self._in_flight) < self._depth and (rows := self._plan()):
                new = [NewRequest(request.id, request.prompt, [], SamplingParams(temperature=0.0))
                       for request in self._requests if request.id not in self._sent]
                self._sent |= {request.request_id for request in new}
                self._in_flight.append((rows, self._runner.launch(Step(rows, new))))
            if not self._in_flight:
                break
            rows, launched = self._in_flight.popleft()
            result = self._runner.collect(launched)
            at = time.perf_counter()
            for request in self._requests:
                for token in result.token_ids.get(request.id, ()):
                    request.tokens[request.tokens.index(PENDING, len(request.prompt))] = token
            yield Collected(at, len(rows), result)
        self._runner.collect(self._runner.launch(Step([], ended=sorted(self._sent))))

    def _plan(self) -> list[Row]:
        rows, left = [], self._budget
        waiting = [request for request in self._requests if not request.launched]
        for request in sorted(waiting, key=lambda request: len(request.tokens) - request.computed > 1):
            tokens = request.tokens[request.computed : request.computed + left]
            if not tokens:
                break
            end = request.computed + len(tokens)
            samples = end == len(request.tokens)
            rows.append(Row(request.id, tokens, request.computed, request.blocks, samples,
                            **slots_of(request) if self._runner.num_slots else {}))
            request.computed, left = end, left - len(tokens)
            if samples:
                request.tokens.append(PENDING)
        return rows


def slots_of(request: BenchRequest) -> dict[str, int]:
    """Return the slots of a request's next row, as fields of the row."""
    kept = 2 * request.number
    begins = request.computed == len(request.prompt) - 1 and not request.answer
    if not request.continues:
        return {"state_slot": kept}
    return {"state_slot": kept + 1, "state_source": kept if begins else -1}


def blocks_of(rows: int, length: int, block_size: int) -> list[list[int]]:
    """Return disjoint lists of blocks for `rows` requests of `length` tokens."""
    width = -(-length // block_size)
    return [list(range(row * width, (row + 1) * width)) for row in range(rows)]


def reopened(backend: Backend, **settings: Any) -> Backend:
    """Return the same device with other settings."""
    return type(backend)(settings=replace(backend.settings, **settings))


def runner_of(
    backend: Backend, weights: ModelWeights, config: ModelConfig, rows: int, length: int, budget: int,
    longest: int = 0, draft_depths: Sequence[int] = (),
) -> Runner:
    """Return a runner for `rows` requests of `length` tokens, or one of `longest`.

    draft_depths: numbers of tokens that the model's head can draft after a row, and the next row verify.
    """
    size = backend.capabilities.block_size
    longest = max(longest, length)
    blocks = max(rows * -(-length // size), -(-longest // size))
    return Runner(backend, weights, config, blocks, size, max_model_len=longest, max_num_seqs=rows,
                  max_num_batched_tokens=budget, num_slots=config.slots_of(2 * rows),
                  max_drafts=rows * max(draft_depths, default=0), draft_depths=(0, *draft_depths))


def again(requests: Sequence[BenchRequest], want: int) -> list[BenchRequest]:
    """Return the same requests before their first token; only the prompt's last token is not computed."""
    return [replace(one, want=want, computed=len(one.prompt) - 1, id=next(_ids), tokens=[], continues=True)
            for one in requests]
