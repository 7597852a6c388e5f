"""Model families: what an architecture fixes, and its defaults. Imports no torch.

The defaults are from transformers (configuration_qwen3.py, configuration_qwen2.py, configuration_llama.py), with which
the authors of a checkpoint tested it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npuserve.npu.model.config_json import ModelError, whole


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of an architecture, and defaults for keys that config.json lacks (None: no default)."""

    name: str
    qk_norm: bool
    qkv_bias: bool | None  # None: attention_bias decides, for the output projection too
    mlp_bias: bool | None  # None: mlp_bias decides
    sliding_window: bool
    num_kv_heads: int | None
    head_dim: int | None
    context: int


FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", True, None, False, True, 32, 128, 32768),
    "Qwen2ForCausalLM": Family("qwen2", False, True, False, True, 32, None, 32768),
    "LlamaForCausalLM": Family("llama", False, None, None, False, None, None, 2048),
}


def check_supported(data: Mapping[str, Any], family: Family) -> None:
    """Raise ModelError for an activation or a sliding window that is not supported."""
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act: {activation!r} is not supported; supported: silu")
    kinds = data.get("layer_types") or []
    window = data.get("sliding_window", 4096) if family.sliding_window and data.get("use_sliding_window") else None
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
    if "sliding_attention" in kinds if kinds else full < whole(data, "num_hidden_layers"):
        raise ModelError(f"config.json: use_sliding_window: attention in a window of {window} tokens is not supported")
