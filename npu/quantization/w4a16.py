"""W4A16: weights of 4 bits in groups, multiplied with activations of floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from npuserve.npu.quantization.scheme import Device, WeightScheme

GROUPS = 32, 64, 128
"""Possible columns of a group."""

PACKED_FORMAT = "pack-quantized"
"""Format of a checkpoint of compressed-tensors."""

Packing = Literal["compressed-tensors", "awq", "gptq", "gptq_v2"]


@dataclass(frozen=True, slots=True)
class W4A16(WeightScheme):
    """Quantization scheme of a linear layer with weights of 4 bits.

    group: columns of a group, one of GROUPS; None for one scale per output row.
    symmetric: groups have no zero points.
    packing: form of the tensors in the checkpoint. The versions of GPTQ differ in their zero points.
    act_order: a tensor g_idx assigns columns to groups, instead of their order (GPTQ's desc_act). The weights become
        floats while loading.
    scales: dtype of the stored scales.
    """

    group: int | None = 128
    symmetric: bool = True
    packing: Packing = "compressed-tensors"
    act_order: bool = False
    scales: str = "bfloat16"

    @property
    def name(self) -> str:
        return "w4a16"

    @property
    def format(self) -> str:
        return PACKED_FORMAT

    @property
    def int4(self) -> bool:
        return True

    def with_scales(self, dtype: str) -> W4A16:
        return replace(self, scales=dtype) if self.packing == "compressed-tensors" else self

    def refusal(self, device: Device) -> str:
        return ""

    def group_json(self, targets: Sequence[str]) -> dict[str, Any]:
        return {
            "targets": list(targets),
            "weights": {"num_bits": 4, "type": "int", "symmetric": self.symmetric, "group_size": self.group,
                        "strategy": "channel" if self.group is None else "group", "block_structure": None,
                        "dynamic": False, "actorder": None, "observer": None, "observer_kwargs": {}},
            "input_activations": None,
            "output_activations": None,
            "format": PACKED_FORMAT,
        }
