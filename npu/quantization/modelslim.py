"""Description of a checkpoint of ModelSlim, Huawei's tool for Ascend: quant_model_description.json.

It names the type of each tensor. W8A8_DYNAMIC quantizes inputs by token, W8A8 with a scale and an offset of the
checkpoint. W4A8_DYNAMIC is W8A8_DYNAMIC with weights from -8 to 7, two in a byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from npuserve.npu.quantization.assignment import Quantization
from npuserve.npu.quantization.section import mapping, one_of
from npuserve.npu.quantization.w8a8 import W8A8

DESCRIPTIONS = "quant_model_description*.json"
"""Pattern of the file's name."""

FLOAT = "FLOAT"

_GLOBAL = {"version", "model_quant_type", "metadata", "group_size", "optional", "kv_cache_type", "kv_quant_type"}
"""Keys that name no tensor. kv_cache_type and kv_quant_type are accepted without effect, since the server's settings
define the cache."""


@dataclass(frozen=True, slots=True)
class ModelSlimW8A8(W8A8):
    """W8A8 in the tensors of ModelSlim. Static inputs have offsets."""


@dataclass(frozen=True, slots=True)
class ModelSlimW4A8(ModelSlimW8A8):
    """Weights of 4 bits with a scale for each row, and int8 inputs by token: W8A8 once the weights are unpacked."""

    @property
    def name(self) -> str:
        return "w4a8"


TYPES = {"W8A8_DYNAMIC": ModelSlimW8A8(), "W8A8": ModelSlimW8A8(dynamic=False, symmetric_inputs=False),
         "W4A8_DYNAMIC": ModelSlimW4A8()}
"""Type of a tensor -> scheme of its module."""


def read(data: Any, where: str) -> Quantization:
    """Parse the contents of the file `where`. Raises ValueError naming the key whose value is not supported."""
    description = mapping(data, where)
    one_of(description, where, "group_size", None, 0)
    for key in ("metadata", "optional"):
        one_of(description, where, key, None, {})
    others = sorted(key for key in description if "." not in key and key not in _GLOBAL)
    if others:
        raise ValueError(f"{where}: {others[0]} is not supported; supported: names of tensors, "
                         f"{', '.join(sorted(_GLOBAL))}")
    modules: dict[W8A8, list[str]] = {scheme: [] for scheme in TYPES.values()}
    for name, scheme in _schemes(description, where).items():
        if scheme is not None:
            modules[scheme].append(name)
    return Quantization(tuple((tuple(names), scheme) for scheme, names in modules.items() if names))


def description(tensors: Collection[str]) -> dict[str, Any]:
    """Return the description of a checkpoint with `tensors`, of which some are W8A8_DYNAMIC."""
    kinds: dict[str, Any] = {}
    for name in tensors:
        module, _, part = name.rpartition(".")
        kinds[name] = FLOAT if part == "bias" or f"{module}.weight_scale" not in tensors else "W8A8_DYNAMIC"
    return kinds | {"version": "1.0.0", "model_quant_type": "W8A8_DYNAMIC", "metadata": {}, "group_size": 0,
                    "optional": {}}


def _schemes(description: Mapping[str, Any], where: str) -> dict[str, W8A8 | None]:
    """Return the scheme of each module with a weight; None for floats."""
    schemes: dict[str, W8A8 | None] = {}
    for key, kind in description.items():
        if not key.endswith(".weight"):
            continue
        if kind != FLOAT and kind not in TYPES:
            raise ValueError(f"{where}: {key}: {kind!r} is not supported; supported: {FLOAT}, {', '.join(TYPES)}")
        schemes[key.removesuffix(".weight")] = TYPES.get(kind)
    return schemes
