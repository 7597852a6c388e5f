"""Drafting at the end of a step, by a head for multi-token prediction or by a smaller model (predictor.py).

Kernels that are called one by one draft after the last valid sample of each row (`RowDrafting`), since the device's
results are known then. Where steps are captured, they draft after each sample (`SampleDrafting`), since the host knows
the shapes alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from npuserve.npu.backends.base import Captured, RowLengths
from npuserve.npu.execution.batch import BatchBuffers
from npuserve.npu.execution.dispatch import Dispatch, Selection
from npuserve.npu.execution.predictor import DraftedRows, Drafts, Predictor, drafted_rows
from npuserve.npu.execution.sampler import Put
from npuserve.npu.execution.staged import Part


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


@dataclass(frozen=True, slots=True)
class _SampleDrafts:
    """Drafting after each sample of a part (`Predictor.draft_all`).

    depth: number of drafts after each sample.
    samples: number of samples, padding among them.
    lengths: lengths of the rows in the batch of each token after the samples (`BatchBuffers.fill_samples`).
    captured: the captured step that drafts; None for kernel by kernel.
    """

    depth: int
    samples: int
    lengths: Sequence[RowLengths]
    captured: Captured | None


class SampleDrafting(StepDrafting):
    """Drafting after each sample, by a captured step of its own, or kernel by kernel with the same inputs.

    depths: numbers of tokens that can be drafted after a sample, ascending, 0 among them.
    """

    def __init__(
        self, predictor: Predictor, buffers: BatchBuffers, dispatch: Dispatch, depths: Sequence[int]
    ) -> None:
        super().__init__(predictor, buffers)
        assert buffers.drafting is not None
        self._draft_buffers = buffers.drafting
        self._dispatch = dispatch
        self._depths = depths

    def plan(
        self, part: Part, first: int, selection: Selection | None, put: Put, *, is_timed: bool
    ) -> PlannedDrafts | None:
        if not part.has_head:
            return None
        depth = self._depth(part)
        drafts = self._write(part, selection, depth, is_timed=is_timed)
        return PlannedDrafts(depth, partial(self._draft, part, selection, drafts))

    def _depth(self, part: Part) -> int:
        """Return the number of drafts after each sample of a part. Only the first part of a step has some.

        Steps with too many samples have none (`DraftBuffers.most_samples`).
        """
        has_drafts = not part.first and len(part.samples) <= self._draft_buffers.most_samples
        wanted = max(row.predicts for row in part.rows) if has_drafts else 0
        depth = next((depth for depth in self._depths if depth >= wanted), None)
        if depth is None:
            raise ValueError(f"{wanted} drafts after a row, where at most {self._depths[-1]} are possible")
        return depth

    def _write(self, part: Part, selection: Selection | None, depth: int, *, is_timed: bool) -> _SampleDrafts:
        """Write the samples of a part and the tokens after each. Return how `depth` drafts after each are computed."""
        step = self._dispatch.drafting_step(part, selection, depth)
        captured = None if is_timed else step
        samples = len(part.samples)
        if not depth:
            return _SampleDrafts(0, samples, [], captured)
        is_decode = False
        # As in `Dispatch.batch`: kernels that are called one by one are padded only on a device that compiles.
        if selection is not None and step is not None and (captured is not None or self._dispatch.compiles):
            size = step.size(part.tokens)
            is_decode = not selection.takes_chunks
            samples = size if is_decode else self._draft_buffers.drafted_samples(size)
        lengths = self._buffers.fill_samples(
            part, samples, self._predictor.num_following(depth), is_decode=is_decode)
        return _SampleDrafts(depth, samples, lengths, captured)

    def _draft(
        self, part: Part, selection: Selection | None, drafts: _SampleDrafts, hidden: Tensor
    ) -> list[Drafts]:
        """Draft from what the step kept (`Predictor.keep`); the ids of the drafts are copied with the sampled ones."""
        if drafts.captured is not None:
            drafts.captured.replay(part.tokens, part.head_context_lens, part.cu_seqlens, drafts.lengths)
        else:
            sampled = self._buffers.samples_of(drafts.lengths, drafts.samples)
            self._predictor.draft_all(self._dispatch.batch(part, selection), sampled, drafts.depth)
        return []
