"""Quantization section of the method `gptq` (Frantar et al. 2022, arXiv:2210.17323).

AutoGPTQ and GPTQModel write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npuserve.npu.quantization.assignment import LINEAR, Quantization
from npuserve.npu.quantization.section import mapping, one_of, patterns, refuse_others
from npuserve.npu.quantization.w4a16 import GROUPS, W4A16

KEYS = {"quant_method", "bits", "group_size", "desc_act", "sym", "lm_head", "checkpoint_format", "format", "pack_dtype",
        "is_marlin_format", "dynamic"}
IGNORED_KEYS = {
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "exllama_config", "max_input_length", "meta", "method",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "mse",
    "offload_to_disk", "offload_to_disk_path", "pad_token_id", "static_groups", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama"}
"""Keys accepted without effect: of provenance, and of the kernels of other servers."""


def read(section: Mapping[str, Any], where: str) -> Quantization:
    """Parse the section."""
    refuse_others(section, where, KEYS | IGNORED_KEYS)
    section = {**section, "checkpoint_format": section.get("checkpoint_format", section.get("format")) or "gptq",
               "pack_dtype": str(section.get("pack_dtype") or "int32").removeprefix("torch.")}
    one_of(section, where, "bits", 4)
    one_of(section, where, "group_size", *GROUPS, -1)
    one_of(section, where, "desc_act", None, True, False)
    one_of(section, where, "sym", None, True, False)
    one_of(section, where, "lm_head", None, True, False)
    one_of(section, where, "checkpoint_format", "gptq", "gptq_v2")
    one_of(section, where, "pack_dtype", "int32")
    one_of(section, where, "is_marlin_format", None, False)
    size = section["group_size"]
    scheme = W4A16(group=None if size == -1 else size, symmetric=section.get("sym") is not False,
                   packing="gptq_v2" if section["checkpoint_format"] == "gptq_v2" else "gptq",
                   act_order=bool(section.get("desc_act")), scales="float16")
    kept = [] if section.get("lm_head") else ["lm_head"]
    return Quantization((((LINEAR,), scheme),), (*kept, *_skipped(section.get("dynamic"), f"{where}: dynamic")))


def _skipped(dynamic: Any, where: str) -> list[str]:
    """Return patterns of the layers that `dynamic` excludes: "-:" and an expression for the beginning of a name."""
    names = mapping(dynamic or {}, where)
    if others := [name for name in names if not name.startswith("-:")]:
        raise ValueError(f"{where}: {others[0]!r} is not supported; supported: names that begin with -:, which exclude "
                         "layers")
    return list(patterns([f"re:{name.removeprefix('-:')}" for name in names], where))
