"""EAGLE-3 head with random weights for the model of small.py, for tests that cannot import transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def saved_eagle(folder: Path, *, head_dim: int = 32, vocabulary: int = 100, ids: int = 60, hidden: int = 64) -> Path:
    """Save a head that reads the inputs of both layers, for `ids` of the model's ids."""
    sizes = {"hidden_size": hidden, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": head_dim, "vocab_size": vocabulary, "draft_vocab_size": ids,
             "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    heads, kv = 4 * head_dim, 2 * head_dim
    layer = {
        "self_attn.q_proj": normal(heads, 2 * hidden), "self_attn.k_proj": normal(kv, 2 * hidden),
        "self_attn.v_proj": normal(kv, 2 * hidden), "self_attn.o_proj": normal(hidden, heads),
        "mlp.gate_proj": normal(96, hidden), "mlp.up_proj": normal(96, hidden), "mlp.down_proj": normal(hidden, 96),
        **{name: torch.randn(hidden, generator=generator) * 0.3 + 1
           for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }
    tensors = {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}
    chosen = torch.randperm(vocabulary, generator=generator)[:ids].sort().values
    tensors |= {"fc.weight": normal(hidden, 2 * hidden), "norm.weight": torch.ones(hidden),
                "lm_head.weight": normal(ids, hidden), "d2t": chosen - torch.arange(ids)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(
        {**sizes, "architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32"}))
    return folder
