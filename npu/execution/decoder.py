"""Decoder: embedding, the blocks of a model, and its LM head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from torch import Tensor

from npuserve.kernels.collectives import ALONE, Ranks
from npuserve.kernels.registry import KernelSet
from npuserve.npu.backends.base import Backend
from npuserve.npu.execution.batch import Batch
from npuserve.npu.execution.masks import RowMasks
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.model.layers.layer import Inputs
from npuserve.npu.model.layers.shard import Span
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.model.weights import ModelWeights

MAX_LOGITS_BYTES = 32 << 20
"""Bytes of a slice of logits in float32. Slices bound the memory for the logits of a long chunk."""


class InputReader(Protocol):
    """Takes the inputs of layers while a model is computed, or recorded."""

    def read(self, layer: int, residual: Tensor) -> None:
        """Take the input [T, H] of a layer."""


@dataclass(frozen=True, slots=True)
class Model:
    """Decoder with its weights.

    config: configuration of the whole model, or of this rank's shard.
    cos_sin: [P, D] float32 for the P positions that a request may have (`rope.cos_sin_table`).
    ranks: group of the model's ranks.
    counts_together: see `Capabilities`.
    """

    config: ModelConfig
    weights: ModelWeights
    cos_sin: Tensor
    kernels: KernelSet
    ranks: Ranks = ALONE
    counts_together: bool = False

    @staticmethod
    def of(
        config: ModelConfig, weights: ModelWeights, length: int, kernels: KernelSet, backend: Backend,
        ranks: Ranks = ALONE,
    ) -> Model:
        """Return a model for requests of at most `length` tokens."""
        cos_sin = cos_sin_table(config.rope, config.attention.head_dim, length, backend.device)
        return Model(config, weights, cos_sin, kernels, ranks, backend.capabilities.counts_together)

    def hidden(self, batch: Batch, store: StateStore, reader: InputReader | None = None) -> Tensor:
        """Return the hidden states [T, H] of a batch after the final norm; write its state to the store.

        reader: takes the inputs of the layers.
        """
        return self.layers(self.embedding(batch.ids), batch, store, reader)

    def layers(
        self, residual: Tensor, batch: Batch, store: StateStore, reader: InputReader | None = None
    ) -> Tensor:
        """Return the output [T, H] of all layers after the final norm; write their state to the store.

        residual: [T, H], input of the first layer.
        """
        k = self.kernels
        w = self.weights
        eps = self.config.rms_norm_eps
        inputs = self._inputs(batch)
        if reader is None and (after := self._fused_layers(residual, store, inputs)) is not None:
            return k.rms_norm(after, w.norm, eps)  # type: ignore[no-any-return]  # a Tensor without a scheme
        first = w.layers[0][0]
        normed = k.rms_norm(residual, first.norm, eps, first.input_scheme)
        return self._layers(normed, residual, store, inputs, reader)[0]

    def layers_after_norm(
        self, normed: Tensor, residual: Tensor, batch: Batch, store: StateStore
    ) -> tuple[Tensor, Tensor]:
        """Return the output [T, H] of all layers after the final norm, and before it; write their state to the store.

        normed: input of the first layer's mixer, in place of the norm of the residual stream [T, H].
        """
        return self._layers(normed, residual, store, self._inputs(batch), None)

    def _inputs(self, batch: Batch) -> Inputs:
        return Inputs(self.kernels, batch.positions, batch.slot_mapping, batch.attention, batch.state_slots,
                      self.cos_sin, self.config.rms_norm_eps, [] if self.counts_together else None)

    def _layers(
        self, normed: Any, residual: Tensor, store: StateStore, inputs: Inputs, reader: InputReader | None
    ) -> tuple[Tensor, Tensor]:
        k = self.kernels
        blocks = list(self.weights.blocks)
        following = [*((block.norm, block.input_scheme, block.layer.reads_float32) for block in blocks[1:]),
                     (self.weights.norm, None, False)]
        ends = accumulate(map(len, self.weights.layers), initial=0)
        begins = {end: layer for layer, end in enumerate(ends)} if reader is not None else {}
        for place, (block, state, (norm, scheme, widens)) in enumerate(
                zip(blocks, store.states, following, strict=True)):
            if reader is not None and place in begins:
                reader.read(begins[place], residual)
            out = self._sum(block.layer.forward(normed, block.weights, state, inputs))
            normed, residual = k.add_rms_norm(out, residual, norm, inputs.eps, scheme, widens)
        if inputs.uncounted:
            store.count(inputs.uncounted)
        return normed, residual  # the final norm has no scheme

    def _fused_layers(self, residual: Tensor, store: StateStore, inputs: Inputs) -> Tensor | None:
        """Return the residual stream after all layers in one kernel; None if the backend or the model has none."""
        if self.ranks.size > 1 or "decoder_layers" not in self.kernels.labels:
            return None
        attention = self.weights.layers[0][0].layer
        layers = self.weights.attention_layers()
        if layers is None or not isinstance(attention, Attention):
            return None
        return self.kernels.decoder_layers(
            residual, layers, store.paged, inputs.eps, inputs.cos_sin, inputs.positions, inputs.slot_mapping,
            inputs.attention, attention.num_heads, attention.head_dim**-0.5)

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
        head = self.weights.lm_head
        k = self.kernels
        if self.ranks.size == 1:
            return k.linear_argmax(hidden, head.weight, head.bias, self.config.vocab_size, *(masks or ()))
        if masks is None:
            return k.linear_argmax_shard(hidden, head.weight, head.bias, self._ids.size, self._ids.first, self.ranks)
        logits = self.logits(hidden)
        k.mask_logits(logits, self.config.vocab_size, *masks)
        return k.greedy(logits, self.config.vocab_size)

    def embedding(self, ids: Tensor) -> Tensor:
        """Return the embeddings [T, H] of ids [T] int64."""
        table = self.weights.embedding
        k = self.kernels
        if self.ranks.size == 1:
            return k.embedding(ids, table)
        return self._sum(k.embedding_shard(ids, table, self._ids.first, self._ids.size))

    @property
    def _ids(self) -> Span:
        """The ids of this rank's rows of embedding and LM head."""
        return self.config.shard.vocabulary(self.config.vocab_size, self.weights.padded_vocabulary * self.ranks.size)

    def _sum(self, part: Tensor) -> Tensor:
        return part if self.ranks.size == 1 else self.kernels.all_reduce(part, self.ranks)
