"""EAGLE-3 heads: one layer that drafts tokens from hidden states of several layers of the served model (Li et al. 2025,
arXiv:2503.01840). Imports no torch.

A head has a folder of its own. Its tensors, for hidden size H, served hidden size S and D ids of its own:

    fc [H, 3 S]                               of the inputs of three layers of the served model
    midlayer.input_layernorm, hidden_norm     norms of the embedding of the next token, and of the product with fc
    midlayer.self_attn.*                      attention, whose projections take both, [2 H]
    midlayer.post_attention_layernorm, mlp.*
    norm, lm_head [D, H]
    d2t [D]                                   id of the served model, less the head's own id; absent if D is all
    embed_tokens [V, H]                       absent if it is that of the served model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npuserve.npu.model.families.config_json import ModelError, flag, whole
from npuserve.npu.model.families.family import check_activation, head_counts, num_layers
from npuserve.npu.model.folder import has_tensor
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.model.layers.layer import Block, DecoderLayer
from npuserve.npu.model.layers.swiglu import SwiGLU

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Key of the layers that a head reads, in eagle_config or beside it (`_inputs`)."""

LAYER_NAMES = "midlayer.", "layers.0."
"""Beginnings of the names of the layer's tensors, as published heads have them."""


@dataclass(frozen=True, slots=True)
class EagleHead:
    """What a head has beside a model.

    inputs: layers of the served model whose inputs it reads, ascending.
    served_size: size of these.
    vocabulary: number of ids of the served model.
    layer: beginning of the names of the layer's tensors.
    norms_residual: the layer adds to the normed features; otherwise to the features.
    has_embedding, has_ids: the folder has an embedding, and ids of the served model (d2t).
    """

    inputs: tuple[int, ...]
    served_size: int
    vocabulary: int
    layer: str
    norms_residual: bool
    has_embedding: bool
    has_ids: bool


def is_eagle(data: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a head."""
    names = data.get("architectures") or []
    return "draft_vocab_size" in data or (isinstance(names, list) and any("Eagle3" in str(name) for name in names))


def read_eagle(data: Mapping[str, Any], folder: Path, served_layers: int, served_size: int) -> EagleHead:
    """Return what a config.json and the names of a folder's tensors say.

    served_layers, served_size: number of layers of the served model, and its hidden size. Raises ModelError.
    """
    if data.get("speculators_model_type") is not None:
        raise ModelError("config.json: speculators_model_type: heads in the format of speculators are not supported; "
                         "supported: the format that EAGLE and SpecForge write")
    if data.get("quantization_config") is not None:
        raise ModelError("config.json: quantization_config: an EAGLE-3 head in floats is supported")
    if num_layers(data) != 1:
        raise ModelError(f"config.json: num_hidden_layers: an EAGLE-3 head has 1, got {num_layers(data)}")
    inputs = _inputs(data, served_layers)
    if (size := whole(data, "target_hidden_size", served_size)) != served_size:
        raise ModelError(f"config.json: target_hidden_size: is {size}, where the served model has {served_size}")
    has_embedding = has_tensor(folder, "embed_tokens.weight")
    if not has_embedding and whole(data, "hidden_size") != served_size:
        raise ModelError(f"{folder}: 1 missing: embed_tokens.weight, since its hidden_size, "
                         f"{whole(data, 'hidden_size')}, is not that of the served model, {served_size}")
    layer = next((name for name in LAYER_NAMES if has_tensor(folder, f"{name}hidden_norm.weight")), LAYER_NAMES[0])
    vocabulary, has_ids = whole(data, "vocab_size"), has_tensor(folder, "d2t")
    if not has_ids and whole(data, "draft_vocab_size", vocabulary) != vocabulary:
        raise ModelError(f"{folder}: 1 missing: d2t, since draft_vocab_size is not vocab_size, {vocabulary}")
    return EagleHead(inputs, served_size, vocabulary, layer,
                     flag(data, "norm_before_residual", False), has_embedding, has_ids)


def _inputs(data: Mapping[str, Any], served_layers: int) -> tuple[int, ...]:
    """Return the layers of the served model whose inputs the head reads, ascending. Raises ModelError.

    Those of eagle_config number the layers whose outputs are read (SpecForge, SGLang); those of the outer object number
    the layers whose inputs are read (vLLM).
    """
    nested = data.get("eagle_config")
    outputs = nested.get(LAYER_IDS) if isinstance(nested, dict) else None
    ids, offset = (outputs, 1) if outputs else (data.get(LAYER_IDS), 0)
    if not ids:
        default = 2, served_layers // 2, served_layers - 3
        if not default[0] < default[1] < default[2]:
            raise ModelError(
                f"config.json: {LAYER_IDS}: is missing, and a served model of {served_layers} layers has no default; "
                "the head may have been trained for another model")
        return default
    last = served_layers - 1 - offset
    if (not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= last for each in ids)
            or ids != sorted(set(ids))):
        raise ModelError(f"config.json: {LAYER_IDS}: must be ascending numbers of layers of the served model, in "
                         f"[0, {last}], got {ids!r}")
    return tuple(each + offset for each in ids)


def read_layer(data: Mapping[str, Any], folder: Path, eagle: EagleHead) -> DecoderLayer:
    check_activation(data)
    bias = flag(data, "attention_bias", False)
    attention = Attention(*head_counts(data), qk_norm=has_tensor(folder, f"{eagle.layer}self_attn.q_norm.weight"),
                          qkv_bias=bias, o_bias=bias, num_inputs=2)
    mlp = SwiGLU(whole(data, "intermediate_size"), flag(data, "mlp_bias", False))
    return Block("hidden_norm", "self_attn", attention), Block("post_attention_layernorm", "mlp", mlp)
