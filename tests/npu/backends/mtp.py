"""Heads for multi-token prediction (MTP) of small random models, for tests that cannot import transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ADDING = "o_proj", "out_proj", "down_proj"
"""Matrices whose products are added to the residual stream."""


def add_head(folder: Path, *, of_hidden: float = 0.05, damping: float = 0.1, seed: int = 0) -> Path:
    """Add a head to the checkpoint of a small Qwen3.5 or Qwen3-Next, some of whose drafts are right. Return the folder.

    The model's next token depends most on the last one, since what its layers add is multiplied by `damping`. So does
    the head's draft.

    of_hidden: weight of the model's hidden state beside the embedding of the next token.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    kinds = config["layer_types"]
    for name, tensor in tensors.items():
        if any(part in name for part in ADDING):
            tensor.mul_(damping)
    norm = tensors["model.norm.weight"]
    norm.copy_(3 * (1 + norm) - 1)
    source = f"model.layers.{kinds.index('full_attention')}."
    head = {name.replace(source, "mtp.layers.0."): tensor.clone() for name, tensor in tensors.items()
            if name.startswith(source)}
    mixed = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(seed)) * of_hidden
    head["mtp.fc.weight"] = torch.cat((torch.eye(hidden), mixed), 1)
    for part in ("embedding", "hidden"):
        head[f"mtp.pre_fc_norm_{part}.weight"] = torch.zeros(hidden)
    head["mtp.norm.weight"] = norm.clone()
    save_file(tensors | head, file)
    return folder
