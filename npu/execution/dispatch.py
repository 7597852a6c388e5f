"""Dispatch of a step's rows: which captured step computes them, or whether kernels are called one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from npuserve.kernels.registry import Timings
from npuserve.npu.backends.base import Backend, Captured
from npuserve.npu.execution.batch import Batch, BatchBuffers, Part
from npuserve.npu.step import Row

Rows = Sequence[Row]


class Dispatch:
    """Selection among the captured steps of a runner.

    greedy: decode rows with argmax sampling, LM head included; None if the backend captures no decode steps. It does
        not serve constrained rows, whose masks arrive after the forward pass is queued.
    decode: decode rows up to the final norm; `mixed` if decode steps need no padding.
    mixed: any rows up to the final norm.

    hidden: computes a batch up to the final norm.
    argmax_step: computes the given number of decode rows and stores their argmax ids.
    max_rows, max_tokens: rows and tokens of the largest step.
    on_host: chunks are computed on the host (`host_prefill`).
    """

    def __init__(
        self, backend: Backend, buffers: BatchBuffers, hidden: Callable[[Batch], Tensor],
        argmax_step: Callable[[int], Tensor], *, max_rows: int, max_tokens: int, on_host: bool,
    ):
        self._buffers, self._on_host = buffers, on_host
        self._pads = backend.padding_blocks > 0
        with torch.inference_mode():
            self.greedy = backend.capture(argmax_step, max_rows, decode=True)
            self.decode = backend.capture(
                lambda rows: hidden(buffers.decode(rows)), max_rows, decode=True) if self._pads else None
            if self._pads:
                buffers.clear()
            self.mixed = backend.capture(lambda tokens: hidden(buffers.tokens(tokens)), max_tokens, decode=False)
            self.decode = self.decode or self.mixed
            if self.mixed and self.mixed.largest < max_tokens:
                # Compile and allocate now what the largest steps, which are not captured, compile and allocate.
                hidden(buffers.tokens(max_tokens))
                backend.synchronize()

    def parts(self, rows: Rows) -> list[tuple[Rows, int]]:
        """Split a step into rows that are computed together; return them with the number that they are padded to."""
        graphs = self.decode if self._pads else None
        if graphs is None and not self._on_host:
            return [(rows, len(rows))]
        decodes = [row for row in rows if _decodes(row)]
        captured = graphs is not None and 0 < len(decodes) <= graphs.largest
        if not self._on_host and (not captured or (self.mixed and len(decodes) < len(rows))):
            return [(rows, len(rows))]
        others = [row for row in rows if not _decodes(row)]
        size = graphs.size(len(decodes)) if graphs and captured else len(decodes)
        return [(part, n) for part, n in ((decodes, size), (others, len(others))) if part]

    def is_on_host(self, part: Part) -> bool:
        """Return True if the host computes the part."""
        return self._on_host and not _decodes(part.rows[0])

    def select(self, part: Part, *, argmax: bool) -> Captured | None:
        """Return the captured step that serves a part; None for kernel by kernel.

        argmax: every row of the step samples its argmax token.

        If the captured step takes any rows, the part is padded to its size in the buffers.
        """
        # A captured step reads the beginning of the buffers.
        if part.first or self.is_on_host(part):
            return None
        is_decode = len(part.samples) == len(part.rows) == part.tokens
        candidates = (self.greedy if argmax else None, self.decode, self.mixed) if is_decode else (self.mixed,)
        captured: Captured | None = next(
            (each for each in candidates if each and part.tokens <= each.largest), None)
        if captured is not None and captured is self.mixed and self._pads:
            self._buffers.pad(part, captured.size(part.tokens))
        return captured


def replay(captured: Captured, part: Part, timings: Timings | None) -> Tensor | None:
    """Replay a captured step for a part. With `timings`, add the times of its kernels.

    Return None, without running anything, if a timed replay cannot be split into kernels.
    """
    if timings is None:
        return captured.replay(part.tokens, part.context_lens)
    if (timed := captured.replay_timed(part.tokens, part.context_lens)) is None:
        return None
    timings.add(timed[1])
    return timed[0]


def _decodes(row: Row) -> bool:
    """Return True for a row of one token that samples: a decode row or a prompt's last token."""
    return row.samples and len(row.token_ids) == 1
