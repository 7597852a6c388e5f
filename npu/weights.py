"""A model's weights as the kernels take them: projections that share an input are fused, the vocabulary is padded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from npuserve.npu.model_config import ModelConfig

Targets = dict[str, Tensor]
"""A checkpoint's tensor name -> the view of the fused storage that it fills."""


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [N, K], bias [N] or None."""

    weight: Tensor
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

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear

    @property
    def padded_vocabulary(self) -> int:
        return self.lm_head.weight.shape[0]

    def fill_padding(self, vocabulary: int) -> None:
        """Fill the padded rows, once the real ones hold the checkpoint's numbers."""
        self.embedding[vocabulary:] = 0
        self.lm_head.weight[vocabulary:] = self.lm_head.weight[0]


def allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, vocabulary_tile: int
) -> tuple[ModelWeights, Targets]:
    """Uninitialized storage for a model, and which of its parts each tensor of a checkpoint fills."""
    c = config
    targets: Targets = {}

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def vector(name: str, size: int) -> Tensor:
        targets[f"{name}.weight"] = made = tensor(size)
        return made

    def linear(prefix: str, parts: dict[str, int], inputs: int, bias: bool) -> Linear:
        sizes = list(parts.values())
        made = Linear(tensor(sum(sizes), inputs), tensor(sum(sizes)) if bias else None)
        for kind, whole in (("weight", made.weight), ("bias", made.bias)):
            if whole is not None:
                targets.update(
                    {f"{prefix}.{name}.{kind}": view for name, view in zip(parts, whole.split(sizes), strict=True)}
                )
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

    padded = c.padded_vocabulary(vocabulary_tile)
    embedding = tensor(padded, c.hidden_size)
    targets["model.embed_tokens.weight"] = embedding[: c.vocab_size]
    layers = tuple(layer(index) for index in range(c.num_layers))
    norm = vector("model.norm", c.hidden_size)
    head = embedding if c.tie_word_embeddings else tensor(padded, c.hidden_size)
    if not c.tie_word_embeddings:
        targets["lm_head.weight"] = head[: c.vocab_size]
    return ModelWeights(embedding, layers, norm, Linear(head, None)), targets
