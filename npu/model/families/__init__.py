"""Families of models, one file each: a family reads config.json and lists the blocks of each decoder layer.

Imports no torch.
"""

from __future__ import annotations

from npuserve.npu.model.families.family import Family
from npuserve.npu.model.families.llama import LLAMA
from npuserve.npu.model.families.qwen2 import QWEN2
from npuserve.npu.model.families.qwen3 import QWEN3
from npuserve.npu.model.families.qwen3_5 import QWEN3_5, QWEN3_5_TEXT

FAMILIES: dict[str, Family] = {family.architecture: family for family in (QWEN3, QWEN3_5, QWEN3_5_TEXT, QWEN2, LLAMA)}
"""Class name in config.json's `architectures` -> family. The first that a config.json names is served."""

_EXPERTS = "its layers are mixtures of experts"

REFUSED = {
    "Qwen3MoeForCausalLM": f"{_EXPERTS}; serve a dense model, such as Qwen/Qwen3-8B",
    "Qwen3NextForCausalLM": f"{_EXPERTS}; serve a dense model with linear attention, such as Qwen/Qwen3.5-9B",
    "Qwen3_5MoeForCausalLM": f"{_EXPERTS}; serve a dense model of the same release, such as Qwen/Qwen3.5-27B",
    "Qwen3_5MoeForConditionalGeneration":
        f"{_EXPERTS}; serve a dense model of the same release, such as Qwen/Qwen3.5-27B",
    "Qwen3VLForConditionalGeneration": "it needs images; serve its text model, such as Qwen/Qwen3-8B",
}
"""Class name of related models -> why they are not served, and what to serve instead."""
