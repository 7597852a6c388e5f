"""Qwen3.5 and 3.6 with experts: mixers of the dense models, and a shared expert beside the chosen ones. Text only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from npuserve.npu.model.families.moe import read_experts
from npuserve.npu.model.families.qwen3_5 import QWEN3_5, QWEN3_5_TEXT, read_attention, read_mixers
from npuserve.npu.model.layers.layer import Block, DecoderLayer


def read_layers(data: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    return tuple((mixer, _mlp(data)) for mixer in read_mixers(data, kv_heads=2))


def read_mtp(data: Mapping[str, Any]) -> DecoderLayer:
    return read_attention(data, kv_heads=2), _mlp(data)


def _mlp(data: Mapping[str, Any]) -> Block:
    experts = read_experts(data, 256, 8, 512, renormalizes=None, shared=512)
    return Block("post_attention_layernorm", "mlp", experts)


QWEN3_5_MOE_TEXT = replace(QWEN3_5_TEXT, name="qwen3_5_moe", architecture="Qwen3_5MoeForCausalLM",
                           read_layers=read_layers, read_mtp=read_mtp)
QWEN3_5_MOE = replace(QWEN3_5, name="qwen3_5_moe", architecture="Qwen3_5MoeForConditionalGeneration",
                      read_layers=read_layers, read_mtp=read_mtp)
