"""Parser of quantization_config: supported values, refused values, and matching of layer names."""

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import FineGrainedFP8Config

from npuserve.npu.backends.capabilities import Capabilities
from npuserve.npu.quantization.assignment import Quantization
from npuserve.npu.quantization.formats import quantization_of
from npuserve.npu.quantization.w4a16 import W4A16
from npuserve.npu.quantization.w8a8 import W8A8

# As written by llm-compressor with QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]).
W8A8_JSON: dict[str, Any] = {
    "config_groups": {"group_0": {
        "format": "int-quantized",
        "input_activations": {
            "actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8,
            "observer": None, "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "int"},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {
            "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
            "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "int"}}},
    "format": "int-quantized", "global_compression_ratio": None, "ignore": ["lm_head"], "kv_cache_scheme": None,
    "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
    "transform_config": {}, "version": "0.12.2",
}
PLAIN = Quantization(((("Linear",), W8A8()),), ("lm_head",))


def read(data: Any) -> Quantization | None:
    return quantization_of({"quantization_config": data})


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return W8A8_JSON with another value at a dotted path of keys; g stands for group_0."""
    data = copy.deepcopy(W8A8_JSON)
    *parts, last = path.replace("g.", "config_groups.group_0.").split(".")
    place = data
    for part in parts:
        place = place[part]
    place[last] = value
    return data


def float8_json() -> dict[str, Any]:
    """Return the same in float8, as RedHatAI/Qwen3-14B-FP8-dynamic has it."""
    data = copy.deepcopy(W8A8_JSON)
    group = data["config_groups"]["group_0"]
    for part in ("weights", "input_activations"):
        group[part]["type"] = "float"
    group["format"] = data["format"] = "float-quantized"
    return data


def test_quantization_config_of_llm_compressor():
    assert read(W8A8_JSON) == PLAIN
    assert PLAIN.of("model.layers.0.mlp.up_proj") == W8A8()
    assert PLAIN.of("lm_head") is None


@pytest.mark.parametrize("nothing", [None, {}])
def test_quantization_absent_is_none(nothing):
    assert read(nothing) is None
    assert quantization_of({}) is None


@pytest.mark.parametrize("harmless", [
    changed("kv_cache_scheme", {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}),
    changed("quantization_status", "frozen"),
    changed("global_compression_ratio", 1.46),
    changed("format", "naive-quantized"),
    changed("g.format", None),
    changed("g.weights.actorder", "static"),
    changed("g.weights.actorder", "weight"),
    changed("g.weights.observer", "mse"),
    changed("g.weights.observer_kwargs", {"maxshrink": 0.2}),
    changed("g.weights.group_size", -1),
    changed("g.weights.strategy", "CHANNEL"),
    changed("g.weights.scale_dtype", "torch.bfloat16"),
    changed("g.weights.zp_dtype", "torch.int8"),
    changed("sparsity_config", {"format": "dense", "global_sparsity": 0.15, "targets": [], "ignore": []}),
    changed("transform_config", {"config_groups": {}}),
    changed("moe_sparsity_config", None),
    changed("unheard_of", None),
    {"quantization_config": W8A8_JSON, "sparsity_config": None},
    {"quantization_config": {k: v for k, v in W8A8_JSON.items() if k != "quant_method"},
     "quant_method": "compressed-tensors"},
])
def test_quantization_keys_without_effect_are_accepted(harmless):
    assert read(harmless) == PLAIN
    assert quantization_of({"compression_config": harmless}) == PLAIN


@pytest.mark.parametrize(("group", "scheme"), [
    ({"weights": {"strategy": "tensor"}}, W8A8(per_channel=False)),
    ({"weights": {"strategy": None}}, W8A8(per_channel=False)),
    ({"weights": {"strategy": None, "group_size": -1}}, W8A8()),
    ({"weights": {"symmetric": False}}, W8A8(symmetric=False)),
    ({"input_activations": {"symmetric": False}}, W8A8(symmetric_inputs=False)),
    ({"input_activations": {"strategy": "tensor", "dynamic": False}}, W8A8(dynamic=False)),
    ({"input_activations": {"strategy": None, "dynamic": False, "symmetric": False}},
     W8A8(dynamic=False, symmetric_inputs=False)),
])
def test_quantization_supported_schemes(group, scheme):
    data = copy.deepcopy(W8A8_JSON)
    for part, changes in group.items():
        data["config_groups"]["group_0"][part] |= changes
    assert read(data) == Quantization(((("Linear",), scheme),), ("lm_head",))


@pytest.mark.parametrize(("group", "scheme"), [
    ({}, W8A8(float8=True)),
    ({"weights": {"strategy": "tensor"}}, W8A8(per_channel=False, float8=True)),
    ({"input_activations": {"strategy": "tensor", "dynamic": False}}, W8A8(dynamic=False, float8=True)),
])
@pytest.mark.parametrize("format_of_group", ["float-quantized", "naive-quantized", None])
def test_quantization_supported_schemes_of_float8(group, scheme, format_of_group):
    data = float8_json()
    data["config_groups"]["group_0"]["format"] = format_of_group
    for part, changes in group.items():
        data["config_groups"]["group_0"][part] |= changes
    assert read(data) == Quantization(((("Linear",), scheme),), ("lm_head",))


@pytest.mark.parametrize(("path", "value", "message"), [
    ("weights.type", "int", "group_0: format: 'float-quantized' is not supported; supported: None, int-quantized"),
    ("input_activations.type", "int", "input_activations: type: 'int' is not supported; supported: float"),
    ("weights.num_bits", 6, "weights: num_bits: 6 is not supported; supported: 8"),
    ("weights.symmetric", False, "weights: symmetric: False is not supported; supported: True"),
    ("input_activations.symmetric", False, "input_activations: symmetric: False"),
    ("weights.strategy", "group", "weights: strategy: 'group'"),
    ("weights.type", "nf4", "weights: type: 'nf4' is not supported; supported: int, float"),
])
def test_quantization_unsupported_float8_is_refused_by_name(path, value, message):
    data = float8_json()
    part, key = path.split(".")
    data["config_groups"]["group_0"][part][key] = value
    with pytest.raises(ValueError, match=message):
        read(data)


def test_quantization_supported_blocks_of_float8():
    data = float8_json()
    data["config_groups"]["group_0"]["weights"] |= {"strategy": "block", "block_structure": [128, 128]}
    data["config_groups"]["group_0"]["input_activations"] |= {"strategy": "group", "group_size": 128}
    scheme = W8A8(per_channel=False, float8=True, blocks=True)
    assert read(data) == Quantization(((("Linear",), scheme),), ("lm_head",))
    for part, changes, message in (
            ("weights", {"block_structure": [64, 128]}, r"block_structure: \[64, 128\] .*; supported: \[128, 128\]"),
            ("input_activations", {"group_size": 64}, "group_size: 64 is not supported; supported: 128"),
            ("input_activations", {"strategy": "token", "group_size": None}, "strategy: 'token' .*; supported: group"),
            ("input_activations", {"dynamic": False}, "dynamic: False is not supported; supported: True")):
        wrong = copy.deepcopy(data)
        wrong["config_groups"]["group_0"][part] |= changes
        with pytest.raises(ValueError, match=message):
            read(wrong)


# As Qwen/Qwen3-14B-FP8 has it.
QWEN_FP8: dict[str, Any] = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def test_quantization_config_of_method_fp8():
    made = read(QWEN_FP8)
    assert made is not None
    assert made.of("model.layers.0.mlp.up_proj") == W8A8(
        per_channel=False, float8=True, blocks=True, scale_name="weight_scale_inv")
    assert made.of("lm_head") is None
    assert all(scheme.float8 for _, scheme in made.groups)
    made = read({**QWEN_FP8, "modules_to_not_convert": ["lm_head", "model.layers.1", "down_proj", "re:.*3.*"]})
    assert made is not None
    for name, is_quantized in (
            ("model.layers.0.mlp.up_proj", True), ("model.layers.1.mlp.up_proj", False),
            ("model.layers.10.mlp.up_proj", True), ("model.layers.0.mlp.down_proj", False),
            ("model.layers.3.mlp.up_proj", False), ("lm_head", False)):
        assert (made.of(name) is not None) == is_quantized, name
    for scheme in ("dynamic", "static"):
        made = read({"activation_scheme": scheme, "quant_method": "fp8", "ignored_layers": ["lm_head"]})
        assert made is not None
        assert made.of("o_proj") == W8A8(per_channel=False, dynamic=scheme == "dynamic", float8=True)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_quantization_names_the_decoder_with_or_without_a_tower(prefix):
    """Tools that remove or add a vision tower rename tensors and leave the list of ignored names."""
    ignored = ["lm_head", f"{prefix}layers.1.linear_attn.in_proj_a", "model.visual.blocks.1.mlp", "mtp.layers.0"]
    compressed = W8A8_JSON | {"ignore": ignored}
    for made in (read({**QWEN_FP8, "modules_to_not_convert": ignored}), read(compressed)):
        assert made is not None
        for own in ("model.", "model.language_model."):
            assert made.of(f"{own}layers.1.linear_attn.in_proj_a") is None
            assert made.of(f"{own}layers.11.linear_attn.in_proj_a") is not None
            assert made.of(f"{own}layers.0.linear_attn.in_proj_qkv") is not None


@pytest.mark.parametrize(("changes", "message"), [
    ({"fmt": "e5m2"}, "fmt: 'e5m2' is not supported; supported: None, e4m3"),
    ({"weight_block_size": [64, 64]}, r"weight_block_size: \[64, 64\] is not supported; supported: None, \[128, 128\]"),
    ({"activation_scheme": "static"}, "activation_scheme: 'static' is not supported; supported: dynamic"),
    ({"activation_scheme": None}, "activation_scheme: None is not supported; supported: dynamic"),
    ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert: must be a list of names, got 'lm_head'"),
    ({"scale_fmt": "ue8m0"}, "scale_fmt: 'ue8m0' is not supported; supported: None, float"),
    ({"expert_dtype": "fp4"}, "expert_dtype: 'fp4' is not supported; supported: None, fp8"),
    ({"modules_to_convert": ["embed_tokens"]}, "modules_to_convert is not supported"),
])
def test_quantization_unsupported_method_fp8_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        read({**QWEN_FP8, **changes})


def test_quantization_config_of_method_fp8_as_transformers_writes_it():
    """The keys `scale_fmt` and `expert_dtype` are new in transformers 5."""
    written = json.loads(FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_json_string())
    assert read(written) == read(QWEN_FP8)
    assert read({**written, "scale_fmt": "float", "expert_dtype": "fp8"}) == read(QWEN_FP8)


class Device(NamedTuple):
    name: str
    capabilities: Capabilities


def device(name: str, **products: bool) -> Device:
    return Device(name, Capabilities(dtypes=(), vocabulary_tile=1, block_size=1, **products))


def test_scheme_refusal_names_what_a_device_supports():
    float8, zeros = W8A8(float8=True), W8A8(symmetric=False)
    assert float8.refusal(device("npu", int8_zeros=True, float8=False)) == (
        "float8 weights and input_activations (type: float) are not possible on npu; possible is int8 (type: int)")
    assert not float8.refusal(device("cuda", int8_zeros=False, float8=True))
    assert not zeros.refusal(device("cpu", int8_zeros=True, float8=False))
    assert zeros.refusal(device("cuda", int8_zeros=False, float8=True)).startswith("weights with zero points")


@pytest.mark.parametrize(("data", "message"), [
    ("w8a8", "quantization_config: must be an object, got 'w8a8'"),
    ({"quant_method": "bitsandbytes", "bits": 4},
     r"another method \(bitsandbytes\); supported: compressed-tensors, fp8, awq, gptq"),
    ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
    (changed("config_groups", []), "config_groups is missing"),
    (changed("config_groups", {"W8A8": ["Linear"]}), "config_groups.W8A8: must be an object"),
    (changed("format", "pack-quantized"), "format: 'pack-quantized' is not supported; supported: int-quantized"),
    (changed("format", "mixed-precision"), "format: 'mixed-precision'"),
    (changed("g.format", "pack-quantized"), "config_groups.group_0: format: 'pack-quantized'"),
    (changed("quantization_status", "calibration"), "quantization_status: 'calibration' is not supported"),
    (changed("g.weights.num_bits", 3), "num_bits: 3 is not supported; supported: 8"),
    (changed("g.weights.num_bits", True), "num_bits: True"),
    (changed("g.weights.type", "float"), "group_0: format: 'int-quantized' is not supported; .*: None, float-quant"),
    (changed("g.input_activations.type", "float"), "group_0.input_activations: type: 'float' .*; supported: int"),
    (changed("g.weights.strategy", "group"), "group_0.weights: strategy: 'group' is not supported; .*channel, tensor"),
    (changed("g.weights.strategy", "block"), "strategy: 'block'"),
    (changed("g.weights.group_size", 128), "group_size: 128"),
    (changed("g.weights.strategy", "token"), "weights: strategy: 'token' is not supported; supported: channel, tensor"),
    (changed("g.weights.block_structure", [128, 128]), r"block_structure: \[128, 128\]"),
    (changed("g.weights.actorder", "group"), "actorder: 'group'"),
    (changed("g.weights.actorder", True), "actorder: True"),
    (changed("g.weights.dynamic", True), "weights: dynamic: True"),
    (changed("g.weights.symmetric", "yes"), "symmetric: 'yes'"),
    (changed("g.weights.rotation", 3), "group_0.weights: rotation is not supported"),
    (changed("g.input_activations.dynamic", "local"), "dynamic: 'local'"),
    (changed("g.input_activations.dynamic", False), "strategy: 'token' is not supported; supported: tensor"),
    (changed("g.input_activations.strategy", "tensor"), "strategy: 'tensor' is not supported; supported: token"),
    (changed("g.input_activations.scale_dtype", "torch.uint8"), "scale_dtype: 'torch.uint8'"),
    (changed("g.input_activations", None), "input_activations: is missing: only weights are quantized"),
    (changed("g.weights", None), "weights: is missing: only inputs are quantized"),
    (changed("g.output_activations", {"num_bits": 8}), "output_activations: {'num_bits': 8} is not supported"),
    (changed("g.targets", "Linear"), "group_0.targets: must be a list of names, got 'Linear'"),
    (changed("g.targets", ["re:("]), r"targets: 're:\(' is not a regular expression"),
    (changed("g.bias", {}) | {"ignore": [3]}, r"ignore: must be a list of names, got \[3\]"),
    (changed("g.smooth", 0.5), "group_0: smooth is not supported; supported: format, input_activations"),
    (changed("sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config: {'format': 'sparse-24-bitmask'}"),
    (changed("transform_config", {"config_groups": {"v": {}}}), "transform_config: "),
    (changed("moe_sparsity_config", {"method": "prune"}), "moe_sparsity_config: "),
    (changed("unheard_of", 1), "quantization_config: unheard_of is not supported"),
])
def test_quantization_unsupported_value_is_refused_by_name(data, message):
    with pytest.raises(ValueError, match=message):
        read(data)


LAYERS = [f"model.layers.{i}.{name}" for i in range(2) for name in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj")] + ["lm_head"]
PATTERNS = [
    "Linear", "lm_head", "re:.*lm_head", "re:model.layers.[1-9].*_proj", "re:.*down_proj$", "re:down_proj",
    "mlp.up_proj", "model.layers.0.mlp.up_proj", "re:.*self_attn[.].*", "re:.*_proj", "LlamaMLP"]
schemes = st.builds(W8A8, st.booleans(), st.booleans(), st.booleans(), st.booleans()) | st.builds(
    W8A8, st.booleans(), dynamic=st.booleans(), float8=st.just(True)) | st.just(
    W8A8(per_channel=False, float8=True, blocks=True)) | st.builds(
    W4A16, st.sampled_from([32, 64, 128, None]), st.booleans())
quantizations = st.builds(
    Quantization,
    st.lists(st.tuples(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3).map(tuple), schemes), min_size=1,
             max_size=3).map(tuple),
    st.lists(st.sampled_from(PATTERNS), max_size=2).map(tuple))


@given(quantizations)
def test_quantization_json_round_trip(quantization):
    assert read(quantization.to_json()) == quantization


def test_quantization_targets_match_as_in_compressed_tensors():
    """The compressed-tensors package applies our configuration to a model of transformers."""
    package = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    from tests.support.models import random_model

    model = random_model("llama", num_hidden_layers=2)

    @settings(max_examples=20, deadline=None)
    @given(quantizations)
    def check(quantization: Quantization) -> None:
        config = package.QuantizationConfig.model_validate(quantization.to_json())
        formats = {scheme.format for _, scheme in quantization.groups}
        assert config.format == (formats.pop() if len(formats) == 1 else "mixed-precision")
        applied = copy.deepcopy(model)
        package.apply_quantization_config(applied, config, show_progress=False)
        modules = dict(applied.named_modules())
        for name in LAYERS:
            theirs, ours = getattr(modules[name], "quantization_scheme", None), quantization.of(name)
            assert (ours is None) == (theirs is None), name
            if isinstance(ours, W4A16):
                assert theirs.input_activations is None
                assert ours == W4A16(theirs.weights.group_size, theirs.weights.symmetric), name
            elif ours:
                weights, inputs = theirs.weights, theirs.input_activations
                assert ours == W8A8(
                    weights.strategy == "channel", weights.symmetric, inputs.dynamic, inputs.symmetric,
                    weights.type == inputs.type == "float", weights.strategy == "block"), name

    check()
