"""Checkpoints of ModelSlim.

`modelslim` is one that msmodelslim 26.1.0 wrote of a random Qwen3 on a CPU: attention static, MLPs dynamic, one
projection in floats. Its vocabulary was cut to 96 ids afterwards. Others are that one, edited. `modelslim_w4a8` is
another that it wrote: MLPs of 4 bits with int8 inputs, attention W8A8, both dynamic.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from npuserve.kernels.native import available
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.kernels.weight import form_of
from npuserve.npu.backends.cpu import CpuBackend, NativeWeights
from npuserve.npu.model import loader
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.shard import WHOLE, Shard
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.step import Row
from tests.npu.execution.test_decoder import Bench

FIXTURE = Path(__file__).parent / "modelslim"
INT4 = Path(__file__).parent / "modelslim_w4a8"
WEIGHTS, DESCRIPTION = "quant_model_weights.safetensors", "quant_model_description.json"
BACKENDS = [CpuBackend(native=False), *([CpuBackend()] if available() else [])]
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.kernels)
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    made: CpuBackend = request.param
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "model"))


def load(folder: Path, backend: CpuBackend, shard: Shard = WHOLE) -> ModelWeights:
    config = ModelConfig.from_folder(folder).sharded(shard)
    return load_weights(folder, config, torch.float32, backend, lambda done, total: None)


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors; None removes one."""
    tensors = load_file(folder / WEIGHTS) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def describe(folder: Path, **changes: Any) -> None:
    path = folder / DESCRIPTION
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def unpacked(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return the numbers of a module; of two rows of 4 bits in a byte the first has the low ones."""
    weight = tensors[f"{name}.weight"]
    if f"{name}.scale_bias" not in tensors:
        return weight
    levels = weight.int() & 255
    both = torch.stack((levels % 16, levels // 16), 1).flatten(0, 1)
    return torch.where(both < 8, both, both - 16)


def product(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Return the product of a module as the format defines it."""
    weight = unpacked(tensors, name).double()
    if f"{name}.deq_scale" in tensors:
        quantized = (x.double() / tensors[f"{name}.input_scale"].double() + tensors[f"{name}.input_offset"].double())
        sums = quantized.round().clamp(-128, 127) @ weight.T + tensors[f"{name}.quant_bias"].double()
        scale = tensors[f"{name}.deq_scale"]
        return sums * (scale.int().view(torch.float32) if scale.dtype == torch.int64 else scale).double()
    if f"{name}.weight_scale" not in tensors:
        return x.double() @ weight.T
    step = x.abs().amax(dim=1, keepdim=True) / 127.5  # in float32: the largest is between two numbers
    quantized = (x / step).round().clamp(-128, 127).double()
    return quantized @ weight.T * step.double() * tensors[f"{name}.weight_scale"].double().T


def check(folder: Path, backend: CpuBackend) -> None:
    """Compare each product with that of the format."""
    tensors, config = load_file(folder / WEIGHTS), ModelConfig.from_folder(folder)
    weights = load(folder, backend)
    generator = torch.Generator().manual_seed(1)
    for index, blocks in enumerate(weights.layers):
        for block, stored in zip(blocks, config.layers[index], strict=True):
            for linear in block.linears:
                form = form_of(linear.weight)
                x = torch.randn(9, form.shape[1], generator=generator) * 0.5
                prefix = f"model.layers.{index}.{stored.name}."
                parts = [product(tensors, prefix + part, x) for part in _parts(stored.name, len(form))]
                torch.testing.assert_close(
                    form.linear(x, linear.bias).double(), torch.cat(parts, dim=1), atol=2e-5, rtol=1e-4)


def _parts(block: str, rows: int) -> list[str]:
    if block == "self_attn":
        return ["q_proj", "k_proj", "v_proj"] if rows == 256 else ["o_proj"]
    return ["gate_proj", "up_proj"] if rows == 256 else ["down_proj"]


def test_modelslim_products_equal_the_definition(folder, backend):
    assert ModelConfig.from_folder(folder).quantization_name == "w8a8"
    check(folder, backend)


def test_modelslim_int4_products_equal_the_definition(backend, caplog):
    """scale_bias of the tool is 8 times the sums of the rows: the numbers are unpacked in the order of its rows."""
    with caplog.at_level(logging.INFO, loader.__name__):
        check(INT4, backend)
    said = "6 of 15 linear layers have weights of 4 bits (W4A8_DYNAMIC), which are served as int8 and take "
    assert (said in caplog.text) == (not isinstance(backend.weights, NativeWeights))
    tensors = load_file(INT4 / WEIGHTS)
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.{part}"
        sums = unpacked(tensors, name).float().sum(1, keepdim=True) * tensors[f"{name}.weight_scale"] * 8
        torch.testing.assert_close(tensors[f"{name}.scale_bias"].sum(1, keepdim=True), sums, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", range(2))
def test_modelslim_int4_ranks_have_their_rows(rank, backend):
    whole, ours = load(INT4, backend), load(INT4, backend, Shard(rank, 2))
    ids = torch.arange(128)
    for mine, all_of in zip(ours.layers, whole.layers, strict=True):
        (gate_up, down), (all_gate_up, all_down) = (
            [form_of(linear.weight) for linear in blocks[1].linears] for blocks in (mine, all_of))
        rows = torch.cat((ids[:64] + 64 * rank, ids[:64] + 64 * rank + 128))
        assert torch.equal(gate_up.rows(ids), all_gate_up.rows(rows))
        assert torch.equal(down.rows(ids[:64]), all_down.rows(ids[:64])[:, 64 * rank : 64 * rank + 64])


def test_modelslim_int4_rows_are_divided_in_pairs(tmp_path, backend):
    """Numbers of 126 rows on two ranks: 63 are no pairs."""
    folder = Path(shutil.copytree(INT4, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 126}))
    with pytest.raises(ModelError, match="gate_proj: has an odd number of rows on a rank, and stores"):
        load(folder, backend, Shard(0, 2))


def test_modelslim_parts_with_scales_of_their_own_are_merged(folder, backend, caplog):
    tensors = load_file(folder / WEIGHTS)
    scale, deq = (tensors[f"{Q_PROJ}.{name}"] for name in ("input_scale", "deq_scale"))
    edit(folder, **{f"{Q_PROJ}.input_scale": scale * 1.5, f"{Q_PROJ}.deq_scale": deq * 1.5})
    with caplog.at_level(logging.INFO, loader.__name__):
        load(folder, backend)
    assert "differ between the parts of 1 fused layers" in caplog.text


def test_modelslim_deq_scale_of_float16_is_read_from_its_bits(folder, backend):
    names = [name for name in load_file(folder / WEIGHTS) if name.endswith("deq_scale")]
    tensors = load_file(folder / WEIGHTS)
    edit(folder, **{name: tensors[name].view(torch.int32).long() for name in names})
    check(folder, backend)


@pytest.mark.parametrize("rank", range(2))
def test_modelslim_ranks_have_their_parts(folder, rank, backend):
    whole, ours = load(folder, backend), load(folder, backend, Shard(rank, 2))
    for mine, all_of in zip(ours.blocks, whole.blocks, strict=True):
        last, same = mine.linears[-1], all_of.linears[-1]  # o_proj, down_proj: divided by columns
        form, form_of_all = form_of(last.weight), form_of(same.weight)
        k = form.shape[1]
        ids = torch.arange(len(form))
        assert torch.equal(form.rows(ids), form_of_all.rows(ids)[:, rank * k : (rank + 1) * k])
        if isinstance(form, QuantizedWeight) and form.inputs.scale is not None:
            assert torch.equal(form.inputs.scale, form_of_all.inputs.scale)
            assert torch.equal(form.inputs.zero, form_of_all.inputs.zero)


def test_modelslim_model_computes(folder, backend):
    """The logits of one step equal those of two."""
    ids = [3, 14, 15, 92, 65, 35]
    bench = Bench(folder, backend)
    [whole] = bench.logits([Row(0, ids, 0, [0], True)])
    parts = [bench.logits([Row(1, ids[begin:end], begin, [1], True)])[0] for begin, end in ((0, 4), (4, 6))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


def test_modelslim_scales_of_the_cache_are_ignored(folder, backend, caplog):
    describe(folder, kv_cache_type="C8", kv_quant_type="C8", **{"model.layers.0.self_attn.k_proj.kv_cache_scale": "C8"})
    edit(folder, **{"model.layers.0.self_attn.k_proj.kv_cache_scale": torch.ones(64)})
    with caplog.at_level(logging.WARNING, loader.__name__):
        load(folder, backend)
    assert "1 scales of a quantized KV cache" in caplog.text


@pytest.mark.parametrize(("changes", "message"), [
    ({f"{Q_PROJ}.weight": "W4A4_DYNAMIC"}, rf"{DESCRIPTION}: {Q_PROJ}.weight: 'W4A4_DYNAMIC' is not supported; "
     "supported: FLOAT, W8A8_DYNAMIC, W8A8, W4A8_DYNAMIC"),
    ({f"{Q_PROJ}.weight": "W8A8_MIX"}, "'W8A8_MIX' is not supported"),
    ({f"{Q_PROJ}.weight": "W8A16"}, "'W8A16' is not supported"),
    ({"group_size": 64}, "group_size: 64 is not supported; supported: None, 0"),
    ({"optional": {"quarot": {}}}, "optional: {'quarot': {}} is not supported"),
    ({"metadata": {"quarot": {"block": 1}}}, "metadata: .* is not supported"),
    ({"fa_quant_type": "FAKQuant"}, "fa_quant_type is not supported"),
    ({f"{Q_PROJ}.weight": "FLOAT"}, "q_proj and .*k_proj are quantized in different ways"),
])
def test_modelslim_other_types_are_refused_by_name(folder, changes, message, backend):
    describe(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load(folder, backend)


@pytest.mark.parametrize(("changes", "message"), [
    ({f"{Q_PROJ}.quant_bias": torch.full((128,), 1000, dtype=torch.int32)},
     f"{Q_PROJ}.quant_bias: is not that of input_offset and weight: the module has a bias"),
    ({f"{Q_PROJ}.input_offset": torch.tensor([0.5])}, r"input_offset: must be a whole number in \[-128, 127\]"),
    ({"model.layers.0.mlp.up_proj.weight_offset": torch.ones(128, 1)}, "up_proj.weight_offset: is not 0"),
    ({f"{Q_PROJ}.deq_scale": None}, f"1 missing: {Q_PROJ}.deq_scale"),
    ({"model.layers.0.input_layernorm.bias": torch.ones(64)}, "1 unknown: model.layers.0.input_layernorm.bias"),
])
def test_modelslim_wrong_tensors_are_refused(folder, changes, message, backend):
    edit(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load(folder, backend)


def test_modelslim_description_that_is_no_json_is_refused(folder):
    (folder / DESCRIPTION).write_text("{")
    with pytest.raises(ModelError, match=f"{DESCRIPTION}: cannot be read"):
        ModelConfig.from_folder(folder)
