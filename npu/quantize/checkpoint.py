"""Quantization of a checkpoint in floats or float8 to W8A8, in the format of compressed-tensors and llm-compressor.

One layer is in memory at a time, with the hidden states of the calibration texts:

    embedding ──► hidden states ──► layer 0, exact ──► layer 1, exact ──► ...
                                    │ its inputs smooth it (smoothing.py)
                                    └► rounded to int8, written

Each row of a weight has a scale and is rounded to nearest. Inputs are quantized dynamically when the model is served.
Embedding, norms, biases, LM head and the head for multi-token prediction are not changed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.layer import Array, Matrix
from npuserve.npu.model.layers.shard import WHOLE
from npuserve.npu.model.loader import check_weights, report_ignored_head
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.model.storage import linears, matrices
from npuserve.npu.quantization import modelslim
from npuserve.npu.quantization.assignment import LINEAR, Quantization
from npuserve.npu.quantization.formats import QUANTIZATION_KEYS
from npuserve.npu.quantize.layer import Layer
from npuserve.npu.quantize.rounding import Int8Rounding, Rounding
from npuserve.npu.quantize.smoothing import smooth
from npuserve.npu.quantize.source import Source, TensorSpec
from npuserve.npu.quantize.writer import Writer, replaced_folder, write_json

OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".ot")
"""Suffixes of files that are not copied, since they contain the weights in floats."""


INT8 = Int8Rounding()


@dataclass(frozen=True, slots=True)
class QuantizationResult:
    """Result of a quantization.

    scheme: name of the scheme.
    quantized: number of quantized linear layers of the decoder; linears: number of all.
    source_bytes, nbytes: bytes of the tensors before and after.
    strengths: result of `smooth` for each layer.
    """

    scheme: str
    quantized: int
    linears: int
    source_bytes: int
    nbytes: int
    strengths: tuple[dict[str, float], ...]


def quantize_checkpoint(
    folder: Path,
    out: Path,
    sequences: Sequence[Sequence[int]] = (),
    *,
    rounding: Rounding = INT8,
    ignore: Sequence[str] = (),
    strength: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> QuantizationResult:
    """Quantize the model in `folder` to the folder `out`, which is replaced when the result is complete.

    sequences: token ids of the calibration texts, at least one in each; empty for no smoothing.
    rounding: numbers that the weights are rounded to.
    ignore: names of layers to skip, or "re:" and a regular expression.
    strength: strength of the smoothing, in [0, 1]; None searches it.
    progress: called with (layers done, all layers).

    Raises ModelError for a model that cannot be quantized, OSError if `out` cannot be written.
    """
    stored = ModelConfig.from_folder(folder, float8=False, mtp="auto")
    config = stored.with_experts(stacked=False)
    if config.pooling:
        raise ModelError(f"{folder}: is an embedding model or a reranker (modules.json), which is not quantized")
    if config.schemes:
        raise ModelError(f"{folder}: is quantized to {config.quantization_name} already; supported are bfloat16, "
                         "float16, float32 or float8")
    of_head = ("re:mtp[.].*",) if config.mtp else ()
    kept = "lm_head", *of_head, *_float_modules(config), *ignore
    everything, inputs = _linears(config, Quantization((((LINEAR,), rounding.scheme),), kept), ignore)
    quantization = Quantization(rounding.groups(inputs), kept)
    largest = max(map(max, sequences), default=0)
    if largest >= config.vocab_size:
        raise ModelError(f"{folder}: the tokenizer makes token id {largest} of the calibration text, "
                         f"and the model's ids are in [0, {config.vocab_size - 1}]")
    report_ignored_head(folder, config)
    float8 = {name: scheme for matrix in matrices(config, 1) for name, scheme in matrix.form.converted.items()}
    source = Source(folder, frozenset(check_weights(folder, stored)), float8, getattr(torch, config.dtype))
    specs = _specs(source, inputs, rounding)
    strengths = []
    with replaced_folder(out) as folder_out:
        with Writer(folder_out, specs) as writer:
            for name in source.specs:
                if not name.startswith(f"{config.prefix}layers."):
                    for first, piece in source.pieces(name):
                        writer.write(name, piece, first)
            hidden = [source.rows(f"{config.prefix}embed_tokens.weight", torch.tensor(ids)) for ids in sequences]
            cos_sin = cos_sin_table(config.rope, config.attention.head_dim, max(map(len, sequences), default=0))
            for index in range(config.num_layers):
                progress(index, config.num_layers)
                strengths.append(_layer(config, index, source, writer, rounding, inputs, hidden, cos_sin, strength))
            progress(config.num_layers, config.num_layers)
        _copy_others(folder, folder_out)
        if rounding.is_modelslim:
            write_json(folder_out / "quant_model_description.json", modelslim.description(specs))
        _write_config(folder, folder_out, {} if rounding.is_modelslim else {
            "quantization_config": quantization.to_json()})
    nbytes = sum(spec.nbytes for spec in specs.values())
    return QuantizationResult(rounding.name, len(inputs), len(everything), source.nbytes, nbytes, tuple(strengths))


def _layer(
    config: ModelConfig, index: int, source: Source, writer: Writer, rounding: Rounding, names: Collection[str],
    hidden: list[Tensor], cos_sin: Tensor, strength: float | None,
) -> dict[str, float]:
    prefix = f"{config.prefix}layers.{index}."
    short = {name.removeprefix(prefix): spec for name, spec in source.specs.items() if name.startswith(prefix)}
    weights = {name: source.read(prefix + name) for name in short}
    strengths: dict[str, float] = {}
    power: dict[str, Tensor] = {}
    if hidden:
        layer = Layer(config, index, weights, {name: spec.dtype for name, spec in short.items()}, cos_sin, rounding)
        strengths = smooth(layer, hidden, {name.removeprefix(prefix) for name in names}, strength)
        weights, power = layer.weights, layer.input_power
    for name, weight in weights.items():
        whole = prefix + name
        dtype = short[name].dtype
        module = name.removesuffix(".weight")
        if prefix + module in names and module != name:
            for part, tensor in rounding.tensors(weight, dtype, power.get(module)).items():
                writer.write(f"{prefix}{module}.{part}", tensor)
        else:
            writer.write(whole, weight.to(dtype))
    return strengths


def _float_modules(config: ModelConfig) -> list[str]:
    """Return patterns of the linear layers that stay floats, whatever the user ignores."""
    modules = set()
    for block in {block for blocks in config.layers for block in blocks}:
        for parameter in block.layer.parameters(config.hidden_size, WHOLE).values():
            if isinstance(parameter, Matrix) and not parameter.can_quantize:
                modules |= {f"{block.name}.{module}" for module in parameter.parts}
            elif isinstance(parameter, Array) and parameter.is_linear:
                modules.add(f"{block.name}.{parameter.tensor.removesuffix('.weight')}")
    return sorted(f"re:.*[.]{module.replace('.', '[.]')}$" for module in modules)


def _linears(
    config: ModelConfig, quantization: Quantization, ignore: Sequence[str]
) -> tuple[frozenset[str], dict[str, int]]:
    """Return all linear layers of the decoder, and the inputs of those to be quantized."""
    for pattern in ignore:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ModelError(f"ignore: {pattern!r} is not a regular expression: {error}") from None
    planned = replace(config, quantization=quantization)
    stored = [linear for index in range(config.num_layers) for linear in linears(planned, index)]
    kept = Quantization(quantization.groups, tuple(_float_modules(config)))
    everything = frozenset(name for linear in stored for name in linear.parts if kept.of(name))
    for pattern in ignore:
        alone = Quantization(quantization.groups, (pattern,))
        if all(alone.of(name) for name in (*everything, "lm_head")):
            raise ModelError(f"ignore: {pattern!r} names no linear layer; they are named like {min(everything)}")
    inputs = {name: linear.inputs for linear in stored if not linear.form.is_float for name in linear.parts}
    if not inputs:
        raise ModelError("ignore: names all linear layers, so that there is nothing to quantize")
    return everything, inputs


def _specs(source: Source, names: Collection[str], rounding: Rounding) -> dict[str, TensorSpec]:
    """Return the specs of the tensors to be written, in the same files as in the source."""
    specs: dict[str, TensorSpec] = {}
    for name, spec in source.specs.items():
        module = name.removesuffix(".weight")
        if module in names and module != name:
            specs |= {f"{module}.{part}": of_part for part, of_part in rounding.specs(spec).items()}
        else:
            specs[name] = spec
    return specs


def _write_config(folder: Path, out: Path, section: Mapping[str, Any]) -> None:
    """Write config.json with the section of the quantization in place of an earlier one."""
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for keys in (written, written.get("text_config") or {}):
        for key in QUANTIZATION_KEYS:
            keys.pop(key, None)
    write_json(out / "config.json", {**written, **section})


def _copy_others(folder: Path, out: Path) -> None:
    """Copy all files but weights: tokenizer, templates, generation settings, licences."""
    for path in sorted(folder.iterdir()):
        weights = path.suffix in OTHER_WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, out / path.name)
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        target = out / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
