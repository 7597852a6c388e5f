"""Two families that no checkpoint has: one whose third layer has no attention, and one with layers that sum up.

Importing this module adds them to FAMILIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from npuserve.kernels.layer import Linear
from npuserve.npu.model.families import FAMILIES
from npuserve.npu.model.families.config_json import whole
from npuserve.npu.model.families.family import Family, head_counts, repeat
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.model.layers.layer import Array, Block, DecoderLayer, Fixed, Inputs, Layer, Matrix, Parameters
from npuserve.npu.model.layers.shard import Shard, Span
from npuserve.npu.model.layers.swiglu import SwiGLU

DECAY = 0.875


def attention_and_mlp(data: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    return repeat(data, Attention(*head_counts(data)), SwiGLU(whole(data, "intermediate_size")))


def gapped(data: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    """Leave the attention of the third layer out."""
    layers = attention_and_mlp(data)
    return *layers[:2], layers[2][1:], *layers[3:]


class RunningSumWeights(NamedTuple):
    gain: Tensor
    out: Linear


@dataclass(frozen=True, slots=True)
class RunningSum(Layer):
    """Mixer out(s_t) with s_t = DECAY s_(t - 1) + gain * x_t in float32."""

    width: int

    weights: ClassVar[type] = RunningSumWeights

    def parameters(self, hidden: int, shard: Shard) -> Parameters:
        return {"gain": Array("gain", Span.all(hidden), dtype="float32"),
                "out": Matrix({"out_proj": Span.all(hidden)}, Span.all(hidden))}

    def local(self, shard: Shard) -> RunningSum:
        return self

    @property
    def state(self) -> Fixed:
        return Fixed(((self.width,),), ("float32",))

    def forward(self, x: Tensor, weights: RunningSumWeights, state: Any, inputs: Inputs) -> Tensor:
        (sums,), starts = state, inputs.attention.host_cu_seqlens_q
        assert inputs.state_slots is not None
        output = torch.zeros_like(x)
        for row, context in enumerate(inputs.attention.host_context_lens):
            begin, end, slot = starts[row], starts[row + 1], inputs.state_slots[row]
            total = torch.zeros(self.width) if context == end - begin else sums[slot]
            for token in range(begin, end):
                total = DECAY * total + weights.gain * x[token].float()
                output[token] = total
            sums[slot] = total
        return inputs.kernels.linear(output, weights.out.weight, weights.out.bias)

    @property
    def output_width(self) -> int:
        return 2 * self.width

    def golden_elements(self, tokens: int, context: int) -> int:
        return 2 * tokens * self.width


def summing(data: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    """Replace the attention of every second layer by a running sum."""
    mixer = Block("input_layernorm", "mixer", RunningSum(whole(data, "hidden_size")))
    return tuple((mixer, *layer[1:]) if index % 2 else layer for index, layer in enumerate(attention_and_mlp(data)))


FAMILIES["GappedForCausalLM"] = Family("gapped", "GappedForCausalLM", 512, gapped)
FAMILIES["SummingForCausalLM"] = Family("summing", "SummingForCausalLM", 512, summing)
