"""Gated delta net: linear attention whose state is corrected by the delta rule and decays by a gate.

Yang et al. 2024, arXiv:2412.06464. With a causal convolution over queries, keys and values, and an output that is
normed and gated by silu(z), as in Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from npuserve.npu.model.layers.layer import Array, Fixed, Inputs, Layer, Matrix, Parameters
from npuserve.npu.model.layers.shard import DivisionError, Rows, Shard, Span

if TYPE_CHECKING:
    from torch import Tensor

    from npuserve.kernels.layer import Linear
    from npuserve.kernels.registry import KernelSet

ELEMENTS_PER_FLOAT32 = 4
"""Elements of the model's dtype for each number that the golden function computes: float32 takes two of 16 bits, and
a result exists beside its operand."""


class GatedDeltaNetWeights(NamedTuple):
    """Weights for hidden size H, Hk heads of size Dk of queries and keys, and Hv heads of size Dv of values.

    qkv [2 Hk Dk + Hv Dv, H]: queries, keys, values; z [Hv Dv, H]; a, b [Hv, H]; out [H, Hv Dv].
    conv [2 Hk Dk + Hv Dv, K], for a kernel of K tokens.
    a_log, dt_bias [Hv] float32; norm [Dv].

    z, a, b: None where their rows follow those of the field before (`GatedDeltaNet.stackable`).
    """

    qkv: Linear
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Linear
    z: Linear | None = None
    a: Linear | None = None
    b: Linear | None = None


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(Layer):
    """Mixer with a state [Hv, Dk, Dv], and the last inputs of its convolution.

    key_heads, value_heads: heads of queries and keys; heads of values. Value head h uses key head
        h // (value_heads / key_heads).
    key_dim, value_dim: sizes of their heads.
    conv_kernel: tokens that the convolution sees.
    fused: the checkpoint has the projections of queries, keys, values and z in one tensor, and those of b and a in
        another, each with the rows of one head of keys after those of the one before.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    fused: bool = False

    weights: ClassVar[type] = GatedDeltaNetWeights

    @property
    def keys(self) -> int:
        """Columns of the keys, and of the queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of the values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def parameters(self, hidden: int, shard: Shard) -> Parameters:
        everything = Span.all(hidden)
        heads = shard.part(self.value_heads)
        keys = shard.part(self.key_heads).times(self.key_dim)
        values = heads.times(self.value_dim)
        channels = Rows.stacked(keys, keys, values) if shard.size > 1 else Span.all(self.channels)
        projections: dict[str, tuple[str, Span | Rows]] = {
            "qkv": ("in_proj_qkv", channels), "z": ("in_proj_z", values), "a": ("in_proj_a", heads),
            "b": ("in_proj_b", heads)}
        if self.fused:
            projections = self._fused_projections(shard.part(self.key_heads))
        return {
            **{field: Matrix({name: rows}, everything, can_quantize=field in ("qkv", "z"))
               for field, (name, rows) in projections.items()},
            "conv": Array("conv1d.weight", channels, (self.conv_kernel,), whole_row_shape=(1, self.conv_kernel)),
            "a_log": Array("A_log", heads, dtype="float32"),
            "dt_bias": Array("dt_bias", heads, dtype="float32"),
            "norm": Array("norm.weight", Span.all(self.value_dim)),
            "out": Matrix({"out_proj": everything}, values),
        }

    def _fused_projections(self, heads: Span) -> dict[str, tuple[str, Span | Rows]]:
        """Return the tensor and the rows of each projection in a fused checkpoint. heads: of the keys."""
        group = self.value_heads // self.key_heads
        key, value = self.key_dim, group * self.value_dim
        size = 2 * (key + value)
        return {
            "qkv": ("in_proj_qkvz", Rows.of_units(heads, size, (0, key), (key, key), (2 * key, value))),
            "z": ("in_proj_qkvz", Rows.of_units(heads, size, (2 * key + value, value))),
            "a": ("in_proj_ba", Rows.of_units(heads, 2 * group, (group, group))),
            "b": ("in_proj_ba", Rows.of_units(heads, 2 * group, (0, group)))}

    def local(self, shard: Shard) -> GatedDeltaNet:
        for name, count in (("key", self.key_heads), ("value", self.value_heads)):
            if count % shard.size:
                raise DivisionError(
                    f"tensor_parallel_size: {shard.size} does not divide the {count} {name} heads of the model's "
                    "linear attention")
        return replace(self, key_heads=self.key_heads // shard.size, value_heads=self.value_heads // shard.size)

    @property
    def state(self) -> Fixed:
        return Fixed(((self.channels, self.conv_kernel - 1), (self.value_heads, self.key_dim, self.value_dim)),
                     ("model", "state"))

    @property
    def kernels(self) -> tuple[str, ...]:
        return "causal_conv_silu", "gated_delta_rule", "gated_rms_norm"

    @property
    def stackable(self) -> tuple[str, ...]:
        return "qkv", "z", "a", "b"

    @property
    def operator_sizes(self) -> dict[str, tuple[int, ...]]:
        return {"gated_delta_rule": (self.key_heads, self.value_heads, self.key_dim, self.value_dim)}

    def forward(
        self, x: Tensor, weights: GatedDeltaNetWeights, state: tuple[Tensor, Tensor], inputs: Inputs
    ) -> Tensor:
        k, (window, memory), w = inputs.kernels, state, weights
        qkv, z, a, b = self._projected(x, w, k)
        mixed = k.causal_conv_silu(qkv, w.conv, window, inputs.attention, inputs.state_slots)
        out = k.gated_delta_rule(
            mixed, a, b, w.a_log, w.dt_bias, memory, inputs.attention, inputs.state_slots, self.key_heads)
        normed = k.gated_rms_norm(out, z, w.norm, inputs.eps)
        return k.linear(normed, w.out.weight, w.out.bias)

    def _projected(self, x: Tensor, weights: GatedDeltaNetWeights, kernels: KernelSet) -> list[Tensor]:
        """Return the products of x with the matrices of `stackable`."""
        projected: list[Tensor] = []
        widths: list[int] = []  # of the matrices whose rows the next product has
        fields = zip((weights.b, weights.a, weights.z, weights.qkv),
                     (self.value_heads, self.value_heads, self.values, self.channels), strict=True)
        for linear, width in fields:
            widths.insert(0, width)
            if linear is not None:
                product = kernels.linear(x, linear.weight, linear.bias)
                projected = [*(product.split(widths, 1) if len(widths) > 1 else [product]), *projected]
                widths = []
        return projected

    @property
    def output_width(self) -> int:
        projected = convolved = self.channels
        z = out = normed = self.values
        a = b = self.value_heads
        return projected + convolved + z + out + normed + a + b

    def golden_elements(self, tokens: int, context: int) -> int:
        repeated = 2 * self.values  # queries and keys, with the heads of the values
        state = self.value_heads * self.key_dim * self.value_dim  # of one row
        return ELEMENTS_PER_FLOAT32 * (tokens * (self.channels + repeated) + state)
