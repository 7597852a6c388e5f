"""Families of models, one file each: a family reads config.json and lists the blocks of each decoder layer.

Imports no torch.
"""

from __future__ import annotations

from npuserve.npu.model.families.family import Family
from npuserve.npu.model.families.llama import LLAMA
from npuserve.npu.model.families.qwen2 import QWEN2
from npuserve.npu.model.families.qwen3 import QWEN3
from npuserve.npu.model.families.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from npuserve.npu.model.families.qwen3_5_moe import QWEN3_5_MOE, QWEN3_5_MOE_TEXT
from npuserve.npu.model.families.qwen3_moe import QWEN3_MOE
from npuserve.npu.model.families.qwen3_next import QWEN3_NEXT

FAMILIES: dict[str, Family] = {family.architecture: family for family in (
    QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_TEXT, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_NEXT, QWEN2, LLAMA)}
"""Class name in config.json's `architectures` -> family. The first that a config.json names is served."""

REFUSED = {
    "Qwen3VLForConditionalGeneration": "it needs images; serve its text model, such as Qwen/Qwen3-8B",
}
"""Class name of related models -> why they are not served, and what to serve instead."""
