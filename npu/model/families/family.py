"""What a family declares, and values of config.json that several families read in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from npuserve.npu.model.families.config_json import ModelError, whole
from npuserve.npu.model.layers.layer import Block, DecoderLayer, Layer

MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Family:
    """Family of models.

    name: name in metadata and logs.
    architecture: class name in config.json.
    context: max_position_embeddings if config.json lacks it.
    read_layers: returns the blocks of each decoder layer for the contents of a config.json. Raises ModelError.
    prefix: beginning of the names of the decoder's tensors in the checkpoint.
    text_config: returns the keys of the decoder, for a config.json that nests them.
    ignored: beginnings of the names of tensors that are not loaded.
    zero_centred_norms: the weights of norms in the checkpoint are the factors less 1.
    rotates_part: rotary embeddings may cover a part of a head.
    read_mtp: returns the decoder layer of the head for multi-token prediction (MTP); None if the family has none.
    """

    name: str
    architecture: str
    context: int
    read_layers: Callable[[Mapping[str, Any]], tuple[DecoderLayer, ...]]
    prefix: str = "model."
    text_config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda data: data
    ignored: tuple[str, ...] = ()
    zero_centred_norms: bool = False
    rotates_part: bool = False
    read_mtp: Callable[[Mapping[str, Any]], DecoderLayer] | None = None


def repeat(data: Mapping[str, Any], mixer: Layer, mlp: Layer) -> tuple[DecoderLayer, ...]:
    """Return num_hidden_layers layers of a mixer and an MLP."""
    layer = Block("input_layernorm", "self_attn", mixer), Block("post_attention_layernorm", "mlp", mlp)
    return (layer,) * num_layers(data)


def num_layers(data: Mapping[str, Any]) -> int:
    """Return num_hidden_layers."""
    count = whole(data, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers: must be in [1, {MAX_LAYERS}], got {count}")
    return count


def head_counts(
    data: Mapping[str, Any], kv_heads: int | None = None, head_dim: int | None = None
) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key and value heads, and their size.

    kv_heads, head_dim: defaults for absent keys; None for as many as query heads, and for their share of hidden_size.
    """
    num_heads = whole(data, "num_attention_heads")
    num_kv_heads = whole(data, "num_key_value_heads", kv_heads, num_heads)
    size = whole(data, "head_dim", head_dim, whole(data, "hidden_size") // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads: {num_kv_heads} does not divide {num_heads} attention heads")
    if size % 2:
        raise ModelError(f"config.json: head_dim: must be even for rotary embeddings, got {size}")
    return num_heads, num_kv_heads, size


def check_activation(data: Mapping[str, Any]) -> None:
    """Raise ModelError for an activation other than that of SwiGLU."""
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act: {activation!r} is not supported; supported: silu")


def check_full_attention(data: Mapping[str, Any], *, has_window: bool) -> None:
    """Raise ModelError for layers other than full attention. has_window: the family reads `sliding_window`."""
    kinds = data.get("layer_types") or []
    window = data.get("sliding_window", 4096) if has_window and data.get("use_sliding_window") else None
    if not isinstance(kinds, list):
        raise ModelError(f"config.json: layer_types: must be a list, got {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"config.json: layer_types: {', '.join(unknown)} is not supported; supported: full_attention")
    if window is None:
        return
    full = data.get("max_window_layers", 28)
    if isinstance(full, bool) or not isinstance(full, int):
        raise ModelError(f"config.json: max_window_layers: must be a whole number, got {full!r}")
    if "sliding_attention" in kinds if kinds else full < num_layers(data):
        raise ModelError(f"config.json: use_sliding_window: attention in a window of {window} tokens is not supported")
