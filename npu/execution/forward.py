"""Forward pass of a batch: decoder, LM head and sampler over memory at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from npuserve.kernels.sample import Filters
from npuserve.npu.execution.batch import Batch, BatchBuffers
from npuserve.npu.execution.decoder import InputReader, Model
from npuserve.npu.execution.masks import RowMasks
from npuserve.npu.execution.predictor import Predictor
from npuserve.npu.execution.sampler import Logprobs, RowPlan, Sampler
from npuserve.npu.execution.state_store import StateStore


class Forward:
    """Forward pass, called kernel by kernel, or by the backend while it captures a step.

    last: [R] int64, the ids that the last step sampled. The PENDING tokens of a batch refer to them, and each method
        that chooses tokens writes them, from index `first` on.
    buffers: sampling parameters of `sample_fixed`.
    predictor: keeps what it drafts from (`Predictor.keep`); None if it drafts from nothing that a step keeps.
    reader: takes the inputs of the model's layers.
    """

    def __init__(
        self, model: Model, store: StateStore, sampler: Sampler, buffers: BatchBuffers, last: Tensor,
        predictor: Predictor | None = None, reader: InputReader | None = None,
    ):
        self._model = model
        self._store = store
        self._sampler = sampler
        self._buffers = buffers
        self._last = last
        self._predictor = predictor
        self._reader = reader

    def hidden(self, batch: Batch) -> Tensor:
        """Return the hidden states [T, H] of a batch after the final norm."""
        ids = self._model.kernels.take_ids(batch.ids, self._last)
        hidden = self._model.hidden(replace(batch, ids=ids), self._store, self._reader)
        if self._predictor is not None:
            self._predictor.keep(ids, hidden)
        return hidden

    def choose_argmax(self, hidden: Tensor, first: int = 0, masks: RowMasks | None = None) -> None:
        """Choose the argmax token of each row of hidden [R, H]."""
        self._keep(self._model.argmax(hidden, masks), first)

    def choose_fixed(self, hidden: Tensor, filters: Filters, first: int = 0) -> None:
        """Sample each row of hidden [R, H] by the parameters of the first R rows of the buffers."""
        logits = self._model.logits(hidden)
        self._keep(self._sampler.sample_fixed(logits, self._buffers.sampling(len(hidden)), filters), first)

    def choose_planned(
        self, hidden: Tensor, plan: RowPlan, first: int, masks: RowMasks | None, valid: Mapping[int, int]
    ) -> Logprobs | None:
        """Sample each row of hidden [R, H] by a plan; return the reports of its rows. valid: see `Sampler.sample`."""
        sampled = self._sampler.sample(self._model.logits(hidden), plan, masks, valid)
        self._keep(sampled.ids, first)
        return sampled.logprobs

    def prompt_logprobs(self, hidden: Tensor, next_ids: Tensor, top: int) -> list[Logprobs]:
        """Return reports of the prompt tokens next_ids [T] that hidden [T, H] predicts, with `top` tokens each."""
        return [self._sampler.prompt_logprobs(logits, ids, top)
                for logits, ids in self._model.sliced_logits(hidden, next_ids)]

    def warm_up(self, hidden: Tensor) -> None:
        """Call LM head and sampler for hidden [R, H], so that their kernels are compiled and loaded."""
        self._model.argmax(hidden)
        self._sampler.warm_up(self._model.logits(hidden))

    def _keep(self, ids: Tensor, first: int) -> None:
        self._model.kernels.keep_ids(ids, self._last[first : first + len(ids)])
