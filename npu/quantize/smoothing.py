"""Smoothing of decoder layers: moves the quantization error of inputs into the weights without changing the outputs.

SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): a product x W^T does not change if x_j is divided by s_j and column
W_j is multiplied by it. The division is folded into the layer that produces x:

- Before q, k, v and before gate, up it is folded into the weight of the norm.
- Before o it is folded into the rows of v, since attention mixes values linearly.
- Before down it is folded into the rows of up, since SwiGLU multiplies by up.

With grouped queries, heads that share values share factors.

s_j = m_j^a / max|W_j|^(1 - a) with a strength a between 0 and 1. In SmoothQuant m_j is the largest |x_j|. Here each
token has its own scale, so m_j is the root mean square of x_j relative to its token. The strength of each mapping
minimizes the change of the block's output when only the product after it is in rounded numbers (a search as in AWQ, Lin
et al. 2023, arXiv:2306.00978).
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from npuserve.npu.quantize.layer import Layer, SmoothMapping

MAX_SEARCH_SEQUENCES = 2
"""Number of sequences on which a strength is searched."""


@torch.inference_mode()
def smooth(
    layer: Layer, hidden: list[Tensor], rounded: Set[str], strength: float | None = None
) -> dict[str, float]:
    """Fold factors into the layer for each mapping whose `after`, and `before` unless it is a norm, are in `rounded`.

    Return the strengths by `SmoothMapping.before`.

    hidden: inputs of the layer, each [T, H]. The outputs replace them.
    rounded: names of the linear layers to be quantized.
    strength: strength of all mappings; 0 for no factors; None searches one for each mapping.
    """
    searched = hidden[:MAX_SEARCH_SEQUENCES]
    power = layer.power = {}
    for index, x in enumerate(hidden):
        for block in range(len(layer.blocks)):
            x = x + layer.outputs(block, x)
        hidden[index] = x
    layer.power = None
    chosen: dict[str, float] = {}
    block = 0
    for mapping in layer.mappings:
        while block < mapping.block:
            searched = [x + layer.outputs(block, x) for x in searched]
            block += 1
        inputs = power[mapping.after[0]]
        factors = torch.ones(())
        if set(mapping.after) <= rounded and (mapping.is_norm or mapping.before in rounded):
            chosen[mapping.before] = _searched(layer, mapping, inputs, searched) if strength is None else strength
            factors = layer.factors(mapping, inputs, chosen[mapping.before])
            layer.fold(mapping, factors)
            factors = layer.spread(mapping, factors)
        layer.input_power |= dict.fromkeys(mapping.after, inputs / factors.square())
    return chosen


def _searched(layer: Layer, mapping: SmoothMapping, power: Tensor, sequences: Sequence[Tensor]) -> float:
    """Return the strength with the smallest error of the block's output.

    The error is relative to the residual stream, with `mapping.after` computed in rounded numbers.
    sequences: inputs of the mapping's block.
    """
    exact = [layer.outputs(mapping.block, x) for x in sequences]
    inputs = [] if mapping.is_norm else [layer.inputs(mapping, x) for x in sequences]
    before = dict(layer.weights)
    errors: dict[float, float] = {}
    for strength in (0.0, *layer.rounding.strengths):
        factors = layer.factors(mapping, power, strength)
        layer.fold(mapping, factors)
        of_inputs = power / layer.spread(mapping, factors).square()
        layer.rounded = {name: layer.rounding.dequantized(layer.weights[key], layer.dtypes[key], of_inputs)
                         for name in mapping.after for key in [f"{name}.weight"]}
        rounded = (layer.outputs(mapping.block, x) for x in sequences) if mapping.is_norm else (
            layer.project(mapping.after, x / layer.spread(mapping, factors)) for x in inputs)
        errors[strength] = sum(
            float(((out - y).square().sum(dim=1) / (x + y).square().sum(dim=1).clamp(min=1e-30)).sum())
            for out, x, y in zip(rounded, sequences, exact, strict=True))
        layer.rounded = {}
        layer.weights = dict(before)
    return min(errors, key=lambda strength: errors[strength])
