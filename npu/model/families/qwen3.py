"""Qwen3, dense, which normalises query and key heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npuserve.npu.model.families.config_json import flag, whole
from npuserve.npu.model.families.family import Family, check_activation, check_full_attention, head_counts, repeat
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.model.layers.layer import DecoderLayer
from npuserve.npu.model.layers.swiglu import SwiGLU


def read_layers(data: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    check_activation(data)
    check_full_attention(data, has_window=True)
    bias = flag(data, "attention_bias", False)
    attention = Attention(*head_counts(data, 32, 128), qk_norm=True, qkv_bias=bias, o_bias=bias)
    return repeat(data, attention, SwiGLU(whole(data, "intermediate_size")))


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", 32768, read_layers)
