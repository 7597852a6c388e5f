"""Parser of the quantization section of a config.json. Imports no torch.

The compressed-tensors package defines the format (quantization/quant_config.py, quant_args.py and utils/match.py);
llm-compressor writes it and vLLM reads it. Only W8A8 is supported: int8 weights multiplied with int8 activations, and
float8 weights (e4m3) with float8 activations. The method `fp8` is that of Qwen's and DeepSeek's checkpoints, as
FineGrainedFP8Config of transformers reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

METHOD = "compressed-tensors"
FP8 = "fp8"
LINEAR = "Linear"
BLOCK = 128
"""Rows and columns of a block of weights, and columns of a group of inputs."""

QUANTIZATION_KEYS = "quantization_config", "compression_config"
"""Keys of a config.json for its quantization section."""

FORMATS = {"int": "int-quantized", "float": "float-quantized"}
"""Type of the numbers -> format of the checkpoint."""

DECODER_PREFIXES = "model.language_model.", "language_model.model.", "model."
"""Beginnings of the names of a decoder's modules, alone and in a model with a vision tower. Sections of a config.json
name the same module by any of them, since tools that remove or add a tower do not rewrite the names."""


@dataclass(frozen=True, slots=True)
class W8A8:
    """Quantization scheme of a linear layer with int8 weights and inputs, or float8 ones.

    per_channel: True for one weight scale per output row. False for one per tensor.
    symmetric: weights have no zero points.
    dynamic: True for one input scale per token, computed at run time. False for one per tensor, from the checkpoint.
    symmetric_inputs: inputs have no zero points.
    float8: weights and inputs are float8 (e4m3), without zero points.
    blocks: float8 weights have a scale for each block, and a token's inputs for each group of BLOCK columns.
    scale_name: name of the checkpoint's tensors of weight scales.
    """

    per_channel: bool = True
    symmetric: bool = True
    dynamic: bool = True
    symmetric_inputs: bool = True
    float8: bool = False
    blocks: bool = False
    scale_name: str = "weight_scale"

    @property
    def type(self) -> str:
        """Type of the numbers as config.json names it: "int" or "float"."""
        return "float" if self.float8 else "int"

    @property
    def format(self) -> str:
        return FORMATS[self.type]

    def refusal(self, device: str, *, zeros: bool, float8: bool) -> str:
        """Return what a device does not support of the scheme, and which values it supports; "" for a supported scheme.

        zeros, float8: the device supports zero points, and float8.
        """
        if self.float8 and not float8:
            return (f"float8 weights and input_activations (type: float) are not possible on {device}; possible is "
                    "int8 (type: int)")
        wrong = [name for name, symmetric in (
            ("weights", self.symmetric), ("input_activations", self.symmetric_inputs)) if not symmetric]
        if wrong and not zeros:
            return (f"{' and '.join(wrong)} with zero points (symmetric: false) are not possible on {device}, whose "
                    "int8 GEMM takes none; possible is symmetric: true")
        return ""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Assignment of schemes to linear layers.

    groups: (targets, scheme) pairs.
    ignore: layers that are not quantized.

    A target or an entry of `ignore` is "Linear" (all linear layers), a layer's name, or "re:" followed by a regular
    expression that matches the beginning of a name. Each of DECODER_PREFIXES stands for the others in a name.
    """

    groups: tuple[tuple[tuple[str, ...], W8A8], ...]
    ignore: tuple[str, ...] = ()

    def of(self, name: str) -> W8A8 | None:
        """Return the scheme of the linear layer `name`, or None if it is not quantized.

        If several targets match, names take precedence over regular expressions, and these over "Linear"; within a
        kind the first in alphabetical order applies, and the last of equal targets.
        """
        if any(_names(pattern, name) for pattern in self.ignore):
            return None
        schemes = {target: scheme for targets, scheme in self.groups for target in targets}
        order = sorted(schemes, key=lambda target: (target == LINEAR, target.startswith("re:"), target))
        return next((schemes[target] for target in order if _names(target, name)), None)

    def to_json(self) -> dict[str, Any]:
        """Return the value of config.json's `quantization_config`, with the keys that llm-compressor writes."""
        return {
            "config_groups": {f"group_{index}": _group_json(*group) for index, group in enumerate(self.groups)},
            "format": (self.groups[0][1] if self.groups else W8A8()).format,
            "global_compression_ratio": None,
            "ignore": list(self.ignore),
            "kv_cache_scheme": None,
            "quant_method": METHOD,
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
        }

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Quantization | None:
        """Parse the contents of a config.json. Return None if they have no quantization section.

        Raises ValueError naming the key whose value is not supported, and the supported values.
        """
        key = next((key for key in QUANTIZATION_KEYS if config.get(key)), None)
        return None if key is None else _read(config[key], key)


def _names(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == LINEAR or _in_decoder(pattern) == _in_decoder(name)


def _in_decoder(name: str) -> str:
    """Return a module's name within the decoder."""
    prefix = next((prefix for prefix in DECODER_PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def _group_json(targets: Sequence[str], scheme: W8A8) -> dict[str, Any]:
    def args(symmetric: bool, strategy: str, dynamic: bool) -> dict[str, Any]:
        return {"num_bits": 8, "type": scheme.type, "symmetric": symmetric,
                "group_size": BLOCK if strategy == "group" else None, "strategy": strategy,
                "block_structure": [BLOCK, BLOCK] if strategy == "block" else None, "dynamic": dynamic,
                "actorder": None, "observer": None, "observer_kwargs": {}}

    of_weights = "block" if scheme.blocks else "channel" if scheme.per_channel else "tensor"
    of_inputs = "group" if scheme.blocks else "token" if scheme.dynamic else "tensor"
    return {
        "targets": list(targets),
        "weights": args(scheme.symmetric, of_weights, False),
        "input_activations": args(scheme.symmetric_inputs, of_inputs, scheme.dynamic),
        "output_activations": None,
        "format": scheme.format,
    }


def _read(data: Any, where: str) -> Quantization:
    section = _object(data, where)
    if isinstance(inner := section.get("quantization_config"), dict):  # older versions of transformers nest it
        section = {**{key: value for key, value in section.items() if key != "quantization_config"}, **inner}
    if (method := section.get("quant_method", METHOD)) == FP8:
        return _read_fp8(section, where)
    if method != METHOD:
        raise ValueError(
            f"{where}: the checkpoint is quantized by another method ({method}); supported: {METHOD}, {FP8}")
    if not isinstance(groups := section.get("config_groups"), dict) or not groups:
        raise ValueError(f"{where}: config_groups is missing; a checkpoint of {METHOD} has it ({method})")
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") == "dense":
        section = {**section, "sparsity_config": None}
    # Accepted without effect: keys of provenance, and kv_cache_scheme, since the server's settings define the cache.
    _refuse_others(section, where, {
        "quant_method", "config_groups", "ignore", "kv_cache_scheme", "global_compression_ratio", "version", "format",
        "quantization_status", "sparsity_config", "transform_config", "moe_sparsity_config"})
    _one_of(section, where, "format", *FORMATS.values(), "naive-quantized")
    _one_of(section, where, "quantization_status", "compressed", "frozen")
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        _one_of(section, where, key, None, {}, {"config_groups": {}})
    ignore = section.get("ignore")
    return Quantization(
        tuple(_group(group, f"{where}: config_groups.{name}") for name, group in groups.items()),
        _patterns([] if ignore is None else ignore, f"{where}: ignore"))


def _read_fp8(section: Mapping[str, Any], where: str) -> Quantization:
    """Parse the section of the method `fp8`. A module that is not converted is a name or a part of names."""
    _refuse_others(section, where, {
        "quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
        "kv_cache_scheme", "scale_fmt", "expert_dtype"})
    _one_of(section, where, "fmt", None, "e4m3")
    _one_of(section, where, "scale_fmt", None, "float")
    _one_of(section, where, "expert_dtype", None, "fp8")
    _one_of(section, where, "weight_block_size", None, [BLOCK, BLOCK])
    blocks = section.get("weight_block_size") is not None
    _one_of(section, where, "activation_scheme", "dynamic", *([] if blocks else ["static"]))
    names = ["lm_head"]
    for key in ("modules_to_not_convert", "ignored_layers"):
        names += [] if section.get(key) is None else _patterns(section[key], f"{where}: {key}")
    scheme = W8A8(per_channel=False, dynamic=section["activation_scheme"] == "dynamic", float8=True, blocks=blocks,
                  scale_name="weight_scale_inv" if blocks else "weight_scale")
    ignore = (name if name.startswith("re:") else f"re:(.*[.])?{re.escape(_in_decoder(name))}([.].*)?$"
              for name in names)
    return Quantization((((LINEAR,), scheme),), tuple(dict.fromkeys(ignore)))


def _group(data: Any, where: str) -> tuple[tuple[str, ...], W8A8]:
    group = _object(data, where)
    _refuse_others(group, where, {"targets", "weights", "input_activations", "output_activations", "format"})
    _one_of(group, where, "output_activations", None)
    for key, what in (("weights", "only inputs are quantized"), ("input_activations", "only weights are quantized")):
        if group.get(key) is None:
            raise ValueError(f"{where}.{key}: is missing: {what}; supported: int8 weights with int8 inputs, "
                             "float8 weights with float8 inputs")
    weights = _args(group["weights"], f"{where}.weights", "block")
    inputs = _args(group["input_activations"], f"{where}.input_activations", "group")
    _one_of(group, where, "format", None, FORMATS[weights["type"]], "naive-quantized")
    _one_of(inputs, f"{where}.input_activations", "type", weights["type"])
    _one_of(weights, f"{where}.weights", "dynamic", False)
    has_blocks = ["block"] if weights["type"] == "float" else []
    _one_of(weights, f"{where}.weights", "strategy", "channel", "tensor", *has_blocks)
    blocks = weights["strategy"] == "block"
    if blocks:
        _one_of(inputs, f"{where}.input_activations", "dynamic", True)
    _one_of(inputs, f"{where}.input_activations", "strategy", (
        "group" if blocks else "token" if inputs["dynamic"] else "tensor"))
    if inputs["dynamic"]:
        _one_of(inputs, f"{where}.input_activations", "scale_dtype", None)
    return _patterns(group.get("targets"), f"{where}.targets"), W8A8(
        per_channel=weights["strategy"] == "channel", symmetric=weights["symmetric"], dynamic=inputs["dynamic"],
        symmetric_inputs=inputs["symmetric"], float8=weights["type"] == "float", blocks=blocks)


def _args(data: Any, where: str, of_float8: str) -> dict[str, Any]:
    """Return QuantizationArgs of compressed-tensors with its defaults filled in.

    of_float8: strategy that is supported for float8 only.
    """
    given = {key: value.lower() if key in ("type", "strategy", "actorder") and isinstance(value, str) else value
             for key, value in _object(data, where).items()}
    args = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False} | given
    if args.get("strategy") is None:
        size = args.get("group_size")
        args["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
    _refuse_others(args, where, {
        "num_bits", "type", "symmetric", "dynamic", "strategy", "group_size", "block_structure", "actorder",
        "scale_dtype", "zp_dtype", "observer", "observer_kwargs"})
    _one_of(args, where, "type", *FORMATS)
    _one_of(args, where, "num_bits", 8)
    _one_of(args, where, "symmetric", True, *([False] if args["type"] == "int" else []))
    _one_of(args, where, "dynamic", True, False)
    _one_of(args, where, "strategy", "channel", "tensor", "token", *([of_float8] if args["type"] == "float" else []))
    _one_of(args, where, "group_size", *([BLOCK] if args["strategy"] == "group" else [None, -1]))
    _one_of(args, where, "block_structure", *([[BLOCK, BLOCK]] if args["strategy"] == "block" else [None]))
    _one_of(args, where, "actorder", None, False, "weight", "static")  # these keep the order of the columns
    return args


def _object(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: must be an object, got {data!r}")
    return data


def _patterns(data: Any, where: str) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(entry, str) for entry in data):
        raise ValueError(f"{where}: must be a list of names, got {data!r}")
    for entry in data:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise ValueError(f"{where}: {entry!r} is not a regular expression: {error}") from None
    return tuple(data)


def _refuse_others(data: Mapping[str, Any], where: str, known: set[str]) -> None:
    """Raise ValueError for an unknown key whose value is neither None, False nor empty."""
    unknown = sorted(str(key) for key, value in data.items() if key not in known and value not in (None, {}, [], False))
    if unknown:
        raise ValueError(f"{where}: {', '.join(unknown)} is not supported; supported: {', '.join(sorted(known))}")


def _one_of(data: Mapping[str, Any], where: str, key: str, *supported: Any) -> None:
    """Raise ValueError unless the value of `key` (None if absent) is one of `supported`."""
    value = data.get(key)
    if not any(type(value) is type(choice) and value == choice for choice in supported):
        kinds = ", ".join(str(choice) for choice in supported)
        raise ValueError(f"{where}: {key}: {value!r} is not supported; supported: {kinds}")
