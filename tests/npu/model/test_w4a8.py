"""Checkpoints in W4A8 of compressed-tensors, compared with transformers; see test_w8a8.py for the tolerance."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.kernels.int4_weight import Int4Weight
from npuserve.kernels.linear import linear
from npuserve.kernels.native import available
from npuserve.kernels.quantized import DYNAMIC
from npuserve.kernels.registry import KERNELS
from npuserve.kernels.weight import WeightForm, form_of
from npuserve.npu.backends import BackendError
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import check_schemes, stored_bytes
from npuserve.npu.quantization.w4a8 import W4A8
from npuserve.npu.quantization.w4a16 import W4A16
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.rounding import Int4Int8Rounding
from tests.npu.model import test_w8a8
from tests.npu.model.test_w8a8 import FLIPS, far, logits, oracles
from tests.npu.quantize.test_checkpoint import sequences
from tests.npu.quantize.test_rounding import outlying_model
from tests.support.models import edit_config, random_model, saved
from tests.support.quantized import loaded, save_quantized, w4a8

backend = test_w8a8.backend
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


@pytest.mark.parametrize("group", [32, 64, None])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama-bias"])
def test_w4a8_logits_equal_transformers(tmp_path, kind, group, backend):
    """The checkpoint is written by compressed-tensors."""
    save_quantized(random_model(kind, **SIZES), tmp_path, w4a8(group))
    config = ModelConfig.from_folder(tmp_path)
    assert config.quantization_name == "w4a8"
    assert far(logits(tmp_path, backend), oracles(loaded(tmp_path))) < FLIPS


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "calibrated"), [("qwen3", False), ("qwen2", True), ("llama-bias", True)])
def test_quantized_w4a8_logits_equal_transformers(tmp_path, kind, calibrated, backend):
    folder = saved(outlying_model(kind, torch.float32), tmp_path / "model", max_shard_size="60KB")
    written = quantize_checkpoint(
        folder, tmp_path / "out", sequences() if calibrated else [], rounding=Int4Int8Rounding(64), strength=0.5)
    assert (written.scheme, written.quantized) == ("w4a8", 21)
    assert far(logits(tmp_path / "out", backend), oracles(loaded(tmp_path / "out"))) < FLIPS


def test_w4a8_ranks_have_the_parts_that_they_have_of_floats(tmp_path, backend):
    save_quantized(random_model("qwen3-bias", **SIZES, num_attention_heads=4, head_dim=16), tmp_path / "int4", w4a8(32))
    shutil.copytree(tmp_path / "int4", tmp_path / "floats")
    path = tmp_path / "floats" / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        scale = tensors.pop(name).repeat_interleave(32, dim=1)
        weight = name.removesuffix("_scale")
        tensors[weight] = tensors[weight].float() * scale
    save_file(tensors, path, {"format": "pt"})
    edit_config(tmp_path / "floats", quantization_config=None)
    for rank in range(2):
        ours, floats = (load(tmp_path / name, backend, Shard(rank, 2)) for name in ("int4", "floats"))
        for form, same in zip(ours, floats, strict=True):
            assert isinstance(form, Int4Weight)
            torch.testing.assert_close(form.rows(torch.arange(len(form))), same.rows(torch.arange(len(same))))


def load(folder, backend: CpuBackend, shard: Shard) -> list[WeightForm]:
    config = ModelConfig.from_folder(folder).sharded(shard)
    weights = load_weights(folder, config, torch.float32, backend, lambda done, total: None)
    return [form_of(linear.weight) for block in weights.blocks for linear in block.linears]


def test_w4a8_stored_bytes_are_those_of_4_bits(tmp_path, backend):
    save_quantized(random_model("qwen3", **SIZES), tmp_path, w4a8(32))
    config = ModelConfig.from_folder(tmp_path)
    packed = W4A16(32, scales="float32")
    assert config.quantization is not None
    same = replace(config, quantization=replace(config.quantization, groups=((("Linear",), packed),)))
    assert stored_bytes(config, torch.float32, backend) == stored_bytes(same, torch.float32, backend)
    for form in load(tmp_path, backend, Shard(0, 1)):
        assert isinstance(form, Int4Weight)
        assert form.inputs == DYNAMIC
        n, k = form.shape
        assert form.numbers.nbytes == backend.weights.int4_bytes(n, k, form.numbers.grouping)


@pytest.mark.parametrize("name", ["npu", "cuda"])
def test_w4a8_is_refused_by_name_on_other_devices(name):
    class Other(CpuBackend):
        capabilities = replace(CpuBackend.capabilities, w4a8=False)

    Other.name = name
    with pytest.raises(BackendError, match=rf"quantization_config: weights of 4 bits \(num_bits: 4\) with int8 "
                                           rf"input_activations \(W4A8\) are not possible on {name}; possible are"):
        check_schemes(SimpleNamespace(schemes=[W4A8(W4A16())], draft=None), Other(native=False))


def test_w4a8_numbers_beyond_4_bits_are_refused(tmp_path, backend):
    save_quantized(random_model("qwen3", **SIZES), tmp_path, w4a8(32))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = 8
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj\.weight: has numbers that are not from -8 to 7"):
        load(tmp_path, backend, Shard(0, 1))


@pytest.mark.skipif(not available(), reason="no native kernels")
@pytest.mark.parametrize("rows", [2, 13, 70])
def test_w4a8_row_does_not_depend_on_other_rows(rows):
    made = KERNELS["linear"].implementations["cpu"]
    case = next(case for case in linear.cases if case.name == "29x392x90+bias int4 given 128")
    _, weight, bias = case.make(torch.Generator().manual_seed(0), torch.bfloat16)
    x = torch.randn(rows, 392, generator=torch.Generator().manual_seed(1)).bfloat16()
    many = made.function(*made.adapt((x, weight, bias)))
    alone = torch.cat([made.function(*made.adapt((x[row : row + 1], weight, bias))) for row in range(rows)])
    assert torch.equal(many, alone)
    assert weight.inputs == DYNAMIC
