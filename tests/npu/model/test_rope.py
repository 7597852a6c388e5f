from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.families.config_json import ModelError
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.model.rope_config import parse_rope
from tests.support.models import ROPES, SIZES

KINDS = {
    "default": {"rope_type": "default", "rope_theta": 1e6}, **ROPES,
    "llama3-low": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
    "yarn-qwen3": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0,
    },
    "yarn-step": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
        "beta_slow": 2.6,
    },
    # Without factor it is max_position_embeddings / original; mscale has no effect without mscale_all_dim.
    "yarn-implied": {
        "rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
        "mscale": 0.7,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [8, 10, 64, 128])
@pytest.mark.parametrize(
    ("config_class", "module", "architecture"),
    [(LlamaConfig, LlamaRotaryEmbedding, "LlamaForCausalLM"), (Qwen3Config, Qwen3RotaryEmbedding, "Qwen3ForCausalLM")],
)
def test_rope_table_equals_transformers_bit_for_bit(config_class, module, architecture, head_dim, kind):
    length = 40000
    config = config_class(**SIZES, head_dim=head_dim, rope_parameters=dict(KINDS[kind]))
    cos, sin = module(config)(torch.zeros(1), torch.arange(length)[None])
    ours = ModelConfig.from_dict({**config.to_dict(), "architectures": [architecture]})
    table = cos_sin_table(ours.rope, ours.attention.head_dim, length)
    assert table.shape == (length, head_dim)
    assert table.dtype == torch.float32
    half = head_dim // 2
    for part in (slice(0, half), slice(half, head_dim)):  # transformers repeats each angle in the second half
        assert torch.equal(table[:, :half], cos[0, :, part])
        assert torch.equal(table[:, half:], sin[0, :, part])


def test_rope_attention_factor_of_config_takes_precedence():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 0.5}
    config = ModelConfig.from_dict({**SIZES, "architectures": ["LlamaForCausalLM"], "rope_scaling": rope})
    assert cos_sin_table(config.rope, 8, 3)[0].tolist() == [0.5] * 4 + [0.0] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "factor", "rotary_dim"), [(256, 0.25, 64), (128, 0.5, 64), (24, 0.25, 6)])
def test_partial_rope_table_equals_transformers_bit_for_bit(head_dim, factor, rotary_dim, kind):
    length = 4000
    rope = {**KINDS[kind], "partial_rotary_factor": factor}
    config = Qwen3NextConfig(**SIZES, head_dim=head_dim, rope_parameters=rope)
    cos, sin = Qwen3NextRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    ours = parse_rope(config.to_dict(), config.max_position_embeddings, partial_of=head_dim)
    assert ours.rotary_dim(head_dim) == rotary_dim
    table = cos_sin_table(ours, head_dim, length)
    assert table.shape == (length, rotary_dim)
    half = rotary_dim // 2
    assert torch.equal(table[:, :half], cos[0, :, :half])
    assert torch.equal(table[:, half:], sin[0, :, :half])


def test_partial_rotary_factor_is_read_from_rope_parameters_or_top_level():
    for data in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}},
                 {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
                  "partial_rotary_factor": 0.25}):
        assert parse_rope(data, 64, partial_of=16).rotary_dim(16) == 8
        with pytest.raises(ModelError, match=r"partial_rotary_factor: 0\.5 is not supported; supported: 1"):
            parse_rope(data, 64)
    assert parse_rope({"partial_rotary_factor": 1.0}, 64).rotary_dim(16) == 16
    for factor in (0, -0.5, 1.5, 0.2, 0.06):
        with pytest.raises(ModelError, match="partial_rotary_factor: must be"):
            parse_rope({"partial_rotary_factor": factor}, 64, partial_of=16)
