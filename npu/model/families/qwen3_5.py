"""Qwen3.5, 3.6 and 3.8, dense: gated delta net in most layers, gated attention in the others. Text only.

The published checkpoints contain a vision tower, which is not loaded, and a head for multi-token prediction (MTP): one
layer of attention, which is loaded for drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from npuserve.npu.model.families.config_json import ModelError, flag, whole
from npuserve.npu.model.families.family import Family, check_activation, head_counts, num_layers
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.model.layers.gated_delta_net import GatedDeltaNet
from npuserve.npu.model.layers.layer import Block, DecoderLayer
from npuserve.npu.model.layers.swiglu import SwiGLU

FULL = "full_attention"
LINEAR = "linear_attention"


def text_config(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the decoder: those of `text_config`, and those beside it that it lacks."""
    nested = data.get("text_config")
    if nested is None and not {"vocab_size", "hidden_size"} & set(data):
        raise ModelError("config.json: text_config: is missing; it holds the sizes of the decoder")
    if nested is not None and not isinstance(nested, dict):
        raise ModelError(f"config.json: text_config: must be an object, got {nested!r}")
    merged = {**data, **(nested or {})}
    if data.get("tie_word_embeddings") is not None:
        merged["tie_word_embeddings"] = data["tie_word_embeddings"]
    merged.setdefault("head_dim", 256)
    rope = merged.get("rope_parameters") or merged.get("rope_scaling") or {}
    if isinstance(rope, dict) and rope.get("partial_rotary_factor") is None:
        merged.setdefault("partial_rotary_factor", 0.25)
    return merged


def read_layers(data: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    return tuple((mixer, _mlp(data)) for mixer in read_mixers(data))


def read_mtp(data: Mapping[str, Any]) -> DecoderLayer:
    return read_attention(data), _mlp(data)


def _mlp(data: Mapping[str, Any]) -> Block:
    return Block("post_attention_layernorm", "mlp", SwiGLU(whole(data, "intermediate_size")))


def read_mixers(data: Mapping[str, Any], *, kv_heads: int = 4, fused: bool = False) -> list[Block]:
    """Return the mixer of each layer.

    kv_heads: default of num_key_value_heads.
    fused: see `GatedDeltaNet`.
    """
    check_activation(data)
    if not flag(data, "attn_output_gate", True):
        raise ModelError("config.json: attn_output_gate: false is not supported; supported: true, as "
                         "in Qwen3.5, 3.6 and 3.8")
    mixers = {FULL: read_attention(data, kv_heads=kv_heads),
              LINEAR: Block("input_layernorm", "linear_attn", _delta_net(data, fused=fused))}
    return [mixers[kind] for kind in _layer_types(data)]


def read_attention(data: Mapping[str, Any], *, kv_heads: int = 4) -> Block:
    """Return the mixer of a layer of attention. kv_heads: as for `read_mixers`."""
    bias = flag(data, "attention_bias", False)
    attention = Attention(*head_counts(data, kv_heads, 256), qk_norm=True, qkv_bias=bias, o_bias=bias,
                          zero_centred=True, output_gate=True)
    return Block("input_layernorm", "self_attn", attention)


def _delta_net(data: Mapping[str, Any], *, fused: bool) -> GatedDeltaNet:
    keys = whole(data, "linear_num_key_heads", 16)
    values = whole(data, "linear_num_value_heads", 32)
    if values % keys:
        raise ModelError(f"config.json: linear_num_key_heads: {keys} does not divide linear_num_value_heads, {values}")
    key_dim = whole(data, "linear_key_head_dim", 128)
    value_dim = whole(data, "linear_value_head_dim", 128)
    taps = whole(data, "linear_conv_kernel_dim", 4)
    if taps < 2:
        raise ModelError(f"config.json: linear_conv_kernel_dim: must be at least 2, got {taps}")
    return GatedDeltaNet(keys, values, key_dim, value_dim, taps, fused)


def _layer_types(data: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer's mixer."""
    count = num_layers(data)
    interval = whole(data, "full_attention_interval", 4)
    kinds = data.get("layer_types")
    if kinds is None:
        kinds = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ModelError(f"config.json: layer_types: must be a list of {count} names, one for each of "
                         f"num_hidden_layers, got {len(kinds) if isinstance(kinds, list) else repr(kinds)}")
    if unknown := sorted({str(kind) for kind in kinds} - {FULL, LINEAR}):
        raise ModelError(
            f"config.json: layer_types: {', '.join(unknown)} is not supported; supported: {FULL}, {LINEAR}")
    if FULL not in kinds:
        raise ModelError(f"config.json: layer_types: a model without {FULL} is not supported")
    return kinds


QWEN3_5_TEXT = Family("qwen3_5", "Qwen3_5ForCausalLM", 32768, read_layers, text_config=text_config, ignored=("mtp.",),
                      zero_centred_norms=True, rotates_part=True, read_mtp=read_mtp)
QWEN3_5 = replace(QWEN3_5_TEXT, architecture="Qwen3_5ForConditionalGeneration", prefix="model.language_model.",
                  ignored=("mtp.", "model.visual."))
