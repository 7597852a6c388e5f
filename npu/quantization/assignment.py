"""Assignment of quantization schemes to the linear layers of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from npuserve.npu.quantization.scheme import WeightScheme
from npuserve.npu.quantization.w8a8 import W8A8

METHOD = "compressed-tensors"
LINEAR = "Linear"

MIXED = "mixed-precision"
"""Format of a checkpoint whose groups have different formats."""

DECODER_PREFIXES = "model.language_model.", "language_model.model.", "model."
"""Beginnings of the names of a decoder's modules, alone and in a model with a vision tower. Sections of a config.json
name the same module by any of them, since tools that remove or add a tower do not rewrite the names."""


class Patterns:
    """Values of targets or of entries of `ignore`. A checkpoint may name tens of thousands of layers."""

    def __init__(self, values: Mapping[str, Any]):
        self._linear = values.get(LINEAR)
        self._names: dict[str, Any] = {}
        self._expressions: list[tuple[str, Any]] = []
        for pattern in sorted(values):
            if pattern.startswith("re:"):
                self._expressions.append((pattern[3:], values[pattern]))
            elif pattern != LINEAR:
                self._names.setdefault(in_decoder(pattern), values[pattern])

    def of(self, name: str) -> Any:
        """Return the value for the layer `name`, as `Quantization.of` says; None if no pattern matches."""
        if (value := self._names.get(in_decoder(name))) is not None:
            return value
        return next((value for expression, value in self._expressions if re.match(expression, name)), self._linear)


def in_decoder(name: str) -> str:
    """Return a module's name within the decoder."""
    prefix = next((prefix for prefix in DECODER_PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Assignment of schemes to linear layers.

    groups: (targets, scheme) pairs.
    ignore: layers that are not quantized.

    A target or an entry of `ignore` is "Linear" (all linear layers), a layer's name, or "re:" followed by a regular
    expression that matches the beginning of a name. Each of DECODER_PREFIXES stands for the others in a name.
    """

    groups: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    ignore: tuple[str, ...] = ()
    _found: dict[str, WeightScheme | None] = field(init=False, repr=False, compare=False)
    _targets: Patterns = field(init=False, repr=False, compare=False)
    _ignored: Patterns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_found", {})
        schemes = {target: scheme for targets, scheme in self.groups for target in targets}
        object.__setattr__(self, "_targets", Patterns(schemes))
        object.__setattr__(self, "_ignored", Patterns(dict.fromkeys(self.ignore, True)))

    def of(self, name: str) -> WeightScheme | None:
        """Return the scheme of the linear layer `name`, or None if it is not quantized.

        If several targets match, names take precedence over regular expressions, and these over "Linear"; within a
        kind the first in alphabetical order applies, and the last of equal targets.
        """
        if name not in self._found:
            self._found[name] = None if self._ignored.of(name) else self._targets.of(name)
        return self._found[name]

    def with_scales(self, dtype: str) -> Quantization:
        """Return the assignment for a checkpoint of floats of `dtype`, which its scales have too."""
        return replace(self, groups=tuple((targets, scheme.with_scales(dtype)) for targets, scheme in self.groups))

    def to_json(self) -> dict[str, Any]:
        """Return the value of config.json's `quantization_config`, with the keys that llm-compressor writes."""
        formats = list(dict.fromkeys(scheme.format for _, scheme in self.groups))
        return {
            "config_groups": {f"group_{index}": scheme.group_json(targets)
                              for index, (targets, scheme) in enumerate(self.groups)},
            "format": MIXED if len(formats) > 1 else (formats or [W8A8().format])[0],
            "global_compression_ratio": None,
            "ignore": list(self.ignore),
            "kv_cache_scheme": None,
            "quant_method": METHOD,
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
        }
