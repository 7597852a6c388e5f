"""Heads for multi-token prediction (MTP) made by transformers, the reference of the tests."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.support.benches import bench
from tests.support.models import LINEAR_LAYERS, PLAIN_W8A8, rounded

ADDING = "o_proj", "out_proj", "down_proj"
"""Modules whose outputs are added to the residual stream."""


def add_mtp(model: PreTrainedModel, folder: Path, seed: int = 0) -> MtpModel:
    """Add a random head to the checkpoint of a model in a folder; return the head as transformers loads it."""
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    model.config.name_or_path = str(folder)
    model.config.dtype = torch.float32
    torch.manual_seed(seed)
    head = MtpModel(model, 1)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in bench("quality.train_mtp").checkpoint_tensors(head).items():
        tensors[name] = torch.randn(tensor.shape) * (0.3 if tensor.dim() == 1 else 1.5 / tensor.shape[-1] ** 0.5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return MtpModel.from_pretrained(model).eval()


@torch.no_grad()
def assert_drafts(
    model: PreTrainedModel, head: MtpModel, drafted: list[tuple[list[int], list[int]]], start: int = 0
) -> None:
    """Assert that the head drafts the second list after the first one, whose last token is the sampled one. The model
    reads the longest lists first: their hidden states serve what they begin with.

    start: first position that the head computes.
    """
    read: list[tuple[list[int], torch.Tensor]] = []
    for tokens, drafts in sorted(drafted, key=lambda one: -len(one[0])):
        before = tokens[:-1]
        hidden = next((hidden for longer, hidden in read if longer[: len(before)] == before), None)
        if hidden is None:
            hidden = model.model(torch.tensor([before])).last_hidden_state
            read.append((before, hidden))
        assert drafts == drafts_of(head, hidden[:, start : len(before)], tokens, len(drafts), start)


def drafts_of(head: MtpModel, hidden: torch.Tensor, tokens: list[int], count: int, start: int = 0) -> list[int]:
    """Return what the head drafts. hidden: normalized hidden states of `tokens` from `start` on but the last."""
    cache = MtpCache(config=head.config)
    ids = torch.tensor([tokens[1 + start :]])
    positions = torch.arange(1 + start, len(tokens))[None]
    drafts: list[int] = []
    for _ in range(count):
        hidden = head.forward_layer(0, hidden, positions, cache, input_ids=ids)[:, -1:]
        drafts.append(int(head._project_to_logits(hidden)[0, -1].argmax()))
        ids = torch.tensor([drafts[-1:]])
        positions = positions[:, -1:] + 1
    return drafts


def damped(model: PreTrainedModel) -> PreTrainedModel:
    """Scale down what the layers of a model add, so that the next token depends most on the last one. Scale its logits
    up, so that samples are often the likeliest tokens."""
    with torch.no_grad():
        norm = model.model.norm.weight
        norm.copy_(3 * (1 + norm) - 1)
        for name, parameter in model.named_parameters():
            if any(part in name for part in ADDING):
                parameter.mul_(0.02)
    return model


def add_likely_mtp(model: PreTrainedModel, folder: Path) -> None:
    """Add a head to the checkpoint of a `damped` model that predicts from the next token alone, so that drafts are
    often right."""
    add_mtp(model, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    hidden = model.config.hidden_size
    norm = next(name for name in tensors if name.endswith("model.norm.weight"))
    tensors["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
    tensors["mtp.norm.weight"] = tensors[norm].clone()
    for name, tensor in tensors.items():
        if name.startswith("mtp.layers.") and any(part in name for part in ADDING):
            tensor.mul_(0.02)
    save_file(tensors, file, {"format": "pt"})


def round_mtp(folder: Path) -> None:
    """Round the linear layers of a head to W8A8, in the format of compressed-tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in list(tensors.items()):
        layer = name.removesuffix(".weight")
        if name.startswith("mtp.") and layer.endswith((*LINEAR_LAYERS, "mtp.fc")):
            tensors |= {f"{layer}.{part}": tensor for part, tensor in rounded(weight, PLAIN_W8A8).items()}
    save_file(tensors, file, {"format": "pt"})
