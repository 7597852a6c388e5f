"""Emulated CUDA backend with float8 weights and activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npuserve.cli.acceptance import reference
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.model import check_tokens
from npuserve.cli.acceptance.reference import load_reference
from npuserve.kernels.registry import KERNELS
from npuserve.npu import backends
from npuserve.npu.backends import BackendError, select
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cuda import emulated as cuda_emulated
from npuserve.npu.backends.machine import takes_case
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.kernels.triton import needs_triton
from tests.npu.backends.cuda.test_backend import emulated, load, started  # noqa: F401
from tests.npu.backends.small import ids_of, saved
from tests.support.golden_cpu import GoldenCpu
from tests.support.models import random_model, saved_w8a8

pytestmark = needs_triton


@pytest.mark.parametrize("scheme", [
    W8A8(float8=True), W8A8(per_channel=False, dynamic=False, float8=True),
    W8A8(per_channel=False, float8=True, blocks=True)], ids=["dynamic", "static", "blocks"])
def test_cuda_float8_logprobs_are_near_golden(tmp_path: Path, scheme: W8A8) -> None:
    """Chunks and captured decode rows, equal except where a number is a near tie and becomes the next float8."""
    sizes = {"hidden_size": 160, "intermediate_size": 200} if scheme.blocks else {}
    folder = saved_w8a8(random_model("qwen3", num_hidden_layers=1, **sizes), tmp_path, scheme)
    assert load(folder, "cpu", max_model_len=64).config.quantization_name == "none"
    with pytest.raises(BackendError, match=r"float8 weights and input_activations .* are not possible on cpu; .* int8"):
        load(folder, prefill_device="cpu")
    assert ModelConfig.from_folder(folder).quantization_name == "w8a8-fp8"
    backends.register_emulated(GoldenCpu)
    found, prompt = [], ids_of(20)
    for name in ("cuda", "cpu"):
        runner = load(folder, name, max_model_len=64)
        new = NewRequest(0, prompt, [], SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1))
        rows = [Row(0, prompt[:12], 0, [0], False), Row(0, prompt[12:], 12, [0, 1], True),
                Row(0, [7], 20, [0, 1], True)]
        results = [runner.collect(runner.launch(Step([row], [new] * (row.start == 0)))) for row in rows]
        reports = [report for result in results[:2] for report in result.prompt_logprobs[0]]
        found.append([report.logprob for report in (*reports, *results[1].logprobs[0], *results[2].logprobs[0])])
    assert len(found[0]) == 21
    torch.testing.assert_close(*map(torch.tensor, found), atol=0.02, rtol=0.01)


def test_cuda_float8_tokens_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's golden functions judge the tokens part of `npuserve check --accept`."""
    folder = saved_w8a8(random_model("qwen3", num_hidden_layers=1), tmp_path, W8A8(float8=True))
    monkeypatch.setattr(accept_tokens, "BUDGET", 16)
    backend = select("cuda", settings=DeviceSettings(decode_buckets=(2,)))
    golden = load_reference(folder, backend, "float32", 64, 1)
    loaded = reference.load(folder, backend, "float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16,
                             block_size=16)
    found = {x.name: x for x in check_tokens(loaded, golden, [ids_of(20), ids_of(5, 1)], 3, folder)}
    assert found["beside the CPU, float32"].passed
    assert found["beside the CPU, float32"].figures["largest_logit_difference"] > 0
    assert found["overlapped and not, float32"].passed


def test_cuda_float8_needs_its_tensor_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_w8a8(random_model("qwen3", num_hidden_layers=1), tmp_path, W8A8(float8=True))
    cases = [case for case in KERNELS["linear"].cases if case.float8]
    assert cases
    assert all(takes_case(started(), case) for case in cases)
    monkeypatch.setattr(cuda_emulated, "get_device_capability", lambda device: (8, 6))
    assert load(folder, max_model_len=64).config.quantization_name == "none"
    with pytest.raises(BackendError, match=r"kv_cache_dtype: 'fp8' is not possible on cuda; .* auto, int8$"):
        load(saved(tmp_path / "plain", layers=1), kv_cache_dtype="fp8")
    assert not any(takes_case(started(), case) for case in cases)
