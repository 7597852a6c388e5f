"""W8A8 on the emulated Ascend device: steps, layout of the weights, and refused schemes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.kernels import ascend
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.npu import emulator
from npuserve.npu.backends import BackendError, select
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.model.config import HeadDtype, ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import stored_bytes
from npuserve.npu.quantization.assignment import Quantization
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.npu.backends.ascend.test_backend import load
from tests.npu.backends.small import GREEDY, answers, asks, saved, saved_w8a8
from tests.npu.emulator.child import emulated, needs_npu, run

LAYERS = 2
WIDE = ascend.SWIGLU_ROW // 2 + 32


def static(folder: Path) -> None:
    """Convert a model to static inputs, with one scale per layer for all tokens."""
    path, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[name.replace("weight_scale", "input_scale")] = torch.tensor([0.04])
    save_file(tensors, path)
    made = Quantization(((("Linear",), W8A8(dynamic=False)),), ("lm_head",))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": made.to_json()}))


def equal_to_the_cpu(folder: Path, is_static: bool, head: HeadDtype) -> None:
    saved_w8a8(folder, layers=LAYERS)
    if is_static:
        static(folder / "w8a8")
    npu = load(folder / "w8a8", decode_buckets=(2, 4), lm_head_dtype=head)
    cpu = load(folder / "w8a8", "cpu", block_size=128, threads=1, lm_head_dtype=head, int8_levels=ascend.LEVELS)
    assert npu.fallbacks == []
    got, results = answers(npu, asks(6, 8))
    expected, _ = answers(cpu, asks(6, 8))
    assert got == expected
    assert all(result.captured for result in results)


@needs_npu
@pytest.mark.parametrize(("is_static", "head", "order", "seed"), [
    (False, "auto", "lazy", 0), (False, "int8", "shuffled", 1), (True, "auto", "lazy", 0),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        (False, "auto", "shuffled", 1), (False, "int8", "lazy", 0), (True, "auto", "shuffled", 1)))])
def test_ascend_w8a8_greedy_tokens_equal_cpu(
    tmp_path: Path, is_static: bool, head: HeadDtype, order: str, seed: int
) -> None:
    """The CPU uses the device's int8 levels."""
    options = {"relax": ("fp32",), "order": order, "seed": seed, "poison": True}
    run(equal_to_the_cpu, {"folder": tmp_path, "is_static": is_static, "head": head}, options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@emulated()
def test_ascend_w8a8_step_in_device_dtypes_needs_no_relaxation(tmp_path: Path, dtype: str) -> None:
    folder = saved_w8a8(tmp_path)
    prompt, reports = [3, 1, 4, 1, 5, 9, 2, 6], []
    for runner in (load(folder, dtype=dtype), load(folder, "cpu", threads=1, int8_levels=ascend.LEVELS)):
        new = NewRequest(1, prompt, [], SamplingParams(temperature=0.0, logprobs=5))
        reports.append(runner.collect(runner.launch(Step([Row(1, prompt, 0, [0], True)], [new]))).logprobs[1][0])
    assert reports[0].token_id == reports[1].token_id
    assert reports[0].logprob == pytest.approx(reports[1].logprob, abs=0.1)


FUSED = Counter({"aclnnDequantSwigluQuantV2": LAYERS, "aclnnDynamicQuantV2": LAYERS + 1})
APART = Counter({"aclnnSwiGlu": LAYERS, "aclnnDynamicQuantV2": 2 * LAYERS + 1})


@pytest.mark.parametrize(("inner", "expected"), [(96, FUSED), (WIDE, APART)])
@emulated()
def test_ascend_w8a8_operators_are_fused(tmp_path: Path, inner: int, expected: Counter[str]) -> None:
    """A prompt chunk needs separate quantization only for the first norm and the output of attention.

    SwiGLU is fused up to the documented width.
    """
    runner = load(saved_w8a8(tmp_path, layers=LAYERS, inner=inner), dtype="bfloat16", lm_head_dtype="int8",
                  capture_chunks=False)
    new = [NewRequest(0, [1, 2], [], GREEDY)]
    torch.npu.synchronize()
    emulator.clear_calls()
    runner.collect(runner.launch(Step([Row(0, [1, 2], 0, [0], True)], new)))
    torch.npu.synchronize()
    calls = Counter(call.name for call in emulator.calls())
    wanted = Counter({
        "aclnnRmsNorm": 1 + 2 * LAYERS, "aclnnAddRmsNormDynamicQuantV2": 2 * LAYERS - 1, "aclnnAddRmsNorm": 1,
        "aclnnQuantMatmulWeightNz": 4 * LAYERS, "aclnnQuantMatmulV5": 1})
    expected = expected + wanted + Counter({"aclnnDynamicQuantV2": 1})  # input of the LM head
    found = Counter({name: calls[name] for name in (expected | FUSED | APART) if calls[name]})
    assert found == expected, found


@emulated()
def test_ascend_w8a8_weights_stored_once_as_predicted(tmp_path: Path) -> None:
    """Each weight is in FRACTAL_NZ. While a weight is converted, it is in memory two more times."""
    import torch_npu

    folder = saved_w8a8(tmp_path, layers=6)
    backend, config = select("npu"), ModelConfig.from_folder(folder, "int8")
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    weights = load_weights(folder, config, torch.bfloat16, backend, lambda done, total: None)
    torch.npu.synchronize()
    taken, peak = torch.npu.memory_allocated() - before, torch.npu.max_memory_allocated() - before
    assert isinstance(weights.embedding, QuantizedWeight)
    linears = [linear.weight for x in weights.attention_layers() for linear in x.linears]
    pieces = 0
    for weight in linears:
        assert isinstance(weight, QuantizedWeight)
        assert torch_npu.get_npu_format(weight.values) == ascend.FRACTAL_NZ
        pieces += 4  # values, scale, sums; a norm
    assert torch_npu.get_npu_format(weights.embedding.values) != ascend.FRACTAL_NZ
    expected = stored_bytes(config, torch.bfloat16, backend)
    assert expected <= taken <= expected + 512 * (pieces + 16)  # granularity of the device's allocator
    largest = max(weight.values.nbytes for weight in linears)
    assert peak <= taken + 2 * largest + 4096


ZEROS: dict[str, Any] = {
    "weights": {"symmetric": False}, "input_activations": {"symmetric_inputs": False},
    "weights and input_activations": {"symmetric": False, "symmetric_inputs": False, "dynamic": False},
}


@pytest.mark.parametrize("what", ZEROS)
@emulated()
def test_ascend_zero_points_are_refused_before_loading(tmp_path: Path, what: str) -> None:
    config = replace(
        ModelConfig.from_folder(saved(tmp_path)), quantization=Quantization(((("Linear",), W8A8(**ZEROS[what])),)))
    with pytest.raises(BackendError, match=rf"quantization_config: {what} with zero points .*symmetric: true"):
        predict(config, select("npu"))
