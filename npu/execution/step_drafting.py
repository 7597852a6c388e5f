"""Drafting at the end of a step, by a head for multi-token prediction or by a smaller model (predictor.py).

Kernels that are called one by one draft after the last valid sample of each row (`RowDrafting`), since the device's
results are known then. Where steps are captured, they draft after each sample (`SampleDrafting`), since the host knows
the shapes alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from npuserve.npu.execution.batch import BatchBuffers, Part
from npuserve.npu.execution.dispatch import Dispatch, Drafting, Selection
from npuserve.npu.execution.predictor import DraftedRows, Drafts, Predictor, drafted_rows
from npuserve.npu.execution.sampler import Put


class PlannedDrafts(NamedTuple):
    """Drafting after a part of a step.

    depth: number of drafts after each sample; 0 for drafts by row.
    queue: queues it once the part is sampled. Takes the hidden states of the part, and returns the drafts by row.
    """

    depth: int
    queue: Callable[[Tensor], list[Drafts]]


class StepDrafting(ABC):
    """Drafting at the end of each step."""

    def __init__(self, predictor: Predictor, buffers: BatchBuffers) -> None:
        self._predictor = predictor
        self._buffers = buffers

    def prepare(self, part: Part) -> None:  # noqa: B027  # captured steps precede the sampling whole
        """Compute what precedes the sampling of a part. Call it within enqueued work."""

    @abstractmethod
    def plan(
        self, part: Part, first: int, selection: Selection | None, put: Put, *, is_timed: bool
    ) -> PlannedDrafts | None:
        """Plan the drafting after a part, and write its inputs; None if it is not computed.

        first: index of the part's first sample among those of the step.
        selection: the captured step that computes the part.
        is_timed: the kernels of the step are called one by one, to time each.
        """


class RowDrafting(StepDrafting):
    """Drafting after the last valid sample of each row, kernel by kernel."""

    def prepare(self, part: Part) -> None:
        if not part.has_head:
            return
        self._predictor.prepare(self._buffers.batch(part))

    def plan(
        self, part: Part, first: int, selection: Selection | None, put: Put, *, is_timed: bool
    ) -> PlannedDrafts | None:
        if not part.has_head:
            return None
        return PlannedDrafts(0, partial(self._draft, part, drafted_rows(part, first, put)))

    def _draft(self, part: Part, drafted: DraftedRows | None, hidden: Tensor) -> list[Drafts]:
        return self._predictor.draft(self._buffers.batch(part), hidden, drafted)


class SampleDrafting(StepDrafting):
    """Drafting after each sample, by a captured step of its own, or kernel by kernel with the same inputs."""

    def __init__(self, predictor: Predictor, buffers: BatchBuffers, dispatch: Dispatch) -> None:
        super().__init__(predictor, buffers)
        self._dispatch = dispatch

    def plan(
        self, part: Part, first: int, selection: Selection | None, put: Put, *, is_timed: bool
    ) -> PlannedDrafts | None:
        if not part.has_head:
            return None
        drafting = self._dispatch.drafting(part, selection, is_timed=is_timed)
        return PlannedDrafts(drafting.depth, partial(self._draft, part, selection, drafting))

    def _draft(
        self, part: Part, selection: Selection | None, drafting: Drafting, hidden: Tensor
    ) -> list[Drafts]:
        """Draft from what the step kept (`Predictor.keep`); the ids of the drafts are copied with the sampled ones."""
        if drafting.captured is not None:
            drafting.captured.replay(part.tokens, part.head_context_lens, part.cu_seqlens, drafting.lengths)
        else:
            sampled = self._buffers.samples_of(drafting.lengths, drafting.samples)
            self._predictor.draft_all(self._dispatch.batch(part, selection), sampled, drafting.depth)
        return []
