"""Balanced decoder layers: what makes inputs hard to round to int8 is moved into the weights, and nothing else changes.

SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): for a product x W^T, x_j / s_j and the column s_j W_j give the same.
The division is folded into what makes x: a norm's weight before q, k, v and before gate, up; v's rows before o, since
attention mixes values linearly; up's rows before down, since SwiGLU multiplies by up. Of grouped queries, heads that
share values share factors.

s_j = m_j^a / max|W_j|^(1 - a) with a strength a between 0 and 1. In SmoothQuant m_j is the largest |x_j|; here, as each
token has a scale of its own, it is the root mean square of x_j beside its token's. The strength is, at each place, that
by which the block's output changes least when the product after it alone is in int8 (a search as in AWQ, Lin et al.
2023, arXiv:2306.00978).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.norm import normalize
from npuserve.kernels.quantize import quantize
from npuserve.kernels.quantized import DYNAMIC
from npuserve.npu.model.config import ModelConfig

STRENGTHS = (0.4, 0.5, 0.6, 0.7, 0.8)

SEARCHED = 2
"""Sequences by which a strength is chosen."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where factors go: `before` makes the inputs of all of `after`."""

    before: str
    after: tuple[str, ...]

    @property
    def norm(self) -> bool:
        return self.before.endswith("layernorm")


PLACES = (
    Place("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Place("self_attn.v_proj", ("self_attn.o_proj",)),
    Place("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    Place("mlp.up_proj", ("mlp.down_proj",)),
)


class Layer:
    """One decoder layer in float32.

    weights: of the checkpoint, by their names in the layer. dtypes: those that they have there. cos_sin: [P, D]. int8:
    of projections that are computed in int8, their weights as int8 has them. power: by the first of the projections
    that share an input, the sum over tokens of x_j^2 / mean(x^2), if that is to be noted.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], cos_sin: Tensor
    ):
        self.config, self.weights, self.dtypes, self.cos_sin = config, dict(weights), dtypes, cos_sin
        self.int8: dict[str, Tensor] = {}
        self.power: dict[str, Tensor] | None = None

    def attention(self, x: Tensor) -> Tensor:
        """What attention adds to x [T, H], a sequence from its beginning."""
        return self.project(PLACES[1].after, self.mixed(x))[0]

    def mixed(self, x: Tensor) -> Tensor:
        """x [T, H] -> what o projects."""
        c, length = self.config, len(x)
        q, k, v = (out.view(length, -1, c.head_dim).transpose(0, 1)
                   for out in self.project(PLACES[0].after, self._norm("input_layernorm", x)))
        q, k = self._rotated("self_attn.q_norm", q), self._rotated("self_attn.k_norm", k)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return mixed.transpose(0, 1).reshape(length, -1)

    def mlp(self, x: Tensor) -> Tensor:
        """What the MLP adds to x [T, H]."""
        return self.project(PLACES[3].after, self.gated(x))[0]

    def gated(self, x: Tensor) -> Tensor:
        """x [T, H] -> what down projects."""
        gate, up = self.project(PLACES[2].after, self._norm("post_attention_layernorm", x))
        return F.silu(gate).mul_(up)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return normalize(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _rotated(self, norm: str, heads: Tensor) -> Tensor:
        """heads [N, T, D], normed where the family does."""
        if self.config.qk_norm:
            heads = self._norm(norm, heads)
        cos, sin = self.cos_sin[: heads.shape[1]].chunk(2, dim=-1)
        a, b = heads.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def project(self, names: Sequence[str], x: Tensor) -> list[Tensor]:
        """The projections of that names of x [T, K]: int8 or not, all of them."""
        if self.power is not None:
            squares = x.square()
            beside = squares.mean(dim=1, keepdim=True).clamp(min=1e-30)
            self.power[names[0]] = self.power.get(names[0], 0) + (squares / beside).sum(dim=0)
        if names[0] in self.int8:
            made = quantize(x, DYNAMIC)
            x = _dequantized(made.values, made.scale[:, None])
        return [F.linear(x, self.int8.get(name, self.weights[f"{name}.weight"]), self.weights.get(f"{name}.bias"))
                for name in names]

    def fold(self, place: Place, factors: Tensor) -> None:
        """Divide the outputs of `place.before` by factors and multiply the columns after it."""
        weight, bias = self.weights[f"{place.before}.weight"], self.weights.get(f"{place.before}.bias")
        if place.norm:
            # The norm is to be numbers of the checkpoint's dtype: the factors are those that it then stands for.
            norm = (weight / factors).to(self.dtypes[f"{place.before}.weight"]).float()
            usable = (norm != 0) & norm.isfinite()
            factors = torch.where(usable, weight / norm, 1.0)
            self.weights[f"{place.before}.weight"] = torch.where(usable, norm, weight)
        else:
            self.weights[f"{place.before}.weight"] = weight / factors[:, None]
        if bias is not None:
            self.weights[f"{place.before}.bias"] = bias / factors
        factors = self.spread(place, factors)
        for name in place.after:
            self.weights[f"{name}.weight"] = self.weights[f"{name}.weight"] * factors

    def factors(self, place: Place, power: Tensor, strength: float) -> Tensor:
        """Of the outputs of `place.before`; their geometric mean is 1. power: of the inputs of `place.after`."""
        if strength == 0:
            return torch.ones(len(self.weights[f"{place.before}.weight"]))
        columns = torch.stack([self.weights[f"{name}.weight"].abs().amax(dim=0) for name in place.after]).amax(dim=0)
        logs = strength / 2 * _log(self._gathered(place, power)) - (1 - strength) * _log(self._gathered(place, columns))
        return (logs - logs.mean()).exp()

    def _gathered(self, place: Place, columns: Tensor) -> Tensor:
        """The largest of the columns that one output of `place.before` becomes."""
        c = self.config
        if place.before != "self_attn.v_proj":
            return columns
        return columns.view(c.num_kv_heads, -1, c.head_dim).amax(dim=1).flatten()

    def spread(self, place: Place, factors: Tensor) -> Tensor:
        """For each column that of the output of `place.before` that it is."""
        c = self.config
        if place.before != "self_attn.v_proj":
            return factors
        heads = factors.view(c.num_kv_heads, 1, c.head_dim)
        return heads.expand(-1, c.num_heads // c.num_kv_heads, -1).flatten()


@torch.inference_mode()
def balance(
    layer: Layer, hidden: list[Tensor], int8: Set[str], strength: float | None = None
) -> dict[str, float]:
    """Fold factors into the layer at each place where what is after it, and before it unless that is a norm, is to be
    `int8`.

    hidden: inputs of the layer, each [T, H], which become its outputs. strength: at all places, 0 for no factors; None
    searches it for each. Returns the strengths, by what comes before the place.
    """
    searched = hidden[:SEARCHED]
    power = layer.power = {}
    for index, x in enumerate(hidden):
        x = x + layer.attention(x)
        hidden[index] = x + layer.mlp(x)
    layer.power = None
    chosen: dict[str, float] = {}
    for number, place in enumerate(PLACES):
        if number == 2:
            searched = [x + layer.attention(x) for x in searched]
        if not set(place.after) <= int8 or not (place.norm or place.before in int8):
            continue
        inputs = power[place.after[0]]
        chosen[place.before] = _searched(layer, place, inputs, searched) if strength is None else strength
        layer.fold(place, layer.factors(place, inputs, chosen[place.before]))
    return chosen


def _searched(layer: Layer, place: Place, power: Tensor, sequences: Sequence[Tensor]) -> float:
    """The strength by which what the layer adds to the sequences, inputs of its attention or of its MLP, differs least
    beside what it is added to, once the products after `place` are in int8."""
    block, inputs_of = (layer.attention, layer.mixed) if place in PLACES[:2] else (layer.mlp, layer.gated)
    exact = [block(x) for x in sequences]
    inputs = [] if place.norm else [inputs_of(x) for x in sequences]
    before = dict(layer.weights)
    errors: dict[float, float] = {}
    for strength in (0.0, *STRENGTHS):
        factors = layer.factors(place, power, strength)
        layer.fold(place, factors)
        layer.int8 = {name: _dequantized(*to_int8(layer.weights[key], layer.dtypes[key]))
                      for name in place.after for key in [f"{name}.weight"]}
        made = (block(x) for x in sequences) if place.norm else (
            layer.project(place.after, x / layer.spread(place, factors))[0] for x in inputs)
        errors[strength] = sum(
            float(((out - y).square().sum(dim=1) / (x + y).square().sum(dim=1).clamp(min=1e-30)).sum())
            for out, x, y in zip(made, sequences, exact, strict=True))
        layer.int8, layer.weights = {}, dict(before)
    return min(errors, key=lambda strength: errors[strength])


def to_int8(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight [N, K] float32 -> values int8 [N, K] and scale [N, 1] of `dtype`: each row's largest magnitude by 127,
    rounded up so that nothing is cut, or 1 where that is 0."""
    least = weight.abs().amax(dim=1, keepdim=True) / 127
    scale = least.to(dtype)
    scale = torch.where(scale < least, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale).round().to(torch.int8), scale


def _dequantized(values: Tensor, scale: Tensor) -> Tensor:
    return values.float() * scale


def _log(sizes: Tensor) -> Tensor:
    """Those that are next to nothing beside the mean count as a little more."""
    return sizes.clamp(min=float(sizes.mean()) * 1e-6 + 1e-30).log()
