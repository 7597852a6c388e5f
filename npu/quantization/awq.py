"""Quantization section of the method `awq`, as AutoAWQ writes it (Lin et al. 2023, arXiv:2306.00978)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from npuserve.npu.quantization.assignment import LINEAR, Quantization, in_decoder
from npuserve.npu.quantization.section import one_of, patterns, refuse_others
from npuserve.npu.quantization.w4a16 import GROUPS, W4A16


def read(section: Mapping[str, Any], where: str) -> Quantization:
    """Parse the section. A module that is not converted is a part of names."""
    # Accepted without effect: keys for the kernels of other servers.
    refuse_others(section, where, {
        "quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "backend",
        "modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"})
    section = {**section, "bits": section.get("bits", section.get("w_bit")),
               "group_size": section.get("group_size", section.get("q_group_size")),
               "version": str(section.get("version", section.get("format", "gemm"))).lower()}
    one_of(section, where, "bits", 4)
    one_of(section, where, "group_size", *GROUPS, -1)
    one_of(section, where, "zero_point", True)
    one_of(section, where, "version", "gemm")
    kept = section.get("modules_to_not_convert")
    names = ["lm_head", *([] if kept is None else patterns(kept, f"{where}: modules_to_not_convert"))]
    size = section["group_size"]
    scheme = W4A16(group=None if size == -1 else size, symmetric=False, packing="awq", scales="float16")
    ignore = (f"re:.*{re.escape(in_decoder(name))}" for name in names)
    return Quantization((((LINEAR,), scheme),), tuple(dict.fromkeys(ignore)))
