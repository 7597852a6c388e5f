"""A W8A8 checkpoint of `npuserve quantize`, served by an emulated NPU through gRPC: tokens as on the CPU in W8A8.

Both compute in float32 (a labelled relaxation) with the device's int8 levels. A few tokens may differ: a number halfway
between two int8 values rounds by the order of a sum. The CPU's kernels and golden functions differ as much
(bench/RESULTS.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from npuserve.cli import main as cli
from npuserve.cli.acceptance.reference import forced_logits, load_reference
from npuserve.cli.acceptance.tokens import agreement, prompts_of
from npuserve.kernels.ascend import LEVELS
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model.config import ModelConfig
from npuserve.v1 import model_pb2
from tests.e2e.server import request, serving, streamed
from tests.npu.emulator.child import needs_npu
from tests.support.real_models import model_folder

pytestmark = [pytest.mark.full, needs_npu]  # tests/npu/backends/ascend/test_int8.py has steps

ANSWER = 24


def quantized(name: str, out: Path) -> Path:
    assert cli.main(["quantize", str(model_folder(name)), str(out), "--calibration", "none"]) == 0
    return out


@pytest.mark.timeout(200)
def test_tokens_are_those_of_the_cpu_in_w8a8(tmp_path: Path) -> None:
    folder = quantized("storyteller", tmp_path / "w8a8")
    prompts = prompts_of(folder, ModelConfig.from_folder(folder).vocab_size, 100)
    with serving(
        str(folder), "--device", "npu", "--emulate", "--emulate-relax", "fp32,small_heads", "--dtype", "float32",
        "--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--kv-cache-memory", "64MiB", "--kernel-sampling", "0",
    ) as server:
        info = server.stub.GetModelInfo(model_pb2.GetModelInfoRequest())
        made = [streamed(server.stub, request(prompt, ANSWER, ignore_eos=True))[1] for prompt in prompts]
        captured, eager = (server.metric("npuserve_decode_tokens_total", mode=mode) for mode in ("captured", "eager"))
    assert info.quantization == "w8a8"
    assert all(len(ids) == ANSWER for ids in made)
    sequences = [prompt + ids for prompt, ids in zip(prompts, made, strict=True)]
    device = CpuBackend(settings=DeviceSettings(int8_levels=LEVELS))
    logits = list(forced_logits(*load_reference(folder, device, "float32", 128, 0), sequences, 64))
    found = agreement(logits, logits, prompts, made)
    assert found.tokens == len(prompts) * ANSWER
    assert found.likeliest >= 0.97 * found.tokens
    assert found.gap < 1  # of logits up to 35
    assert captured >= len(prompts) * (ANSWER - 2) > 0 == eager
