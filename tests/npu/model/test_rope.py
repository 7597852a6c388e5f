from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.rope import cos_sin_table
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
    table = cos_sin_table(ours.rope, ours.rotary_dim, length)
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
