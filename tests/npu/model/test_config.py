from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.rope_config import RopeConfig
from tests.support.models import FAMILIES, random_model

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}


def test_config_published_in_style_of_transformers_4():
    config = ModelConfig.from_dict(QWEN3_06B)
    attention = config.attention
    assert (config.family, attention.head_dim, attention.q_size, attention.kv_size) == ("qwen3", 128, 2048, 1024)
    assert config.rope == RopeConfig("default", 1e6)
    assert (config.dtype, config.quantization, config.context_length) == ("bfloat16", None, 40960)
    assert config.num_parameters == 596_049_920  # "0.6B" in the model card
    assert config.padded_vocabulary(64) == 151936
    assert ModelConfig.from_dict({**QWEN3_06B, "vocab_size": 100}).padded_vocabulary(64) == 128


@pytest.mark.parametrize("kind", FAMILIES)
def test_config_num_parameters_equals_transformers(kind):
    model = random_model(kind)
    config = ModelConfig.from_dict({**model.config.to_dict(), "architectures": [type(model).__name__]})
    assert config.num_parameters == model.num_parameters()


@pytest.mark.parametrize("config_class", [Qwen3Config, Qwen2Config, LlamaConfig])
@pytest.mark.parametrize("nulls", [False, True])
def test_config_absent_keys_default_as_in_transformers(config_class, nulls):
    sizes = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 3}
    optional = {"num_key_value_heads": None} if nulls else {}
    theirs = config_class(**sizes, **optional, num_attention_heads=32)
    name = config_class.__name__.replace("Config", "ForCausalLM")
    ours = ModelConfig.from_dict({**sizes, **optional, "num_attention_heads": 32, "architectures": [name]})
    assert ours.attention.num_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.attention.head_dim == head_dim
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope == RopeConfig("default", theirs.rope_parameters["rope_theta"])


def test_config_yarn_extends_trained_context():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = ModelConfig.from_dict({**QWEN3_06B, "rope_scaling": yarn})
    assert config.context_length == 131072
    assert config.rope.theta == 1e6
    assert config.rope.attention_factor == pytest.approx(1.1386, abs=1e-4)


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "harmless",
    [
        {"sliding_window": 4096},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28},
        {"use_sliding_window": True, "sliding_window": 4096, "layer_types": ["full_attention"] * 28},
        {"hidden_act": "swish"},
        {"partial_rotary_factor": 1.0},
        {"mlp_bias": True},
        {"quantization_config": None},
        {"dtype": "bfloat16", "torch_dtype": "float16"},
    ],
)
def test_config_keys_without_effect_are_accepted(harmless):
    assert ModelConfig.from_dict({**QWEN3_06B, **harmless}) == ModelConfig.from_dict(QWEN3_06B)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM'.*Qwen3For.*, Qwen2For.*, LlamaFor"),
        ({"architectures": None}, "architectures: .* is not supported"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config: group_size: None is not"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"quantization_config: .*\(bitsandbytes\)"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, r"\(compressed-tensors\)"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}, "window of 4096 tokens"),
        (
            {"use_sliding_window": True, "sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]},
            "window of 128 tokens",
        ),
        ({"layer_types": ["linear_attention"]}, "layer_types: linear_attention"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'.*linear, llama3, yarn"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope_type 'mrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one object for all layers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor: is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor: must be a number above 0, got -1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"vocab_size": None}, "vocab_size: is missing"),
        ({"hidden_size": 0}, "hidden_size: must be a whole number of at least 1, got 0"),
        ({"hidden_size": "1024"}, "hidden_size: must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers: must be a whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers: is missing"),
        ({"num_hidden_layers": "28"}, "num_hidden_layers: must be a whole number"),
        ({"num_hidden_layers": 10**30}, r"num_hidden_layers: must be in \[1, 4096\], got 1000"),
        ({"architectures": 5}, "architectures: must be a list of names, got 5"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures: must be a list of names, got 'Qwen3ForCausalLM'"),
        ({"dtype": "int4"}, "dtype: 'int4' is not supported; supported: bfloat16"),
        ({"torch_dtype": 5}, "dtype: 5 is not supported"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "architectures: .* is not supported"),
        ({"layer_types": "full_attention"}, "layer_types: must be a list, got 'full_attention'"),
        ({"layer_types": ["linear_attention", None]}, "layer_types: None, linear_attention is not supported"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": "21"}, "max_window_layers: must be"),
        ({"rope_scaling": {**YARN, "attention_factor": "1"}}, "attention_factor: must be a number above 0, got '1'"),
        ({"rope_scaling": {**YARN, "attention_factor": -1}}, "attention_factor: must be a number above 0, got -1"),
        ({"rope_scaling": {**YARN, "mscale": "1", "mscale_all_dim": 1}}, "mscale: must be a number above 0, got '1'"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta: must not be 1 under yarn"),
        ({"num_key_value_heads": 5}, "5 does not divide 16 attention heads"),
        ({"head_dim": 127}, "head_dim: must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
    ],
)
def test_config_unsupported_value_is_refused_by_name(change, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict({**QWEN3_06B, **change})


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize(("change", "message"), [
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"), ({"layer_types": ["linear_attention"]}, "layer_types: linear_att"),
])
def test_config_of_another_family_with_an_unsupported_value_is_refused(architecture, change, message):
    data = {**QWEN3_06B, "architectures": [architecture]}
    assert ModelConfig.from_dict(data).num_layers == 28
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict({**data, **change})


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config])
def test_config_absent_sliding_window_is_that_of_transformers(config_class):
    data = {**config_class(use_sliding_window=True, max_window_layers=2, num_hidden_layers=4).to_dict(),
            "architectures": [config_class.__name__.replace("Config", "ForCausalLM")]}
    window = data.pop("sliding_window")
    with pytest.raises(ModelError, match=f"use_sliding_window: attention in a window of {window} tokens"):
        ModelConfig.from_dict({name: value for name, value in data.items() if name != "layer_types"})
    assert ModelConfig.from_dict({**data, "layer_types": ["full_attention"] * 4}).num_layers == 4
    assert ModelConfig.from_dict({**data, "layer_types": None, "sliding_window": None}).num_layers == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("{", "cannot be read"), ("[]", "must hold a JSON object"),
     pytest.param("[" * 100_000, "cannot be read", id="nested")],
)
def test_config_unreadable_file_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=f"config.json: {message}"):
        ModelConfig.from_folder(tmp_path)


def test_config_imports_no_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    code = (
        "import sys; from npuserve.npu.model.config import ModelConfig; "
        f"ModelConfig.from_folder({str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
