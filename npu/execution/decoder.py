"""Decoder: the sequence of kernels of a model. Families differ in the weights that exist (query and key norms, biases)
and in the table of rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from npuserve.kernels.collectives import ALONE, Ranks
from npuserve.kernels.registry import KernelSet
from npuserve.npu.execution.batch import Batch
from npuserve.npu.execution.kv_cache import KVCache
from npuserve.npu.execution.masks import RowMasks
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.shard import Span
from npuserve.npu.model.weights import ModelWeights

MAX_LOGITS_BYTES = 32 << 20
"""Bytes of a slice of logits in float32. Slices bound the memory for the logits of a long chunk."""


@dataclass(frozen=True, slots=True)
class Model:
    """Decoder with its weights.

    config: configuration of the whole model, or of this rank's shard.
    cos_sin: [P, D] float32 for the P positions that a request may have (`rope.cos_sin_table`).
    ranks: group of the model's ranks.
    """

    config: ModelConfig
    weights: ModelWeights
    cos_sin: Tensor
    kernels: KernelSet
    ranks: Ranks = ALONE

    def hidden(self, batch: Batch, cache: KVCache) -> Tensor:
        """Return the hidden states [T, H] of a batch after the final norm; write its keys and values to the cache."""
        k, w, eps = self.kernels, self.weights, self.config.rms_norm_eps
        heads, scale = self.config.local.num_heads, self.config.head_dim**-0.5
        residual = self._embedding(batch.ids)
        if self.ranks.size == 1:
            after = k.decoder_layers(residual, w.layers, cache.layers, eps, self.cos_sin, batch.positions,
                                     batch.slot_mapping, batch.attention, heads, scale)
            if after is not None:
                return k.rms_norm(after, w.norm, eps)  # type: ignore[no-any-return]  # a Tensor without a scheme
        normed = k.rms_norm(residual, w.layers[0].input_norm, eps, w.layers[0].qkv.inputs)
        follows = [*((layer.input_norm, layer.qkv.inputs) for layer in w.layers[1:]), (w.norm, None)]
        for layer, (keys, values), (next_norm, next_inputs) in zip(w.layers, cache.layers, follows, strict=True):
            qkv = k.linear(normed, layer.qkv.weight, layer.qkv.bias)
            q = k.qk_norm_rope_kv_write(
                qkv, layer.q_norm, layer.k_norm, eps, self.cos_sin, batch.positions, batch.slot_mapping,
                keys, values, heads)
            attended = k.paged_attention(q, keys, values, batch.attention, scale)
            out = self._sum(k.linear(attended, layer.o.weight, layer.o.bias))
            normed, residual = k.add_rms_norm(out, residual, layer.post_norm, eps, layer.gate_up.inputs)
            gated = k.linear_swiglu(normed, layer.gate_up.weight, layer.gate_up.bias, layer.down.inputs)
            out = self._sum(k.linear(gated, layer.down.weight, layer.down.bias))
            normed, residual = k.add_rms_norm(out, residual, next_norm, eps, next_inputs)
        return normed  # type: ignore[no-any-return]  # a Tensor, since next_inputs of the last layer is None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, Vp] of hidden [R, H] over the padded vocabulary, in the model's dtype."""
        logits = self.kernels.linear(hidden, self.weights.lm_head.weight, self.weights.lm_head.bias)
        return logits if self.ranks.size == 1 else self.kernels.all_gather(logits, self.ranks)

    def sliced_logits(self, hidden: Tensor, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits of hidden [R, H] with their part of ids [R], in slices of at most MAX_LOGITS_BYTES."""
        rows = max(1, MAX_LOGITS_BYTES // (4 * self.weights.padded_vocabulary * self.ranks.size))
        for part, of_part in zip(hidden.split(rows), ids.split(rows), strict=True):
            yield self.logits(part), of_part

    def argmax(self, hidden: Tensor, masks: RowMasks | None = None) -> Tensor:
        """Return argmax ids [R, W] int64 of hidden [R, H] under the rows' masks.

        The first column equals `greedy` of the logits, after `mask_logits`.
        """
        head, k = self.weights.lm_head, self.kernels
        if self.ranks.size == 1:
            return k.linear_argmax(hidden, head.weight, head.bias, self.config.vocab_size, *(masks or ()))
        if masks is None:
            return k.linear_argmax_shard(hidden, head.weight, head.bias, self._ids.size, self._ids.first, self.ranks)
        logits = self.logits(hidden)
        k.mask_logits(logits, self.config.vocab_size, *masks)
        return k.greedy(logits, self.config.vocab_size)

    def _embedding(self, ids: Tensor) -> Tensor:
        table, k = self.weights.embedding, self.kernels
        if self.ranks.size == 1:
            return k.embedding(ids, table)
        return self._sum(k.embedding_shard(ids, table, self._ids.first, self._ids.size))

    @property
    def _ids(self) -> Span:
        """The ids of this rank's rows of embedding and LM head."""
        return self.config.shard.vocabulary(self.config.vocab_size, self.weights.padded_vocabulary * self.ranks.size)

    def _sum(self, part: Tensor) -> Tensor:
        return part if self.ranks.size == 1 else self.kernels.all_reduce(part, self.ranks)
