"""W4A16 on the emulated Ascend device: steps, layout of the weights, and weights that become floats."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.kernels.ascend_int4 import AscendInt4, refusal
from npuserve.kernels.int4 import Grouping
from npuserve.kernels.int4_weight import Int4Weight
from npuserve.kernels.weight import WeightForm, form_of
from npuserve.npu import emulator
from npuserve.npu.backends import select
from npuserve.npu.model import loader
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import stored_bytes
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.rounding import Int4Rounding
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.npu.backends.ascend.test_backend import load
from tests.npu.backends.small import GREEDY, answers, asks, saved
from tests.npu.emulator.child import emulated, needs_npu, run
from tests.support.int4_checkpoints import to_int4

LAYERS = 2


def saved_int4(folder: Path, dtype: torch.dtype, size: int = 32, **sizes: Any) -> Path:
    """Save the small model with weights of 4 bits and scales of `dtype`."""
    floats = saved(folder / "floats", layers=LAYERS, **sizes)
    path, config = floats / "model.safetensors", floats / "config.json"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    name = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": name}))
    quantize_checkpoint(floats, folder / "int4", rounding=Int4Rounding(size))
    return folder / "int4"


def loaded(folder: Path) -> ModelWeights:
    """Return the weights for activations in bfloat16."""
    config = ModelConfig.from_folder(folder)
    return load_weights(folder, config, torch.bfloat16, select("npu"), lambda done, total: None)


def forms_of(weights: ModelWeights) -> list[WeightForm]:
    return [form_of(linear.weight) for block in weights.blocks for linear in block.linears]


def equal_to_floats(folder: Path) -> None:
    """Compare with the checkpoint in floats, whose numbers are those of the 4 bits."""
    npu = load(folder / "int4", decode_buckets=(2, 4))
    cpu = load(folder / "floats", "cpu", block_size=128, threads=1)
    assert npu.config.quantization_name == "w4a16"
    assert npu.fallbacks == []
    got, results = answers(npu, asks(6, 8))
    expected, _ = answers(cpu, asks(6, 8))
    assert got == expected
    assert all(result.captured for result in results)


@needs_npu
@pytest.mark.parametrize(("method", "order"), [("awq", "lazy"), ("gptq", "shuffled"), ("compressed-tensors", "lazy")])
def test_ascend_int4_greedy_tokens_equal_floats(tmp_path: Path, method: str, order: str) -> None:
    """Checkpoints of three formats, with zero points, and groups that do not divide the columns."""
    floats, int4 = (saved(tmp_path / name, layers=LAYERS, inner=200) for name in ("floats", "int4"))
    dtype = torch.float32 if method == "compressed-tensors" else torch.float16
    numbers = to_int4(int4, method, dtype=dtype)
    path = floats / "model.safetensors"
    save_file(load_file(path) | numbers, path)
    run(equal_to_floats, {"folder": tmp_path}, {"relax": ("fp32", "small_heads"), "order": order, "poison": True})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@emulated()
def test_ascend_int4_step_in_device_dtypes_needs_no_relaxation(tmp_path: Path, dtype: str) -> None:
    folder = saved_int4(tmp_path, getattr(torch, dtype))
    prompt, reports = [3, 1, 4, 1, 5, 9, 2, 6], []
    for runner in (load(folder, dtype=dtype), load(folder, "cpu", threads=1)):
        new = NewRequest(1, prompt, [], SamplingParams(temperature=0.0, logprobs=5))
        reports.append(runner.collect(runner.launch(Step([Row(1, prompt, 0, [0], True)], [new]))).logprobs[1][0])
    assert reports[0].token_id == reports[1].token_id
    assert reports[0].logprob == pytest.approx(reports[1].logprob, abs=0.1)


@emulated()
def test_ascend_int4_operators_of_a_step(tmp_path: Path) -> None:
    """One product a weight, without further operators."""
    runner = load(saved_int4(tmp_path, torch.bfloat16), dtype="bfloat16", capture_chunks=False)
    torch.npu.synchronize()
    emulator.clear_calls()
    runner.collect(runner.launch(Step([Row(0, [1, 2], 0, [0], True)], [NewRequest(0, [1, 2], [], GREEDY)])))
    torch.npu.synchronize()
    calls = Counter(call.name for call in emulator.calls())
    assert calls["aclnnWeightQuantBatchMatmulV2"] == 4 * LAYERS
    assert calls["aclnnSwiGlu"] == LAYERS


@pytest.mark.parametrize("size", [32, 128])
@emulated()
def test_ascend_int4_weights_stored_once_as_predicted(tmp_path: Path, size: int) -> None:
    folder = saved_int4(tmp_path, torch.bfloat16, size)
    backend = select("npu")
    before = torch.npu.memory_allocated()
    weights = loaded(folder)
    torch.npu.synchronize()
    taken = torch.npu.memory_allocated() - before
    forms = forms_of(weights)
    assert all(isinstance(form, Int4Weight) and isinstance(form.numbers, AscendInt4) for form in forms)
    expected = stored_bytes(ModelConfig.from_folder(folder), torch.bfloat16, backend)
    assert expected <= taken <= expected + 512 * (3 * len(forms) + 32)  # granularity of the device's allocator


@emulated()
def test_ascend_int4_scales_of_another_dtype_become_floats(tmp_path: Path) -> None:
    """The product takes scales of the dtype of the activations alone, and none are rounded."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(loader.__name__).addHandler(handler)
    weights = loaded(saved_int4(tmp_path, torch.float16))
    assert not any(isinstance(form, Int4Weight) for form in forms_of(weights))
    assert [text for text in said if text.startswith(
        "14 of 14 linear layers have scales in float16 beside activations in bfloat16: they were converted to ")]


@pytest.mark.parametrize(("n", "k", "dtype", "reason"), [
    (64, 128, torch.bfloat16, ""), (65528, 65535, torch.bfloat16, ""), (64, 128, torch.float32, ""),
    (60, 128, torch.bfloat16, "have 60 rows, which are not a multiple of 8"),
    (151936, 128, torch.bfloat16, "have 151936 rows or columns, and the operator takes 65535"),
    (64, 65536, torch.bfloat16, "have 65536 rows or columns, and the operator takes 65535"),
    (64, 128, torch.float16, "have scales in bfloat16 beside activations in float16"),
])
def test_ascend_int4_refusal(n: int, k: int, dtype: torch.dtype, reason: str) -> None:
    assert refusal(n, k, Grouping(32, torch.bfloat16), dtype) == reason
