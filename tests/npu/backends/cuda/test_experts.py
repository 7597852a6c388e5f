"""Emulated CUDA backend with mixtures of experts, beside the CPU's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.cli.acceptance import reference
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.model import check_tokens
from npuserve.cli.acceptance.reference import load_reference
from npuserve.npu import backends
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.kernels.triton import needs_triton
from tests.npu.backends.cuda.test_backend import emulated  # noqa: F401
from tests.npu.backends.cuda.test_hybrid import ask, both, few_graphs  # noqa: F401
from tests.npu.backends.small import GREEDY, ids_of
from tests.npu.model.test_experts_quantized import FLOATS
from tests.support.golden_cpu import GoldenCpu
from tests.support.int4_checkpoints import save_int4
from tests.support.loop import serve
from tests.support.mixtures import random_mixture, restack
from tests.support.models import PLAIN_W8A8, saved, saved_w8a8

pytestmark = [needs_triton, pytest.mark.timeout(600)]

FEW_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize("seed", [
    pytest.param(seed, marks=[] if seed in (2, 3, 4) else pytest.mark.full) for seed in range(12)])
def test_tokens_equal_the_cpu(tmp_path: Path, seed: int) -> None:
    """Families in turn, with 4 to 128 experts of which a token takes 1 to 8, renormalized or not, with a shared one or
    without, beside layers of one MLP and of linear attention. Chunks beside decode rows, two steps in flight."""
    folder = saved(random_mixture(seed), tmp_path)
    restack(folder, stacked=seed % 2 == 0)
    found = []
    for runner in both(folder, max_num_batched_tokens=16):
        assert runner.fallbacks == []
        asks = [ask(ids_of(length, length), 2, index) for index, length in enumerate((14, 4, 9))]
        answers, _ = serve(runner, asks, 2, 64, 3, 16)
        found.append([answer.tokens for answer in answers])
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == [2] * 3


def test_one_graph_serves_any_choice_of_experts(tmp_path: Path) -> None:
    """Rows with the same tokens choose the same experts, others do not; the host learns neither."""
    steps = []
    for first, ended, prompts in ((0, [], [[5], [5], [5]]), (3, [0, 1, 2], [[9], [70], [33]])):
        requests = range(first, first + 3)
        steps.append(Step([Row(request, prompt, 0, [slot], True, state_slot=slot)
                           for slot, (request, prompt) in enumerate(zip(requests, prompts, strict=True))],
                          [NewRequest(request, prompt, [], GREEDY)
                           for request, prompt in zip(requests, prompts, strict=True)], ended))
        steps.append(Step([Row(request, [slot + 40], 1, [slot], True, state_slot=slot)
                           for slot, request in enumerate(requests)]))
    found = []
    for runner in both(saved(random_mixture(2), tmp_path), max_num_batched_tokens=16):
        results = [runner.collect(runner.launch(step)) for step in steps]
        found.append([result.token_ids for result in results])
        assert all(result.captured for result in results)
        if runner.backend_name == "cuda":
            assert [result.captured_decodes + result.decoder_decodes for result in results] == [0, 3, 0, 3]
    assert found[0] == found[1]


def logprobs(runner: Runner) -> torch.Tensor:
    """Return those of a prompt in two chunks, and of a captured decode row."""
    prompt = ids_of(14)
    new = NewRequest(0, prompt, [], SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1))
    steps = [Step([Row(0, prompt[:10], 0, [0], False, state_slot=2)], [new]),
             Step([Row(0, prompt[10:], 10, [0], True, state_slot=2)]),
             Step([Row(0, [7], 14, [0], True, state_slot=2)])]
    results = [runner.collect(runner.launch(step)) for step in steps]
    reports = [report for result in results[:2] for report in result.prompt_logprobs[0]]
    return torch.tensor([report.logprob for report in (*reports, *results[1].logprobs[0], *results[2].logprobs[0])])


def quantized(folder: Path, kind: str) -> Path:
    """Write a mixture with a shared expert and linear attention (float8 in blocks), or of Qwen3."""
    if kind == "blocks":
        sizes = FEW_EXPERTS | {"moe_intermediate_size": 144, "shared_expert_intermediate_size": 144}
        model = random_mixture(2, hidden_size=160, **sizes)
        return saved_w8a8(model, folder, W8A8(per_channel=False, float8=True, blocks=True), FLOATS)
    model = random_mixture(0, hidden_size=64, num_hidden_layers=2, mlp_only_layers=[], **FEW_EXPERTS)
    if kind == "int4":
        save_int4(model, folder, "awq", symmetric=False, dtype=torch.float16)
        return folder
    scheme = W8A8(float8=True) if kind == "float8" else PLAIN_W8A8
    return saved_w8a8(model, folder, scheme, FLOATS)


@pytest.mark.parametrize(("kind", "name", "tolerance"), [
    ("blocks", "w8a8-fp8", 0.05), ("float8", "w8a8-fp8", 0.05), ("int8", "w8a8", 0.05), ("int4", "w4a16", 2e-4)])
def test_quantized_experts_are_near_the_cpu(tmp_path: Path, kind: str, name: str, tolerance: float) -> None:
    folder = quantized(tmp_path, kind)
    assert ModelConfig.from_folder(folder).quantization_name == name
    if "fp8" in name:
        backends.register_emulated(GoldenCpu)
    cuda, cpu = both(folder, max_num_batched_tokens=16)
    assert cuda.fallbacks == []
    torch.testing.assert_close(logprobs(cuda), logprobs(cpu), atol=tolerance, rtol=tolerance)


@pytest.mark.full  # test_hybrid.py has a model without experts
@pytest.mark.parametrize("seed", [0, 2])
def test_tokens_of_bfloat16_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The rule of `npuserve check --accept`."""
    folder = saved(random_mixture(seed, **FEW_EXPERTS), tmp_path)
    monkeypatch.setattr(accept_tokens, "BUDGET", 24)
    backend = backends.select("cuda", settings=DeviceSettings(decode_buckets=(2,)))
    golden = load_reference(folder, backend, "float32", 64, 1)
    loaded = reference.load(folder, backend, "bfloat16", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=24,
                            block_size=16)
    checks = check_tokens(loaded, golden, [ids_of(30), ids_of(5, 1)], 3, folder)
    assert checks
    assert all(check.passed for check in checks), checks


