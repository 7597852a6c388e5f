from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.folder import weight_files
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.quantization.assignment import Quantization
from npuserve.npu.quantization.formats import quantization_of
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.layer import Layer
from npuserve.npu.quantize.rounding import Int8Rounding, to_int8
from npuserve.npu.quantize.smoothing import smooth
from tests.npu.model.test_float8 import BLOCKS, LARGE_HYBRID, METHOD_FP8, saved_blocks, take_converted
from tests.support.hybrids import random_hybrid
from tests.support.models import FAMILIES, edit_config, random_model, saved
from tests.support.pooling import embeds

BF16 = torch.bfloat16


def sequences(count: int = 4, length: int = 40, seed: int = 0) -> list[list[int]]:
    return torch.randint(0, 100, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


LARGEST = max(map(max, sequences(2)))
"""Largest token id of the texts that calibrate the refused models."""


def layer_of(model, config: ModelConfig, index: int, dtype: torch.dtype) -> Layer:
    prefix = f"model.layers.{index}."
    weights = {name.removeprefix(prefix): tensor.detach().float() for name, tensor in model.state_dict().items()
               if name.startswith(prefix)}
    table = cos_sin_table(config.rope, config.attention.head_dim, 64)
    return Layer(config, index, weights, dict.fromkeys(weights, dtype), table, Int8Rounding())


def outlying(kind: str, dtype: torch.dtype = BF16, **sizes):
    """Return a model whose linear inputs have outlier columns, as large models do."""
    model = random_model(kind, **sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, linears in (
                (layer.input_layernorm, (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
                (layer.post_attention_layernorm, (layer.mlp.gate_proj, layer.mlp.up_proj)),
            ):
                norm.weight[:3] *= 60
                for linear in linears:
                    linear.weight[:, :3] /= 60
            layer.mlp.up_proj.weight[5] *= 40
            layer.mlp.down_proj.weight[:, 5] /= 40
    return model.to(dtype)


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint as read by safetensors; int8 tensors are dequantized."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return {name: tensor.float() * tensors[f"{name}_scale"].float() if tensor.dtype == torch.int8 else tensor
            for name, tensor in tensors.items() if not name.endswith("_scale")}


@torch.inference_mode()
def logits(model, ids: list[list[int]]) -> torch.Tensor:
    return model(torch.tensor(ids)).logits.float()


def with_rounded_inputs(model):
    """Return transformers' model with inputs of all linear layers but the LM head rounded as int8 kernels do."""

    def rounded(_, inputs):
        scale = inputs[0].abs().amax(-1, keepdim=True) / 127
        return ((inputs[0] / scale).round() * scale,)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_layer_output_equals_transformers(kind):
    model = random_model(kind)
    config = ModelConfig.from_dict(model.config.to_dict() | {"architectures": [type(model).__name__]})
    ids = sequences(1)
    with torch.inference_mode():
        states = model(torch.tensor(ids), output_hidden_states=True).hidden_states
        for index in range(config.num_layers - 1):  # transformers applies the final norm to the last
            layer, x = layer_of(model, config, index, torch.float32), states[index][0]
            x = x + layer.outputs(0, x)
            torch.testing.assert_close(x + layer.outputs(1, x), states[index + 1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-bias", "qwen2", "llama-bias"])
def test_smooth_does_not_change_layer_output(kind, dtype):
    model = outlying(kind, dtype)
    config = ModelConfig.from_dict(model.config.to_dict() | {"architectures": [type(model).__name__]})
    layer = layer_of(model, config, 1, dtype)
    before = dict(layer.weights)
    x = torch.randn(20, config.hidden_size, generator=torch.Generator().manual_seed(1))
    exact = layer.outputs(0, x), layer.outputs(1, x)
    names = {name for mapping in layer.mappings for name in (mapping.before, *mapping.after) if name.endswith("proj")}
    hidden = [x.clone()]
    strengths = smooth(layer, hidden, names, strength=0.5)
    assert strengths == dict.fromkeys((mapping.before for mapping in layer.mappings), 0.5)
    for mapping in layer.mappings:
        assert not torch.equal(layer.weights[f"{mapping.before}.weight"], before[f"{mapping.before}.weight"])
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        assert torch.equal(layer.weights[norm].to(dtype).float(), layer.weights[norm])
    for made, was in zip((layer.outputs(0, x), layer.outputs(1, x)), exact, strict=True):
        torch.testing.assert_close(made, was, rtol=1e-3, atol=1e-4 * float(was.abs().max()))
    x = x + exact[0]
    torch.testing.assert_close(hidden[0], x + layer.outputs(1, x), rtol=1e-3, atol=1e-2)


def test_smooth_only_mappings_with_int8_on_both_sides():
    model = outlying("qwen3")
    config = ModelConfig.from_dict(model.config.to_dict() | {"architectures": [type(model).__name__]})
    x = torch.randn(20, config.hidden_size, generator=torch.Generator().manual_seed(1))
    layer = layer_of(model, config, 0, BF16)
    before = dict(layer.weights)
    assert smooth(layer, [x], {"self_attn.o_proj", "mlp.up_proj", "mlp.gate_proj"}, 0.5) == {
        "post_attention_layernorm": 0.5}
    changed = {name for name, weight in layer.weights.items() if not torch.equal(weight, before[name])}
    assert changed == {"post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"}


def test_smooth_float16_bias_stays_finite(tmp_path):
    model = random_model("llama-bias")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.bias[:] = layer.mlp.up_proj.bias[:] = 3e4
            layer.self_attn.o_proj.weight[:, 1] *= 1e4
    folder = saved(model.to(torch.float16), tmp_path / "model")
    quantize_checkpoint(folder, tmp_path / "out", sequences(), strength=0.5)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name, tensor in written.items() if not tensor.float().isfinite().all()] == []
    changed = written["model.layers.0.self_attn.v_proj.bias"] != 3e4
    assert changed.any()
    assert not changed.all()


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32), st.floats(1e-3, 1e3),
       st.sampled_from([torch.float32, BF16, torch.float16]))
def test_to_int8_rounds_rows_to_nearest(n, k, seed, size, dtype):
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * size
    weight[0] = 0
    values, scale = to_int8(weight, dtype)
    assert values.dtype == torch.int8
    assert (scale.dtype, scale.shape) == (dtype, (n, 1))
    assert values.min() >= -127
    assert scale[0] == 1
    assert not values[0].any()
    wide = scale.double()
    assert ((values * wide - weight).abs() <= wide * 0.5001).all()
    assert (wide[1:, 0] <= weight[1:].double().abs().amax(1) / 127 * (1 + 2 * torch.finfo(dtype).eps) + 6e-8).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_quantize_checkpoint_equals_model_without_rounding(tmp_path, kind):
    """Without rounded inputs the smoothed model equals the model except for the rounding of its weights."""
    model = outlying(kind)
    folder = saved(model, tmp_path / "model", max_shard_size="20KB")
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    (folder / "pytorch_model.bin").write_bytes(b"floats once more")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    written = quantize_checkpoint(folder, tmp_path / "out", sequences(), strength=0.5)
    out = tmp_path / "out"
    assert (written.quantized, written.linears) == (21, 21)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    kept = {path.name for path in folder.iterdir()} - {"pytorch_model.bin"}
    assert {path.name for path in out.iterdir()} == kept
    assert (out / "tokenizer.json").read_text() == '{"a": "tokenizer"}'
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"

    config, before = (json.loads((at / "config.json").read_text()) for at in (out, folder))
    assert quantization_of(config).to_json() == config.pop("quantization_config")
    assert config == before
    index = json.loads((out / "model.safetensors.index.json").read_text())
    in_files = {}
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            in_files |= dict.fromkeys(file.keys(), path.name)
    assert index["weight_map"] == in_files
    assert index["metadata"]["total_size"] == written.nbytes
    source = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: file for name, file in in_files.items() if not name.endswith("_scale")} == source

    tensors = dequantized(out)
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(tensors[name], state[name])
    model.float()
    exact = logits(model, sequences(2, seed=1))
    missing, unexpected = model.load_state_dict({name: t.float() for name, t in tensors.items()}, strict=False)
    assert not unexpected
    assert all(name == "lm_head.weight" and model.config.tie_word_embeddings for name in missing)
    error = logits(model, sequences(2, seed=1)) - exact
    assert error.std() / exact.std() < 0.06


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama-bias"])
def test_smooth_reduces_quantization_error(tmp_path, kind):
    model = outlying(kind)
    folder, ids = saved(model, tmp_path / "model"), sequences(4, seed=1)
    exact, errors = logits(model.float(), ids), {}
    for way, calibration, strength in (
        ("rounded", [], None), ("half", sequences(), 0.5), ("searched", sequences(), None),
        ("none", sequences(), 0.0),
    ):
        quantize_checkpoint(folder, tmp_path / way, calibration, strength=strength)
        model.load_state_dict({n: t.float() for n, t in dequantized(tmp_path / way).items()}, strict=False)
        errors[way] = float((logits(with_rounded_inputs(model), ids) - exact).std())
        for module in model.modules():
            module._forward_pre_hooks.clear()
    assert errors["half"] < errors["rounded"] / 2
    assert errors["searched"] < errors["rounded"] / 2
    assert errors["none"] == errors["rounded"]
    assert (tmp_path / "none" / "model.safetensors").read_bytes() == (
        tmp_path / "rounded" / "model.safetensors").read_bytes()


def test_smooth_search_chooses_strength_only_if_it_helps(tmp_path):
    folder = saved(outlying("llama"), tmp_path / "model")
    strengths = quantize_checkpoint(folder, tmp_path / "out", sequences()).strengths
    assert len(strengths) == 3
    assert all(found["input_layernorm"] >= 0.4 and found["post_attention_layernorm"] >= 0.4 for found in strengths)


def test_quantize_checkpoint_keeps_ignored_layers(tmp_path):
    model = outlying("qwen3-untied")
    folder = saved(model, tmp_path / "model")
    ignore = ["model.layers.1.mlp.down_proj", r"re:model\.layers\.2\."]
    written = quantize_checkpoint(folder, tmp_path / "out", sequences(), ignore=ignore)
    assert (written.quantized, written.linears) == (7 + 6, 21)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    state = model.state_dict()
    assert torch.equal(tensors["lm_head.weight"], state["lm_head.weight"])
    for name in state:
        if name.startswith("model.layers.2.") or "1.mlp.down" in name:
            assert torch.equal(tensors[name], state[name])
            assert f"{name}_scale" not in tensors
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == torch.int8
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", *ignore]


def _spoil(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(f"model.{name.replace('__', '.')}.weight", None)
        if tensor is not None:
            tensors[f"model.{name.replace('__', '.')}.weight"] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("spoil", "arguments", "message"), [
    (lambda f: edit_config(f, architectures=["MambaForCausalLM"]), {}, "MambaForCausalLM.*is not supported"),
    (lambda f: edit_config(f, quantization_config=Quantization((), ()).to_json() | {
        "config_groups": {"group_0": Quantization((), ()).to_json()}}), {}, "quantization_config"),
    (lambda f: _spoil(f, layers__0__mlp__up_proj=None), {}, "1 missing: model.layers.0.mlp.up_proj.weight"),
    (lambda f: _spoil(f, layers__1__input_layernorm=torch.ones(31)), {},
     r"input_layernorm.weight \[31\] instead of \[32\]"),
    (lambda f: _spoil(f, norm=torch.ones(32, dtype=torch.int8)), {}, "1 not of a float type: model.norm.weight I8"),
    (lambda f: _spoil(f, norm=torch.ones(32, dtype=torch.float64)), {}, "model.norm.weight is F64; supported are F32"),
    (lambda f: _spoil(f, layers__0__other=torch.ones(1)), {}, "1 unknown: model.layers.0.other.weight"),
    (lambda f: edit_config(f, num_hidden_layers=2), {}, "9 unknown: .*; config.json has 2 layers, the files have 3"),
    (lambda f: edit_config(f, vocab_size=LARGEST), {},
     rf"makes token id {LARGEST} of .* text, and the model's ids are in \[0, {LARGEST - 1}\]"),
    (lambda f: _spoil(f, layers__2__mlp__up_proj=torch.full((48, 32), torch.nan)), {}, "up_proj.weight.* not finite"),
    (lambda f: (f / "model.safetensors").write_bytes(b"noise"), {}, "is not a complete safetensors file"),
    (lambda f: (f / "model.safetensors").unlink(), {}, "has neither model.safetensors nor"),
    (lambda f: None, {"ignore": ["model.layers.7.mlp.up_proj"]}, r"names no linear layer; .* like model\.layers\.0\."),
    (lambda f: None, {"ignore": ["re:.*("]}, "is not a regular expression"),
    (lambda f: None, {"ignore": ["re:.*q_proj"]}, "q_proj and .*k_proj are quantized in different ways"),
    (lambda f: None, {"ignore": ["Linear"]}, "nothing to quantize"),
])
def test_quantize_checkpoint_refusal_leaves_no_files(tmp_path, spoil, arguments, message):
    folder = saved(random_model("llama"), tmp_path / "model")
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        quantize_checkpoint(folder, tmp_path / "out", sequences(2), **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_quantize_checkpoint_leaves_out_tensors_that_are_ignored(tmp_path):
    folder = saved(random_model("qwen3"), tmp_path / "model")  # its LM head is tied
    names = load_file(folder / "model.safetensors").keys()
    quantize_checkpoint(folder, tmp_path / "expected")
    ignored = {"lm_head.weight": torch.ones(100, 32), "model.layers.9.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load_file(folder / "model.safetensors") | ignored, folder / "model.safetensors")
    quantize_checkpoint(folder, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == load_file(tmp_path / "expected" / "model.safetensors").keys()
    assert names < written.keys()


def test_quantize_checkpoint_of_quantized_model_is_refused(tmp_path):
    folder = saved(random_model("llama"), tmp_path / "model")
    quantize_checkpoint(folder, tmp_path / "out")
    with pytest.raises(ModelError, match="is quantized to w8a8 already"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "twice")


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_quantize_checkpoint_of_float8_is_that_of_its_floats(tmp_path, is_calibrated):
    """Blocks of 128 x 128 and an ignored module, in a hybrid."""
    model = random_hybrid(1, **LARGE_HYBRID)
    saved_blocks(model, tmp_path / "float8", ("re:.*1.mlp.up_proj",))
    take_converted(model, load_file(tmp_path / "float8" / "model.safetensors"), BLOCKS)
    edit_config(tmp_path / "float8", quantization_config=METHOD_FP8 | {
        "modules_to_not_convert": ["in_proj_a", "in_proj_b", "model.language_model.layers.1.mlp.up_proj"]})
    saved(model, tmp_path / "float")
    sequences = [[3, 50, 7, 90] * 8] if is_calibrated else []
    results = [quantize_checkpoint(tmp_path / name, tmp_path / f"{name}-int8", sequences)
               for name in ("float8", "float")]
    ours, theirs = (load_file(tmp_path / f"{name}-int8" / "model.safetensors") for name in ("float8", "float"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert results[0].source_bytes < results[1].source_bytes / 2
    assert ModelConfig.from_folder(tmp_path / "float8-int8").quantization_name == "w8a8"


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("trouble", ["interrupted", "at the last", "full at once", "full later"])
def test_quantize_checkpoint_error_leaves_no_partial_output(tmp_path, monkeypatch, trouble, there):
    folder = saved(random_model("llama"), tmp_path / "model")
    source = {path: path.read_bytes() for path in folder.iterdir()}
    out = tmp_path / "out"
    if there:
        out.mkdir()
        (out / "old").write_text("what was there")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def progress(done: int, total: int) -> None:
        seen = [path for path in tmp_path.iterdir() if path not in (folder, out)]
        assert len(seen) == 1
        assert not (seen[0] / "config.json").exists()
        if trouble == "interrupted" and done == 1:
            raise KeyboardInterrupt
        if trouble == "full later" and done == 2:
            monkeypatch.setattr(os, "pwrite", full)

    if trouble == "full at once":
        monkeypatch.setattr(os, "posix_fallocate", full)
    if trouble == "at the last":
        monkeypatch.setattr(Path, "rename", full)
    kind = KeyboardInterrupt if trouble == "interrupted" else OSError
    with pytest.raises(kind):
        quantize_checkpoint(folder, out, sequences(2), strength=0.5, progress=progress)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", *(["out"] if there else [])]
    if there:
        assert (out / "old").read_text() == "what was there"
    quantize_checkpoint(folder, out, sequences(2), strength=0.5)
    assert not (out / "old").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert {path: path.read_bytes() for path in folder.iterdir()} == source


def test_quantized_checkpoint_of_one_file_with_an_index_has_an_index(tmp_path):
    """As models of the hub whose only file is model-00001-of-00001.safetensors."""
    folder = saved(random_model("qwen3"), tmp_path / "model")
    name = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / name)
    with safe_open(folder / name, framework="pt") as file:
        places = dict.fromkeys(file.keys(), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    quantize_checkpoint(folder, tmp_path / "out")
    assert [path.name for path in weight_files(tmp_path / "out")] == [name]


def test_quantize_of_a_model_that_pools_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is an embedding model or a reranker"):
        quantize_checkpoint(embeds(saved(random_model("qwen3"), tmp_path / "model")), tmp_path / "out")
