"""W8A8: int8 weights multiplied with int8 activations, and float8 weights (e4m3) with float8 activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from npuserve.npu.quantization.scheme import Device, WeightScheme

BLOCK = 128
"""Rows and columns of a block of weights, and columns of a group of inputs."""

FORMATS = {"int": "int-quantized", "float": "float-quantized"}
"""Type of the numbers -> format of the checkpoint."""


@dataclass(frozen=True, slots=True)
class W8A8(WeightScheme):
    """Quantization scheme of a linear layer with int8 weights and inputs, or float8 ones.

    per_channel: True for one weight scale per output row. False for one per tensor.
    symmetric: weights have no zero points.
    dynamic: True for one input scale per token, computed at run time. False for one per tensor, from the checkpoint.
    symmetric_inputs: inputs have no zero points.
    float8: weights and inputs are float8 (e4m3), without zero points.
    blocks: float8 weights have a scale for each block, and a token's inputs for each group of BLOCK columns.
    scale_name: name of the checkpoint's tensors of weight scales.
    """

    per_channel: bool = True
    symmetric: bool = True
    dynamic: bool = True
    symmetric_inputs: bool = True
    float8: bool = False
    blocks: bool = False
    scale_name: str = "weight_scale"

    @property
    def name(self) -> str:
        return "w8a8-fp8" if self.float8 else "w8a8"

    @property
    def type(self) -> str:
        """Type of the numbers as config.json names it: "int" or "float"."""
        return "float" if self.float8 else "int"

    @property
    def format(self) -> str:
        return FORMATS[self.type]

    def refusal(self, device: Device) -> str:
        if self.float8 and not device.capabilities.float8:
            return (f"float8 weights and input_activations (type: float) are not possible on {device.name}; possible "
                    "is int8 (type: int)")
        wrong = [name for name, symmetric in (
            ("weights", self.symmetric), ("input_activations", self.symmetric_inputs)) if not symmetric]
        if wrong and not device.capabilities.int8_zeros:
            return (f"{' and '.join(wrong)} with zero points (symmetric: false) are not possible on {device.name}, "
                    "whose int8 GEMM takes none; possible is symmetric: true")
        return ""

    def group_json(self, targets: Sequence[str]) -> dict[str, Any]:
        def args(symmetric: bool, strategy: str, dynamic: bool) -> dict[str, Any]:
            return {"num_bits": 8, "type": self.type, "symmetric": symmetric,
                    "group_size": BLOCK if strategy == "group" else None, "strategy": strategy,
                    "block_structure": [BLOCK, BLOCK] if strategy == "block" else None, "dynamic": dynamic,
                    "actorder": None, "observer": None, "observer_kwargs": {}}

        of_weights = "block" if self.blocks else "channel" if self.per_channel else "tensor"
        of_inputs = "group" if self.blocks else "token" if self.dynamic else "tensor"
        return {
            "targets": list(targets),
            "weights": args(self.symmetric, of_weights, False),
            "input_activations": args(self.symmetric_inputs, of_inputs, self.dynamic),
            "output_activations": None,
            "format": self.format,
        }
