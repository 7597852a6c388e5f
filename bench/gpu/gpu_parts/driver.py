"""Requests driven through a runner without a scheduler: decode rows first, then chunks up to the step's budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from npuserve.npu.backends.base import Backend
from npuserve.npu.execution.in_flight import LaunchedStep
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.step import PENDING, NewRequest, Row, SamplingParams, Step, StepResult

_ids = count()


@dataclass
class Ask:
    """A greedy request. blocks: its KV-cache blocks. computed: tokens whose keys and values are cached. tokens: the
    prompt and the tokens sampled so far, of `want`; PENDING for tokens in flight."""

    prompt: list[int]
    want: int
    blocks: list[int]
    computed: int = 0
    id: int = field(default_factory=lambda: next(_ids))
    tokens: list[int] = field(default_factory=list)

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

    def __init__(self, runner: Runner, asks: Sequence[Ask], budget: int, depth: int = 2):
        self._runner, self._asks, self._budget, self._depth = runner, asks, budget, depth
        self._met: set[int] = set()
        self._flying: deque[tuple[list[Row], LaunchedStep]] = deque()

    def run(self) -> Iterator[Collected]:
        """Yield each collected step until all answers are complete."""
        while True:
            while len(self._flying) < self._depth and (rows := self._plan()):
                new = [NewRequest(ask.id, ask.prompt, [], SamplingParams(temperature=0.0))
                       for ask in self._asks if ask.id not in self._met]
                self._met |= {request.request_id for request in new}
                self._flying.append((rows, self._runner.launch(Step(rows, new))))
            if not self._flying:
                break
            rows, launched = self._flying.popleft()
            result = self._runner.collect(launched)
            at = time.perf_counter()
            for ask in self._asks:
                if (token := result.token_ids.get(ask.id)) is not None:
                    ask.tokens[ask.tokens.index(PENDING, len(ask.prompt))] = token
            yield Collected(at, len(rows), result)
        self._runner.collect(self._runner.launch(Step([], ended=sorted(self._met))))

    def _plan(self) -> list[Row]:
        rows, left = [], self._budget
        waiting = [ask for ask in self._asks if not ask.launched]
        for ask in sorted(waiting, key=lambda ask: len(ask.tokens) - ask.computed > 1):
            tokens = ask.tokens[ask.computed : ask.computed + left]
            if not tokens:
                break
            end = ask.computed + len(tokens)
            samples = end == len(ask.tokens)
            rows.append(Row(ask.id, tokens, ask.computed, ask.blocks, samples))
            ask.computed, left = end, left - len(tokens)
            if samples:
                ask.tokens.append(PENDING)
        return rows


def blocks_of(rows: int, length: int, block_size: int) -> list[list[int]]:
    """Return disjoint lists of blocks for `rows` requests of `length` tokens."""
    width = -(-length // block_size)
    return [list(range(row * width, (row + 1) * width)) for row in range(rows)]


def runner_of(
    backend: Backend, weights: ModelWeights, config: ModelConfig, rows: int, length: int, budget: int,
    buckets: Sequence[int] = (), longest: int = 0,
) -> Runner:
    """Return a runner for `rows` requests of `length` tokens, or one of `longest`. buckets: of captured decodes."""
    size = backend.block_size
    longest = max(longest, length)
    blocks = max(rows * -(-length // size), -(-longest // size))
    backend.decode_buckets = tuple(buckets)
    return Runner(backend, weights, config, blocks, size, max_model_len=longest, max_num_seqs=rows,
                  max_num_batched_tokens=budget)


def again(asks: Sequence[Ask], want: int) -> list[Ask]:
    """Return the same requests before their first token; only the prompt's last token is not computed."""
    return [replace(ask, want=want, computed=len(ask.prompt) - 1, id=next(_ids), tokens=[]) for ask in asks]
