"""Quantized checkpoints made by the compressed-tensors package, and by hand from its parts. It and transformers are the
reference of the tests."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (Python 3.11 and later)")

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams

SCHEMES: dict[str, dict[str, dict[str, Any]]] = {
    "dynamic": {"weights": {"strategy": "channel"}, "input_activations": {"strategy": "token", "dynamic": True}},
    "dynamic asymmetric": {
        "weights": {"strategy": "channel"},
        "input_activations": {"strategy": "token", "dynamic": True, "symmetric": False}},
    "static": {"weights": {"strategy": "channel"}, "input_activations": {"strategy": "tensor"}},
    "static asymmetric": {
        "weights": {"strategy": "channel"}, "input_activations": {"strategy": "tensor", "symmetric": False}},
    "per tensor": {"weights": {"strategy": "tensor"}, "input_activations": {"strategy": "token", "dynamic": True}},
    "zeros of weights": {
        "weights": {"strategy": "channel", "symmetric": False},
        "input_activations": {"strategy": "token", "dynamic": True}},
    "zeros of all": {
        "weights": {"strategy": "tensor", "symmetric": False},
        "input_activations": {"strategy": "tensor", "symmetric": False}},
}
FLOAT8 = ("dynamic", "static", "per tensor")
"""Names of the schemes that exist in float8 too."""


def scheme(name: str, targets: Iterable[str] = ("Linear",), *, float8: bool = False) -> QuantizationScheme:
    kind = "float" if float8 else "int"
    parts = {part: QuantizationArgs(num_bits=8, type=kind, **args) for part, args in SCHEMES[name].items()}
    return QuantizationScheme(targets=list(targets), **parts)


def w4a8(group: int | None) -> QuantizationScheme:
    """Return a scheme of weights of 4 bits and int8 inputs by token. group: None for a scale a row."""
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, type="int", **strategy),
        input_activations=QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True))


@torch.no_grad()
def save_quantized(
    model: PreTrainedModel, folder: Path, *schemes: QuantizationScheme, ignore: Iterable[str] = ("lm_head",),
    alike: bool = True, **settings: Any,
) -> Path:
    """Save the model with linear layers rounded to nearest, as compressed-tensors writes it.

    alike: projections with the same static input have one scale for it.
    settings: arguments of save_pretrained.
    """
    config = QuantizationConfig(
        config_groups={f"group_{index}": made for index, made in enumerate(schemes)}, ignore=list(ignore))
    apply_quantization_config(model, config)
    most = torch.Generator().manual_seed(5)
    for name, module in model.named_modules():
        if (found := getattr(module, "quantization_scheme", None)) is None:
            continue
        weight = module.weight
        if found.weights.strategy == "tensor":
            weight = weight.flatten()
        elif found.weights.strategy == "group":
            weight = weight.unflatten(1, (-1, found.weights.group_size))
        low, high = weight.amin(dim=-1), weight.amax(dim=-1)
        _set(module, "weight", *calculate_qparams(low, high, found.weights))
        if not found.input_activations.dynamic:
            shared = name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
            edge = torch.tensor(6.0) if alike and shared else 3 * torch.rand((), generator=most) + 5
            _set(module, "input", *calculate_qparams(-0.6 * edge, edge, found.input_activations))
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder, **settings)
    compressor.update_config(folder)
    return folder


def _set(module: torch.nn.Module, name: str, scale: torch.Tensor, zero: torch.Tensor) -> None:
    for kind, numbers in (("scale", scale), ("zero_point", zero)):
        parameter = getattr(module, f"{name}_{kind}")
        parameter.copy_(numbers.reshape(parameter.shape))


def loaded(folder: Path) -> PreTrainedModel:
    """Load with transformers, which computes in floats with the rounding of compressed-tensors."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def edit_quantization(folder: Path, **changes: Any) -> None:
    """Change keys of config.json's quantization_config."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["quantization_config"] |= changes
    path.write_text(json.dumps(data))


@torch.no_grad()
def save_packed(model: PreTrainedModel, folder: Path, *, symmetric: bool, group: int | None) -> PreTrainedModel:
    """Save the model with linear layers of 4 bits, as compressed-tensors packs them, and return it with its numbers.

    group: None for a scale a row.
    """
    floats = copy.deepcopy(model)
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **strategy)
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")},
        ignore=["lm_head"], format="pack-quantized")
    apply_quantization_config(model, config)
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        groups = module.weight.unflatten(1, (-1, group or module.weight.shape[1]))
        _set(module, "weight", *calculate_qparams(groups.amin(dim=2), groups.amax(dim=2), weights))
        floats.get_submodule(name).weight.copy_(
            fake_quantize(module.weight, module.weight_scale, getattr(module, "weight_zero_point", None), weights))
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return floats
