"""What config.json says of a quantized checkpoint, checked. Imports no torch.

The format is that of the compressed-tensors package (its quantization/quant_config.py, quant_args.py and
utils/match.py), which llm-compressor writes and vLLM reads. Of it W8A8 is served: products of int8 with int8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

METHOD, FORMAT, LINEAR = "compressed-tensors", "int-quantized", "Linear"


@dataclass(frozen=True, slots=True)
class W8A8:
    """How a linear layer is int8. Without the symmetry there are zero points.

    per_channel: a scale for each row of the weight; otherwise one for all. dynamic: inputs have a scale for each token,
    found as it comes; otherwise one for all, in the checkpoint.
    """

    per_channel: bool = True
    symmetric: bool = True
    dynamic: bool = True
    symmetric_inputs: bool = True


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which linear layers are int8.

    groups: each has targets and how what they name is quantized. A target, and an entry of ignore, is "Linear" (all),
    a layer's name, or "re:" and what a name begins with, as a regular expression.
    """

    groups: tuple[tuple[tuple[str, ...], W8A8], ...]
    ignore: tuple[str, ...] = ()

    def of(self, name: str) -> W8A8 | None:
        """How the linear layer of that name is quantized; None: not at all.

        Of several targets that name it the first counts, names before expressions before "Linear", each in the order
        of their letters; of equal targets the last.
        """
        if any(_names(pattern, name) for pattern in self.ignore):
            return None
        schemes = {target: scheme for targets, scheme in self.groups for target in targets}
        order = sorted(schemes, key=lambda target: (target == LINEAR, target.startswith("re:"), target))
        return next((schemes[target] for target in order if _names(target, name)), None)

    def to_json(self) -> dict[str, Any]:
        """config.json's quantization_config, with the keys that llm-compressor writes."""
        return {
            "config_groups": {f"group_{index}": _group_json(*group) for index, group in enumerate(self.groups)},
            "format": FORMAT,
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
        """From the contents of a config.json; None where it says nothing of quantization.

        Raises ValueError that names the key whose value is not supported, and what is.
        """
        key = next((key for key in ("quantization_config", "compression_config") if config.get(key)), None)
        return None if key is None else _read(config[key], key)


def _names(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern in (LINEAR, name)


def _group_json(targets: Sequence[str], scheme: W8A8) -> dict[str, Any]:
    def args(symmetric: bool, strategy: str, dynamic: bool) -> dict[str, Any]:
        return {"num_bits": 8, "type": "int", "symmetric": symmetric, "group_size": None, "strategy": strategy,
                "block_structure": None, "dynamic": dynamic, "actorder": None, "observer": None, "observer_kwargs": {}}

    return {
        "targets": list(targets),
        "weights": args(scheme.symmetric, "channel" if scheme.per_channel else "tensor", False),
        "input_activations": args(scheme.symmetric_inputs, "token" if scheme.dynamic else "tensor", scheme.dynamic),
        "output_activations": None,
        "format": FORMAT,
    }


def _read(data: Any, where: str) -> Quantization:
    found = _object(data, where)
    if isinstance(inner := found.get("quantization_config"), dict):  # as older versions of transformers nest it
        found = {**{key: value for key, value in found.items() if key != "quantization_config"}, **inner}
    if (method := found.get("quant_method", METHOD)) != METHOD:
        raise ValueError(f"{where}: the checkpoint is quantized by another method ({method}); supported: {METHOD}")
    if not isinstance(groups := found.get("config_groups"), dict) or not groups:
        raise ValueError(f"{where}: config_groups is missing; a checkpoint of {METHOD} has it ({method})")
    sparsity = found.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") == "dense":
        found = {**found, "sparsity_config": None}
    # What says how the checkpoint came about, and kv_cache_scheme: the cache is as the server is told.
    _refuse_others(found, where, {
        "quant_method", "config_groups", "ignore", "kv_cache_scheme", "global_compression_ratio", "version", "format",
        "quantization_status", "sparsity_config", "transform_config", "moe_sparsity_config"})
    _one_of(found, where, "format", FORMAT, "naive-quantized")
    _one_of(found, where, "quantization_status", "compressed", "frozen")
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        _one_of(found, where, key, None, {}, {"config_groups": {}})
    ignore = found.get("ignore")
    return Quantization(
        tuple(_group(group, f"{where}: config_groups.{name}") for name, group in groups.items()),
        _patterns([] if ignore is None else ignore, f"{where}: ignore"))


def _group(data: Any, where: str) -> tuple[tuple[str, ...], W8A8]:
    group = _object(data, where)
    _refuse_others(group, where, {"targets", "weights", "input_activations", "output_activations", "format"})
    _one_of(group, where, "output_activations", None)
    _one_of(group, where, "format", None, FORMAT, "naive-quantized")
    for key, what in (("weights", "only inputs are quantized"), ("input_activations", "only weights are quantized")):
        if group.get(key) is None:
            raise ValueError(f"{where}.{key}: is missing: {what}; supported: int8 weights with int8 inputs")
    weights = _args(group["weights"], f"{where}.weights")
    inputs = _args(group["input_activations"], f"{where}.input_activations")
    _one_of(weights, f"{where}.weights", "dynamic", False)
    _one_of(weights, f"{where}.weights", "strategy", "channel", "tensor")
    _one_of(inputs, f"{where}.input_activations", "strategy", "token" if inputs["dynamic"] else "tensor")
    if inputs["dynamic"]:
        _one_of(inputs, f"{where}.input_activations", "scale_dtype", None)
    return _patterns(group.get("targets"), f"{where}.targets"), W8A8(
        per_channel=weights["strategy"] == "channel", symmetric=weights["symmetric"], dynamic=inputs["dynamic"],
        symmetric_inputs=inputs["symmetric"])


def _args(data: Any, where: str) -> dict[str, Any]:
    """compressed-tensors' QuantizationArgs, with its defaults."""
    given = {key: value.lower() if key in ("type", "strategy", "actorder") and isinstance(value, str) else value
             for key, value in _object(data, where).items()}
    args = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False} | given
    if args.get("strategy") is None:
        size = args.get("group_size")
        args["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
    _refuse_others(args, where, {
        "num_bits", "type", "symmetric", "dynamic", "strategy", "group_size", "block_structure", "actorder",
        "scale_dtype", "zp_dtype", "observer", "observer_kwargs"})
    _one_of(args, where, "type", "int")
    _one_of(args, where, "num_bits", 8)
    _one_of(args, where, "symmetric", True, False)
    _one_of(args, where, "dynamic", True, False)
    _one_of(args, where, "strategy", "channel", "tensor", "token")
    _one_of(args, where, "group_size", None, -1)
    _one_of(args, where, "block_structure", None)
    _one_of(args, where, "actorder", None, False, "weight", "static")  # these leave the columns in their order
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
                raise ValueError(f"{where}: {entry!r} is no regular expression: {error}") from None
    return tuple(data)


def _refuse_others(data: Mapping[str, Any], where: str, known: set[str]) -> None:
    """Raises ValueError for a key that is not known, unless it says nothing."""
    unknown = sorted(str(key) for key, value in data.items() if key not in known and value not in (None, {}, [], False))
    if unknown:
        raise ValueError(f"{where}: {', '.join(unknown)} is not supported; supported: {', '.join(sorted(known))}")


def _one_of(data: Mapping[str, Any], where: str, key: str, *supported: Any) -> None:
    """Raises ValueError unless the value, None where it is absent, is one of those."""
    value = data.get(key)
    if not any(type(value) is type(one) and value == one for one in supported):
        kinds = ", ".join(str(one) for one in supported)
        raise ValueError(f"{where}: {key}: {value!r} is not supported; supported: {kinds}")
