"""Dispatch of a step's rows: which captured step computes them, or whether kernels are called one by one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from npuserve.kernels.registry import Timings
from npuserve.kernels.sample import Filters
from npuserve.npu.backends.base import Backend, BackendError, Captured, CaptureError, CaptureMode, RowLengths
from npuserve.npu.execution.batch import Batch, BatchBuffers, Part
from npuserve.npu.execution.forward import Forward
from npuserve.npu.execution.predictor import Predictor
from npuserve.npu.step import Row

log = logging.getLogger(__name__)

Rows = Sequence[Row]
Key = TypeVar("Key", int, Filters)

MIN_FORCED = 2
MIN_FORCED_EAGER = 4
"""Least number of known tokens that are worth a chunk. With two steps in flight, a chunk of n tokens saves n - 1 decode
steps. Within a captured step it costs little more than a decode row. Otherwise it reads the weights a second time and
launches its kernels one by one: that takes as long as two or three captured steps."""

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
        sampled = self._buffers.sampled_tokens(rows, self.num_following(depth), is_decode=True)
        return self._predictor.draft_all(self._buffers.decode(rows), sampled, depth)

    def chunks_drafts(self, depth: int, tokens: int) -> Tensor:
        """Draft `depth` tokens after the samples of a batch of any rows."""
        assert self._predictor is not None
        sampled = self._buffers.sampled_tokens(
            self.drafted_samples(tokens), self.num_following(depth), is_decode=False)
        return self._predictor.draft_all(self._buffers.tokens(tokens), sampled, depth)

    def largest(self) -> Tensor:
        """Compute the largest batch of any rows, and draft after its samples. Return its hidden states."""
        tokens = self._buffers.most_tokens
        hidden = self.chunks(tokens)
        if self.depths:
            self.chunks_drafts(self.depths[-1], tokens)
        return hidden

    def num_following(self, depth: int) -> int:
        """Return the number of tokens after each sample that are computed for `depth` drafts."""
        assert self._predictor is not None
        return self._predictor.num_following(depth)

    def drafted_samples(self, tokens: int) -> int:
        """Return the number of samples after which a captured step of `tokens` tokens drafts."""
        assert self._buffers.drafting is not None
        return min(tokens, self._buffers.drafting.most_samples)

    def _chosen_of(self, hidden: Tensor) -> Tensor:
        return hidden.index_select(0, self._buffers.sample_tokens(self.chosen))


@dataclass(frozen=True, slots=True)
class CapturedSteps:
    """Captured steps that take the same rows; None for a step that is not captured.

    hidden: step up to the final norm. It may be `argmax`, which returns the hidden states too: this saves its graphs.
        Rows that need logits then take a second product of the LM head.
    argmax: step with the LM head, which chooses argmax tokens.
    sampled: step with LM head and sampler, by the filters that it applies; empty if the sampler is not captured.
    drafts: step that drafts after the rows are sampled, by the number of drafts after each row; empty if none does.
    """

    hidden: Captured | None = None
    argmax: Captured | None = None
    sampled: Mapping[Filters, Captured] = field(default_factory=dict)
    drafts: Mapping[int, Captured] = field(default_factory=dict)

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
class Selection:
    """Captured step that computes a part.

    chooses: it chooses the part's tokens too.
    takes_chunks: it takes any rows; False: decode rows.
    """

    captured: Captured
    chooses: bool
    takes_chunks: bool


@dataclass(frozen=True, slots=True)
class Drafting:
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


class Dispatch:
    """Selection among the captured steps of a runner. Without captured steps all kernels are called one by one.

    decodes: captured steps of decode rows. They have no `hidden` if the device pads no steps: `chunks` serves them.
    chunks: captured steps of any rows, of which up to `CapturableSteps.chosen` yield a token. They choose tokens only
        if the backend captures the sampler. None samples without filters: beside a chunk, the time of filters that are
        off does not matter.

    Constrained rows are sampled outside, since their masks arrive after the forward pass is queued.

    If the device refuses to capture the sampler or drafting alone, the other steps stay captured, and the refused ones
    run kernel by kernel.

    max_rows: rows of the largest step.
    capture_chunks: capture steps of any rows.
    capture_mode: whether steps are captured.
    may_drop: this process may run steps kernel by kernel if it cannot capture them. A rank of a group may not: captured
        steps are padded, and the collectives of all ranks must have the same number of rows.

    A step with decode rows and chunks is computed together, so that weights are read once, if it is captured, or if it
    cannot be over this KV cache. Otherwise the decode rows are a captured step of their own.

    Raises CaptureError if the device refuses the capture, and `capture_mode` is on, `may_drop` is False or the
    device is unusable afterwards. Otherwise the reason is logged.
    """

    def __init__(
        self, backend: Backend, buffers: BatchBuffers, steps: CapturableSteps, max_rows: int, *,
        capture_mode: CaptureMode, capture_chunks: bool, may_drop: bool,
    ):
        self._buffers = buffers
        self._chosen = steps.chosen
        self._steps = steps
        self._pads = backend.capabilities.padding_blocks > 0
        self._capture_mode = capture_mode
        self._captures_chunks = capture_chunks
        self._compiles = backend.capabilities.compiles
        self.decodes = CapturedSteps()
        self.chunks = CapturedSteps()
        warm_up = backend.capabilities.compiles or bool(backend.capabilities.sampler_filters)
        with torch.inference_mode():
            try:
                if capture_mode != "off":
                    self.decodes, self.chunks = self._capture(backend, steps, max_rows, may_drop)
                    largest = self.chunks.hidden
                    warm_up = largest is not None and largest.largest < buffers.most_tokens
            except CaptureError as error:
                if capture_mode == "on" or not may_drop:
                    raise
                if not _is_usable(backend):
                    raise
                log.warning("%s. Steps run kernel by kernel, which is slower", error)
                warm_up = True
            if warm_up:
                # Compile, load and allocate now what the first step that is not captured would.
                if self._pads:
                    buffers.clear()
                steps.largest()
                backend.synchronize()
        self._together = self.chunks.hidden is not None or (backend.settings.capture_chunks and not capture_chunks)

    def _capture(
        self, backend: Backend, steps: CapturableSteps, max_rows: int, may_drop: bool
    ) -> tuple[CapturedSteps, CapturedSteps]:
        """Capture all steps that the backend can capture: of decode rows, and of any rows. Raises CaptureError."""
        each_filters = backend.capabilities.sampler_filters
        has_sampler = bool(each_filters)
        argmax = backend.capture(steps.decode_argmax, max_rows, decode=True)
        hidden: Captured | None = None
        sampled: Mapping[Filters, Captured] = {}
        if has_sampler:
            hidden = argmax
            sampled = self._capture_sampler(
                backend, steps.decode_sampled, each_filters, max_rows, decode=True, may_drop=may_drop)
        elif self._pads:
            hidden = backend.capture(steps.decode, max_rows, decode=True)
        drafts: Mapping[int, Captured] = {}
        if self._captures_chunks:
            drafts = self._capture_drafts(backend, steps, hidden, may_drop=may_drop)
        decodes = CapturedSteps(hidden, argmax, sampled, drafts)
        if self._pads:
            self._buffers.clear()
        if self._pads and not self._captures_chunks:
            return decodes, CapturedSteps()
        max_tokens = self._buffers.most_tokens
        if drafts:
            drafts = self._capture_chunk_drafts(backend, steps, may_drop=may_drop)
        if not has_sampler:
            return decodes, CapturedSteps(backend.capture(steps.chunks, max_tokens, decode=False), drafts=drafts)
        argmax = backend.capture(steps.chunks_argmax, max_tokens, decode=False)
        hidden = argmax or backend.capture(steps.chunks, max_tokens, decode=False)
        if decodes.sampled:
            filtering = [filters for filters in each_filters if filters is not Filters.NONE]
            sampled = self._capture_sampler(
                backend, steps.chunks_sampled, filtering, max_tokens, decode=False, may_drop=may_drop)
        return decodes, CapturedSteps(hidden, argmax, sampled, drafts)

    def _capture_drafts(
        self, backend: Backend, steps: CapturableSteps, decodes: Captured | None, *, may_drop: bool
    ) -> dict[int, Captured]:
        """Capture the steps that draft after decode rows, by the number of drafts after each.

        decodes: captured steps of decode rows, which drafting follows.
        """
        if self._buffers.drafting is None or decodes is None:
            return {}
        most_rows = min(decodes.largest, self._buffers.drafting.most_samples)
        drafted = sorted({rows for rows in map(decodes.size, range(1, most_rows + 1)) if rows <= most_rows})

        def capture(depth: int) -> Captured | None:
            log.info("capturing steps of decode rows with %d drafts after each", depth)
            step = partial(steps.decode_drafts, depth)
            if not depth:
                return backend.capture(step, decodes.largest, decode=True)
            return backend.capture(step, drafted[-1], decode=True, buckets=drafted) if drafted else None

        return self._capture_each(
            backend, {depth: partial(capture, depth) for depth in steps.depths}, "Drafting", may_drop=may_drop)

    def _capture_chunk_drafts(
        self, backend: Backend, steps: CapturableSteps, *, may_drop: bool
    ) -> dict[int, Captured]:
        """Capture the steps that draft after the samples of any rows, by the number of drafts after each."""

        def capture(depth: int) -> Captured | None:
            log.info("capturing steps of any rows with %d drafts after each sample", depth)
            return backend.capture(partial(steps.chunks_drafts, depth), self._buffers.most_tokens, decode=False)

        return self._capture_each(
            backend, {depth: partial(capture, depth) for depth in steps.depths}, "Drafting", may_drop=may_drop)

    def _capture_sampler(
        self, backend: Backend, step: Callable[[Filters, int], Tensor], each_filters: Sequence[Filters], largest: int,
        *, decode: bool, may_drop: bool,
    ) -> dict[Filters, Captured]:
        """Capture a step with the sampler for each of `each_filters`. Return {} if the device refuses one of them."""
        captures = {filters: partial(backend.capture, partial(step, filters), largest, decode=decode)
                    for filters in each_filters}
        return self._capture_each(backend, captures, "The sampler", may_drop=may_drop)

    def _capture_each(
        self, backend: Backend, captures: Mapping[Key, Callable[[], Captured | None]], name: str, *, may_drop: bool
    ) -> dict[Key, Captured]:
        """Capture steps that may run kernel by kernel after captured ones. Return {} if the device refuses one of them.

        captures: calls that capture one of the steps each.
        name: what they compute, for the log.

        Raises CaptureError if the steps must be captured, or if the device is unusable afterwards.
        """
        captured: dict[Key, Captured] = {}
        if self._capture_mode == "decoder":
            return captured
        try:
            for key, capture in captures.items():
                if (graphs := capture()) is not None:
                    captured[key] = graphs
        except CaptureError as error:
            if self._capture_mode == "on" or not may_drop or not _is_usable(backend):
                error.next_mode = "decoder"
                raise
            log.warning("%s. %s runs kernel by kernel after captured steps, which is slower", error, name)
            return {}
        return captured

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
        if self._together:
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
        return self._chosen if self._chooses(self.chunks.sampled.get(Filters.ANY), part) else 0

    def batch(self, part: Part, selection: Selection | None) -> Batch:
        """Return the batch of a part whose kernels are called one by one.

        selection: the step that would compute it in one launch. On a device that compiles, the batch is padded to that
            step's size: kernels of other sizes may not be compiled yet.
        """
        if selection is None or not self._compiles:
            return self._buffers.batch(part)
        size = selection.captured.size(part.tokens)
        return self._buffers.tokens(size) if selection.takes_chunks else self._buffers.decode(size)

    def _chooses(self, chunks: Captured | None, part: Part) -> bool:
        """Return True if a captured step of any rows can choose the tokens of the part."""
        return chunks is not None and part.tokens <= chunks.largest and len(part.samples) <= self._chosen

    def select(self, part: Part, *, argmax: bool, filters: Filters | None) -> Selection | None:
        """Return the captured step that serves a part; None for kernel by kernel.

        argmax: every row of the step samples its argmax token.
        filters: `sampled` can sample every row of the part, with these filters; None if it cannot.

        If the captured step takes any rows, the part is padded to its size in the buffers.
        """
        if part.first:  # a captured step reads the beginning of the buffers
            return None
        candidates: list[tuple[Captured | None, bool, bool]] = []
        if _all_decode(part):
            candidates += [(self.decodes.choosing(argmax=argmax, filters=filters), True, False),
                           (self.decodes.hidden, False, False)]
        chunks = self.chunks.choosing(argmax=argmax, filters=filters)
        candidates += [(chunks if self._chooses(chunks, part) else None, True, True),
                       (self.chunks.hidden, False, True)]
        selection = next((Selection(captured, chooses, takes_chunks) for captured, chooses, takes_chunks in candidates
                          if captured is not None and part.tokens <= captured.largest), None)
        if selection is not None and self._pads and selection.takes_chunks:
            self._buffers.pad(part, selection.captured.size(part.tokens))
        return selection

    def drafting(self, part: Part, selection: Selection | None, *, is_timed: bool) -> Drafting:
        """Plan the drafts after each sample of a part, and write their inputs. Only the first part of a step has some.

        Steps with too many samples have none (`DraftBuffers.most_samples`).

        selection: the step that computes the part.
        is_timed: the kernels of the step are called one by one, to time each.
        """
        assert self._buffers.drafting is not None
        most_samples = self._buffers.drafting.most_samples
        samples = len(part.samples)
        wanted = 0 if part.first or samples > most_samples else max(row.predicts for row in part.rows)
        depth = next((depth for depth in self._steps.depths if depth >= wanted), None)
        if depth is None:
            raise ValueError(f"{wanted} drafts after a row, where at most {self._steps.depths[-1]} are possible")
        graphs: Captured | None = None
        takes_decodes = selection is not None and not selection.takes_chunks
        if selection is not None:
            graphs = (self.decodes if takes_decodes else self.chunks).drafts.get(depth)
        if graphs is not None and part.tokens > graphs.largest:
            graphs = None
        captured = None if is_timed else graphs
        if not depth:
            return Drafting(0, samples, [], captured)
        # As `batch` does: kernels that are called one by one are padded only on a device that compiles.
        is_padded = graphs is not None and (captured is not None or self._compiles)
        if graphs is not None and is_padded:
            size = graphs.size(part.tokens)
            samples = size if takes_decodes else self._steps.drafted_samples(size)
        lengths = self._buffers.fill_samples(
            part, samples, self._steps.num_following(depth), is_decode=takes_decodes and is_padded)
        return Drafting(depth, samples, lengths, captured)


def _is_usable(backend: Backend) -> bool:
    """Return False if the device still fails after a failed capture, or if torch_npu drops what is launched."""
    try:
        backend.synchronize()
        number = backend.empty((1,), torch.int64)
        return all(int(number.fill_(value)) == value for value in (1, 2))
    except (RuntimeError, BackendError):
        return False


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


def _all_decode(part: Part) -> bool:
    return len(part.samples) == len(part.rows) == part.tokens


def is_decode(row: Row) -> bool:
    """Return True for a row of one token that samples: a decode row or a prompt's last token."""
    return row.samples > 0 and len(row.token_ids) == 1
