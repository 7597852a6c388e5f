"""Decoder layer in float32, with optional int8 projections, and the folding of factors into its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.norm import normalize
from npuserve.kernels.qk_norm_rope_kv_write import rotate
from npuserve.kernels.quantize import quantize
from npuserve.kernels.quantized import DYNAMIC
from npuserve.npu.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SmoothMapping:
    """Layers that factors are folded into: the output of `before` is the input of each of `after`."""

    before: str
    after: tuple[str, ...]

    @property
    def is_norm(self) -> bool:
        """True if `before` is a norm."""
        return self.before.endswith("layernorm")


MAPPINGS = (
    SmoothMapping("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    SmoothMapping("self_attn.v_proj", ("self_attn.o_proj",)),
    SmoothMapping("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    SmoothMapping("mlp.up_proj", ("mlp.down_proj",)),
)


class Layer:
    """Decoder layer computed in float32.

    weights: weights of the checkpoint, by name in the layer.
    dtypes: dtypes of the weights in the checkpoint.
    cos_sin: [P, R] float32, as by `rope.cos_sin_table`.
    int8: dequantized weights of the projections that are computed in int8.
    power: sum over tokens of x_j^2 / mean(x^2); None if not recorded. The key is the first projection with input x.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], cos_sin: Tensor
    ):
        self.config, self.weights, self.dtypes, self.cos_sin = config, dict(weights), dtypes, cos_sin
        self.int8: dict[str, Tensor] = {}
        self.power: dict[str, Tensor] | None = None

    def attention(self, x: Tensor) -> Tensor:
        """Return the output of attention for x [T, H], a sequence from its beginning."""
        return self.project(MAPPINGS[1].after, self.mixed(x))[0]

    def mixed(self, x: Tensor) -> Tensor:
        """Return the input of the o projection for x [T, H]."""
        c, length = self.config, len(x)
        q, k, v = (out.view(length, -1, c.head_dim).transpose(0, 1)
                   for out in self.project(MAPPINGS[0].after, self._norm("input_layernorm", x)))
        q, k = self._rotated("self_attn.q_norm", q), self._rotated("self_attn.k_norm", k)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return mixed.transpose(0, 1).reshape(length, -1)

    def mlp(self, x: Tensor) -> Tensor:
        """Return the output of the MLP for x [T, H]."""
        return self.project(MAPPINGS[3].after, self.gated(x))[0]

    def gated(self, x: Tensor) -> Tensor:
        """Return the input of the down projection for x [T, H]."""
        gate, up = self.project(MAPPINGS[2].after, self._norm("post_attention_layernorm", x))
        return F.silu(gate).mul_(up)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return normalize(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _rotated(self, norm: str, heads: Tensor) -> Tensor:
        """Return heads [N, T, D] rotated, after their norm if the family has one."""
        if self.config.qk_norm:
            heads = self._norm(norm, heads)
        cos, sin = self.cos_sin[: heads.shape[1]].chunk(2, dim=-1)
        return rotate(heads, cos, sin)

    def project(self, names: Sequence[str], x: Tensor) -> list[Tensor]:
        """Return the projections `names` of x [T, K]. Either all of them are int8 or none."""
        if self.power is not None:
            squares = x.square()
            beside = squares.mean(dim=1, keepdim=True).clamp(min=1e-30)
            self.power[names[0]] = self.power.get(names[0], 0) + (squares / beside).sum(dim=0)
        if names[0] in self.int8:
            made = quantize(x, DYNAMIC)
            x = dequantized(made.values, made.scale[:, None])
        return [F.linear(x, self.int8.get(name, self.weights[f"{name}.weight"]), self.weights.get(f"{name}.bias"))
                for name in names]

    def fold(self, mapping: SmoothMapping, factors: Tensor) -> None:
        """Divide the outputs of `mapping.before` by factors and multiply the columns of `mapping.after` by them."""
        weight, bias = self.weights[f"{mapping.before}.weight"], self.weights.get(f"{mapping.before}.bias")
        if mapping.is_norm:
            # The norm is rounded to the checkpoint's dtype; the columns use the factors that result from the rounding.
            norm = (weight / factors).to(self.dtypes[f"{mapping.before}.weight"]).float()
            usable = (norm != 0) & norm.isfinite()
            factors = torch.where(usable, weight / norm, 1.0)
            self.weights[f"{mapping.before}.weight"] = torch.where(usable, norm, weight)
        else:
            self.weights[f"{mapping.before}.weight"] = weight / factors[:, None]
        if bias is not None:
            self.weights[f"{mapping.before}.bias"] = bias / factors
        factors = self.spread(mapping, factors)
        for name in mapping.after:
            self.weights[f"{name}.weight"] = self.weights[f"{name}.weight"] * factors

    def factors(self, mapping: SmoothMapping, power: Tensor, strength: float) -> Tensor:
        """Return the factors of the outputs of `mapping.before`.

        Their geometric mean is 1. Then each that would make a bias infinite in the checkpoint's dtype is replaced by 1.

        power: value of `Layer.power` for the inputs of `mapping.after`.
        """
        if strength == 0:
            return torch.ones(len(self.weights[f"{mapping.before}.weight"]))
        columns = torch.stack([self.weights[f"{name}.weight"].abs().amax(dim=0) for name in mapping.after]).amax(dim=0)
        inputs, weights = (self._column_maximum(mapping, sizes) for sizes in (power, columns))
        logs = strength / 2 * _log(inputs) - (1 - strength) * _log(weights)
        factors = (logs - logs.mean()).exp()
        if (bias := self.weights.get(f"{mapping.before}.bias")) is not None:
            folded = (bias / factors).to(self.dtypes[f"{mapping.before}.bias"])
            factors = torch.where(folded.isfinite(), factors, 1.0)
        return factors

    def _column_maximum(self, mapping: SmoothMapping, columns: Tensor) -> Tensor:
        """Return for each output of `mapping.before` the maximum of the columns that it feeds."""
        c = self.config
        if mapping.before != "self_attn.v_proj":
            return columns
        return columns.view(c.num_kv_heads, -1, c.head_dim).amax(dim=1).flatten()

    def spread(self, mapping: SmoothMapping, factors: Tensor) -> Tensor:
        """Return for each column of `mapping.after` the factor of the output that feeds it."""
        c = self.config
        if mapping.before != "self_attn.v_proj":
            return factors
        heads = factors.view(c.num_kv_heads, 1, c.head_dim)
        return heads.expand(-1, c.num_heads // c.num_kv_heads, -1).flatten()


def to_int8(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize weight [N, K] float32 to values int8 [N, K] and scale [N, 1] of `dtype`.

    A row's scale is its maximum magnitude / 127, rounded up so that nothing is clipped; 1 for a row of zeros.
    """
    least = weight.abs().amax(dim=1, keepdim=True) / 127
    scale = least.to(dtype)
    scale = torch.where(scale < least, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale).round().to(torch.int8), scale


def dequantized(values: Tensor, scale: Tensor) -> Tensor:
    """Return values * scale in float32."""
    return values.float() * scale


def _log(sizes: Tensor) -> Tensor:
    """Return the logarithm of sizes >= 0, clamped to 1e-6 of their mean."""
    return sizes.clamp(min=float(sizes.mean()) * 1e-6 + 1e-30).log()
