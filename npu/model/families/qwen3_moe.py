"""Qwen3 with experts: attention as in Qwen3, dense. Layers may have one MLP in place of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npuserve.npu.model.families.config_json import flag
from npuserve.npu.model.families.family import Family, check_activation, check_full_attention, head_counts
from npuserve.npu.model.families.moe import read_experts, read_mlps
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.model.layers.layer import Block, DecoderLayer


def read_layers(data: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    check_activation(data)
    check_full_attention(data, has_window=True)
    bias = flag(data, "attention_bias", False)
    attention = Attention(*head_counts(data, 4), qk_norm=True, qkv_bias=bias, o_bias=bias)
    mixer = Block("input_layernorm", "self_attn", attention)
    experts = read_experts(data, 128, 8, 768, renormalizes=False)
    return tuple((mixer, Block("post_attention_layernorm", "mlp", mlp)) for mlp in read_mlps(data, experts))


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", 32768, read_layers)
