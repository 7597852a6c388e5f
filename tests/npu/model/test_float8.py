"""Checkpoints in float8 on a device without float8 products, beside transformers with the same weights in floats."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from npuserve.kernels.native import available
from npuserve.kernels.native.packed import PackedWeight
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model import loader
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.forms import floats
from npuserve.npu.model.forms.floats import converted
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.model.loader import load_weights, refused_bytes
from npuserve.npu.model.storage import stored_bytes
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.step import SamplingParams
from tests.npu.execution.test_runner import load
from tests.npu.model.test_weights import tensors_of
from tests.support.hybrids import logprobs_of, random_hybrid, use_recurrent_rule
from tests.support.loop import Ask, serve
from tests.support.models import assert_greedy, edit_config, random_model, saved, saved_w8a8

BLOCKS = W8A8(per_channel=False, float8=True, blocks=True, scale_name="weight_scale_inv")
SCHEMES = {
    "blocks": BLOCKS,
    "blocks of compressed-tensors": replace(BLOCKS, scale_name="weight_scale"),
    "rows": W8A8(float8=True),
    "tensor": W8A8(per_channel=False, float8=True),
    "static inputs": W8A8(dynamic=False, float8=True),
}
LARGE: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 160, "intermediate_size": 288, "head_dim": 24, "num_key_value_heads": 2}
"""Sizes with parts of fused layers that begin and end within a block."""

LARGE_HYBRID: dict[str, Any] = {
    "hidden_size": 160, "intermediate_size": 288, "head_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 40,
    "full_attention_interval": 2, "num_hidden_layers": 2}

METHOD_FP8: dict[str, Any] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def saved_blocks(model: PreTrainedModel, folder: Path, ignored: tuple[str, ...] = ()) -> Path:
    """Save a model as the method `fp8` does. ignored: expressions beside lm_head."""
    saved_w8a8(model, folder, BLOCKS, ("lm_head", *ignored))
    edit_config(folder, quantization_config=METHOD_FP8 | {"modules_to_not_convert": ["in_proj_a", "in_proj_b"]})
    return folder


@pytest.fixture(autouse=True)
def _recurrent_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    use_recurrent_rule(monkeypatch)


@torch.no_grad()
def take_converted(model: PreTrainedModel, tensors: dict[str, torch.Tensor], scheme: W8A8) -> None:
    """Give a model the float8 numbers of a checkpoint times their scales."""
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        scale = tensors.get(f"{layer}.{scheme.scale_name}") if layer != name else None
        if scale is None:
            continue
        wide = scale.float()
        if scheme.blocks:
            wide = wide.repeat_interleave(128, 0).repeat_interleave(128, 1)[: parameter.shape[0], : parameter.shape[1]]
        parameter.copy_(tensors[name].float() * wide)


def assert_equal_answers(folder: Path, model: PreTrainedModel) -> None:
    runner = load(folder, dtype="float32", max_num_batched_tokens=16)
    assert runner.config.quantization_name == "none"
    prompts = [[7, 20, 3, 41, 9], [5] * 3 + list(range(10, 40))]
    sampling = SamplingParams(temperature=0.0, logprobs=1)
    asks = [Ask(0, None, {"prompt_ids": prompt, "max_tokens": 8, "sampling": sampling}) for prompt in prompts]
    answers, _ = serve(runner, asks, 1, 32, 4, 16)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_greedy(model, prompt, answer.tokens, 8)
        ours = torch.tensor([report.logprob for report in answer.logprobs])
        torch.testing.assert_close(ours, logprobs_of(model, prompt, answer.tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-bias", "llama"])
@pytest.mark.parametrize("name", SCHEMES)
def test_float8_layers_become_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setattr(floats, "CONVERTED_AT_ONCE", 1)
    scheme, model = SCHEMES[name], random_model(kind, **LARGE)
    saved_w8a8(model, tmp_path, scheme)
    if name == "blocks":
        edit_config(tmp_path, quantization_config=METHOD_FP8)
    take_converted(model, tensors_of(tmp_path), scheme)
    with caplog.at_level(logging.WARNING):
        assert_equal_answers(tmp_path, model)
    layers = 7 if model.config.tie_word_embeddings else 8
    assert (f"7 of {layers} linear layers are float8, which cpu does not multiply: they were converted to float32"
            in caplog.text)


def publish(folder: Path, ignored: list[str]) -> None:
    """Rewrite a text model in float8 as Qwen3.5-FP8 is published: nested, with a tower and drafts, partly in float8."""
    tensors = load_file(folder / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    float8 = torch.ones(130, 3).to(torch.float8_e4m3fn)
    nested |= {
        "model.visual.blocks.0.attn.qkv.weight": torch.ones(3, 3), "mtp.fc.weight": torch.ones(3, 3),
        "mtp.layers.0.mlp.up_proj.weight": float8, "mtp.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 1)}
    save_file(nested, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    del text["quantization_config"]
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "quantization_config": METHOD_FP8 | {"modules_to_not_convert": ignored}}))


IGNORED = [
    "lm_head", "model.language_model.embed_tokens", "model.language_model.norm", "model.visual.blocks.0.attn.qkv",
    "mtp.fc", "mtp.pre_fc_norm_hidden",
    *(f"model.language_model.layers.{layer}.{name}" for layer in range(2)
      for name in ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.conv1d", "linear_attn.A_log",
                   "input_layernorm"))]
"""Entries as in the published lists: modules, norms and parameters, in the decoder, the drafts and the tower."""


@pytest.mark.parametrize("more", [
    [], ["model.language_model.layers.0.linear_attn", "model.language_model.layers.1.mlp.down_proj"]])
@pytest.mark.parametrize("is_nested", [True, False])
def test_published_hybrid_in_float8_equals_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: list[str], is_nested: bool
) -> None:
    """The names to ignore begin with `model.language_model.` even if a text-only class has the tensors."""
    model = random_hybrid(1, **LARGE_HYBRID)
    skipped = tuple(name.replace("model.language_model.", "model.") for name in more)
    saved_blocks(model, tmp_path, tuple(f"re:{name}[.]?" for name in skipped))
    tensors = tensors_of(tmp_path)
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values()) == 13 - (4 if more else 0)
    if is_nested:
        publish(tmp_path, IGNORED + more)
    else:
        edit_config(tmp_path, quantization_config=METHOD_FP8 | {"modules_to_not_convert": IGNORED + more})
    take_converted(model, tensors, BLOCKS)
    with caplog.at_level(logging.INFO):
        assert_equal_answers(tmp_path, model)
    layers = 15 if model.config.tie_word_embeddings else 16
    assert f"{9 if more else 13} of {layers} linear layers are float8" in caplog.text
    assert ("3 tensors mtp.… are not loaded" in caplog.text) == is_nested


def linears_of(weights: ModelWeights) -> list[torch.Tensor]:
    """Return the numbers of all linear layers of the decoder, as they are stored."""
    values = [linear.weight.values for block in weights.blocks for linear in block.linears]
    return [each.words if isinstance(each, PackedWeight) else each for each in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converted_weights_are_those_of_a_checkpoint_in_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    model = random_hybrid(1, **LARGE_HYBRID)
    saved_blocks(model, tmp_path / "float8")
    take_converted(model, tensors_of(tmp_path / "float8"), BLOCKS)
    saved(model, tmp_path / "plain")
    backends = [CpuBackend(native=False), *([CpuBackend()] if available() else [])]
    for backend in backends:
        configs = [ModelConfig.from_folder(tmp_path / name, float8=False) for name in ("float8", "plain")]
        ours, theirs = (linears_of(load_weights(tmp_path / name, config, dtype, backend))
                        for name, config in zip(("float8", "plain"), configs, strict=True))
        assert len(ours) == len(theirs) == 12
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert len({stored_bytes(config, dtype, backend) for config in configs}) == 1


def test_converted_weights_divided_between_ranks_within_a_block(tmp_path: Path) -> None:
    sizes = {**LARGE_HYBRID, "intermediate_size": 300}  # 150 columns of a rank
    saved_blocks(random_hybrid(1, **sizes), tmp_path)
    backend, config = CpuBackend(native=False), ModelConfig.from_folder(tmp_path, float8=False)
    whole = load_weights(tmp_path, config, torch.float32, backend)
    parts = [load_weights(tmp_path, config.sharded(Shard(rank, 2)), torch.float32, backend) for rank in range(2)]
    for layer, blocks in enumerate(whole.layers):
        down, *divided = (weights.layers[layer][1].weights.down.weight.values for weights in (whole, *parts))
        assert torch.equal(torch.cat(divided, 1), down)
        mixer, *halves = (weights.layers[layer][0].weights for weights in (whole, *parts))
        out = "out" if hasattr(mixer, "out") else "o"
        columns = [getattr(half, out).weight.values for half in halves]
        assert torch.equal(torch.cat(columns, 1), getattr(mixer, out).weight.values)
        if out == "out":
            sizes_of_rows = [24, 24, 120]
            rows = [half.qkv.weight.values.split(sizes_of_rows) for half in halves]
            merged = torch.cat([part for both in zip(*rows, strict=True) for part in both])
            assert torch.equal(merged, mixer.qkv.weight.values)
        assert len(blocks) == 2


def test_converted_head_can_be_int8(tmp_path: Path) -> None:
    """The head is converted, then rounded as `lm_head_dtype` says."""
    model = random_model("llama", **LARGE)
    saved_w8a8(model, tmp_path / "float8", W8A8(float8=True), ignore=())
    take_converted(model, tensors_of(tmp_path / "float8"), W8A8(float8=True))
    saved(model, tmp_path / "plain")
    backend = CpuBackend(native=False)
    heads = [load_weights(tmp_path / name, ModelConfig.from_folder(tmp_path / name, "int8", float8=False),
                          torch.float32, backend).lm_head.weight for name in ("float8", "plain")]
    assert heads[0].values.dtype == torch.int8
    assert torch.equal(heads[0].values, heads[1].values)
    assert torch.equal(heads[0].scale, heads[1].scale)


@pytest.mark.skipif(not available(), reason="the native kernels are not built")
def test_refused_bytes_of_converted_weights_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_hybrid(1, **LARGE_HYBRID)
    saved_blocks(model, tmp_path / "float8")
    take_converted(model, tensors_of(tmp_path / "float8"), BLOCKS)
    saved(model, tmp_path / "plain")
    monkeypatch.setattr("npuserve.kernels.native.packed.compacts", lambda k, dtype: dtype == torch.bfloat16)
    seen: list[list[torch.Tensor]] = []
    for name in ("float8", "plain"):
        samples: list[torch.Tensor] = []
        monkeypatch.setattr(loader, "packs_compact", lambda rows, into=samples: into.append(rows) is None)
        folder = tmp_path / name
        refused_bytes(folder, ModelConfig.from_folder(folder, float8=False), torch.bfloat16, CpuBackend())
        seen.append(samples)
    assert len(seen[0]) == len(seen[1]) > 10
    assert all(torch.equal(ours.bfloat16(), theirs.bfloat16()) for ours, theirs in zip(*seen, strict=True))


def test_converted_part_takes_its_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(300, 260, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3, generator=generator)
    whole = converted(numbers, BLOCKS, scale)
    assert torch.equal(converted(numbers[120:290, 100:], BLOCKS, scale, 120, 100), whole[120:290, 100:])
    assert whole[127, 128] == numbers[127, 128].float() * scale[0, 1]


def test_float8_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    saved_blocks(random_model("qwen3", **LARGE), tmp_path)
    good, file = tensors_of(tmp_path), tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.down_proj"
    config, backend = ModelConfig.from_folder(tmp_path, float8=False), CpuBackend()
    wrong = good[f"{name}.weight"].clone()
    wrong[3, 5] = torch.nan
    for changes, message in (
        ({f"{name}.weight": wrong}, f"{name}.weight: has numbers that are not finite in float32"),
        ({f"{name}.weight": good[f"{name}.weight"].float()}, rf"1 not float8 \(e4m3\): {name}.weight F32"),
        ({f"{name}.weight_scale_inv": torch.ones(1, 1)}, rf"{name}.weight_scale_inv \[1, 1\] instead of \[2, 3\]"),
        ({f"{name}.weight_scale_inv": -good[f"{name}.weight_scale_inv"]}, "scales must be numbers above 0"),
    ):
        save_file(good | changes, file)
        with pytest.raises(ModelError, match=message):
            load_weights(tmp_path, config, torch.float32, backend)
    save_file({key: tensor for key, tensor in good.items() if key != f"{name}.weight_scale_inv"}, file)
    with pytest.raises(ModelError, match=f"1 missing: {name}.weight_scale_inv"):
        load_weights(tmp_path, config, torch.float32, backend)
