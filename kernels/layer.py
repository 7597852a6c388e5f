"""Weights of a decoder layer as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from npuserve.kernels.quantized import Scheme
from npuserve.kernels.weight import Weight, form_of


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layer: weight [N, K], bias [N] or None."""

    weight: Weight
    bias: Tensor | None

    @property
    def inputs(self) -> Scheme | None:
        """Quantization scheme of its inputs; None if they are floats."""
        return form_of(self.weight).inputs


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer. I: intermediate size. Row order: queries, keys, values; gate, up.

    qkv [(Hq + 2 Hkv) D, H], o [H, Hq D], gate_up [2 I, H], down [H, I]; norms [H]; q_norm, k_norm [D] or None.
    """

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The linear layers in the order of their use."""
        return self.qkv, self.o, self.gate_up, self.down
