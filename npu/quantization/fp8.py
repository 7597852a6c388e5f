"""Quantization section of the method `fp8`: Qwen's and DeepSeek's checkpoints in float8 (e4m3).

FineGrainedFP8Config of transformers reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from npuserve.npu.quantization.assignment import LINEAR, Quantization, in_decoder
from npuserve.npu.quantization.section import one_of, patterns, refuse_others
from npuserve.npu.quantization.w8a8 import BLOCK, W8A8


def read(section: Mapping[str, Any], where: str) -> Quantization:
    """Parse the section. A module that is not converted is a name or a part of names."""
    refuse_others(section, where, {
        "quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
        "kv_cache_scheme", "scale_fmt", "expert_dtype"})
    one_of(section, where, "fmt", None, "e4m3")
    one_of(section, where, "scale_fmt", None, "float")
    one_of(section, where, "expert_dtype", None, "fp8")
    one_of(section, where, "weight_block_size", None, [BLOCK, BLOCK])
    blocks = section.get("weight_block_size") is not None
    one_of(section, where, "activation_scheme", "dynamic", *([] if blocks else ["static"]))
    names = ["lm_head"]
    for key in ("modules_to_not_convert", "ignored_layers"):
        names += [] if section.get(key) is None else patterns(section[key], f"{where}: {key}")
    scheme = W8A8(per_channel=False, dynamic=section["activation_scheme"] == "dynamic", float8=True, blocks=blocks,
                  scale_name="weight_scale_inv" if blocks else "weight_scale")
    ignore = (name if name.startswith("re:") else f"re:(.*[.])?{re.escape(in_decoder(name))}([.].*)?$"
              for name in names)
    return Quantization((((LINEAR,), scheme),), tuple(dict.fromkeys(ignore)))
