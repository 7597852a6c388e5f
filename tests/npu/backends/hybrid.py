"""Small random hybrid (Qwen3.5) whose sizes the device's operators take, for tests that cannot import transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN = 64
VOCABULARY = 100
KEY_HEADS, VALUE_HEADS = 1, 2


def saved_hybrid(
    folder: Path, *, layers: int = 4, head_dim: int = 256, linear_dim: int = 128, key_heads: int = KEY_HEADS,
    value_heads: int = VALUE_HEADS, seed: int = 0, full: tuple[int, ...] = (3,), inner: int = 96,
    context: int = 512, a_log: float = 0.0,
) -> Path:
    """Save a float32 Qwen3.5 with 2 query heads for each of 2 KV heads.

    full: layers of attention.
    a_log: mean of A_log. With 0 a state forgets within a few tokens, with -6 within about a thousand.
    """
    kinds = ["full_attention" if layer in full else "linear_attention" for layer in range(layers)]
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": inner,
        "num_hidden_layers": layers, "layer_types": kinds, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": head_dim, "vocab_size": VOCABULARY, "max_position_embeddings": context, "rms_norm_eps": 1e-6,
        "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_key_head_dim": linear_dim,
        "linear_value_head_dim": linear_dim, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
        "torch_dtype": "float32", "hidden_act": "silu", "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 64 / head_dim}}
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    def around(mean: float, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3 + mean

    queries, keys = 2 * 4 * head_dim, 2 * head_dim
    channels = (2 * key_heads + value_heads) * linear_dim
    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "model.norm.weight": around(0, HIDDEN)}
    for layer, kind in enumerate(kinds):
        own = {
            "input_layernorm.weight": around(0, HIDDEN), "post_attention_layernorm.weight": around(0, HIDDEN),
            "mlp.gate_proj.weight": normal(inner, HIDDEN), "mlp.up_proj.weight": normal(inner, HIDDEN),
            "mlp.down_proj.weight": normal(HIDDEN, inner)}
        if kind == "full_attention":
            own |= {
                "self_attn.q_proj.weight": normal(queries, HIDDEN), "self_attn.k_proj.weight": normal(keys, HIDDEN),
                "self_attn.v_proj.weight": normal(keys, HIDDEN),
                "self_attn.o_proj.weight": normal(HIDDEN, queries // 2),
                "self_attn.q_norm.weight": around(0, head_dim), "self_attn.k_norm.weight": around(0, head_dim)}
        else:
            values = value_heads * linear_dim
            own |= {
                "linear_attn.in_proj_qkv.weight": normal(channels, HIDDEN),
                "linear_attn.in_proj_z.weight": normal(values, HIDDEN),
                "linear_attn.in_proj_a.weight": normal(value_heads, HIDDEN),
                "linear_attn.in_proj_b.weight": normal(value_heads, HIDDEN),
                "linear_attn.conv1d.weight": around(0.3, channels, 1, 4),
                "linear_attn.A_log": around(a_log, value_heads),
                "linear_attn.dt_bias": around(-1, value_heads), "linear_attn.norm.weight": around(1, linear_dim),
                "linear_attn.out_proj.weight": normal(HIDDEN, values)}
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
