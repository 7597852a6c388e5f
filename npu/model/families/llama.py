"""Llama 2 and 3, and models of the same architecture."""

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
    check_full_attention(data, has_window=False)
    bias = flag(data, "attention_bias", False)
    attention = Attention(*head_counts(data), qkv_bias=bias, o_bias=bias)
    return repeat(data, attention, SwiGLU(whole(data, "intermediate_size"), flag(data, "mlp_bias", False)))


LLAMA = Family("llama", "LlamaForCausalLM", 2048, read_layers)
