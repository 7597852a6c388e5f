"""Mixtures of experts made of the small models, for tests that cannot import transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from tests.npu.backends.hybrid import saved_hybrid
from tests.npu.backends.small import saved

Family = Literal["qwen3", "qwen3_5", "qwen3_next"]
ARCHITECTURES = {
    "qwen3": "Qwen3MoeForCausalLM", "qwen3_5": "Qwen3_5MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM"}


def saved_mixture(
    folder: Path, family: Family = "qwen3", *, experts: int = 8, top_k: int = 2, width: int = 32, shared: int = 32,
    renormalize: bool = True, dense: tuple[int, ...] = (), seed: int = 0, **sizes: Any,
) -> Path:
    """Save a small model with experts.

    width, shared: intermediate sizes of an expert, and of the shared expert, which `qwen3` lacks.
    renormalize: of the chosen experts' weights; Qwen3.5 always does.
    dense: layers with one MLP, which Qwen3.5 lacks.
    sizes: of `saved`, or of `saved_hybrid` for the other families.
    """
    folder = (saved if family == "qwen3" else saved_hybrid)(folder, seed=seed, **sizes)
    path, settings = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(path), json.loads(settings.read_text())
    generator = torch.Generator().manual_seed(seed + 1)
    hidden = config["hidden_size"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    for layer in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.mlp."
        if layer not in dense:
            for name in ("gate_proj", "up_proj", "down_proj"):
                del tensors[f"{mlp}{name}.weight"]
            tensors[f"{mlp}gate.weight"] = normal(experts, hidden)
            modules = [(f"experts.{expert}", width) for expert in range(experts)]
            if family != "qwen3":
                modules.append(("shared_expert", shared))
                tensors[f"{mlp}shared_expert_gate.weight"] = normal(1, hidden)
            for module, size in modules:
                tensors |= {f"{mlp}{module}.gate_proj.weight": normal(size, hidden),
                            f"{mlp}{module}.up_proj.weight": normal(size, hidden),
                            f"{mlp}{module}.down_proj.weight": normal(hidden, size)}
    if family == "qwen3_next":
        tensors = _fused(tensors, config)
    config |= {
        "architectures": [ARCHITECTURES[family]], "num_experts": experts, "num_experts_per_tok": top_k,
        "moe_intermediate_size": width, "shared_expert_intermediate_size": shared, "norm_topk_prob": renormalize,
        "mlp_only_layers": list(dense), "decoder_sparse_step": 1}
    save_file(tensors, path)
    settings.write_text(json.dumps(config))
    return folder


def _fused(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors with the projections of Qwen3-Next: the rows of one head of keys after those of another."""
    heads, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    fused = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".in_proj_")
        if part == "qkv.weight":
            queries, keys, values = tensor.split([heads * dim, heads * dim, len(tensor) - 2 * heads * dim])
            parts = queries, keys, values, tensors[f"{module}.in_proj_z.weight"]
            fused[f"{module}.in_proj_qkvz.weight"] = _by_head(parts, heads)
            parts = tensors[f"{module}.in_proj_b.weight"], tensors[f"{module}.in_proj_a.weight"]
            fused[f"{module}.in_proj_ba.weight"] = _by_head(parts, heads)
        elif not module:
            fused[name] = tensor
    return fused


def _by_head(parts: tuple[torch.Tensor, ...], heads: int) -> torch.Tensor:
    return torch.cat([part.view(heads, -1, part.shape[1]) for part in parts], dim=1).flatten(0, 1)
