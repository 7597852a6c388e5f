"""SwiGLU MLP: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from npuserve.npu.model.layers.layer import Inputs, Layer, Matrix, Parameters, Smoothing
from npuserve.npu.model.layers.shard import DivisionError, Shard, Span

if TYPE_CHECKING:
    from torch import Tensor

    from npuserve.kernels.layer import Linear
    from npuserve.kernels.quantized import Quantized, Scheme


class SwiGLUWeights(NamedTuple):
    """gate_up [2 I, H], down [H, I] for the intermediate size I."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class SwiGLU(Layer):
    """MLP with a gate. width: intermediate size. bias: all projections have one."""

    width: int
    bias: bool = False

    weights: ClassVar[type] = SwiGLUWeights

    def parameters(self, hidden: int, shard: Shard) -> Parameters:
        rows = shard.part(self.width)
        columns = Span.all(hidden)
        return {
            "gate_up": Matrix({"gate_proj": rows, "up_proj": rows}, columns, self.bias),
            "down": Matrix({"down_proj": columns}, rows, self.bias),
        }

    def local(self, shard: Shard) -> SwiGLU:
        if self.width % shard.size:
            raise DivisionError(
                f"tensor_parallel_size: {shard.size} does not divide the model's {self.width} intermediate columns")
        return replace(self, width=self.width // shard.size)

    def input_scheme(self, weights: SwiGLUWeights) -> Scheme | None:
        return weights.gate_up.inputs

    def forward(self, x: Tensor | Quantized, weights: SwiGLUWeights, state: None, inputs: Inputs) -> Tensor:
        k = inputs.kernels
        down = weights.down
        gated = k.linear_swiglu(x, weights.gate_up.weight, weights.gate_up.bias, down.inputs)
        return k.linear(gated, down.weight, down.bias)

    @property
    def output_width(self) -> int:
        gate_up = 2 * self.width
        gated = quantized = self.width
        return gate_up + gated + quantized

    def golden_elements(self, tokens: int, context: int) -> int:
        gate_up = 2 * self.width
        activated = gated = self.width
        return tokens * (gate_up + activated + gated)

    @property
    def smoothings(self) -> tuple[Smoothing, ...]:
        return Smoothing("", ("gate_proj", "up_proj")), Smoothing("up_proj", ("down_proj",))
