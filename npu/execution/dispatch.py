"""Dispatch of a step's rows: which captured step computes them, or whether kernels are called one by one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from npuserve.kernels.registry import Timings
from npuserve.kernels.sample import Filters
from npuserve.npu.backends.base import Backend, BackendError, Captured, CaptureError
from npuserve.npu.execution.batch import Batch, BatchBuffers, Part
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.sampler import Sampler
from npuserve.npu.step import Row

log = logging.getLogger(__name__)

Rows = Sequence[Row]

MIN_FORCED, MIN_FORCED_EAGER = 2, 4
"""Least number of known tokens that are worth a chunk. With two steps in flight, a chunk of n tokens saves n - 1 decode
steps. Within a captured step it costs little more than a decode row. Otherwise it reads the weights a second time and
launches its kernels one by one: that takes as long as two or three captured steps."""

MAX_CHOSEN = 64
"""Rows of which a captured step with chunks can choose a token. It always chooses as many, so more would be slower."""


class CapturableSteps:
    """Steps as a backend captures them: functions of a number of rows or tokens that read and write fixed memory.

    They read batches from `buffers` and write the sampled ids to the beginning of `last` [R] int64.

    hidden: computes a batch up to the final norm.
    """

    def __init__(
        self, model: Model, sampler: Sampler, buffers: BatchBuffers, hidden: Callable[[Batch], Tensor], last: Tensor
    ):
        self._model, self._sampler, self._buffers, self._last = model, sampler, buffers, last
        self._hidden = hidden

    def argmax(self, rows: int) -> Tensor:
        """Compute a step of decode rows with argmax sampling; return the hidden states."""
        return self._choose_argmax(self.decode(rows))

    def sampled(self, filters: Filters, rows: int) -> Tensor:
        """Compute a step of decode rows with the buffers' sampling parameters; return the hidden states."""
        return self._choose_sampled(self.decode(rows), filters)

    def decode(self, rows: int) -> Tensor:
        """Return the hidden states of decode rows."""
        return self._hidden(self._buffers.decode(rows))

    def mixed(self, tokens: int) -> Tensor:
        """Return the hidden states of a batch of any rows."""
        return self._hidden(self._buffers.tokens(tokens))

    def mixed_argmax(self, tokens: int) -> Tensor:
        """Compute a batch of any rows and the argmax tokens of its `chosen` rows; return the hidden states."""
        hidden = self.mixed(tokens)
        self._choose_argmax(self._chosen_of(hidden))
        return hidden

    def mixed_sampled(self, filters: Filters, tokens: int) -> Tensor:
        """Compute a batch of any rows and sample its `chosen` rows with the buffers' parameters; return the hidden
        states."""
        hidden = self.mixed(tokens)
        self._choose_sampled(self._chosen_of(hidden), filters)
        return hidden

    @property
    def chosen(self) -> int:
        """Rows of which a step of any rows chooses a token: the first that yield one, and padding."""
        return min(len(self._last), MAX_CHOSEN)

    def _chosen_of(self, hidden: Tensor) -> Tensor:
        return hidden.index_select(0, self._buffers.sample_tokens(self.chosen))

    def _choose_argmax(self, hidden: Tensor) -> Tensor:
        self._model.kernels.keep_ids(self._model.argmax(hidden), self._last[: len(hidden)])
        return hidden

    def _choose_sampled(self, hidden: Tensor, filters: Filters) -> Tensor:
        ids = self._sampler.sample_fixed(self._model.logits(hidden), self._buffers.sampling(len(hidden)), filters)
        self._model.kernels.keep_ids(ids, self._last[: len(hidden)])
        return hidden


class Dispatch:
    """Selection among the captured steps of a runner. Without captured steps all kernels are called one by one.

    The captured steps; None for one that is not captured:

    greedy: decode rows with argmax sampling, LM head included.
    sampled: decode rows with any sampling that `SamplingInputs` describes, LM head and sampler included, for each of
        `Backend.sampler_filters`. Empty if the sampler cannot be captured.
    decode: decode rows up to the final norm. It is `mixed` if decode steps need no padding. If the backend captures
        the sampler, it is `greedy`, which also returns the hidden states. This saves a graph per bucket. Rows that need
        logits take a second product of the LM head.
    mixed: any rows up to the final norm. If the backend captures the sampler, it is `mixed_argmax`, which also returns
        the hidden states.
    mixed_argmax, mixed_sampled: any rows, of which up to `chosen` yield a token, with argmax sampling or as `sampled`.
        None and empty if the backend does not capture the sampler. `mixed_sampled` has no step for rows without
        filters: beside a chunk, the time of filters that are off does not matter.

    Constrained rows are sampled outside, since their masks arrive after the forward pass is queued.

    If the device refuses to capture the sampler alone, the other steps stay captured, and the sampler runs kernel by
    kernel.

    max_rows: rows of the largest step.
    on_host: chunks are computed on the host (`host_prefill`).
    capture_chunks: capture `mixed` (`Backend.captures_chunks`).
    may_drop: this process may run steps kernel by kernel if it cannot capture them. A rank of a group may not: captured
        steps are padded, and the collectives of all ranks must have the same number of rows.

    A step with decode rows and chunks is computed together, so that weights are read once, if it is captured, or if it
    cannot be over this KV cache. Otherwise the decode rows are a captured step of their own.

    Raises CaptureError if the device refuses the capture, and the backend's `capture_mode` is on, `may_drop` is False
    or the device is unusable afterwards. Otherwise the reason is logged.
    """

    def __init__(
        self, backend: Backend, buffers: BatchBuffers, steps: CapturableSteps, max_rows: int, *, on_host: bool,
        capture_chunks: bool, may_drop: bool,
    ):
        self._buffers, self._on_host, self._chosen = buffers, on_host, steps.chosen
        self._pads, self._captures_chunks = backend.padding_blocks > 0, capture_chunks
        self._compiles = backend.compiles
        self._drop()
        warm_up = backend.compiles or bool(backend.sampler_filters)
        with torch.inference_mode():
            try:
                if backend.capture_mode != "off":
                    self._capture(backend, steps, max_rows, may_drop)
                    warm_up = self.mixed is not None and self.mixed.largest < buffers.most_tokens
            except CaptureError as error:
                if backend.capture_mode == "on" or not may_drop:
                    raise
                if not _is_usable(backend):
                    raise
                log.warning("%s. Steps run kernel by kernel, which is slower", error)
                self._drop()
                warm_up = True
            if warm_up:
                # Compile, load and allocate now what the first step that is not captured would.
                if self._pads:
                    buffers.clear()
                steps.mixed(buffers.most_tokens)
                backend.synchronize()
        self._together = self.mixed is not None or (backend.capture_chunks and not capture_chunks)

    def _drop(self) -> None:
        self.greedy: Captured | None = None
        self.decode: Captured | None = None
        self.mixed: Captured | None = None
        self.mixed_argmax: Captured | None = None
        self.sampled: dict[Filters, Captured] = {}
        self.mixed_sampled: dict[Filters, Captured] = {}

    def _capture(self, backend: Backend, steps: CapturableSteps, max_rows: int, may_drop: bool) -> None:
        """Capture all steps that the backend can capture. Raises CaptureError."""
        has_sampler = bool(backend.sampler_filters)
        self.greedy = backend.capture(steps.argmax, max_rows, decode=True)
        if has_sampler:
            self.decode = self.greedy
            self.sampled = self._capture_sampler(
                backend, steps.sampled, backend.sampler_filters, max_rows, decode=True, may_drop=may_drop)
        elif self._pads:
            self.decode = backend.capture(steps.decode, max_rows, decode=True)
        if self._pads:
            self._buffers.clear()
        if self._captures_chunks or not self._pads:
            max_tokens = self._buffers.most_tokens
            if has_sampler:
                self.mixed_argmax = backend.capture(steps.mixed_argmax, max_tokens, decode=False)
            self.mixed = self.mixed_argmax or backend.capture(steps.mixed, max_tokens, decode=False)
            if self.sampled:
                some = [filters for filters in backend.sampler_filters if filters is not Filters.NONE]
                self.mixed_sampled = self._capture_sampler(
                    backend, steps.mixed_sampled, some, max_tokens, decode=False, may_drop=may_drop)
        self.decode = self.decode or self.mixed

    @staticmethod
    def _capture_sampler(
        backend: Backend, step: Callable[[Filters, int], Tensor], each_filters: Sequence[Filters], largest: int, *,
        decode: bool, may_drop: bool,
    ) -> dict[Filters, Captured]:
        """Capture a step with the sampler for each of `each_filters`. Return {} if the device refuses one of them.

        Raises CaptureError if the step must be captured, or if the device is unusable afterwards.
        """
        captured: dict[Filters, Captured] = {}
        if backend.capture_mode == "decoder":
            return captured
        try:
            for filters in each_filters:
                if (graphs := backend.capture(partial(step, filters), largest, decode=decode)) is not None:
                    captured[filters] = graphs
        except CaptureError as error:
            if backend.capture_mode == "on" or not may_drop or not _is_usable(backend):
                error.next_mode = "decoder"
                raise
            log.warning("%s. The sampler runs kernel by kernel after captured steps, which is slower", error)
            return {}
        return captured

    def parts(self, rows: Rows) -> list[tuple[Rows, int]]:
        """Split a step into rows that are computed together; return them with the number that they are padded to."""
        graphs = self.decode if self._pads else None
        if graphs is None and not self._on_host:
            return [(rows, len(rows))]
        decodes = [row for row in rows if _decodes(row)]
        captured = graphs is not None and 0 < len(decodes) <= graphs.largest
        if not self._on_host and (not captured or (self._together and len(decodes) < len(rows))):
            return [(rows, len(rows))]
        others = [row for row in rows if not _decodes(row)]
        size = graphs.size(len(decodes)) if graphs and captured else len(decodes)
        return [(part, n) for part, n in ((decodes, size), (others, len(others))) if part]

    @property
    def min_forced(self) -> int:
        """Least number of known tokens for which a chunk is faster than as many decode rows; 0: none is."""
        if self._on_host:
            return 0  # the context would be copied to the host, and the chunk back
        return MIN_FORCED if self.mixed or not self.decode else MIN_FORCED_EAGER

    def is_on_host(self, part: Part) -> bool:
        """Return True if the host computes the part."""
        return self._on_host and not _decodes(part.rows[0])

    def sampled_rows(self, part: Part) -> int:
        """Return the rows of the captured sampler that can take the part; 0 if none can."""
        if not self.sampled or part.first or self.is_on_host(part):
            return 0
        if _all_decode(part) and part.tokens <= self.sampled[Filters.ANY].largest:
            return part.padded
        return self._chosen if self._chooses(self.mixed_sampled.get(Filters.ANY), part) else 0

    def batch(self, part: Part, captured: Captured | None) -> Batch:
        """Return the batch of a part whose kernels are called one by one.

        captured: the step that would compute it in one launch. On a device that compiles, the batch is padded to that
            step's size: kernels of other sizes may not be compiled yet.
        """
        if captured is None or not self._compiles:
            return self._buffers.batch(part)
        size = captured.size(part.tokens)
        decodes = captured is not self.mixed and captured in (self.greedy, self.decode, *self.sampled.values())
        return self._buffers.decode(size) if decodes else self._buffers.tokens(size)

    def _chooses(self, mixed: Captured | None, part: Part) -> bool:
        """Return True if a captured step of any rows can choose the tokens of the part."""
        return mixed is not None and part.tokens <= mixed.largest and len(part.samples) <= self._chosen

    def select(self, part: Part, *, argmax: bool, filters: Filters | None) -> tuple[Captured | None, bool]:
        """Return the captured step that serves a part, None for kernel by kernel, and whether it samples too.

        argmax: every row of the step samples its argmax token.
        filters: `sampled` can sample every row of the part, with these filters; None if it cannot.

        If the captured step takes any rows, the part is padded to its size in the buffers.
        """
        # A captured step reads the beginning of the buffers.
        if part.first or self.is_on_host(part):
            return None, False
        decodes: Captured | None = None
        mixed: Captured | None = None
        if argmax:
            decodes, mixed = self.greedy, self.mixed_argmax
        elif filters is not None:
            decodes, mixed = _with_filters(self.sampled, filters), _with_filters(self.mixed_sampled, filters)
        whole = [decodes if _all_decode(part) else None, mixed if self._chooses(mixed, part) else None]
        candidates = (whole[0], self.decode if _all_decode(part) else None, whole[1], self.mixed)
        captured = next((each for each in candidates if each and part.tokens <= each.largest), None)
        if captured is not None and self._pads and captured in (self.mixed, *self.mixed_sampled.values()):
            self._buffers.pad(part, captured.size(part.tokens))
        return captured, captured is not None and captured in whole


def _with_filters(captured: Mapping[Filters, Captured], filters: Filters) -> Captured | None:
    """Return the captured step with the fewest filters that include `filters`; None if there is none."""
    return next((captured[each] for each in sorted(captured) if each >= filters), None)


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


def _decodes(row: Row) -> bool:
    """Return True for a row of one token that samples: a decode row or a prompt's last token."""
    return row.samples and len(row.token_ids) == 1
