"""Causal attention with rotary embeddings and groups of query heads (Ainslie et al. 2023, arXiv:2305.13245)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from npuserve.npu.model.layers.layer import Inputs, Layer, Matrix, Paged, Parameters, Smoothing, norm
from npuserve.npu.model.layers.shard import DivisionError, Rows, Shard, Span

if TYPE_CHECKING:
    from torch import Tensor

    from npuserve.kernels.kv_cache import Cache
    from npuserve.kernels.layer import Linear
    from npuserve.kernels.quantized import Quantized, Scheme


class AttentionWeights(NamedTuple):
    """Weights for hidden size H, heads of size D, Hq query heads and Hkv key and value heads.

    qkv [(Hq + 2 Hkv) D, H]: queries, keys, values. Of several inputs (`Attention.num_inputs`), [..., number of H].
    o [H, Hq D].
    q_norm, k_norm [D], gate [Hq D, H]: None for a layer without.
    """

    qkv: Linear
    o: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    gate: Linear | None = None


@dataclass(frozen=True, slots=True)
class Attention(Layer):
    """Attention over all earlier tokens.

    num_heads, num_kv_heads: number of query heads; number of key and value heads.
    qk_norm: RMSNorm is applied to each query and key head.
    zero_centred: the checkpoint has the weights of these norms less 1.
    output_gate: the output is multiplied by the sigmoid of a gate. q_proj holds the query and the gate of each head,
        one after the other.
    num_inputs: number of tensors of the hidden size that the layer takes, one after the other.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    zero_centred: bool = False
    output_gate: bool = False
    num_inputs: int = 1

    weights: ClassVar[type] = AttentionWeights

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def parameters(self, hidden: int, shard: Shard) -> Parameters:
        inputs = Span.all(self.num_inputs * hidden)
        heads = shard.part(self.num_heads)
        columns = heads.times(self.head_dim)
        queries, gates = (
            Rows.of_units(heads, 2 * self.head_dim, (part * self.head_dim, self.head_dim)) for part in range(2))
        keys = shard.kv_heads(self.num_kv_heads).times(self.head_dim)
        parameters: Parameters = {
            "qkv": Matrix({"q_proj": queries if self.output_gate else columns, "k_proj": keys, "v_proj": keys},
                          inputs, self.qkv_bias),
            "o": Matrix({"o_proj": Span.all(hidden)}, columns, self.o_bias),
        }
        if self.output_gate:
            parameters["gate"] = Matrix({"q_proj": gates}, inputs, self.qkv_bias)
        if self.qk_norm:
            for name in ("q_norm", "k_norm"):
                parameters[name] = norm(name, self.head_dim, zero_centred=self.zero_centred)
        return parameters

    def local(self, shard: Shard) -> Attention:
        ranks = shard.size
        kv_heads = self.num_kv_heads
        if self.num_heads % ranks:
            raise DivisionError(
                f"tensor_parallel_size: {ranks} does not divide the model's {self.num_heads} attention heads")
        if kv_heads % ranks and ranks % kv_heads:
            raise DivisionError(
                f"tensor_parallel_size: {ranks} neither divides the model's {kv_heads} key and value heads nor is a "
                "multiple")
        return replace(self, num_heads=self.num_heads // ranks, num_kv_heads=shard.kv_heads(kv_heads).size)

    @property
    def state(self) -> Paged:
        return Paged(self.num_kv_heads, self.head_dim)

    def input_scheme(self, weights: AttentionWeights) -> Scheme | None:
        return weights.qkv.inputs

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("sigmoid_gate",) if self.output_gate else ()

    def forward(
        self, x: Tensor | Quantized, weights: AttentionWeights, state: tuple[Cache, Cache], inputs: Inputs
    ) -> Tensor:
        k, (keys, values) = inputs.kernels, state
        qkv = k.linear(x, weights.qkv.weight, weights.qkv.bias)
        q = k.qk_norm_rope_kv_write(
            qkv, weights.q_norm, weights.k_norm, inputs.eps, inputs.cos_sin, inputs.positions, inputs.slot_mapping,
            keys, values, self.num_heads)
        attended = k.paged_attention(q, keys, values, inputs.attention, self.head_dim**-0.5)
        if weights.gate is not None:
            attended = k.sigmoid_gate(attended, k.linear(x, weights.gate.weight, weights.gate.bias))
        return k.linear(attended, weights.o.weight, weights.o.bias)

    @property
    def output_width(self) -> int:
        qkv = self.q_size + 2 * self.kv_size
        queries = attended = self.q_size
        width = qkv + queries + attended
        # Each output stays until the next layer has written it again: at most a further qkv, and one of the others.
        replaced = qkv + self.q_size
        gates = 2 * self.q_size if self.output_gate else 0  # the gate's projection, and the gated output
        return width + replaced + gates

    def golden_elements(self, tokens: int, context: int) -> int:
        projected = normed = rotated = tokens * (self.q_size + 2 * self.kv_size)
        copied = 2 * context * self.q_size  # attention copies a row's keys and values, for each query head
        gates = 2 * tokens * self.q_size if self.output_gate else 0
        return projected + normed + rotated + copied + gates

    def scratch_bytes(self, context: int, threads: int) -> int:
        # Threads that compute parts of a context keep their results until they are merged.
        return threads * context * self.num_heads // self.num_kv_heads * (self.head_dim + 32) // 4

    @property
    def smoothings(self) -> tuple[Smoothing, ...]:
        queries_per_head = self.num_heads // self.num_kv_heads
        return (
            Smoothing("", ("q_proj", "k_proj", "v_proj")),
            # Attention mixes values linearly. Heads that share values share factors.
            Smoothing("v_proj", ("o_proj",), self.num_kv_heads, self.head_dim, queries_per_head),
        )
