"""Tokens of an emulated NPU through gRPC, compared with the CPU's by bench/quality/emulated.py.

Greedy tokens in float32 (a labelled relaxation) are equal, and logits in bfloat16 are near, with changing batches,
chunks, prefix hits and preemption. docs/ascend.md says how to run the model of Qwen3-14B's widths, which is too large
for a test.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.npu.backends.hybrid import saved_hybrid
from tests.npu.backends.mixture import saved_mixture
from tests.npu.emulator.child import needs_npu
from tests.support.benches import bench
from tests.support.real_models import BUILT_IN, model_folder, published

ROOT = Path(__file__).parents[3]
REQUESTS, ANSWER = 4, 24



def findings(*arguments: str, exact: bool = True) -> list[dict[str, Any]]:
    """Return the findings. exact: they must have passed."""
    done = subprocess.run([sys.executable, "bench/quality/emulated.py", *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=280)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr
    assert done.returncode == 0 or not exact, found
    return found


@needs_npu
@pytest.mark.full  # test_accept_ascend.py compares tokens with one step in flight and with two
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["overlapped", "alone"])
@pytest.mark.parametrize("name", [BUILT_IN, *published("minimind2-small", "stories260K-qwen3")])
def test_tokens_are_those_of_the_cpu(name: str, way: str) -> None:
    (found,) = findings(str(model_folder(name)), "--parts", "tokens", "--requests", str(REQUESTS), "--answer",
                        str(ANSWER), "--blocks", "4", "--ways", way)
    assert found["passed"]
    assert found["equal"] == found["tokens"] == REQUESTS * ANSWER
    # These events must have occurred.
    assert found["preemptions"] > 0
    assert found["prefix_hits"] > 0
    assert found["mixed_steps"] > 0
    assert found["captured"] >= 0.95 * found["decodes"] > 0


@needs_npu
@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [BUILT_IN, *published("stories260K-qwen3", "minimind2-small")])
def test_logits_in_bfloat16_are_near(name: str) -> None:
    (found,) = findings(str(model_folder(name)), "--parts", "forced")
    assert found["passed"]
    assert found["positions"] > 1000
    assert found["equal_argmax"] >= min(0.995, found["of_the_cpu"] - 0.005)
    assert 0 < found["largest_logit_difference"] < 0.05 * found["largest_logit"]


@needs_npu
@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [BUILT_IN, *published("stories260K-qwen3", "minimind2-small")])
def test_predictions_in_w8a8_are_those_of_the_cpu_in_w8a8(name: str) -> None:
    (found,) = findings(str(model_folder(name)), "--parts", "int8")
    assert found["passed"]
    assert found["positions"] > 1000
    assert found["equal_argmax_in_float32"] >= 0.99
    assert found["equal_argmax"] >= min(0.995, found["of_the_cpu"] - 0.005)


def test_the_wide_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from npuserve.npu.execution.load import load_runner

    emulated = bench("quality.emulated")
    assert emulated.QWEN3_14B.items() <= bench("kernels.roofline").QWEN3_14B.items()
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
             "intermediate_size": 96}
    monkeypatch.setattr(emulated, "QWEN3_14B", small)
    runner = load_runner(emulated.wide(tmp_path, 101, layers=3), backend="cpu", max_model_len=64,
                         progress=lambda done, total: None)
    assert (runner.config.num_layers, runner.config.vocab_size, runner.dtype_name) == (3, 101, "bfloat16")


@needs_npu
@pytest.mark.full  # tests/npu/backends/ascend/test_hybrid.py has both in steps
@pytest.mark.timeout(300)
@pytest.mark.parametrize("operators", [True, False], ids=["operators", "fallback"])
def test_tokens_of_a_hybrid_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operators: bool
) -> None:
    """With states continued from checkpoints, and computed again after preemptions.

    The operators' results are in bfloat16 even here, so that near ties may fall the other way.
    """
    if not operators:
        monkeypatch.setenv("EMULATED_CANN_WITHOUT", "aclnnRecurrentGatedDeltaRule aclnnChunkGatedDeltaRule")
    folder = saved_hybrid(tmp_path, layers=2, full=(1,), linear_dim=128 if operators else 64)
    (found,) = findings(str(folder), "--parts", "tokens", "--requests", "6", "--answer", "40", "--blocks",
                        "4", "--ways", "overlapped", exact=not operators)
    least = 0.9 if operators else 1.0
    assert found["equal"] >= least * found["tokens"] == least * 6 * 40
    assert found["preemptions"] > 0
    assert found["prefix_hits"] > 0
    assert found["mixed_steps"] > 0
    assert found["captured"] >= 0.9 * found["decodes"] > 0


@needs_npu
@pytest.mark.full  # tests/npu/backends/ascend/test_experts.py has steps
@pytest.mark.timeout(300)
def test_tokens_of_a_mixture_are_those_of_the_cpu(tmp_path: Path) -> None:
    folder = saved_mixture(tmp_path, layers=2, top_k=3)
    (found,) = findings(str(folder), "--parts", "tokens", "--requests", "6", "--answer", "40", "--blocks",
                        "4", "--ways", "overlapped")
    assert found["equal"] == found["tokens"] == 6 * 40
    assert found["preemptions"] > 0
    assert found["prefix_hits"] > 0
    assert found["mixed_steps"] > 0
    assert found["captured"] >= 0.9 * found["decodes"] > 0
