"""Hidden states of rows that pool, compared with transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step, StepResult
from tests.npu.backends.small import ids_of
from tests.npu.execution import test_host_prefill as host
from tests.npu.execution.test_runner import load
from tests.support.models import greedy, random_model, saved

GREEDY = SamplingParams(temperature=0.0)


@torch.no_grad()
def last_hidden(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    return model.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()


def run(runner: Runner, rows: list[Row], new: list[int]) -> StepResult:
    requests = [NewRequest(i, ids_of(20, i), [], GREEDY) for i in new]
    return runner.collect(runner.launch(Step(rows, requests)))


def check_beside_samples(runner: Runner, model: torch.nn.Module) -> None:
    """Compute a prompt in chunks that pool at its end, beside another request, whose tokens are sampled."""
    prompt = ids_of(20, 1)
    first = run(runner, [Row(0, ids_of(20, 0), 0, [0, 1], True), Row(1, prompt[:7], 0, [2, 3], False)], [0, 1])
    assert first.hidden == {}
    tokens = [*first.token_ids[0]]
    end = run(runner, [Row(0, tokens[-1:], 20, [0, 1], True), Row(1, prompt[7:], 7, [2, 3], False, pools=True)], [])
    tokens += end.token_ids[0]
    assert tokens == greedy(model, ids_of(20, 0), 2)
    assert end.token_ids.keys() == {0}
    assert end.hidden.keys() == {1}
    np.testing.assert_allclose(end.hidden[1], last_hidden(model, prompt), atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_pooled_row_beside_sampled_rows_equals_transformers(tmp_path: Path, kind: str) -> None:
    model = random_model(kind)
    check_beside_samples(load(saved(model, tmp_path)), model)


def test_pooled_row_that_the_host_computes_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("qwen3")
    monkeypatch.setattr(host.load_module, "select", lambda name, emulate, settings: host.Device(settings))
    check_beside_samples(host.load(saved(model, tmp_path), prefill_device="cpu"), model)


def test_pooled_rows_of_a_step_without_samples(tmp_path: Path) -> None:
    model = random_model("qwen3")
    runner = load(saved(model, tmp_path))
    lengths = [1, 20, 5]
    result = run(runner, [Row(i, ids_of(20, i)[:n], 0, [2 * i, 2 * i + 1], False, pools=True)
                          for i, n in enumerate(lengths)], [0, 1, 2])
    assert result.token_ids == {}
    for i, n in enumerate(lengths):
        np.testing.assert_allclose(result.hidden[i], last_hidden(model, ids_of(20, i)[:n]), atol=1e-5)


def test_pooled_row_keeps_the_captured_step(tmp_path: Path) -> None:
    runner = load(saved(random_model("qwen3"), tmp_path))
    result = run(runner, [Row(0, ids_of(20, 0), 0, [0, 1], False, pools=True)], [0])
    assert result.captured == (runner._dispatch.chunks.hidden is not None)
