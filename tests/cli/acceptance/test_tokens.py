"""Prompts and answers of the acceptance check, and their agreement with a reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.tokens import agreement, rounding_dtype
from npuserve.kernels.quantized import FLOAT8
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from tests.cli.acceptance.running import built

pytestmark = pytest.mark.usefixtures("small")


def logits(*best: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(best), 5).float()


def test_agreement_counts_positions_tokens_and_gaps() -> None:
    prompts, tokens = [[0, 1], [2]], [[3, 4, 1], [0]]
    # Rows are positions; those from len(prompt) - 1 on predict the answer.
    reference = [logits(0, 3, 4, 1, 2), logits(0, 1)]
    same = agreement(reference, reference, prompts, tokens)
    assert (same.positions, same.equal, same.tokens, same.likeliest) == (7, 7, 4, 4)
    assert (same.difference, same.gap, same.worst) == (0.0, 0.0, None)
    other = agreement(reference, [logits(0, 3, 4, 1, 2) * 0.5, logits(4, 1)], prompts, [[3, 2, 1], [0]])
    assert (other.positions, other.equal, other.tokens, other.likeliest) == (7, 6, 4, 3)
    assert (other.difference, other.gap, other.worst) == (1.0, 1.0, (0, 1, 2, 4))
    nan = agreement(reference, [x * torch.nan for x in reference], prompts, tokens)
    assert nan.difference == float("inf")


@pytest.mark.parametrize(("dtype", "inputs", "rounding"), [
    ("float32", set(), "float32"), ("float32", {torch.int8}, "float32"), ("float32", {FLOAT8}, "bfloat16"),
    ("float32", {FLOAT8, torch.int8}, "bfloat16"), ("float16", {FLOAT8}, "float16")])
def test_rounding_dtype_of_float8_in_float32_is_bfloat16(dtype: str, inputs: set[torch.dtype], rounding: str) -> None:
    loaded: Any = SimpleNamespace(
        runner=SimpleNamespace(dtype_name=dtype),
        model=SimpleNamespace(weights=SimpleNamespace(quantized_inputs=inputs)))
    assert rounding_dtype(loaded) == rounding


@pytest.mark.slow
@built
def test_answers_prompts_are_chunked_and_share_a_prefix(folder: Path) -> None:
    from npuserve.cli.acceptance import reference
    from npuserve.npu import storyteller

    prompts = accept_tokens.prompts_of(storyteller.FOLDER, 2048, 400)
    assert len(prompts[0]) > 128 > accept_tokens.BUDGET
    assert prompts[-1][: len(prompts[0])] == prompts[0]
    assert max(map(len, accept_tokens.prompts_of(storyteller.FOLDER, 2048, 9))) == 9
    without = accept_tokens.prompts_of(folder, 100, 200)
    assert all(ids and max(ids) < 100 for ids in without)
    backend = CpuBackend(settings=DeviceSettings(threads=1))
    runner = reference.load(folder, backend, "auto", max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64,
                             block_size=16).runner
    made = accept_tokens.answers(runner, without, 20, 2)
    assert [len(x) for x in made.tokens] == [20] * len(without)
    assert any(1 in step and max(step) > 1 for step in made.steps)  # chunks and decode rows in one step
    computed = sum(map(sum, made.steps))
    assert computed < sum(map(len, without)) + 19 * len(without)  # blocks of the first prompt were reused
    alone = accept_tokens.answers(runner, without, 20, 1)
    assert (alone, alone.steps) == (made, made.steps)  # the runner has freed the requests
