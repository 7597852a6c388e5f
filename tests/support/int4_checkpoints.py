"""Checkpoints in 4 bits, written by hand from the descriptions of the formats AWQ, GPTQ and compressed-tensors.

They share no code with the readers. The model that is saved gets the numbers that the checkpoint stands for.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINEAR_LAYERS = "_proj", "in_proj_qkv", "in_proj_z"
"""Ends of the names of linear layers that are quantized."""

AWQ_COLUMNS = 0, 2, 4, 6, 1, 3, 5, 7
"""Column of each number of 4 bits of a word of AWQ, from the lowest on."""

METHODS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "version": "gemm", "zero_point": True,
            "modules_to_not_convert": ["in_proj_a", "in_proj_b", "shared_expert_gate"]},
    "gptq": {"quant_method": "gptq", "checkpoint_format": "gptq", "desc_act": False, "damp_percent": 0.1},
    "gptq_v2": {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "desc_act": False,
                "meta": {"quantizer": "by hand"}},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*in_proj_[ab]", "re:.*shared_expert_gate"]},
}


def save_int4(
    model: PreTrainedModel, folder: Path, method: str, group: int = 32, *, symmetric: bool = False,
    act_order: bool = False, dtype: torch.dtype = torch.float16, **settings: Any,
) -> PreTrainedModel:
    """Save the model with linear layers in 4 bits, and return it with the numbers of the checkpoint.

    settings: of save_pretrained. The others are those of `to_int4`.
    """
    from tests.support.models import parameter_of  # needs transformers, which tests on devices lack

    model.save_pretrained(folder, **settings)
    floats = to_int4(folder, method, group, symmetric=symmetric, act_order=act_order, dtype=dtype)
    with torch.no_grad():
        for name, numbers in floats.items():
            parameter_of(model, name).copy_(numbers)
    return model


def to_int4(
    folder: Path, method: str, group: int = 32, *, symmetric: bool = False, act_order: bool = False,
    dtype: torch.dtype = torch.float16,
) -> dict[str, torch.Tensor]:
    """Replace the linear layers of a checkpoint by random ones in 4 bits. Return the numbers that these stand for.

    method: key of METHODS.
    group: columns of a group; -1 for one scale a row.
    dtype: of the scales.
    """
    draw = random.Random(group)
    floats: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(".weight")]:
            layer = name.removesuffix(".weight")
            if not layer.endswith(LINEAR_LAYERS):
                continue
            n, k = tensors.pop(name).shape
            size = k if group == -1 else group
            order = list(range(k))
            if act_order:
                draw.shuffle(order)
            group_of = np.array(order) // size
            made = Numbers(n, k, -(-k // size), group_of, dtype, symmetric=symmetric)
            tensors |= {f"{layer}.{part}": tensor for part, tensor in made.tensors(method, act_order=act_order).items()}
            floats[name] = made.floats()
        save_file(tensors, path, {"format": "pt"})
    config = folder / "config.json"
    quantization = section(method, group, symmetric=symmetric, act_order=act_order)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))
    return floats


def section(method: str, group: int, *, symmetric: bool, act_order: bool = False) -> dict[str, Any]:
    """Return the quantization_config."""
    base = METHODS[method]
    if method == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False,
                   "strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group}
        return {**base, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    if method == "awq":
        return {**base, "bits": 4, "group_size": group}
    return {**base, "bits": 4, "group_size": group, "sym": symmetric, "desc_act": act_order,
            "dynamic": {"-:.*(in_proj_[ab]|shared_expert_gate)": {}}}


class Numbers:
    """Random weight [n, k] of 4 bits: codes 0 to 15, and a scale and a zero point 0 to 16 for each group."""

    def __init__(self, n: int, k: int, groups: int, group_of: np.ndarray, dtype: torch.dtype, *, symmetric: bool):
        numbers = np.random.default_rng(n * k)
        self.group_of = group_of
        self.codes = numbers.integers(0, 16, (n, k))
        self.scale = torch.from_numpy((0.3 + numbers.random((n, groups))) * 0.3 / k**0.5).to(dtype)
        self.zero = np.full((n, groups), 8) if symmetric else numbers.integers(1, 16, (n, groups))
        self.symmetric = symmetric

    def floats(self) -> torch.Tensor:
        levels = torch.from_numpy(self.codes - self.zero[:, self.group_of]).double()
        return (levels * self.scale.double()[:, self.group_of]).float()

    def tensors(self, method: str, *, act_order: bool) -> dict[str, torch.Tensor]:
        if method == "compressed-tensors":
            made = {"weight_packed": words(self.codes, 1), "weight_scale": self.scale,
                    "weight_shape": torch.tensor(self.codes.shape)}
            return made if self.symmetric else {**made, "weight_zero_point": words(self.zero, 0)}
        if method == "awq":
            return {"qweight": words(self.codes.T, 1, AWQ_COLUMNS), "qzeros": words(self.zero.T, 1, AWQ_COLUMNS),
                    "scales": self.scale.T.contiguous()}
        stored = self.zero - (1 if method == "gptq" else 0)
        return {"qweight": words(self.codes.T, 0), "qzeros": words(stored.T, 1), "scales": self.scale.T.contiguous(),
                "g_idx": torch.from_numpy(self.group_of).int()}


def words(codes: np.ndarray, dim: int, columns: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack codes into int32 along a dimension, padded to 8. columns: of each 8, that of each 4 bits."""
    lines = np.moveaxis(codes, dim, -1)
    lines = np.pad(lines, ((0, 0), (0, -lines.shape[1] % 8)))
    packed = np.zeros((lines.shape[0], lines.shape[1] // 8), np.uint64)
    for place, column in enumerate(columns):
        packed |= lines[:, column::8].astype(np.uint64) << np.uint64(4 * place)
    return torch.from_numpy(np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, dim).copy())
