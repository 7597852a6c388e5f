"""Mixtures of experts: random models of all families, served as a request can ask, and compared with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import Row, SamplingParams
from tests.npu.execution.test_decoder import Bench, oracle
from tests.npu.execution.test_runner import load
from tests.support.hybrids import logprobs_of, prompts
from tests.support.loop import Ask, serve
from tests.support.mixtures import random_mixture, restack, use_recurrent_rule
from tests.support.models import greedy, saved

GREEDY = SamplingParams(temperature=0.0, logprobs=3)


def ask(prompt: list[int], count: int, tick: int = 0, **fields: object) -> Ask:
    return Ask(tick, None, {"prompt_ids": prompt, "max_tokens": count, "sampling": GREEDY, **fields})


@pytest.fixture(autouse=True)
def _recurrent_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    use_recurrent_rule(monkeypatch)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 24))])
def test_tokens_and_logprobs_equal_transformers(tmp_path: Path, seed: int) -> None:
    """The chunk budget, and whether the checkpoint stacks its experts, differ by configuration."""
    model = random_mixture(seed)
    restack(saved(model, tmp_path), stacked=seed % 4 < 2)
    budget = (8, 5, 16, 48, 512)[seed % 5]
    runner = load(tmp_path, dtype="float32", max_num_batched_tokens=max(budget, 8))
    chosen = prompts(5, seed)
    answers, _ = serve(runner, [ask(prompt, 10, 2 * index) for index, prompt in enumerate(chosen)], 1 + seed % 2, 64, 4,
                       budget)
    for prompt, answer in zip(chosen, answers, strict=True):
        assert answer.tokens == greedy(model, prompt, 10)
        ours = torch.tensor([report.logprob for report in answer.logprobs])
        torch.testing.assert_close(ours, logprobs_of(model, prompt, answer.tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", [0, 3])
def test_golden_functions_equal_transformers(tmp_path: Path, seed: int) -> None:
    model = random_mixture(seed)
    bench = Bench(saved(model, tmp_path), CpuBackend(native=False))
    ids = prompts(1, seed)[0][:30]
    ours = torch.cat([bench.logits([Row(0, ids[begin:end], begin, [0, 1], True)])[0]
                      for begin, end in ((0, 20), (20, len(ids)))])
    torch.testing.assert_close(ours, oracle(model, ids), atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = saved(random_mixture(1), tmp_path_factory.mktemp("mixture"))
    return load(folder, dtype=request.param, max_num_batched_tokens=48)


@pytest.mark.parametrize(("pool", "seats", "budget", "depth"), [
    (64, 8, 48, 2), (64, 1, 48, 1), (64, 3, 5, 2), (12, 8, 16, 2), (10, 4, 16, 1)])
def test_numbers_do_not_depend_on_the_batch(served: Runner, pool: int, seats: int, budget: int, depth: int) -> None:
    """Ids and log-probabilities are the same bits alone, beside others, in chunks, preempted, and with prefix hits."""
    if not served.deterministic:
        pytest.skip("the native kernels are not built")
    chosen = prompts(9, 7)
    chosen += chosen[:3]
    alone = [serve(served, [ask(prompt, 16, bypass_prefix_cache=True)], 1, 64, 1, 48)[0][0] for prompt in chosen]
    answers, scheduler = serve(
        served, [ask(prompt, 16, index // 2) for index, prompt in enumerate(chosen)], depth, pool, seats, budget)
    for answer, expected in zip(answers, alone, strict=True):
        assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)
    assert scheduler.prefix_hits > 0
