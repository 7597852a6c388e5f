"""Balance of experts, from counters and from a served model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npuserve.npu.execution.expert_balance import WINDOW_SECONDS, ExpertBalance
from tests.npu.execution.test_runner import load
from tests.support.hybrids import prompts
from tests.support.loop import Ask, serve
from tests.support.mixtures import random_mixture
from tests.support.models import saved


def test_balance_is_the_busiest_expert_beside_the_mean_since_the_last_reading() -> None:
    clock = [0.0]
    counters = [(2 * layer, torch.zeros(4, dtype=torch.int64)) for layer in range(6)]
    counters[0][1][:] = torch.tensor([100, 0, 0, 0])
    balance = ExpertBalance(counters, lambda: clock[0])
    assert balance.take() == {}
    counters[0][1].add_(torch.tensor([1, 1, 1, 1]))
    counters[1][1].add_(torch.tensor([6, 2, 0, 0]))
    counters[5][1].add_(torch.tensor([5, 5, 5, 5]))
    assert balance.take() == {}
    clock[0] = WINDOW_SECONDS
    assert balance.take() == {"0-2": 3.0, "8-10": 1.0}
    counters[1][1].add_(torch.tensor([1, 1, 1, 1]))
    assert balance.take() == {}
    clock[0] *= 2
    assert balance.take() == {"0-2": 1.0}
    clock[0] *= 2
    assert balance.take() == {}


@pytest.mark.parametrize("seed", [0, 2])
def test_served_tokens_are_counted_in_each_layer(tmp_path: Path, seed: int) -> None:
    model = random_mixture(seed)
    runner = load(saved(model, tmp_path), dtype="float32", max_num_batched_tokens=48)
    counters = runner._store.counters
    before = [int(tokens.sum()) for tokens in counters]
    chosen = prompts(3, seed)
    serve(runner, [Ask(0, None, {"prompt_ids": prompt, "max_tokens": 5, "bypass_prefix_cache": True})
                   for prompt in chosen], 1, 64, 4, 48)
    computed = sum(len(prompt) + 4 for prompt in chosen)
    assert counters
    for tokens, at_load in zip(counters, before, strict=True):
        assert int(tokens.sum()) - at_load == computed * model.config.num_experts_per_tok
