"""Requests that generate no token, beside others: their states are those of their whole prompts, whatever is cached,
preempted or computed in chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import SamplingParams
from npuserve.service.engine.pipeline import StepPipeline
from npuserve.service.errors import InvalidField
from npuserve.service.ipc.messages import PoolingParams, Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Progress
from tests.npu.backends.small import ids_of
from tests.npu.execution.test_pooled_rows import last_hidden
from tests.npu.execution.test_runner import load
from tests.support.loop import check_ended
from tests.support.models import assert_greedy, random_model, saved


def pooled(name: str, prompt: list[int], arrival: float = 0.0, **fields: object) -> Request:
    return Request(name, prompt, 0, arrival, pooling=PoolingParams(), **fields)  # type: ignore[arg-type]


def generating(name: str, prompt: list[int], count: int, arrival: float = 0.0) -> Request:
    return Request(name, prompt, count, arrival, SamplingParams(temperature=0.0))


def make(runner: Runner, blocks: int = 200, budget: int = 16) -> Scheduler:
    return Scheduler(BlockManager(blocks, runner.block_size), max_num_seqs=4, max_num_batched_tokens=budget,
                     max_queue=100, aging_seconds=1.0, max_model_len=64)


def run(runner: Runner, scheduler: Scheduler, requests: list[Request], depth: int = 2) -> dict[str, list[Progress]]:
    """Serve the requests until all have ended; return the progress of each."""
    pipeline = StepPipeline(scheduler, runner, depth, lambda: 0.0)
    progress: dict[str, list[Progress]] = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request, (b"", 0), 0.0)
    for _ in range(2000):
        scheduler.check_integrity()
        if (done := pipeline.advance()) is None:
            if not scheduler.has_work and not pipeline:
                break
            continue
        for part in done.progress:
            progress[part.sequence.request.request_id].append(part)
    check_ended(runner, scheduler)
    return progress


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [200, 9])
def test_pooled_requests_beside_generating_ones(tmp_path: Path, depth: int, blocks: int) -> None:
    model = random_model("qwen3")
    runner = load(saved(model, tmp_path))
    scheduler = make(runner, blocks)
    prompts = {f"p{i}": ids_of(1 + 7 * i % 45, i) for i in range(8)}
    texts = {f"g{i}": ids_of(9 + i, 50 + i) for i in range(3)}
    requests = [request for i in range(8) for request in (
        pooled(f"p{i}", prompts[f"p{i}"]), *([generating(f"g{i}", texts[f"g{i}"], 12)] if i < 3 else []))]
    progress = run(runner, scheduler, requests, depth)
    for name, prompt in prompts.items():
        (part,) = progress[name]
        assert (part.token_ids, part.reason) == ([], "pooled")
        np.testing.assert_allclose(part.hidden, last_hidden(model, prompt), atol=1e-5)
    for name, prompt in texts.items():
        assert_greedy(model, prompt, [token for part in progress[name] for token in part.token_ids], 12)


def test_pooled_request_uses_cached_blocks_but_computes_its_last_token(tmp_path: Path) -> None:
    model = random_model("qwen3")
    runner = load(saved(model, tmp_path))
    scheduler = make(runner)
    prompt = ids_of(48, 1)
    run(runner, scheduler, [pooled("first", prompt)])
    (part,) = run(runner, scheduler, [pooled("again", prompt)])["again"]
    assert part.sequence.cached_tokens == 32
    np.testing.assert_allclose(part.hidden, last_hidden(model, prompt), atol=1e-5)


def test_pooled_request_may_fill_the_context(tmp_path: Path) -> None:
    runner = load(saved(random_model("qwen3"), tmp_path))
    scheduler = make(runner)
    assert run(runner, scheduler, [pooled("whole", ids_of(64, 1))])["whole"][0].reason == "pooled"
    with pytest.raises(InvalidField, match="prompt: must be at most 64 tokens, got 65"):
        scheduler.add(pooled("more", ids_of(65, 1)), (b"", 0), 0.0)


def test_pooled_requests_do_not_count_as_answers(tmp_path: Path) -> None:
    runner = load(saved(random_model("qwen3"), tmp_path))
    scheduler = make(runner)
    run(runner, scheduler, [generating("g", ids_of(5, 1), 10)])
    expected = scheduler._estimator.answer_tokens
    run(runner, scheduler, [pooled("p", ids_of(5, 2))])
    assert scheduler._estimator.answer_tokens == expected == 10


def test_documents_count_one_by_one_against_a_limit() -> None:
    scheduler = Scheduler(BlockManager(10, 16), max_num_seqs=4, max_num_batched_tokens=16, max_queue=9,
                          aging_seconds=1.0)
    for index in range(3):
        scheduler.add(pooled("call", [1], client="c", client_limit=3, index=index), (b"", index), 0.0)
    with pytest.raises(Exception, match="client limit"):
        scheduler.add(pooled("call", [1], client="c", client_limit=3, index=3), (b"", 3), 0.0)
