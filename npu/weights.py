"""A model's weights as the kernels take them: projections that share an input are fused, the vocabulary is padded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from npuserve.kernels.native.packed import PackedWeight, Weight, write
from npuserve.npu.backends.base import Backend
from npuserve.npu.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor of the checkpoint goes: the rows of `storage` from `first` on, as many as its shape has."""

    storage: Weight
    first: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.storage.dtype.itemsize

    def write(self, row: int, piece: Tensor) -> None:
        """The tensor's rows from `row` on are those of `piece`, of any float dtype."""
        write(self.storage, self.first + row, piece)


Targets = dict[str, Target]
"""By the name of the checkpoint's tensor."""


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [N, K], bias [N] or None."""

    weight: Weight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. I: intermediate size; queries come before keys before values, gate before up.

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


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding [Vp, H], norm [H], lm_head [Vp, H]: Vp is the padded vocabulary. Of a tied model embedding and
    lm_head are one table.

    Rows of lm_head from the vocabulary's size on repeat row 0, so that a padded id is no likelier than id 0; those of
    an untied embedding are zero.
    """

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear

    @property
    def padded_vocabulary(self) -> int:
        return self.lm_head.weight.shape[0]

    def fill_padding(self, vocabulary: int) -> None:
        """Fill the padded rows, once the real ones hold the checkpoint's numbers."""
        padded, head = self.padded_vocabulary - vocabulary, self.lm_head.weight
        if self.embedding is not head:
            write(self.embedding, vocabulary, torch.zeros(padded, head.shape[1], device=self.norm.device))
        first = head.rows(torch.zeros(1, dtype=torch.int64)) if isinstance(head, PackedWeight) else head[:1]
        write(head, vocabulary, first.expand(padded, -1))


def linear_shapes(config: ModelConfig, vocabulary_tile: int) -> list[tuple[int, int]]:
    """(N, K) of all linear weights and tables as they are stored: fused, and with a padded vocabulary."""
    c = config
    layer = [(c.q_size + 2 * c.kv_size, c.hidden_size), (c.hidden_size, c.q_size),
             (2 * c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size)]
    table = (c.padded_vocabulary(vocabulary_tile), c.hidden_size)
    return layer * c.num_layers + [table] * (1 if c.tie_word_embeddings else 2)


def allocate(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> tuple[ModelWeights, Targets]:
    """Storage for a model, its numbers yet to be written, and which of its parts each tensor of a checkpoint fills."""
    c = config
    targets: Targets = {}

    def parts(prefix: str, kind: str, sizes: dict[str, int], storage: Weight) -> None:
        first = 0
        for name, size in sizes.items():
            targets[f"{prefix}{name}.{kind}"] = Target(storage, first, (size, *storage.shape[1:]))
            first += size

    def vector(name: str, size: int) -> Tensor:
        made = torch.empty(size, dtype=dtype, device=backend.device)
        parts("", "weight", {name: size}, made)
        return made

    def linear(prefix: str, sizes: dict[str, int], inputs: int, biased: bool) -> Linear:
        outputs = sum(sizes.values())
        weight = backend.weight(outputs, inputs, dtype)
        parts(f"{prefix}.", "weight", sizes, weight)
        if not biased:
            return Linear(weight, None)
        bias = torch.empty(outputs, dtype=dtype, device=backend.device)
        parts(f"{prefix}.", "bias", sizes, bias)
        return Linear(weight, bias)

    def table(name: str) -> Weight:
        made = backend.weight(c.padded_vocabulary(backend.vocabulary_tile), c.hidden_size, dtype)
        parts("", "weight", {name: c.vocab_size}, made)
        return made

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        heads = {"q_proj": c.q_size, "k_proj": c.kv_size, "v_proj": c.kv_size}
        halves = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        return LayerWeights(
            input_norm=vector(f"{prefix}.input_layernorm", c.hidden_size),
            qkv=linear(attention, heads, c.hidden_size, c.qkv_bias),
            q_norm=vector(f"{attention}.q_norm", c.head_dim) if c.qk_norm else None,
            k_norm=vector(f"{attention}.k_norm", c.head_dim) if c.qk_norm else None,
            o=linear(attention, {"o_proj": c.hidden_size}, c.q_size, c.o_bias),
            post_norm=vector(f"{prefix}.post_attention_layernorm", c.hidden_size),
            gate_up=linear(mlp, halves, c.hidden_size, c.mlp_bias),
            down=linear(mlp, {"down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
        )

    embedding = table("model.embed_tokens")
    layers = tuple(layer(index) for index in range(c.num_layers))
    norm = vector("model.norm", c.hidden_size)
    head = embedding if c.tie_word_embeddings else table("lm_head")
    return ModelWeights(embedding, layers, norm, Linear(head, None)), targets
