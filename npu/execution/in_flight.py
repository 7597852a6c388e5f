"""Steps in flight: a step's state between its launch and its collection, and the record of the steps of a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np
from torch import Tensor
from torch.profiler import record_function

from npuserve.kernels.registry import HostSpan, Span, Timings
from npuserve.npu.backends.base import Event, Pending
from npuserve.npu.execution.dispatch import Selection
from npuserve.npu.execution.host_prefill import Chunk
from npuserve.npu.execution.masks import ConstrainedRow, StagedMasks
from npuserve.npu.execution.predictor import Drafts
from npuserve.npu.execution.sampler import Logprobs, Plan, Put
from npuserve.npu.execution.staged import Part
from npuserve.npu.execution.step_drafting import PlannedDrafts
from npuserve.npu.step import LostStep, NewRequest, Phase, Row, Step, StepResult, num_right

MISSING = -1
"""Id in the place of one that is not yet on the host."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Hidden states from `begin` on that predict prompt tokens of a request.

    next_ids: [n] int64, the predicted tokens.
    n: number of most likely tokens per report.
    """

    request_id: int
    begin: int
    next_ids: Tensor
    n: int


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows whose last hidden states are wanted.

    requests: ids of their requests.
    tokens: [n] int64, index of the last token of each row within its part.
    """

    requests: list[int]
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """Part of a step as the device computes it.

    first: index of its first token among the tokens that the step samples.
    selection: the captured step that computes it; None for kernel by kernel, or if the host does.
    pooled: None if no row pools.
    drafts: drafting after it; None if nothing drafts.
    times_drafts: the time of drafting is measured.
    """

    part: Part
    first: int
    plan: Plan
    selection: Selection | None
    prompt: list[PromptRows]
    pooled: PooledRows | None = None
    drafts: PlannedDrafts | None = None
    times_drafts: bool = False

    @property
    def needs_all_hidden(self) -> bool:
        """True if hidden states of other tokens than those that are sampled from are needed."""
        return bool(self.prompt or self.pooled)


@dataclass(frozen=True, slots=True)
class HostWork:
    """Part whose hidden states the host computes."""

    work: Work
    chunk: Pending[Chunk]


@dataclass(slots=True)
class StepOutput:
    """Output of a step whose work is queued.

    spans: device times of its kernels. The device may wait for the host between them.
    unsampled: parts whose sampling is not queued yet, with their hidden states.
    reports: reports of sampled tokens, with their requests.
    prompt: reports of prompt tokens by request, in the order of their positions.
    pooled: hidden states [n, H] float32 with their requests.
    drafted: drafts by depth, the first ones of a part before the second ones.
    head_spans: device times of drafting; empty if it is not timed.

    Reports, drafts and hidden states are on the host once `fetched` is complete. The other fields are as in
    `StepResult`.
    """

    spans: list[Span]
    unsampled: list[tuple[Work, Tensor]] = field(default_factory=list)
    reports: list[tuple[list[int], Logprobs]] = field(default_factory=list)
    prompt: list[tuple[int, Logprobs]] = field(default_factory=list)
    pooled: list[tuple[list[int], Tensor]] = field(default_factory=list)
    drafted: list[Drafts] = field(default_factory=list)
    head_spans: list[Span] = field(default_factory=list)
    captured: bool = False
    captured_decodes: int = 0
    decoder_decodes: int = 0
    fetched: Event | None = None
    timings: list[Timings] = field(default_factory=list)

    def result(self, launched: LaunchedStep) -> StepResult:
        """Wait for the copies to the host, and return the result of the step. Raises LostStep if ids are missing."""
        assert self.fetched
        self.fetched.wait()
        ids: list[int]
        ids, *drafts_by_depth = launched.ids.tolist()
        if MISSING in ids:
            raise LostStep("the device has dropped a step, after a failure that it did not report")
        result = StepResult(
            {}, {}, {}, sum(s.read() for s in self.spans),
            self.captured, self.captured_decodes, self.decoder_decodes, bool(self.timings))
        if self.head_spans:
            result = replace(result, head_seconds=sum(span.read() for span in self.head_spans))
        for request_id, token_id in zip(launched.requests, ids, strict=True):
            result.token_ids.setdefault(request_id, []).append(token_id)
        for requests, logprobs in self.reports:
            for request_id, report in zip(requests, logprobs.reports(), strict=True):
                result.logprobs.setdefault(request_id, []).append(report)
        for request_id, logprobs in self.prompt:
            result.prompt_logprobs.setdefault(request_id, []).extend(logprobs.reports())
        for requests, hidden in self.pooled:
            result.hidden.update(zip(requests, hidden.numpy(), strict=True))
        for requests, drafts in self.drafted:
            for request_id, token_id in zip(requests, drafts.tolist(), strict=True):
                result.drafts.setdefault(request_id, []).append(token_id)
        if drafts_by_depth:
            for row, first in launched.predicting:
                last_valid = first + num_right(row.drafts, ids[first:])
                result.drafts[row.request_id] = [drafts[last_valid] for drafts in drafts_by_depth[: row.predicts]]
        return result


@dataclass(slots=True)
class LaunchedStep:
    """Launched step. `Runner.collect` takes it once.

    requests: request of each sampled token, in order.
    ids: [1 + D, n] int64 on the host: their sampled ids, and D drafts after each sample. MISSING before the device has
        written them.
    output: None if the step has no rows, or while part of its work is not queued.
    record: records the collected step for a profile, called with (device seconds, results); None without a profile.
    predicting: rows after which tokens are drafted, and the first sampled token of each; used if there are drafts after
        each sample.
    """

    requests: list[int]
    ids: Tensor
    output: Pending[StepOutput] | None = None
    record: Callable[[float, StepOutput], None] | None = None
    predicting: list[tuple[Row, int]] = field(default_factory=list)


@dataclass(slots=True)
class StepRecord:
    """Step of a profile: numbers only, so that a profile shows no prompt. Times are seconds of time.perf_counter.

    index: number of the step in its profile, from 0.
    rows, tokens, samples: rows, tokens, and tokens that it samples.
    context: sum of the context lengths of its rows after the step.
    continued: rows that continue an earlier step's context.
    launch: begin and end of its launch on the host.
    seconds: its time on the device.
    spans: (begin, seconds) on the device, if the device computes on the host's clock.

    calls: (kernel, begin, seconds) of its kernel calls in order, if the runner times them.
    collected: when its results were on the host.
    """

    index: int
    phase: Phase
    rows: int
    tokens: int
    samples: int
    context: int
    continued: int
    launch: tuple[float, float]
    seconds: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    calls: list[tuple[str, float, float]] = field(default_factory=list)
    collected: float = 0.0


@dataclass(slots=True)
class Recording:
    """Records of the next steps that a runner launches; assign it to `Runner.recording`.

    left: number of steps to record.
    is_timed: the runner times their kernels. False: a profiler of the device does, in which each launch is a range.
    on_full: called before the launch of the first step that is not recorded. It removes the recording from the runner.
    steps: the collected steps.
    in_flight: launched steps that are not collected.
    num_calls: kernel calls of the collected steps.
    """

    left: int
    is_timed: bool
    on_full: Callable[[], None]
    steps: list[StepRecord] = field(default_factory=list)
    in_flight: int = 0
    num_calls: int = 0

    def times(self, step: Step) -> bool:
        """Return True if `launch` will time the kernels of `step`."""
        return self.is_timed and self.left > 0 and bool(step.rows)

    def launch(self, step: Step, launch: Callable[[Step, bool], LaunchedStep]) -> LaunchedStep:
        """Launch a step and record it. launch: takes the step, and whether its kernels are timed."""
        if step.rows and not self.left:
            self.on_full()
        if not step.rows or not self.left:
            return launch(step, False)
        self.left -= 1
        index = len(self.steps) + self.in_flight
        began = time.perf_counter()
        with nullcontext() if self.is_timed else record_function(f"step {index}"):
            launched = launch(step, self.is_timed)
        record = StepRecord(
            index, step.phase, len(step.rows), step.num_tokens, sum(row.samples for row in step.rows),
            sum(row.start + len(row.token_ids) for row in step.rows), sum(row.start > 0 for row in step.rows),
            (began, time.perf_counter()))
        launched.record = partial(self._complete, record)
        self.in_flight += 1
        return launched

    def _complete(self, record: StepRecord, seconds: float, output: StepOutput) -> None:
        record.seconds = seconds
        record.collected = time.perf_counter()
        record.spans = [(span.begin, span.read()) for span in output.spans if isinstance(span, HostSpan)]
        record.calls = [call for timings in output.timings for call in timings.calls()]
        self.steps.append(record)
        self.num_calls += len(record.calls)
        self.in_flight -= 1


@dataclass(slots=True)
class WaitingStep:
    """Step whose beginning is in the device's queue. The rest needs results of the host.

    queued: output of the queued beginning. It has `StepOutput.unsampled` if masks are needed.
    constrained: rows whose masks are not given yet.
    host: part that the host computes; None for a step without such a part.
    masks: masks of the constrained rows; None for no such rows.
    valid: number of valid samples of each constrained request, 0 without a mask.
    """

    launched: LaunchedStep
    queued: Pending[StepOutput]
    constrained: list[ConstrainedRow]
    last: Tensor
    phase: Phase | None
    host: HostWork | None = None
    masks: StagedMasks | None = None
    valid: Mapping[int, int] = field(default_factory=dict)


def pooled_rows(part: Part, put: Put) -> PooledRows | None:
    """Return the rows of a part that pool; None if there are none."""
    rows = [(row.request_id, end - 1) for row, end in zip(part.rows, part.cu_seqlens[1:], strict=False) if row.pools]
    if not rows:
        return None
    requests, tokens = zip(*rows, strict=True)
    return PooledRows(list(requests), put(np.array(tokens)))


def prompt_rows(
    part: Part, prompts: Mapping[int, NewRequest], put: Put
) -> list[PromptRows]:
    """Return the rows that predict prompt tokens of `prompts`, the requests with prompt_logprobs.

    A row at positions [a, b) predicts the prompt's tokens [a + 1, min(b + 1, its length)).
    """
    rows = []
    for row, begin in zip(part.rows, part.cu_seqlens, strict=False):
        request = prompts.get(row.request_id)
        if request is None or request.sampling.prompt_logprobs is None:
            continue
        following = request.prompt_ids[row.start + 1 : row.start + 1 + len(row.token_ids)]
        if following:
            rows.append(
                PromptRows(row.request_id, begin, put(np.array(following)), request.sampling.prompt_logprobs))
    return rows


def predicting_rows(rows: Sequence[Row]) -> list[tuple[Row, int]]:
    """Return the rows after which tokens are drafted, and the first sampled token of each."""
    firsts = accumulate((row.samples for row in rows), initial=0)
    return [(row, first) for row, first in zip(rows, firsts, strict=False) if row.predicts]
