"""Small random models made by transformers, the reference of the tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from npuserve.npu.quantization.assignment import Quantization
from npuserve.npu.quantization.w8a8 import W8A8

SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_theta": 500000.0,
    },
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000000.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
        "mscale": 0.9, "mscale_all_dim": 0.4, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
    },
}

FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-untied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8, "num_key_value_heads": 4}),
    "qwen3-bias": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 10, "attention_bias": True, "num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    **{f"llama-{name}": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": rope}) for name, rope in ROPES.items()},
}


def random_model(kind: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a float32 model. Norms and biases are random too, so that a missing one changes the results."""
    config_class, model_class, settings = FAMILIES[kind]
    settings = {**SIZES, **settings, **overrides}
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    torch.manual_seed(seed)
    model = model_class(config_class(**settings)).eval()
    for name, parameter in model.named_parameters():
        center = 1.0 if "norm" in name else 0.0
        torch.nn.init.normal_(parameter, center, 0.3 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5)
    return model  # type: ignore[no-any-return]


def saved(model: PreTrainedModel, folder: Path, **settings: Any) -> Path:
    """Save in Hugging Face format. settings: of save_pretrained."""
    model.save_pretrained(folder, **settings)
    return folder


PLAIN_W8A8 = W8A8()
LINEAR_LAYERS = "_proj", "in_proj_qkv", "in_proj_z", "lm_head"
"""Ends of the names of linear layers that can be quantized."""


def saved_w8a8(
    model: PreTrainedModel, folder: Path, scheme: W8A8 = PLAIN_W8A8, ignore: tuple[str, ...] = ("lm_head",),
    **settings: Any,
) -> Path:
    """Save a checkpoint in W8A8 (`round_linears`). settings: of save_pretrained."""
    return round_linears(saved(model, folder, **settings), scheme, ignore)


def round_linears(folder: Path, scheme: W8A8, ignore: tuple[str, ...]) -> Path:
    """Round a checkpoint in place to the format of compressed-tensors, written without it.

    Linear layers are rounded to nearest. Zero points, if the scheme has them, are arbitrary; static input scales almost
    never clip.
    """
    quantization = Quantization(((("Linear",), scheme),), ignore)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, weight in list(tensors.items()):
            layer = name.removesuffix(".weight")
            if name.endswith(".weight") and layer.endswith(LINEAR_LAYERS) and quantization.of(layer):
                tensors |= {f"{layer}.{part}": tensor for part, tensor in rounded(weight, scheme).items()}
        save_file(tensors, path, {"format": "pt"})
    edit_config(folder, quantization_config=quantization.to_json())
    return folder


def rounded(weight: torch.Tensor, scheme: W8A8) -> dict[str, torch.Tensor]:
    wide = weight.float()
    most = wide.abs().amax(dim=1, keepdim=True) if scheme.per_channel else wide.abs().amax().reshape(1)
    if scheme.blocks:
        return _in_blocks(wide, scheme.scale_name)
    if scheme.float8:
        found = {"weight_scale": most / 448, "weight": (wide / (most / 448)).to(torch.float8_e4m3fn)}
        return found if scheme.dynamic else {**found, "input_scale": torch.tensor([0.02])}
    made = {"weight_scale": most / 100}
    zero = torch.arange(len(most)).reshape(most.shape) % 28 - 14 if not scheme.symmetric else torch.zeros_like(most)
    if not scheme.symmetric:
        made["weight_zero_point"] = zero.to(torch.int8)
    made["weight"] = ((wide / made["weight_scale"]).round() + zero).to(torch.int8)
    if not scheme.dynamic:
        made["input_scale"] = torch.tensor([0.1])
        if not scheme.symmetric_inputs:
            made["input_zero_point"] = torch.tensor([11], dtype=torch.int8)
    return made


def _in_blocks(wide: torch.Tensor, scale_name: str) -> dict[str, torch.Tensor]:
    rows, columns = (-(-size // 128) for size in wide.shape)
    blocks = F.pad(wide, (0, columns * 128 - wide.shape[1], 0, rows * 128 - wide.shape[0]))
    blocks = blocks.view(rows, 128, columns, 128)
    scale = (blocks.abs().amax(dim=(1, 3)) / 448).bfloat16()
    values = (blocks / scale.float()[:, None, :, None]).clamp(-448, 448).view(rows * 128, -1)
    return {scale_name: scale,
            "weight": values[: wide.shape[0], : wide.shape[1]].contiguous().to(torch.float8_e4m3fn)}


def parameter_of(model: PreTrainedModel, name: str) -> torch.Tensor:
    """Return the parameter that a tensor of the checkpoint is, or the part of it for one of several stacked experts."""
    parameters = dict(model.named_parameters())
    if not (expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name)):
        return parameters[name]
    if expert[3] == "down":
        return parameters[f"{expert[1]}.down_proj"][int(expert[2])]
    return parameters[f"{expert[1]}.gate_up_proj"][int(expert[2])].chunk(2)[expert[3] == "up"]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return the next `count` ids by argmax (the smallest id of equal ones); each step computes the whole sequence."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def assert_greedy(model: PreTrainedModel, prompt: list[int], answer: list[int], count: int) -> None:
    """Assert that an answer is `greedy(model, prompt, count)`, in one pass over the whole sequence."""
    logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    assert (answer, len(answer)) == (logits.argmax(-1).tolist(), count)
