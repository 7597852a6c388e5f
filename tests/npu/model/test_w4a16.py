"""Checkpoints in 4 bits beside transformers with the numbers that they stand for, in floats."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from npuserve.kernels.int4_weight import Int4Weight
from npuserve.kernels.native import available
from npuserve.kernels.weight import form_of
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model import loader
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.shard import WHOLE, Shard
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import stored_bytes
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.step import Row
from tests.npu.execution.test_decoder import Bench, ids_of, oracle
from tests.support.hybrids import random_hybrid
from tests.support.int4_checkpoints import save_int4
from tests.support.models import edit_config, random_model, saved

BACKENDS = [CpuBackend(native=False), *([CpuBackend()] if available() else [])]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 2}


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.kernels)
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    made: CpuBackend = request.param
    return made


class Converting(CpuBackend):
    """CPU that multiplies no weights of 4 bits, as other devices."""

    capabilities = replace(CpuBackend.capabilities, int4=False)


def logits(folder: Path, backend: CpuBackend) -> torch.Tensor:
    ids = ids_of(20)
    bench = Bench(folder, backend)
    parts = [bench.logits([Row(0, ids[begin:end], begin, [0, 1], True)])[0] for begin, end in ((0, 19), (19, 20))]
    return torch.cat(parts)


def check(folder: Path, model: PreTrainedModel, backend: CpuBackend) -> None:
    torch.testing.assert_close(logits(folder, backend), oracle(model, ids_of(20)), atol=2e-4, rtol=2e-4)


def drawn(seed: int) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a random model and the arguments of `save_int4`."""
    draw = random.Random(seed)
    kind = draw.choice(["qwen3", "qwen3-untied", "qwen3-bias", "qwen2", "llama", "llama-bias"])
    sizes = {"hidden_size": draw.choice([64, 96, 160]), "intermediate_size": draw.choice([128, 200, 320]),
             "head_dim": draw.choice([16, 24]), "num_hidden_layers": 2, "tie_word_embeddings": draw.random() < 0.5}
    if kind.startswith(("qwen2", "llama")):
        sizes["head_dim"] = sizes["hidden_size"] // 4
    method = draw.choice(["awq", "gptq", "gptq_v2", "compressed-tensors"])
    return random_model(kind, seed, **sizes), {
        "method": method, "group": draw.choice([32, 64, 128, -1]), "symmetric": method != "awq" and draw.random() < 0.5,
        "act_order": method.startswith("gptq") and draw.random() < 0.3,
        "dtype": torch.float32 if method == "compressed-tensors" else torch.float16}


@pytest.mark.parametrize("seed", [
    0, 2, 5, 6,  # of each method
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 3, 4, 7, 8, 9)),
    *(pytest.param(seed, marks=pytest.mark.full) for seed in range(10, 20))])
def test_int4_logits_of_random_models_equal_floats(tmp_path, seed, backend):
    model, how = drawn(seed)
    model = save_int4(model, tmp_path, **how)
    config = ModelConfig.from_folder(tmp_path)
    assert config.quantization_name == ("none" if how["act_order"] else "w4a16")
    check(tmp_path, model, backend)


@pytest.mark.parametrize("group", [32, 64, None])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_int4_logits_of_packed_checkpoints_equal_compressed_tensors(tmp_path, kind, symmetric, group, backend):
    """The checkpoint is written by compressed-tensors."""
    quantized = pytest.importorskip("tests.support.quantized")
    model = random_model(kind, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    floats = quantized.save_packed(model, tmp_path, symmetric=symmetric, group=group)
    check(tmp_path, floats, backend)
    if symmetric:  # transformers 5.24 loads no packed zero points
        check(tmp_path, quantized.loaded(tmp_path), backend)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rank", range(2))
def test_int4_weights_of_hybrids_equal_floats(tmp_path, seed, method, rank, backend):
    """Queries and gates are parts of one tensor, whose rows alternate."""
    dtype = torch.float32 if method == "compressed-tensors" else torch.float16
    model = random_hybrid(
        seed, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_value_head_dim=16)
    saved(save_int4(model, tmp_path / "int4", method, 32, dtype=dtype), tmp_path / "floats")
    compare(*(load(tmp_path / name, backend, Shard(rank, 2)) for name in ("int4", "floats")))


@pytest.mark.parametrize(("method", "act_order"), [
    ("awq", False), ("compressed-tensors", False), ("gptq", False), ("gptq", True), ("gptq_v2", False),
    ("gptq_v2", True),
])
def test_int4_ranks_have_their_parts(tmp_path, method, act_order, backend):
    """Each rank has the rows and columns that it has of a checkpoint in floats."""
    dtype = torch.float32 if method == "compressed-tensors" else torch.float16
    model = save_int4(random_model("qwen3-bias", **SIZES, num_attention_heads=4), tmp_path / "int4", method, 32,
                      act_order=act_order, dtype=dtype, max_shard_size="40KB")
    saved(model, tmp_path / "floats")
    for rank in range(2):
        ours, theirs = (load(tmp_path / name, backend, Shard(rank, 2)) for name in ("int4", "floats"))
        compare(ours, theirs)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_int4_weights_are_read_in_pieces(
    tmp_path: Path, method: str, backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "MAX_PIECE_BYTES", 200)
    dtype = torch.float32 if method == "compressed-tensors" else torch.float16
    model = random_model("qwen3", **{**SIZES, "num_hidden_layers": 1, "intermediate_size": 16 * loader.PIECE_ROWS})
    saved(save_int4(model, tmp_path / "int4", method, 32, dtype=dtype), tmp_path / "floats")
    compare(*(load(tmp_path / name, backend) for name in ("int4", "floats")))


def load(folder: Path, backend: CpuBackend, shard: Shard = WHOLE) -> ModelWeights:
    config = ModelConfig.from_folder(folder, int4=backend.capabilities.int4).sharded(shard)
    return load_weights(folder, config, torch.float32, backend, lambda done, total: None)


def compare(ours: ModelWeights, theirs: ModelWeights) -> None:
    for one, other in zip(ours.blocks, theirs.blocks, strict=True):
        for linear, same in zip(one.linears, other.linears, strict=True):
            form, floats = form_of(linear.weight), form_of(same.weight)
            ids = torch.arange(len(form))
            torch.testing.assert_close(form.rows(ids), floats.rows(ids), atol=1e-7, rtol=0)


def test_int4_on_a_device_without_becomes_floats(tmp_path, caplog):
    model = save_int4(random_model("qwen3", **SIZES), tmp_path, "awq")
    saved(model, tmp_path / "floats")
    backend = Converting(native=False)
    with caplog.at_level(logging.WARNING, loader.__name__):
        ours = load(tmp_path, backend)
    said = "14 of 14 linear layers have 4 bits, which cpu does not multiply: they were converted to float32 and take "
    assert said in caplog.text
    assert not any(isinstance(linear.weight, Int4Weight) for block in ours.blocks for linear in block.linears)
    compare(ours, load(tmp_path / "floats", backend))


def test_int4_act_order_is_reported(tmp_path, caplog, backend):
    save_int4(random_model("qwen3", **SIZES), tmp_path, "gptq", act_order=True)
    with caplog.at_level(logging.WARNING, loader.__name__):
        load(tmp_path, backend)
    assert "desc_act" in caplog.text


@pytest.mark.parametrize("group", [32, 128, -1])
def test_int4_stored_bytes_are_those_allocated(tmp_path, group, backend):
    save_int4(random_model("qwen3", **SIZES), tmp_path, "gptq_v2", group)
    config = ModelConfig.from_folder(tmp_path)
    weights = load(tmp_path, backend)
    numbers = sum(linear.weight.numbers.nbytes for block in weights.blocks for linear in block.linears)
    floats = stored_bytes(ModelConfig.from_folder(tmp_path), torch.float32, backend) - numbers
    table = config.padded_vocabulary(backend.capabilities.vocabulary_tile) * config.hidden_size * 4
    norms = sum(tensor.nbytes for block in weights.blocks for tensor in (block.norm, *block.weights)
                if isinstance(tensor, torch.Tensor))
    assert floats == table + norms + weights.norm.nbytes


def edit_tensors(folder: Path, change: Any) -> None:
    """Change the tensors of a checkpoint of one file in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def edit_section(folder: Path, **changes: Any) -> None:
    data = json.loads((folder / "config.json").read_text())
    edit_config(folder, quantization_config={**data["quantization_config"], **changes})


LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(("method", "change", "message"), [
    ("gptq", lambda t: t.update({f"{LAYER}.g_idx": t[f"{LAYER}.g_idx"].flip(0).contiguous()}),
     f"{LAYER}.g_idx: does not have the columns in order, though config.json says desc_act: false"),
    ("gptq", lambda t: t.update({f"{LAYER}.bias": torch.ones(64)}), f"{LAYER}.bias: is not 0"),
    ("gptq", lambda t: t.update({f"{LAYER}.scales": t[f"{LAYER}.scales"] * 0}), "scales must be numbers above 0"),
    ("awq", lambda t: t.pop(f"{LAYER}.qzeros"), f"1 missing: {LAYER}.qzeros"),
    ("awq", lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"].long()}),
     f"1 not int32: {LAYER}.qweight I64"),
    ("compressed-tensors", lambda t: t.update({f"{LAYER}.weight_shape": torch.tensor([64, 120])}),
     rf"{LAYER}.weight_shape: is \[64, 120\], not \[64, 128\]"),
    ("compressed-tensors", lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"] / 3}),
     "has scales that bfloat16 rounds"),
])
def test_int4_wrong_tensors_are_refused(tmp_path, method, change, message, backend):
    save_int4(random_model("qwen3", **SIZES), tmp_path, method, dtype=torch.float32)
    if method == "compressed-tensors":
        edit_config(tmp_path, dtype="bfloat16")
        edit_tensors(tmp_path, lambda tensors: tensors.update(
            {name: tensor.bfloat16().float() for name, tensor in tensors.items() if name.endswith("scale")}))
    edit_tensors(tmp_path, lambda tensors: tensors.update(
        {name: tensor.half() for name, tensor in tensors.items() if name.endswith("scales")}))
    load(tmp_path, backend)
    edit_tensors(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load(tmp_path, backend)


def test_int4_gptq_biases_of_0_are_ignored(tmp_path, backend):
    model = save_int4(random_model("qwen3", **SIZES), tmp_path, "gptq")
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{LAYER}.bias": torch.zeros(64)}))
    check(tmp_path, model, backend)


def test_int4_symmetric_with_zero_points_is_refused(tmp_path, backend):
    save_int4(random_model("qwen3", **SIZES), tmp_path, "gptq")
    edit_section(tmp_path, sym=True)
    with pytest.raises(ModelError, match=r"qzeros: has zero points, though config.json says that .* is symmetric"):
        load(tmp_path, backend)


def test_int4_ranks_that_divide_groups_are_refused(tmp_path):
    save_int4(random_model("qwen3", **SIZES), tmp_path, "gptq", 128)
    with pytest.raises(ModelError, match=r"groups of 128 columns of .*self_attn\.o_proj are divided between"):
        load(tmp_path, BACKENDS[0], Shard(0, 2))


@pytest.mark.parametrize(("method", "changes", "message"), [
    ("awq", {"version": "gemv"}, "version: 'gemv' is not supported; supported: gemm"),
    ("awq", {"bits": 8}, "bits: 8 is not supported; supported: 4"),
    ("awq", {"zero_point": False}, "zero_point: False is not supported; supported: True"),
    ("gptq", {"bits": 8}, "bits: 8 is not supported; supported: 4"),
    ("gptq", {"group_size": 256}, "group_size: 256 is not supported; supported: 32, 64, 128, -1"),
    ("gptq", {"dynamic": {"+:.*": {}}}, r"dynamic: '\+:\.\*' is not supported; supported: names that begin with -:"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supported; supported: gptq, gptq_v2"),
    ("compressed-tensors", {"config_groups": {"g": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "group_size": 32, "actorder": "group"}}}}, "actorder: 'group' is not supported"),
    ("compressed-tensors", {"config_groups": {"g": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "float", "group_size": 32}}}}, "type: 'float' is not supported; supported: int"),
])
def test_int4_other_settings_are_refused_by_name(tmp_path, method, changes, message):
    save_int4(random_model("qwen3", **SIZES), tmp_path, method, dtype=torch.float32)
    edit_section(tmp_path, **changes)
    with pytest.raises(ModelError, match=f"{message}.*npuserve quantize MODEL OUT"):
        ModelConfig.from_folder(tmp_path)
