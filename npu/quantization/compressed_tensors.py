"""Quantization section of the method `compressed-tensors`.

The package compressed-tensors defines the format (quantization/quant_config.py, quant_args.py and utils/match.py);
llm-compressor writes it and vLLM reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npuserve.npu.quantization.assignment import MIXED, Quantization
from npuserve.npu.quantization.scheme import WeightScheme
from npuserve.npu.quantization.section import mapping, one_of, patterns, refuse_others
from npuserve.npu.quantization.w4a8 import W4A8
from npuserve.npu.quantization.w4a16 import GROUPS, PACKED_FORMAT, W4A16
from npuserve.npu.quantization.w8a8 import BLOCK, FORMATS, W8A8

IN_ORDER = None, False, "weight", "static"
"""Values of actorder that keep the order of the columns."""


def read(section: Mapping[str, Any], where: str) -> Quantization:
    """Parse the section."""
    if not isinstance(groups := section.get("config_groups"), dict) or not groups:
        raise ValueError(f"{where}: config_groups is missing; a checkpoint of compressed-tensors has it "
                         f"({section.get('quant_method', 'compressed-tensors')})")
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") == "dense":
        section = {**section, "sparsity_config": None}
    # Accepted without effect: keys of provenance, and kv_cache_scheme, since the server's settings define the cache.
    refuse_others(section, where, {
        "quant_method", "config_groups", "ignore", "kv_cache_scheme", "global_compression_ratio", "version", "format",
        "quantization_status", "sparsity_config", "transform_config", "moe_sparsity_config"})
    read_groups = tuple(_group(group, f"{where}: config_groups.{name}") for name, group in groups.items())
    one_of(section, where, "quantization_status", "compressed", "frozen")
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        one_of(section, where, key, None, {}, {"config_groups": {}})
    ignore = section.get("ignore")
    formats = list(dict.fromkeys(scheme.format for _, scheme in read_groups))
    one_of(section, where, "format", *formats, *([MIXED] if len(formats) > 1 else []), "naive-quantized")
    return Quantization(read_groups, patterns([] if ignore is None else ignore, f"{where}: ignore"))


def _group(data: Any, where: str) -> tuple[tuple[str, ...], WeightScheme]:
    group = mapping(data, where)
    refuse_others(group, where, {"targets", "weights", "input_activations", "output_activations", "format"})
    one_of(group, where, "output_activations", None)
    weights = group.get("weights")
    if isinstance(weights, dict) and weights.get("num_bits") == 4:
        scheme: WeightScheme = _of_4_bits(group, where)
    else:
        scheme = _w8a8(group, where)
    return patterns(group.get("targets"), f"{where}.targets"), scheme


def _of_4_bits(group: Mapping[str, Any], where: str) -> W4A16 | W4A8:
    """Parse the scheme of a group whose weights have 4 bits."""
    has_inputs = group.get("input_activations") is not None
    args = _defaults(group["weights"], f"{where}.weights")
    one_of(args, f"{where}.weights", "type", "int")
    one_of(group, where, "format", None, *([FORMATS["int"], "naive-quantized"] if has_inputs else [PACKED_FORMAT]))
    one_of(args, f"{where}.weights", "symmetric", True, *([] if has_inputs else [False]))
    one_of(args, f"{where}.weights", "dynamic", False)
    one_of(args, f"{where}.weights", "strategy", "group", "channel")
    in_groups = args["strategy"] == "group"
    one_of(args, f"{where}.weights", "group_size", *(GROUPS if in_groups else (None, -1)))
    one_of(args, f"{where}.weights", "block_structure", None)
    one_of(args, f"{where}.weights", "actorder", *IN_ORDER)
    weights = W4A16(group=args["group_size"] if in_groups else None, symmetric=args["symmetric"])
    if not has_inputs:
        return weights
    inputs = _args(group["input_activations"], f"{where}.input_activations", "group")
    for key, value in (("type", "int"), ("symmetric", True), ("dynamic", True), ("strategy", "token"),
                       ("scale_dtype", None)):
        one_of(inputs, f"{where}.input_activations", key, value)
    return W4A8(weights)


def _w8a8(group: Mapping[str, Any], where: str) -> W8A8:
    """Parse the scheme of a group whose weights and inputs have 8 bits."""
    for key, what in (("weights", "only inputs are quantized"), ("input_activations", "only weights are quantized")):
        if group.get(key) is None:
            raise ValueError(f"{where}.{key}: is missing: {what}; supported: int8 weights with int8 inputs, "
                             "float8 weights with float8 inputs, weights of 4 bits alone or with int8 inputs")
    weights = _args(group["weights"], f"{where}.weights", "block")
    inputs = _args(group["input_activations"], f"{where}.input_activations", "group")
    one_of(group, where, "format", None, FORMATS[weights["type"]], "naive-quantized")
    one_of(inputs, f"{where}.input_activations", "type", weights["type"])
    one_of(weights, f"{where}.weights", "dynamic", False)
    has_blocks = ["block"] if weights["type"] == "float" else []
    one_of(weights, f"{where}.weights", "strategy", "channel", "tensor", *has_blocks)
    blocks = weights["strategy"] == "block"
    if blocks:
        one_of(inputs, f"{where}.input_activations", "dynamic", True)
    one_of(inputs, f"{where}.input_activations", "strategy", (
        "group" if blocks else "token" if inputs["dynamic"] else "tensor"))
    if inputs["dynamic"]:
        one_of(inputs, f"{where}.input_activations", "scale_dtype", None)
    return W8A8(
        per_channel=weights["strategy"] == "channel", symmetric=weights["symmetric"], dynamic=inputs["dynamic"],
        symmetric_inputs=inputs["symmetric"], float8=weights["type"] == "float", blocks=blocks)


def _args(data: Any, where: str, of_float8: str) -> dict[str, Any]:
    """Return QuantizationArgs of compressed-tensors with its defaults filled in, for numbers of 8 bits.

    of_float8: strategy that is supported for float8 only.
    """
    args = _defaults(data, where)
    one_of(args, where, "type", *FORMATS)
    one_of(args, where, "num_bits", 8)
    one_of(args, where, "symmetric", True, *([False] if args["type"] == "int" else []))
    one_of(args, where, "dynamic", True, False)
    one_of(args, where, "strategy", "channel", "tensor", "token", *([of_float8] if args["type"] == "float" else []))
    one_of(args, where, "group_size", *([BLOCK] if args["strategy"] == "group" else [None, -1]))
    one_of(args, where, "block_structure", *([[BLOCK, BLOCK]] if args["strategy"] == "block" else [None]))
    one_of(args, where, "actorder", *IN_ORDER)
    return args


def _defaults(data: Any, where: str) -> dict[str, Any]:
    """Return QuantizationArgs of compressed-tensors with its defaults filled in."""
    given = {key: value.lower() if key in ("type", "strategy", "actorder") and isinstance(value, str) else value
             for key, value in mapping(data, where).items()}
    args = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False} | given
    if args.get("strategy") is None:
        size = args.get("group_size")
        args["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
    refuse_others(args, where, {
        "num_bits", "type", "symmetric", "dynamic", "strategy", "group_size", "block_structure", "actorder",
        "scale_dtype", "zp_dtype", "observer", "observer_kwargs"})
    return args
