"""Checkpoints in 4 bits and in ModelSlim's format that `quantize_checkpoint` writes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.quantization.w4a16 import W4A16
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.rounding import Int4Rounding, Int8Rounding
from tests.npu.model import test_w8a8
from tests.npu.model.test_w8a8 import FLIPS, far, logits, oracles
from tests.npu.quantize.test_checkpoint import outlying, sequences
from tests.support.models import saved
from tests.support.quantized import loaded

backend = test_w8a8.backend
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def outlying_model(kind: str, dtype: torch.dtype):
    return outlying(kind, dtype, **SIZES)


def test_int4_rounding_has_the_least_error_of_its_scales():
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    rounding = Int4Rounding(32)
    plain = weight.unflatten(1, (-1, 32))
    scale = plain.abs().amax(dim=2, keepdim=True) / 7.5
    error = ((plain / scale).round().clamp(-8, 7) * scale - plain).square().sum()
    ours = (rounding.dequantized(weight, torch.float32) - weight).square().sum()
    assert 0.5 * error < ours < 0.97 * error


def test_int4_rounding_weighs_columns_by_their_power():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    power = torch.ones(64)
    power[::8] = 100
    rounding = Int4Rounding(64)
    weighted, plain = (((rounding.dequantized(weight, torch.float32, p) - weight).square() * power).sum()
                       for p in (power, None))
    assert weighted < 0.95 * plain


@pytest.mark.parametrize("size", [32, 64, 128])
def test_int4_tensors_are_the_dequantized_numbers(size):
    weight = torch.randn(10, 256, generator=torch.Generator().manual_seed(3))
    rounding = Int4Rounding(size)
    tensors = rounding.tensors(weight, torch.bfloat16)
    codes = torch.stack([tensors["weight_packed"] >> 4 * i & 15 for i in range(8)], dim=-1).flatten(1)
    scale = tensors["weight_scale"].float().repeat_interleave(size, dim=1)
    assert torch.equal((codes - 8) * scale, rounding.dequantized(weight, torch.bfloat16))
    assert tensors["weight_shape"].tolist() == [10, 256]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "calibrated"), [
    ("qwen3", torch.bfloat16, True), ("qwen3-untied", torch.float32, False), ("qwen2", torch.float32, True),
    ("llama-bias", torch.float16, False),
])
def test_quantized_int4_logits_equal_transformers(tmp_path, kind, dtype, calibrated, backend):
    model = outlying_model(kind, dtype)
    folder = saved(model, tmp_path / "model", max_shard_size="60KB")
    texts = sequences() if calibrated else []
    written = quantize_checkpoint(folder, tmp_path / "out", texts, rounding=Int4Rounding(64), strength=0.5)
    assert (written.scheme, written.quantized) == ("w4a16", 21)
    whole, theirs = oracles(model.float()), oracles(loaded(tmp_path / "out"))
    assert 0.02 < far(theirs, whole) < 0.7
    assert far(logits(tmp_path / "out", backend), theirs) < 1e-4


def test_quantized_int4_layers_take_the_largest_group_that_divides(tmp_path):
    folder = saved(outlying_model("qwen3", torch.bfloat16), tmp_path / "model")
    quantize_checkpoint(folder, tmp_path / "out", rounding=Int4Rounding(128))
    quantization = ModelConfig.from_folder(tmp_path / "out").quantization
    assert quantization.of("model.layers.0.mlp.down_proj") == W4A16(32)
    assert quantization.of("model.layers.2.mlp.up_proj") == W4A16(64)
    assert quantization.of("lm_head") is None


def test_quantized_int4_inputs_without_group_are_refused(tmp_path):
    folder = saved(outlying("qwen3", torch.bfloat16, hidden_size=64, intermediate_size=40), tmp_path / "model")
    with pytest.raises(ModelError, match=r"down_proj: has 40 inputs, which groups of 32 do not divide; leave"):
        quantize_checkpoint(folder, tmp_path / "out", rounding=Int4Rounding(32))


def test_smoothing_for_int4_reduces_the_error(tmp_path):
    model = outlying_model("qwen3-untied", torch.float32)
    folder = saved(model, tmp_path / "model")
    whole = oracles(model)
    errors = []
    for name, texts in (("plain", []), ("smoothed", sequences())):
        quantize_checkpoint(folder, tmp_path / name, texts, rounding=Int4Rounding(32))
        errors.append(far(oracles(loaded(tmp_path / name)), whole))
    assert errors[1] < 0.9 * errors[0]


def test_modelslim_checkpoint_equals_that_of_compressed_tensors(tmp_path, backend):
    """Its scales are float32, which is the dtype of this model."""
    folder = saved(outlying("qwen2", torch.float32), tmp_path / "model")
    for name, modelslim in (("ours", False), ("theirs", True)):
        quantize_checkpoint(folder, tmp_path / name, sequences(), rounding=Int8Rounding(modelslim=modelslim),
                            strength=0.5)
    description = json.loads((tmp_path / "theirs" / "quant_model_description.json").read_text())
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    assert {key for key in description if "." in key} == tensors.keys()
    assert description["model.layers.0.self_attn.q_proj.weight_offset"] == "W8A8_DYNAMIC"
    assert description["model.layers.0.self_attn.q_proj.bias"] == description["model.norm.weight"] == "FLOAT"
    assert "quantization_config" not in json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert far(logits(tmp_path / "theirs", backend), logits(tmp_path / "ours", backend)) < FLIPS
