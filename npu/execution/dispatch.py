"""Dispatch of a step's rows: which captured step computes them, or whether kernels are called one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from npuserve.kernels.registry import Timings
from npuserve.kernels.sample import Filters
from npuserve.npu.backends.base import Captured
from npuserve.npu.backends.capabilities import Capabilities
from npuserve.npu.execution.batch import Batch, BatchBuffers
from npuserve.npu.execution.capture import Captures
from npuserve.npu.execution.staged import Part
from npuserve.npu.step import Row

Rows = Sequence[Row]

MIN_FORCED = 2
MIN_FORCED_EAGER = 4
"""Least number of known tokens that are worth a chunk. With two steps in flight, a chunk of n tokens saves n - 1 decode
steps. Within a captured step it costs little more than a decode row. Otherwise it reads the weights a second time and
launches its kernels one by one: that takes as long as two or three captured steps."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Captured step that computes a part.

    chooses: it chooses the part's tokens too.
    takes_chunks: it takes any rows; False: decode rows.
    padded_tokens: tokens to which the part must be padded (`BatchBuffers.pad_tokens`); 0 for no padding. Decode rows
        are padded when the step is filled.
    """

    captured: Captured
    chooses: bool
    takes_chunks: bool
    padded_tokens: int = 0


class Dispatch:
    """Selection among the captured steps of a runner. Without captured steps all kernels are called one by one.

    Constrained rows are sampled outside, since their masks arrive after the forward pass is queued.
    """

    def __init__(self, captures: Captures, buffers: BatchBuffers, capabilities: Capabilities) -> None:
        self.decodes = captures.decodes
        self.chunks = captures.chunks
        self._chosen = captures.chosen
        self._computes_together = captures.computes_together
        self._buffers = buffers
        self._pads = capabilities.padding_blocks > 0
        self.compiles = capabilities.compiles

    def parts(self, rows: Rows) -> list[tuple[Rows, int]]:
        """Split a step into rows that are computed together; return them with the number that they are padded to."""
        captured = self.decodes.hidden
        if captured is None:
            return [(rows, len(rows))]
        decodes = [row for row in rows if is_decode(row)]
        if not 0 < len(decodes) <= captured.largest:
            return [(rows, len(rows))]
        size = captured.size(len(decodes))
        if len(decodes) == len(rows):
            return [(rows, size)]
        if self._computes_together:
            return [(rows, len(rows))]
        chunks = [row for row in rows if not is_decode(row)]
        return [(decodes, size), (chunks, len(chunks))]

    @property
    def min_forced(self) -> int:
        """Least number of known tokens for which a chunk is faster than as many decode rows."""
        return MIN_FORCED_EAGER if self.decodes.hidden and not self.chunks.hidden else MIN_FORCED

    @property
    def computes_drafts(self) -> bool:
        """Whether a row with drafts takes about as long as a decode row: both are captured, or neither is."""
        return self.chunks.hidden is not None or self.decodes.hidden is None

    def sampled_rows(self, part: Part) -> int:
        """Return the rows of the captured sampler that can take the part; 0 if none can."""
        if not self.decodes.sampled or part.first:
            return 0
        if _all_decode(part) and part.tokens <= self.decodes.sampled[Filters.ANY].largest:
            return part.padded
        return self._chosen if self._choosing_chunks(self.chunks.sampled.get(Filters.ANY), part) else 0

    def select(self, part: Part, *, argmax: bool, filters: Filters | None) -> Selection | None:
        """Return the captured step that serves a part; None for kernel by kernel.

        argmax: every row of the step samples its argmax token.
        filters: `sampled` can sample every row of the part, with these filters; None if it cannot.
        """
        if part.first:  # a captured step reads the beginning of the buffers
            return None
        if _all_decode(part):
            if captured := _fitting(self.decodes.choosing(argmax=argmax, filters=filters), part):
                return Selection(captured, chooses=True, takes_chunks=False)
            if captured := _fitting(self.decodes.hidden, part):
                return Selection(captured, chooses=False, takes_chunks=False)
        if captured := self._choosing_chunks(self.chunks.choosing(argmax=argmax, filters=filters), part):
            return Selection(captured, True, True, self._padded_tokens(captured, part))
        if captured := _fitting(self.chunks.hidden, part):
            return Selection(captured, False, True, self._padded_tokens(captured, part))
        return None

    def batch(self, part: Part, selection: Selection | None) -> Batch:
        """Return the batch of a part whose kernels are called one by one.

        selection: the step that would compute it in one launch. On a device that compiles, the batch is padded to that
            step's size: kernels of other sizes may not be compiled yet.
        """
        if selection is None or not self.compiles:
            return self._buffers.batch(part)
        size = selection.captured.size(part.tokens)
        return self._buffers.tokens(size) if selection.takes_chunks else self._buffers.decode(size)

    def drafting_step(self, part: Part, selection: Selection | None, depth: int) -> Captured | None:
        """Return the captured step that drafts `depth` tokens after each sample of a part; None for kernel by kernel.

        selection: the step that computes the part.
        """
        if selection is None:
            return None
        steps = self.chunks if selection.takes_chunks else self.decodes
        return _fitting(steps.drafts.get(depth), part)

    def _choosing_chunks(self, captured: Captured | None, part: Part) -> Captured | None:
        """Return a captured step of any rows; None if it cannot choose all tokens of the part."""
        return _fitting(captured, part) if len(part.samples) <= self._chosen else None

    def _padded_tokens(self, chunks: Captured, part: Part) -> int:
        return chunks.size(part.tokens) if self._pads else 0


def replay(captured: Captured, part: Part, timings: Timings | None) -> Tensor | None:
    """Replay a captured step for a part. With `timings`, add the times of its kernels.

    Return None, without running anything, if a timed replay cannot be split into kernels.
    """
    if timings is None:
        return captured.replay(part.tokens, part.context_lens, part.cu_seqlens)
    began = time.perf_counter()
    if (timed := captured.replay_timed(part.tokens, part.context_lens)) is None:
        return None
    timings.add(timed[1], began)
    return timed[0]


def _fitting(captured: Captured | None, part: Part) -> Captured | None:
    """Return a captured step; None if the part is too large for it."""
    return captured if captured is not None and part.tokens <= captured.largest else None


def _all_decode(part: Part) -> bool:
    return len(part.samples) == len(part.rows) == part.tokens


def is_decode(row: Row) -> bool:
    """Return True for a row of one token that samples: a decode row or a prompt's last token."""
    return row.samples > 0 and len(row.token_ids) == 1
