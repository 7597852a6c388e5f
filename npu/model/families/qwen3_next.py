"""Qwen3-Next: the layers of Qwen3.5 with experts. Projections of the gated delta net are fused in the checkpoint.

The published checkpoints contain a head for multi-token prediction (MTP), which is loaded for drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from npuserve.npu.model.families.moe import read_experts, read_mlps
from npuserve.npu.model.families.qwen3_5 import QWEN3_5_TEXT, read_attention, read_mixers
from npuserve.npu.model.layers.layer import Block, DecoderLayer, Layer


def read_layers(data: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    mixers = read_mixers(data, kv_heads=2, fused=True)
    return tuple((mixer, Block("post_attention_layernorm", "mlp", mlp))
                 for mixer, mlp in zip(mixers, _mlps(data), strict=True))


def read_mtp(data: Mapping[str, Any]) -> DecoderLayer:
    """Return the layer of the head. Its number is 0 where the kind of its MLP depends on the number."""
    return read_attention(data, kv_heads=2), Block("post_attention_layernorm", "mlp", _mlps(data)[0])


def _mlps(data: Mapping[str, Any]) -> list[Layer]:
    return read_mlps(data, read_experts(data, 512, 10, 512, renormalizes=True, shared=512))


QWEN3_NEXT = replace(
    QWEN3_5_TEXT, name="qwen3_next", architecture="Qwen3NextForCausalLM", read_layers=read_layers, read_mtp=read_mtp)
