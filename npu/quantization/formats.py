"""Quantization section of a config.json, read by its method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from npuserve.npu.quantization import awq, compressed_tensors, fp8, gptq
from npuserve.npu.quantization.assignment import METHOD, Quantization
from npuserve.npu.quantization.section import mapping

QUANTIZATION_KEYS = "quantization_config", "compression_config"
"""Keys of a config.json for its quantization section."""

METHODS: dict[str, Callable[[Mapping[str, Any], str], Quantization]] = {
    METHOD: compressed_tensors.read, "fp8": fp8.read, "awq": awq.read, "gptq": gptq.read}
"""`quant_method` -> parser of the section, which is also given the name of the section for messages."""


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Parse the contents of a config.json. Return None if they have no quantization section.

    Raises ValueError naming the key whose value is not supported, and the supported values.
    """
    where = next((key for key in QUANTIZATION_KEYS if config.get(key)), None)
    if where is None:
        return None
    section = mapping(config[where], where)
    if isinstance(inner := section.get("quantization_config"), dict):  # older versions of transformers nest it
        section = {**{key: value for key, value in section.items() if key != "quantization_config"}, **inner}
    method = section.get("quant_method", METHOD)
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"{where}: the checkpoint is quantized by another method ({method}); supported: "
                         f"{', '.join(METHODS)}")
    return METHODS[method](section, where)
