"""Emulated CUDA backend with weights of 4 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npuserve.kernels.int4_weight import Int4Weight
from npuserve.kernels.layer import Linear
from npuserve.kernels.registry import KERNELS
from npuserve.kernels.weight import form_of
from npuserve.npu.backends.machine import takes_case
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import stored_bytes
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.kernels.triton import needs_triton
from tests.npu.backends.cuda.test_backend import emulated, load, started  # noqa: F401
from tests.npu.backends.small import ids_of
from tests.support.int4_checkpoints import save_int4
from tests.support.models import random_model, saved

pytestmark = needs_triton


def logprobs(runner: Runner) -> list[float]:
    """Return those of a prompt in two chunks and of a captured decode row."""
    prompt = ids_of(20)
    new = NewRequest(0, prompt, [], SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1))
    rows = [Row(0, prompt[:12], 0, [0], False), Row(0, prompt[12:], 12, [0, 1], True), Row(0, [7], 20, [0, 1], True)]
    results = [runner.collect(runner.launch(Step([row], [new] * (row.start == 0)))) for row in rows]
    reports = [report for result in results[:2] for report in result.prompt_logprobs[0]]
    return [report.logprob for report in (*reports, *results[1].logprobs[0], *results[2].logprobs[0])]


@pytest.mark.parametrize(("method", "kind"), [
    ("awq", "qwen3"), ("gptq", "qwen2"), ("compressed-tensors", "qwen3-bias")])
def test_cuda_int4_logprobs_equal_floats(tmp_path: Path, method: str, kind: str) -> None:
    """Checkpoints of three formats, with zero points, biases, and groups that do not divide the columns, beside the
    CPU with the numbers that they stand for."""
    model = random_model(kind, hidden_size=64, intermediate_size=200, num_hidden_layers=1)
    dtype = torch.float32 if method == "compressed-tensors" else torch.float16
    saved(save_int4(model, tmp_path / "int4", method, dtype=dtype), tmp_path / "floats")
    cuda = load(tmp_path / "int4", max_model_len=64)
    assert cuda.config.quantization_name == "w4a16"
    assert cuda.fallbacks == []
    found = logprobs(cuda)
    assert len(found) == 21
    expected = logprobs(load(tmp_path / "floats", "cpu", max_model_len=64))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_cuda_int4_weights_have_the_planned_bytes(tmp_path: Path) -> None:
    save_int4(random_model("qwen3", num_hidden_layers=1), tmp_path, "gptq")
    config, backend = ModelConfig.from_folder(tmp_path), started()
    weights = load_weights(tmp_path, config, torch.float32, backend, lambda done, total: None)
    layers = [part for block in weights.blocks for part in (block.norm, *block.weights)]
    forms = [form_of(part.weight) for part in layers if isinstance(part, Linear)]
    numbers = sum(form.numbers.nbytes for form in forms if isinstance(form, Int4Weight))
    floats = sum(tensor.nbytes for tensor in (*layers, weights.norm) if isinstance(tensor, torch.Tensor))
    table = weights.padded_vocabulary * config.hidden_size * 4
    assert stored_bytes(config, torch.float32, backend) == numbers + floats + table


def test_cuda_int4_cases_are_taken() -> None:
    cases = [case for case in KERNELS["linear"].cases if case.int4 and not case.w4a8]
    assert cases
    assert all(takes_case(started(), case) for case in cases)
