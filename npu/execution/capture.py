"""Capture of steps when a runner starts: which steps there are, and which of them the backend captures.

Captured steps read the batch at fixed addresses. `capture_steps` returns them as values; `Dispatch` selects among them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from npuserve.kernels.sample import Filters
from npuserve.npu.backends.base import Backend, BackendError, Captured, CaptureError, CaptureMode
from npuserve.npu.execution.batch import BatchBuffers
from npuserve.npu.execution.forward import Forward
from npuserve.npu.execution.predictor import Predictor

log = logging.getLogger(__name__)

Key = TypeVar("Key", int, Filters)

MAX_CHOSEN = 64
"""Tokens that a captured step with chunks can choose. It always chooses as many, so more would be slower."""


class CapturableSteps:
    """Steps as a backend captures them: functions of a number of rows or tokens, which read the batch of `buffers`.

    Each returns the hidden states. Those that choose tokens write their ids to the beginning of `Forward`'s `last`.

    max_samples: tokens that the largest step samples.
    predictor: drafts tokens by captured steps of its own; None for none.
    depths: numbers of tokens that it drafts after a sample, ascending; empty without a predictor.
    """

    def __init__(
        self, forward: Forward, buffers: BatchBuffers, max_samples: int, predictor: Predictor | None = None,
        depths: Sequence[int] = (),
    ):
        self._forward = forward
        self._buffers = buffers
        self._predictor = predictor
        self.depths = depths
        self.chosen = min(max_samples, MAX_CHOSEN)
        """Tokens that a step of any rows chooses: those of the rows, and padding."""

    def decode(self, rows: int) -> Tensor:
        """Compute decode rows."""
        return self._forward.hidden(self._buffers.decode(rows))

    def decode_argmax(self, rows: int) -> Tensor:
        """Compute decode rows and choose their argmax tokens."""
        hidden = self.decode(rows)
        self._forward.choose_argmax(hidden)
        return hidden

    def decode_sampled(self, filters: Filters, rows: int) -> Tensor:
        """Compute decode rows and sample them by the buffers' parameters."""
        hidden = self.decode(rows)
        self._forward.choose_fixed(hidden, filters)
        return hidden

    def chunks(self, tokens: int) -> Tensor:
        """Compute a batch of any rows."""
        return self._forward.hidden(self._buffers.tokens(tokens))

    def chunks_argmax(self, tokens: int) -> Tensor:
        """Compute a batch of any rows and choose `chosen` argmax tokens."""
        hidden = self.chunks(tokens)
        self._forward.choose_argmax(self._chosen_of(hidden))
        return hidden

    def chunks_sampled(self, filters: Filters, tokens: int) -> Tensor:
        """Compute a batch of any rows and sample `chosen` tokens by the buffers' parameters."""
        hidden = self.chunks(tokens)
        self._forward.choose_fixed(self._chosen_of(hidden), filters)
        return hidden

    def decode_drafts(self, depth: int, rows: int) -> Tensor:
        """Draft `depth` tokens after decode rows."""
        assert self._predictor is not None
        sampled = self._buffers.sampled_tokens(rows, self._predictor.num_following(depth), is_decode=True)
        return self._predictor.draft_all(self._buffers.decode(rows), sampled, depth)

    def chunks_drafts(self, depth: int, tokens: int) -> Tensor:
        """Draft `depth` tokens after the samples of a batch of any rows."""
        assert self._predictor is not None
        assert self._buffers.drafting is not None
        samples = self._buffers.drafting.drafted_samples(tokens)
        sampled = self._buffers.sampled_tokens(samples, self._predictor.num_following(depth), is_decode=False)
        return self._predictor.draft_all(self._buffers.tokens(tokens), sampled, depth)

    def largest(self) -> Tensor:
        """Compute the largest batch of any rows, and draft after its samples. Return its hidden states."""
        tokens = self._buffers.most_tokens
        hidden = self.chunks(tokens)
        if self.depths:
            self.chunks_drafts(self.depths[-1], tokens)
        return hidden

    def _chosen_of(self, hidden: Tensor) -> Tensor:
        return hidden.index_select(0, self._buffers.sample_tokens(self.chosen))


@dataclass(frozen=True, slots=True)
class CapturedSteps:
    """Captured steps that take the same rows; None for a step that is not captured.

    decoder: step up to the final norm; None if `shares_argmax`.
    argmax: step with the LM head, which chooses argmax tokens. It returns the hidden states too.
    sampled: step with LM head and sampler, by the filters that it applies; empty if the sampler is not captured.
    drafts: step that drafts after the rows are sampled, by the number of drafts after each row; empty if none does.
    shares_argmax: rows that are sampled outside of captured steps take `argmax`, which saves the graphs of `decoder`.
        Rows that need logits then take a second product of the LM head.
    """

    decoder: Captured | None = None
    argmax: Captured | None = None
    sampled: Mapping[Filters, Captured] = field(default_factory=dict)
    drafts: Mapping[int, Captured] = field(default_factory=dict)
    shares_argmax: bool = False

    @property
    def hidden(self) -> Captured | None:
        """The step that returns the hidden states of rows that are sampled outside of captured steps."""
        return self.argmax if self.shares_argmax else self.decoder

    def choosing(self, *, argmax: bool, filters: Filters | None) -> Captured | None:
        """Return the step that chooses tokens with the fewest filters that include `filters`; None if there is none.

        argmax: choose argmax tokens. filters: None if the rows' parameters are not in the buffers.
        """
        if argmax:
            return self.argmax
        if filters is None:
            return None
        return next((self.sampled[each] for each in sorted(self.sampled) if each >= filters), None)


@dataclass(frozen=True, slots=True)
class Captures:
    """All captured steps of a runner.

    decodes: captured steps of decode rows. They have no `hidden` if the device pads no steps: `chunks` serves them.
    chunks: captured steps of any rows. They choose tokens only if the backend captures the sampler. None samples
        without filters: beside a chunk, the time of filters that are off does not matter.
    chosen: tokens that a step of `chunks` can choose.
    computes_together: decode rows and chunks of a step are computed together, so that weights are read once. True if
        steps of any rows are captured, or cannot be over this KV cache. Otherwise decode rows are a step of their own.
    """

    decodes: CapturedSteps
    chunks: CapturedSteps
    chosen: int
    computes_together: bool


@torch.inference_mode()
def capture_steps(
    backend: Backend, buffers: BatchBuffers, steps: CapturableSteps, max_rows: int, *, mode: CaptureMode,
    captures_chunks: bool, may_drop: bool,
) -> Captures:
    """Capture all steps that the backend can capture. Then call the kernels of steps that are not captured.

    If the device refuses to capture the sampler or drafting alone, the other steps stay captured, and the refused ones
    run kernel by kernel.

    max_rows: rows of the largest step.
    mode: whether steps are captured.
    captures_chunks: capture steps of any rows. Without an effect if the device pads no steps.
    may_drop: this process may run steps kernel by kernel if it cannot capture them. A rank of a group may not: captured
        steps are padded, and the collectives of all ranks must have the same number of rows.

    Raises CaptureError if the device refuses the capture, and `mode` is on, `may_drop` is False or the device is
    unusable afterwards. Otherwise the reason is logged.
    """
    can = backend.capabilities
    decodes = CapturedSteps()
    chunks = CapturedSteps()
    warms_up = can.compiles or bool(can.sampler_filters)
    if mode != "off":
        capture = _Capture(backend, buffers, steps, mode, may_drop=may_drop)
        try:
            decodes, chunks = capture.all_steps(max_rows, captures_chunks=captures_chunks)
            warms_up = chunks.hidden is not None and chunks.hidden.largest < buffers.most_tokens
        except CaptureError as error:
            if not capture.may_drop_after_refusal():
                raise
            log.warning("%s. Steps run kernel by kernel, which is slower", error)
            warms_up = True
    if warms_up:
        # Compile, load and allocate now what the first step that is not captured would.
        if can.padding_blocks:
            buffers.clear()
        steps.largest()
        backend.synchronize()
    computes_together = chunks.hidden is not None or (backend.settings.capture_chunks and not captures_chunks)
    return Captures(decodes, chunks, steps.chosen, computes_together)


class _Capture:
    """Capture of a runner's steps. The parameters are those of `capture_steps`."""

    def __init__(
        self, backend: Backend, buffers: BatchBuffers, steps: CapturableSteps, mode: CaptureMode, *, may_drop: bool
    ) -> None:
        self._backend = backend
        self._buffers = buffers
        self._steps = steps
        self._mode = mode
        self._may_drop = may_drop
        self._pads = backend.capabilities.padding_blocks > 0
        self._each_filters = backend.capabilities.sampler_filters

    def all_steps(self, max_rows: int, *, captures_chunks: bool) -> tuple[CapturedSteps, CapturedSteps]:
        """Capture the steps of decode rows, and those of any rows. Raises CaptureError."""
        decodes = self._decodes(max_rows, drafts=captures_chunks)
        if self._pads:
            self._buffers.clear()
            if not captures_chunks:
                return decodes, CapturedSteps()
        return decodes, self._chunks(decodes)

    def may_drop_after_refusal(self) -> bool:
        """Return True if this process may run the steps that the device refused to capture kernel by kernel."""
        return self._mode != "on" and self._may_drop and _is_usable(self._backend)

    def _decodes(self, max_rows: int, *, drafts: bool) -> CapturedSteps:
        """Capture the steps of decode rows. drafts: those that draft after them, too."""
        steps = self._steps
        decoder: Captured | None = None
        sampled: Mapping[Filters, Captured] = {}
        argmax = self._backend.capture(steps.decode_argmax, max_rows, decode=True)
        if self._each_filters:
            sampled = self._sampler(steps.decode_sampled, self._each_filters, max_rows, decode=True)
        elif self._pads:
            decoder = self._backend.capture(steps.decode, max_rows, decode=True)
        captured = CapturedSteps(decoder, argmax, sampled, shares_argmax=bool(self._each_filters))
        return replace(captured, drafts=self._decode_drafts(captured.hidden)) if drafts else captured

    def _chunks(self, decodes: CapturedSteps) -> CapturedSteps:
        """Capture the steps of any rows. Those that the device refused for `decodes` are not captured."""
        steps = self._steps
        largest = self._buffers.most_tokens
        drafts = self._chunk_drafts() if decodes.drafts else {}
        if not self._each_filters:
            return CapturedSteps(self._backend.capture(steps.chunks, largest, decode=False), drafts=drafts)
        argmax = self._backend.capture(steps.chunks_argmax, largest, decode=False)
        sampled: Mapping[Filters, Captured] = {}
        if decodes.sampled:
            filtering = [filters for filters in self._each_filters if filters is not Filters.NONE]
            sampled = self._sampler(steps.chunks_sampled, filtering, largest, decode=False)
        return CapturedSteps(None, argmax, sampled, drafts, shares_argmax=True)

    def _decode_drafts(self, decodes: Captured | None) -> dict[int, Captured]:
        """Capture the steps that draft after decode rows, by the number of drafts after each.

        decodes: captured steps of decode rows, which drafting follows.
        """
        if self._buffers.drafting is None or decodes is None:
            return {}
        most_rows = min(decodes.largest, self._buffers.drafting.most_samples)
        drafted = sorted({rows for rows in map(decodes.size, range(1, most_rows + 1)) if rows <= most_rows})

        def capture(depth: int) -> Captured | None:
            log.info("capturing steps of decode rows with %d drafts after each", depth)
            step = partial(self._steps.decode_drafts, depth)
            if not depth:
                return self._backend.capture(step, decodes.largest, decode=True)
            return self._backend.capture(step, drafted[-1], decode=True, buckets=drafted) if drafted else None

        return self._each({depth: partial(capture, depth) for depth in self._steps.depths}, "Drafting")

    def _chunk_drafts(self) -> dict[int, Captured]:
        """Capture the steps that draft after the samples of any rows, by the number of drafts after each."""

        def capture(depth: int) -> Captured | None:
            log.info("capturing steps of any rows with %d drafts after each sample", depth)
            step = partial(self._steps.chunks_drafts, depth)
            return self._backend.capture(step, self._buffers.most_tokens, decode=False)

        return self._each({depth: partial(capture, depth) for depth in self._steps.depths}, "Drafting")

    def _sampler(
        self, step: Callable[[Filters, int], Tensor], each_filters: Sequence[Filters], largest: int, *, decode: bool
    ) -> dict[Filters, Captured]:
        """Capture a step with the sampler for each of `each_filters`. Return {} if the device refuses one of them."""
        captures = {filters: partial(self._backend.capture, partial(step, filters), largest, decode=decode)
                    for filters in each_filters}
        return self._each(captures, "The sampler")

    def _each(self, captures: Mapping[Key, Callable[[], Captured | None]], name: str) -> dict[Key, Captured]:
        """Capture steps that may run kernel by kernel after captured ones. Return {} if the device refuses one of them.

        captures: calls that capture one of the steps each.
        name: what they compute, for the log.

        Raises CaptureError if the steps must be captured, or if the device is unusable afterwards.
        """
        captured: dict[Key, Captured] = {}
        if self._mode == "decoder":
            return captured
        try:
            for key, capture in captures.items():
                if (graphs := capture()) is not None:
                    captured[key] = graphs
        except CaptureError as error:
            if not self.may_drop_after_refusal():
                error.next_mode = "decoder"
                raise
            log.warning("%s. %s runs kernel by kernel after captured steps, which is slower", error, name)
            return {}
        return captured


def _is_usable(backend: Backend) -> bool:
    """Return False if the device still fails after a failed capture, or if torch_npu drops what is launched."""
    try:
        backend.synchronize()
        number = backend.empty((1,), torch.int64)
        return all(int(number.fill_(value)) == value for value in (1, 2))
    except (RuntimeError, BackendError):
        return False
