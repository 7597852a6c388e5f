"""Qwen2 and Qwen2.5, which have biases at queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npuserve.npu.model.families.config_json import whole
from npuserve.npu.model.families.family import Family, check_activation, check_full_attention, head_counts, repeat
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.model.layers.layer import DecoderLayer
from npuserve.npu.model.layers.swiglu import SwiGLU


def read_layers(data: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    check_activation(data)
    check_full_attention(data, has_window=True)
    return repeat(data, Attention(*head_counts(data, 32), qkv_bias=True), SwiGLU(whole(data, "intermediate_size")))


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", 32768, read_layers)
