"""Drafts of the tokens that follow those of a step, by a head for multi-token prediction (MTP), an EAGLE-3 head, or a
smaller model.

The samples of a row are compared with its drafts, on the device. New drafts follow the sample after the last right one.
They write keys and values beyond the row, which the next row overwrites.

The MTP head is one layer of attention with keys and values of its own, in the blocks of the request. Its input at
position p is the model's hidden state there and the token at p + 1; its output predicts the token at p + 2:

    position    p - 1    p      p + 1
    hidden      h        h
    next token  x(p)     s                   s: sampled after position p
    output               m ──► draft 1
                                m' ──► draft 2, from m and draft 1

1. `forward` computes all tokens of a step, so that the head has keys and values wherever the model has them: of
   prompts, in blocks of the prefix cache, and after a preemption. Sampled ids are read on the device. Steps of a head
   that does not pay leave it out; later ones read its keys behind these positions alone (`Row.head_start`).
2. The output after the last right draft predicts the first new one.
3. Further drafts take the head's own output in place of the model's.

A position's keys and values depend on the token after it, which another request with the same prefix may not have. So
those of the last position of a cached prefix may belong to another token: a draft becomes less probable, and no answer
changes.

An EAGLE-3 head has the same place, with a feature of the inputs of some layers instead of the model's hidden state.

A smaller model has keys and values of its own, in the same blocks. It computes all tokens of a step, then the sample
after the last right draft, and each draft but the last.

`draft` takes the rows' valid tokens together, of which the host does not know the positions. Where steps are captured,
`draft_all` drafts after each sample as if it were the last valid one (draft_buffers.py), from memory at fixed
addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.npu.backends.base import Backend
from npuserve.npu.execution.batch import Batch
from npuserve.npu.execution.decoder import InputReader, Model
from npuserve.npu.execution.draft_buffers import SampledTokens
from npuserve.npu.execution.sampler import Put
from npuserve.npu.execution.staged import Part
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.eagle import EagleHead
from npuserve.npu.model.weights import EagleWeights, ModelWeights, MtpWeights


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Rows of a part after which tokens are drafted, those with the most drafts first.

    requests: their requests.
    counts: number of rows with a 1st, 2nd, ... draft.
    rows: [N] int64, their numbers in the part.
    samples, tokens: [N, W] int64, index of each of a row's samples among those of the step, and of the token before it
        in the part. The last ones repeat.
    drafts: [N, W] int64, the draft that each sample is compared with; -1 for none.
    """

    requests: list[int]
    counts: list[int]
    rows: Tensor
    samples: Tensor
    tokens: Tensor
    drafts: Tensor


class Drafts(NamedTuple):
    """Drafted tokens [N] int64 of N requests, on the device or on the host."""

    requests: list[int]
    ids: Tensor


class Predictor(ABC):
    """Source of drafts on the device.

    model: layers that compute the drafts, with an LM head.
    store: their keys and values.
    last: ids that the latest step sampled.
    ids: [D, S] int64, where `draft_all` writes the 1st, 2nd, ... draft after each sample.

    reads_next_ids: it reads `Batch.next_ids` and `Batch.head`.
    """

    reads_next_ids = False

    def __init__(self, model: Model, store: StateStore, block_size: int, last: Tensor, ids: Tensor) -> None:
        self.store = store
        self._model = model
        self._block_size = block_size
        self._last = last
        self._ids = ids

    @property
    def reader(self) -> InputReader | None:
        """What takes the inputs of the served model's layers; None if nothing does."""
        return None

    @staticmethod
    @abstractmethod
    def num_following(depth: int) -> int:
        """Return the number of tokens after each sample that are computed for `depth` drafts."""

    @abstractmethod
    def keep(self, ids: Tensor, hidden: Tensor) -> None:
        """Keep what `draft_all` needs of a batch: its ids [T], and its hidden states [T, H]."""

    @abstractmethod
    def draft_all(self, batch: Batch, sampled: SampledTokens, depth: int) -> Tensor:
        """Draft `depth` tokens after each sample of the batch that was kept last. Return what was computed last."""

    @abstractmethod
    def prepare(self, batch: Batch) -> None:
        """Compute what precedes the sampling of a batch. `last` has the ids of the step before."""

    @abstractmethod
    def draft(self, batch: Batch, hidden: Tensor, drafted: DraftedRows | None) -> list[Drafts]:
        """Return the 1st, 2nd, ... drafts of the rows of a batch whose tokens are sampled.

        hidden: [T, H] of the served model. drafted: None if no tokens are drafted.
        """

    def _num_right(self, drafted: DraftedRows) -> Tensor:
        """Return the number [N, 1] int64 of each row's drafts before the first that differs from its sample."""
        is_right = self._last[drafted.samples] == drafted.drafts
        return is_right.to(torch.int64).cumprod(1).sum(1, keepdim=True)

    def _choose(self, requests: list[int], hidden: Tensor) -> Drafts:
        return Drafts(requests, self._best(hidden)[:, 0].contiguous())

    def _best(self, hidden: Tensor) -> Tensor:
        """Return the draft [R, W] int64 after each of hidden [R, H] in the first column."""
        return self._model.argmax(hidden)

    def _choose_all(self, hidden: Tensor, number: int) -> Tensor:
        """Return the draft after each sample; keep it as the one with this number, from 0 on."""
        ids = self._ids[number, : len(hidden)]
        self._model.kernels.keep_ids(self._best(hidden), ids)
        return ids

    def _is_valid(self, sampled: SampledTokens) -> Tensor:
        """Return [S] bool, whether each sample is the last valid one of its row: the first that differs from its
        draft."""
        samples = len(sampled.drafts)
        is_right = (self._last[:samples] == sampled.drafts).to(torch.int32)
        right_before = is_right.cumsum(0, dtype=torch.int32) - is_right
        numbers = torch.arange(samples, device=is_right.device) - sampled.begins
        right_in_row = right_before - right_before.index_select(0, sampled.begins)
        return torch.logical_and(right_in_row == numbers, is_right == 0)

    def _after_samples(
        self, batch: Batch, sampled: SampledTokens, is_valid: Tensor, number: int, ids: Tensor
    ) -> Batch:
        """Return the batch of the tokens with this number after each sample, from 0 on."""
        following = sampled.following[number]
        slots = torch.where(is_valid, following.slots, sampled.padding)
        return replace(
            batch, ids=ids, positions=following.positions, slot_mapping=slots, attention=following.attention)

    def _following(
        self, batch: Batch, rows: Tensor, positions: Tensor, ids: Tensor, keys: AttentionMetadata | None = None
    ) -> Batch:
        """Return the batch of one token at `positions` of each of `rows`.

        keys: whose tables and contexts attention reads, if other than those of the batch.
        """
        tables = batch.attention.block_tables[rows]
        blocks = tables.gather(1, (positions // self._block_size)[:, None]).flatten().to(torch.int64)
        context_lens = positions + 1
        if keys is not None:
            tables = keys.block_tables[rows]
            context_lens = context_lens - (batch.attention.context_lens - keys.context_lens)[rows]
        context_lens = context_lens.to(torch.int32)
        count = len(rows)
        attention = AttentionMetadata(
            tables, context_lens, torch.arange(count + 1, dtype=torch.int32, device=rows.device),
            context_lens.tolist(), list(range(count + 1)))
        return replace(batch, ids=ids, positions=positions, attention=attention,
                       slot_mapping=blocks * self._block_size + positions % self._block_size)


class HiddenHead(Predictor):
    """Head whose input at a position is a hidden state there and the embedding of the next token."""

    reads_next_ids = True

    @staticmethod
    def num_following(depth: int) -> int:
        return max(0, depth - 1)

    def prepare(self, batch: Batch) -> None:
        """Do nothing: the head's input is computed with the model."""

    @abstractmethod
    def forward(self, batch: Batch, hidden: Tensor, next_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's output [T, H], and the hidden state [T, H] for the position after; write its keys and
        values.

        batch: with the attention of the head.
        hidden: [T, H], of the step or of an earlier `forward`. next_ids: [T] int64, token after each position.
        """

    @abstractmethod
    def _kept(self, count: int) -> Tensor:
        """Return the hidden states of the `count` tokens that were kept last."""

    @abstractmethod
    def _of_step(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of the step's tokens. hidden: [T, H] of the served model."""

    def draft_all(self, batch: Batch, sampled: SampledTokens, depth: int) -> Tensor:
        assert batch.next_ids is not None
        next_ids = self._model.kernels.take_ids(batch.next_ids, self._last)
        outputs, hidden = self.forward(_of_head(batch), self._kept(len(next_ids)), next_ids)
        if not depth:
            return outputs
        outputs, hidden = _selected(outputs, hidden, sampled.tokens)
        ids = self._choose_all(outputs, 0)
        if depth == 1:
            return ids
        is_valid = self._is_valid(sampled)
        for number in range(1, depth):
            following = self._after_samples(batch, sampled, is_valid, number - 1, ids)
            outputs, hidden = self.forward(following, hidden, ids)
            ids = self._choose_all(outputs, number)
        return ids

    def draft(self, batch: Batch, hidden: Tensor, drafted: DraftedRows | None) -> list[Drafts]:
        assert batch.next_ids is not None
        next_ids = self._model.kernels.take_ids(batch.next_ids, self._last)
        outputs, hidden = self.forward(_of_head(batch), self._of_step(hidden), next_ids)
        if drafted is None:
            return []
        tokens = drafted.tokens.gather(1, self._num_right(drafted)).flatten()
        outputs, hidden = _selected(outputs, hidden, tokens)
        positions = batch.positions[tokens]
        result: list[Drafts] = []
        for count in drafted.counts:
            if result:
                positions = positions[:count] + 1
                ids = result[-1].ids[:count]
                following = self._following(batch, drafted.rows[:count], positions, ids, batch.head)
                outputs, hidden = self.forward(following, hidden[:count], ids)
            result.append(self._choose(drafted.requests[:count], outputs))
        return result


class MtpHead(HiddenHead):
    """Head of the served model, with its embedding and LM head."""

    def __init__(
        self, model: Model, store: StateStore, block_size: int, last: Tensor, ids: Tensor, weights: MtpWeights,
        hidden: Tensor | None,
    ) -> None:
        """hidden: [T, H], memory for the hidden states of a step; None if `keep` is not called."""
        super().__init__(model, store, block_size, last, ids)
        self._weights = weights
        self._hidden = hidden

    def keep(self, ids: Tensor, hidden: Tensor) -> None:
        assert self._hidden is not None
        self._hidden[: len(hidden)].copy_(hidden)

    def _kept(self, count: int) -> Tensor:
        assert self._hidden is not None
        return self._hidden[:count]

    def _of_step(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, batch: Batch, hidden: Tensor, next_ids: Tensor) -> tuple[Tensor, Tensor]:
        k = self._model.kernels
        weights = self._weights
        eps = self._model.config.rms_norm_eps
        embedded = k.rms_norm(self._model.embedding(next_ids), weights.embedding_norm, eps)
        normed = k.rms_norm(hidden.contiguous(), weights.hidden_norm, eps)
        both = torch.cat((embedded, normed), 1)
        output = self._model.layers(k.linear(both, weights.fc.weight, weights.fc.bias), batch, self.store)
        return output, output


class Eagle3Head(HiddenHead):
    """EAGLE-3 head (npu/model/eagle.py), with an LM head for ids of its own.

    While the served model is computed, or recorded, the head makes its features from the inputs of layers (`read`), and
    keeps those of the step. A further draft takes the layer's output before the final norm in their place.
    """

    def __init__(
        self, model: Model, store: StateStore, block_size: int, last: Tensor, ids: Tensor, eagle: EagleHead,
        weights: EagleWeights, features: Tensor,
    ) -> None:
        """features: [T, H], memory for those of a step."""
        super().__init__(model, store, block_size, last, ids)
        self._eagle = eagle
        self._weights = weights
        self._features = features
        self._sum: Tensor | None = None

    @property
    def reader(self) -> InputReader:
        return self

    def read(self, layer: int, residual: Tensor) -> None:
        """Add the product of a layer's input [T, S] and its part of fc to the features, if the head reads it."""
        inputs = self._eagle.inputs
        if layer not in inputs:
            return
        k = self._model.kernels
        fc = self._weights.fc[inputs.index(layer)]
        product = k.linear(residual, fc.weight, fc.bias)
        if layer != inputs[0]:
            assert self._sum is not None
            _, product = k.add_rms_norm(  # the norm is not used
                product, self._sum, self._weights.embedding_norm, self._model.config.rms_norm_eps)
        self._sum = product
        if layer == inputs[-1]:
            k.keep_rows(product, self._features)
            self._sum = None

    def keep(self, ids: Tensor, hidden: Tensor) -> None:
        """Do nothing: `read` keeps the features."""

    def _kept(self, count: int) -> Tensor:
        return self._features[:count]

    def _of_step(self, hidden: Tensor) -> Tensor:
        return self._features[: len(hidden)]

    def forward(self, batch: Batch, hidden: Tensor, next_ids: Tensor) -> tuple[Tensor, Tensor]:
        k = self._model.kernels
        eps = self._model.config.rms_norm_eps
        embedded = k.rms_norm(self._model.embedding(next_ids), self._weights.embedding_norm, eps)
        features = hidden.contiguous()
        normed = k.rms_norm(features, self._model.weights.layers[0][0].norm, eps)
        residual = normed if self._eagle.norms_residual else features
        return self._model.layers_after_norm(torch.cat((embedded, normed), 1), residual, batch, self.store)

    def _best(self, hidden: Tensor) -> Tensor:
        ids = super()._best(hidden)
        return ids if self._weights.served_ids is None else self._weights.served_ids[ids]


class DraftModel(Predictor):
    """Smaller model with the same vocabulary."""

    def __init__(
        self, model: Model, store: StateStore, block_size: int, last: Tensor, ids: Tensor, tokens: Tensor | None
    ) -> None:
        """tokens: [T] int64, memory for the ids of a step; None if `keep` is not called."""
        super().__init__(model, store, block_size, last, ids)
        self._tokens = tokens

    @staticmethod
    def num_following(depth: int) -> int:
        return depth

    def keep(self, ids: Tensor, hidden: Tensor) -> None:
        assert self._tokens is not None
        self._tokens[: len(ids)].copy_(ids)

    def draft_all(self, batch: Batch, sampled: SampledTokens, depth: int) -> Tensor:
        assert self._tokens is not None
        kept = replace(batch, ids=self._tokens[: len(batch.positions)])
        outputs = self._model.hidden(kept, self.store)
        if not depth:
            return outputs
        is_valid = self._is_valid(sampled)
        ids = self._last[: len(sampled.tokens)]
        for number in range(depth):
            following = self._after_samples(batch, sampled, is_valid, number, ids)
            ids = self._choose_all(self._model.hidden(following, self.store), number)
        return ids

    def prepare(self, batch: Batch) -> None:
        """Compute the keys and values of all tokens of a batch."""
        ids = self._model.kernels.take_ids(batch.ids, self._last)
        self._model.hidden(replace(batch, ids=ids), self.store)

    def draft(self, batch: Batch, hidden: Tensor, drafted: DraftedRows | None) -> list[Drafts]:
        if drafted is None:
            return []
        num_right = self._num_right(drafted)
        positions = batch.positions[drafted.tokens.gather(1, num_right).flatten()]
        ids = self._last[drafted.samples.gather(1, num_right).flatten()]
        result: list[Drafts] = []
        for count in drafted.counts:
            positions = positions[:count] + 1
            following = self._following(batch, drafted.rows[:count], positions, ids[:count])
            result.append(self._choose(drafted.requests[:count], self._model.hidden(following, self.store)))
            ids = result[-1].ids
        return result


def predictor_of(
    model: Model, draft: ModelWeights | None, backend: Backend, allocate: Callable[[ModelConfig], StateStore],
    block_size: int, sampled_ids: Tensor, kept_tokens: int, max_tokens: int,
) -> Predictor | None:
    """Return what drafts tokens beside a model; None if nothing does.

    draft: weights of a smaller model, or of an EAGLE-3 head.
    allocate: allocates the keys and values of a configuration.
    sampled_ids: [1 + D, S] int64, for the ids of a step and the drafts after each.
    kept_tokens: most tokens of a step of which `Predictor.keep` keeps something; 0 if it is not called.
    max_tokens: most tokens of a step.
    """
    last, drafts = sampled_ids[0], sampled_ids[1:]
    if (config := model.config.draft) is not None and draft is not None:
        smaller = Model.of(config, draft, len(model.cos_sin), model.kernels, backend, model.ranks)
        if config.eagle and draft.eagle:
            features = backend.empty((max_tokens, config.hidden_size), draft.dtype).zero_()
            return Eagle3Head(
                smaller, allocate(config), block_size, last, drafts, config.eagle, draft.eagle, features)
        kept_ids = backend.empty((kept_tokens,), torch.int64).zero_() if kept_tokens else None
        return DraftModel(smaller, allocate(config), block_size, last, drafts, kept_ids)
    head = model.weights.mtp
    tables = model.weights.predictor
    if (config := model.config.predictor) is None or head is None or tables is None:
        return None
    layers = replace(model, config=config, weights=tables)
    kept_hidden = None
    if kept_tokens:
        kept_hidden = backend.empty((kept_tokens, config.hidden_size), model.weights.dtype).zero_()
    return MtpHead(layers, allocate(config), block_size, last, drafts, head, kept_hidden)


def _selected(outputs: Tensor, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows `tokens` [N] of both, which may be one tensor."""
    selected = outputs.index_select(0, tokens)
    return selected, selected if hidden is outputs else hidden.index_select(0, tokens)


def _of_head(batch: Batch) -> Batch:
    """Return a batch with the attention of a head."""
    assert batch.head is not None
    return replace(batch, attention=batch.head)


def drafted_rows(part: Part, first: int, put: Put) -> DraftedRows | None:
    """Return the rows of a part after which tokens are drafted; None if there are none.

    first: index of the part's first sample among those of the step.
    """
    ends = part.cu_seqlens[1:]
    begins: list[int] = []
    for row in part.rows:
        begins.append(first)
        first += row.samples
    numbers = [number for number, row in enumerate(part.rows) if row.predicts]
    if not numbers:
        return None
    rows = part.rows
    numbers.sort(key=lambda number: -rows[number].predicts)
    width = max(rows[number].samples for number in numbers)
    samples: list[list[int]] = []
    tokens: list[list[int]] = []
    drafts: list[list[int]] = []
    for number in numbers:
        count = rows[number].samples
        places = [min(place, count - 1) for place in range(width)]
        samples.append([begins[number] + place for place in places])
        tokens.append([ends[number] - count + place for place in places])
        drafts.append([*rows[number].drafts, *[-1] * (width - count + 1)])
    return DraftedRows(
        [rows[number].request_id for number in numbers],
        _counts([rows[number].predicts for number in numbers]),
        *(put(np.array(values, np.int64)) for values in (numbers, samples, tokens, drafts)))


def _counts(predicted: Sequence[int]) -> list[int]:
    """Return the number of rows with a 1st, 2nd, ... draft. predicted: descending."""
    return [sum(count > depth for count in predicted) for depth in range(predicted[0])]
