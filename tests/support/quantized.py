"""Quantized checkpoints made by the compressed-tensors package, and by hand from its parts. It and transformers are the
reference of the tests."""

from __future__ import annotations

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
        dims = None if found.weights.strategy == "tensor" else (1,)
        low, high = (getattr(module.weight, f)(dim=dims, keepdim=True) if dims else getattr(module.weight, f)()
                     for f in ("amin", "amax"))
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
