"""Checkpoints made by compressed-tensors, compared with transformers, which computes them in floats with its rounding.

Two float implementations differ in the last bits, so that a near tie occasionally rounds to the other int8 value and
changes what follows. This mostly affects a token's largest number if it is negative, which by definition of its scale
lies between -127 and -128. The tests compare many short sequences, whose median may contain a few such flips.
"""

from __future__ import annotations

import logging
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from npuserve.kernels.native import available
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model import loader
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import stored_bytes
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.step import Row
from tests.npu.execution.test_decoder import Bench, ids_of, oracle
from tests.npu.model.test_weights import PARTS, each_row, int8_of, load, rewrite, storage, tensors_of
from tests.support.golden_cpu import GoldenCpu
from tests.support.models import edit_config, random_model, saved_w8a8
from tests.support.quantized import FLOAT8, SCHEMES, edit_quantization, loaded, save_quantized, scheme

FLIPS = 3e-3
"""Relative change of the logits by a few flips. int8 itself changes more than 0.02."""

SEQUENCES = [ids_of(4, seed) for seed in range(15)]
BACKENDS = [CpuBackend(native=False), *([CpuBackend()] if available() else [])]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.kernels)
def backend(request) -> CpuBackend:
    return request.param


def logits(folder, backend: CpuBackend, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the logits of each sequence, teacher-forced: all but the last token in one step, the last in another."""
    bench = Bench(folder, backend, dtype=dtype)
    steps = [bench.logits([Row(i, ids[begin:end], begin, [i], True) for i, ids in enumerate(SEQUENCES)])
             for begin, end in ((0, 3), (3, 4))]
    return [torch.cat(parts).float() for parts in zip(*steps, strict=True)]


def oracles(model) -> list[torch.Tensor]:
    return [oracle(model, ids).float() for ids in SEQUENCES]


def far(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the 40th percentile over the sequences of || ours - theirs || / || theirs ||.

    The order of float32 sums decides in how many sequences a number is rounded to the next int8: in up to half of them.
    """
    distances = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
    return statistics.quantiles(distances, n=5)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama-bias"])
def test_w8a8_logits_equal_transformers(tmp_path, kind, name, backend):
    model = random_model(kind)
    whole = oracles(model)
    theirs = oracles(loaded(save_quantized(model, tmp_path, scheme(name))))
    assert far(theirs, whole) > 0.02  # the change by int8
    assert far(logits(tmp_path, backend), theirs) < FLIPS


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.parametrize("kind", ["qwen3", "llama-bias"])
def test_w8a8_float8_logits_equal_transformers(tmp_path, kind, name):
    """Golden functions, since the CPU has no other kernels for float8. The steps of float8 are wider than of int8."""
    model = random_model(kind)
    whole = oracles(model)
    theirs = oracles(loaded(save_quantized(model, tmp_path, scheme(name, float8=True))))
    assert far(theirs, whole) > 0.02
    assert far(logits(tmp_path, GoldenCpu()), theirs) < 3 * FLIPS


@pytest.mark.slow
@pytest.mark.parametrize("status", ["compressed", "frozen"])
def test_w8a8_quantized_head_in_shards_of_old_config(tmp_path, status, backend):
    model = random_model("qwen3-untied")
    save_quantized(model, tmp_path, scheme("dynamic"), ignore=(), max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    theirs = oracles(loaded(tmp_path))
    edit_quantization(tmp_path, quantization_status=status)
    config = Bench(tmp_path, backend).model.config
    assert config.quantization is not None
    edit_config(tmp_path, quantization_config=None, compression_config={
        "quantization_config": config.quantization.to_json(), "sparsity_config": {"format": "dense"}})
    bench = Bench(tmp_path, backend)
    assert isinstance(bench.model.weights.lm_head.weight, QuantizedWeight)
    assert far(logits(tmp_path, backend), theirs) < FLIPS


def test_w8a8_two_groups_and_ignored_layers(tmp_path, backend):
    model = random_model("llama")
    save_quantized(
        model, tmp_path, scheme("static", ["re:.*down_proj$", "model.layers.2.self_attn.o_proj"]),
        scheme("dynamic asymmetric", ["Linear"]), ignore=("lm_head", "re:.*layers.1.self_attn.[qkv]_proj"))
    layers = Bench(tmp_path, backend).model.weights.attention_layers()
    static = [[linear.inputs is not None and linear.inputs.scale is not None
               for linear in x.linears] for x in layers]
    assert static == [[False, False, False, True], [False, False, False, True], [False, True, False, True]]
    assert [x.qkv.inputs is None for x in layers] == [False, True, False]
    assert far(logits(tmp_path, backend), oracles(loaded(tmp_path))) < FLIPS


@pytest.mark.parametrize("name", ["static", "static asymmetric"])
def test_w8a8_fused_layers_with_different_input_scales(tmp_path, caplog, name, backend):
    """One scale serves all parts: the results are close, and as close to the unquantized model."""
    model = random_model("qwen3")
    whole = oracles(model)
    theirs = oracles(loaded(save_quantized(model, tmp_path, scheme(name), alike=False)))
    with caplog.at_level(logging.INFO):
        ours = logits(tmp_path, backend)
    assert "differ between the parts of 6 fused layers" in caplog.text
    assert far(ours, whole) < 1.25 * far(theirs, whole)


@pytest.mark.slow
def test_w8a8_bfloat16_error_equals_transformers(tmp_path, backend):
    model = random_model("qwen3").to(torch.bfloat16)
    whole = oracles(random_model("qwen3"))
    folder = save_quantized(model, tmp_path, scheme("dynamic"))
    theirs = oracles(loaded(folder).to(torch.bfloat16))
    assert far(logits(folder, backend, torch.bfloat16), whole) < 1.25 * far(theirs, whole)


@pytest.mark.parametrize("scheme", [
    W8A8(float8=True), W8A8(per_channel=False, float8=True), W8A8(dynamic=False, float8=True)])
def test_float8_weights_every_number_is_written(tmp_path, monkeypatch, scheme):
    monkeypatch.setattr(loader, "MAX_PIECE_BYTES", 200)
    saved_w8a8(random_model("qwen3-untied"), tmp_path, scheme, ignore=())
    cpu = GoldenCpu()
    weights, there = load(tmp_path, cpu), tensors_of(tmp_path)
    for index, layer in enumerate(weights.attention_layers()):
        for field, names in PARTS.items():
            weight, names = int8_of(getattr(layer, field)), tuple(f"model.layers.{index}.{name}" for name in names)
            assert isinstance(weight.values, torch.Tensor)
            assert torch.equal(weight.values.float(), torch.cat([there[f"{name}.weight"].float() for name in names]))
            assert torch.equal(weight.scale, each_row(there, names, "weight_scale"))
            assert (weight.zero, weight.sums, weight.inputs.zero) == (None, None, None)
            assert (weight.inputs.dtype, weight.inputs.levels) == (torch.float8_e4m3fn, 448)
            assert (weight.inputs.scale is None) == scheme.dynamic
            assert weight.inputs.scale is None or torch.equal(weight.inputs.scale, torch.tensor([0.02]))
    head = int8_of(weights.lm_head)
    assert head.values.dtype == torch.float8_e4m3fn
    assert torch.equal(head.values[100:].float(), head.values[:1].float().expand(28, -1))
    assert torch.equal(head.scale[100:], head.scale[:1].expand(28))
    planned = stored_bytes(ModelConfig.from_folder(tmp_path), torch.float32, cpu)
    assert planned == sum(tensor.nbytes for tensor in storage(weights))


BLOCKS = W8A8(per_channel=False, float8=True, blocks=True)
LARGE: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 160, "intermediate_size": 288, "head_dim": 24, "num_key_value_heads": 2}
"""Sizes with parts of fused layers that begin and end within a block."""


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_float8_block_scales_become_scales_of_rows(tmp_path, monkeypatch, name):
    monkeypatch.setattr(loader, "MAX_PIECE_BYTES", 1)
    scheme = replace(BLOCKS, scale_name=name)
    saved_w8a8(random_model("qwen3", **LARGE), tmp_path, scheme)
    if name == "weight_scale_inv":
        edit_config(tmp_path, quantization_config={
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    weights, there = load(tmp_path, GoldenCpu()), tensors_of(tmp_path)
    for field, names in PARTS.items():
        weight = int8_of(getattr(weights.attention_layers()[0], field))
        whole = []
        for part in names:
            rows, columns = there[f"model.layers.0.{part}.weight"].shape
            scale = there[f"model.layers.0.{part}.{name}"].float()
            assert scale.shape == (-(-rows // 128), -(-columns // 128))
            whole.append(torch.stack([scale[row // 128] for row in range(rows)]))
        assert torch.equal(weight.scale, torch.cat(whole))
        assert weight.scale.t().is_contiguous()
        assert weight.inputs.grouped
    planned = stored_bytes(ModelConfig.from_folder(tmp_path), torch.float32, GoldenCpu())
    assert planned == sum(tensor.nbytes for tensor in storage(weights))


def test_float8_blocks_logits_equal_weights_of_floats(tmp_path):
    """transformers computes these checkpoints on GPUs alone. The reference has the same weights as floats, so that it
    differs by the rounding of the inputs."""
    model = random_model("qwen3", **LARGE)
    whole = oracles(model)
    saved_w8a8(model, tmp_path, BLOCKS)
    there = tensors_of(tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (scale := there.get(name.replace(".weight", ".weight_scale"))) is not None:
                wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
                parameter.copy_(there[name].float() * wide[: parameter.shape[0], : parameter.shape[1]])
    theirs = oracles(model)
    ours = logits(tmp_path, GoldenCpu())
    assert 0.02 < far(theirs, whole) < 0.2
    assert 1e-3 < far(ours, theirs) < 1.5 * far(theirs, whole)


def test_float8_blocks_divided_between_ranks(tmp_path):
    """Rows are divided anywhere (keys at row 64), columns at blocks."""
    saved_w8a8(random_model("qwen3", **{**LARGE, "intermediate_size": 512, "head_dim": 64}), tmp_path, BLOCKS)
    config, cpu = ModelConfig.from_folder(tmp_path), GoldenCpu()
    whole = load(tmp_path, cpu).attention_layers()[0]
    ranks = [load_weights(tmp_path, config.sharded(Shard(rank, 2)), torch.float32, cpu) for rank in range(2)]
    parts = [weights.attention_layers()[0] for weights in ranks]
    for field in ("down", "o"):
        scales = [int8_of(getattr(part, field)).scale for part in parts]
        assert torch.equal(torch.cat(scales, 1), int8_of(getattr(whole, field)).scale)
    for field, sizes in (("gate_up", [256, 256]), ("qkv", [128, 64, 64])):
        divided = [int8_of(getattr(part, field)).scale.split(sizes) for part in parts]
        merged = torch.cat([scale for both in zip(*divided, strict=True) for scale in both])
        assert torch.equal(merged, int8_of(getattr(whole, field)).scale)
    edit_config(tmp_path, intermediate_size=384)
    with pytest.raises(ModelError, match=r"down_proj are divided between ranks; supported: a tensor_parallel_size"):
        stored_bytes(ModelConfig.from_folder(tmp_path).sharded(Shard(1, 2)), torch.float32, cpu)


def test_float8_invalid_tensor_is_refused_by_name(tmp_path):
    saved_w8a8(random_model("llama"), tmp_path, W8A8(float8=True))
    good = tensors_of(tmp_path)["model.layers.1.mlp.down_proj.weight"]
    wrong = good.clone()
    wrong[3, 5] = torch.nan
    rewrite(tmp_path, mlp__down_proj__weight=wrong)
    with pytest.raises(ModelError, match=r"layers.1.mlp.down_proj.weight: has numbers that are not finite"):
        load(tmp_path, GoldenCpu())
    rewrite(tmp_path, mlp__down_proj__weight=good.view(torch.int8))
    with pytest.raises(ModelError, match=r"1 not float8 \(e4m3\): model.layers.1.mlp.down_proj.weight I8"):
        load(tmp_path, GoldenCpu())
    rewrite(tmp_path, mlp__down_proj__weight=good, mlp__down_proj__weight_zero_point=torch.zeros(32, 1).to(good.dtype))
    load(tmp_path, GoldenCpu())
