"""W4A8: weights of 4 bits in groups, multiplied with int8 activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from npuserve.npu.quantization.scheme import Device, WeightScheme
from npuserve.npu.quantization.w4a16 import W4A16
from npuserve.npu.quantization.w8a8 import FORMATS, W8A8


@dataclass(frozen=True, slots=True)
class W4A8(WeightScheme):
    """Quantization scheme of a linear layer with weights of 4 bits, and int8 inputs with a scale for each token.

    Neither has zero points. In a checkpoint of compressed-tensors each number takes a byte.

    weights: group and dtype of the scales.
    """

    weights: W4A16

    @property
    def name(self) -> str:
        return "w4a8"

    @property
    def format(self) -> str:
        return FORMATS["int"]

    def with_scales(self, dtype: str) -> W4A8:
        return replace(self, weights=self.weights.with_scales(dtype))

    def refusal(self, device: Device) -> str:
        if device.capabilities.w4a8:
            return ""
        return ("weights of 4 bits (num_bits: 4) with int8 input_activations (W4A8) are not possible on "
                f"{device.name}; possible are weights of 4 bits with input_activations: null (W4A16), and int8 weights "
                "(W8A8)")

    def group_json(self, targets: Sequence[str]) -> dict[str, Any]:
        inputs = W8A8().group_json(targets)["input_activations"]
        return {**self.weights.group_json(targets), "input_activations": inputs, "format": self.format}
