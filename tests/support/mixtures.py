"""Random mixtures of experts made by transformers, the reference of the tests."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.support.hybrids import VOCABULARY

FAMILIES: tuple[tuple[type[Any], type[Any]], ...] = (
    (Qwen3MoeConfig, Qwen3MoeForCausalLM), (Qwen3NextConfig, Qwen3NextForCausalLM),
    (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM))


def settings_of(seed: int) -> dict[str, Any]:
    """Return the settings of a random model. The family is the seed's remainder by three."""
    draw = random.Random(seed)
    family = seed % len(FAMILIES)
    layers, experts = draw.choice([2, 3, 4]), draw.choice([4, 8, 16, 60, 128])
    kv_heads, group = draw.choice([1, 2]), draw.choice([1, 2, 4])
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": draw.choice([32, 48, 64]), "intermediate_size": draw.choice([24, 40]),
        "num_hidden_layers": layers, "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads,
        "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": draw.random() < 0.5,
        "num_experts": experts, "num_experts_per_tok": draw.randint(1, min(8, experts)),
        "moe_intermediate_size": draw.choice([32, 64]), "bos_token_id": 1, "eos_token_id": 2}
    if family < 2:
        settings |= {"norm_topk_prob": draw.random() < 0.5, "decoder_sparse_step": draw.choice([1, 1, 2]),
                     "mlp_only_layers": draw.choice([[], [0], [layers - 1]])}
    if family > 0:
        kinds = [draw.choice(["linear_attention", "full_attention"]) for _ in range(layers - 1)]
        key_heads = 2 * draw.choice([1, 2])
        settings |= {
            "shared_expert_intermediate_size": draw.choice([32, 48]), "layer_types": [*kinds, "full_attention"],
            "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * draw.choice([1, 2, 3]),
            "linear_key_head_dim": draw.choice([8, 16]), "linear_value_head_dim": draw.choice([8, 16]),
            "linear_conv_kernel_dim": draw.choice([3, 4]),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    return settings


def random_mixture(seed: int, **changes: Any) -> PreTrainedModel:
    """Return a float32 model whose numbers are all random, so that a missing one changes the results."""
    config_class, model_class = FAMILIES[seed % len(FAMILIES)]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**settings_of(seed), **changes})).eval()
    zero_centred = seed % len(FAMILIES) > 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-1, 2)
            elif parameter.dim() == 1:
                centre = 1 if "norm" in name and ("linear_attn" in name or not zero_centred) else 0
                parameter.normal_(centre, 0.3)
            else:
                parameter.normal_(0, 0.6 if "conv1d" in name else 1.5 / parameter.shape[-1] ** 0.5)
    return model  # type: ignore[no-any-return]


def restack(folder: Path, *, stacked: bool, of: str = "") -> None:
    """Write the experts of a checkpoint in one tensor, or one by one. of: beginning of their tensors' names."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    experts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name in [name for name in tensors if name.startswith(of)]:
        if one := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault((one[1], one[3]), {})[int(one[2])] = tensors.pop(name)
        elif name.endswith("experts.gate_up_proj"):
            for index, matrix in enumerate(tensors.pop(name)):
                for part, half in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                    experts.setdefault((name.rpartition(".")[0], part), {})[index] = half
        elif name.endswith("experts.down_proj"):
            experts[name.rpartition(".")[0], "down_proj"] = dict(enumerate(tensors.pop(name)))
    for layer in {layer for layer, _ in experts}:
        parts = {part: torch.stack([experts[layer, part][i] for i in range(len(experts[layer, part]))])
                 for part in ("gate_proj", "up_proj", "down_proj")}
        if stacked:
            tensors[f"{layer}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
            tensors[f"{layer}.down_proj"] = parts["down_proj"]
        else:
            tensors |= {f"{layer}.{i}.{part}.weight": matrix.clone()
                        for part, matrices in parts.items() for i, matrix in enumerate(matrices)}
    save_file(tensors, file, {"format": "pt"})


def use_recurrent_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers compute prompts by the recurrence, as decoding does: its chunked form rounds more."""
    for modeling in (modeling_qwen3_5_moe, modeling_qwen3_next):

        def recurrent(*args: Any, modeling: Any = modeling, chunk_size: int = 64, **settings: Any) -> Any:
            return modeling.torch_recurrent_gated_delta_rule(*args, **settings)

        monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", recurrent)
