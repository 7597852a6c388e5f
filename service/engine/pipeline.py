"""Step loop: plan a step, launch it, collect the oldest step in flight, apply its result.

A step with constrained rows is launched in two parts: `launch` queues its forward pass, `sample` the rest. The masks of
the rows are prepared between the two, once the result of the step before is applied, since they depend on its tokens.
The device computes the forward pass meanwhile. At most one step, the last, is not sampled.

    host     plan 2, launch 2 │ collect 1, apply 1, masks, sample 2 │ plan 3, launch 3 │ collect 2 …

A step waits a limited time for its masks (`StructuredOutputManager.prepare`), longer if its forward pass takes longer.
A row whose mask is not there by then is deferred: its token is discarded, and it gets no row until the mask is
there. The rows of the same grammar are deferred with it, since the loop must not use the grammar meanwhile. Others
continue. The tokens are the same, since a mask depends on the text alone.

Forced tokens a, b, c (structured_output/answer_matcher.py) that follow the token of step 1 are appended after it is
applied. Step 2 computes the token of step 1, and would sample a: its row gets no mask, and its token is discarded.
Step 3 computes a, b and c as a chunk, and samples the token after c. Otherwise step 5 would.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from npuserve.npu.step import Step, StepResult
from npuserve.service import metrics
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Progress, Sequence, State
from npuserve.service.scheduling.step_plan import Plan
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.manager import StructuredOutputManager

Mask = npt.NDArray[np.int32]
"""One bit for each token of the vocabulary, 1 if it is allowed: [ceil(vocabulary / 32)], or [n, ...] for the first n
samples of a row with drafts."""


class Runner(Protocol):
    """Methods of npuserve.npu.execution.runner.Runner that the loop calls. A handle stands for one launched step.

    sample: samples a step with constrained rows. It must be called before the next launch and before `collect` of the
        step, and reads the masks, by request_id, until it returns. The token of a constrained row without a mask is
        discarded: it does not count for penalties, and the row may be computed again.
    """

    def launch(self, step: Step) -> Any: ...
    def sample(self, handle: Any, masks: Mapping[int, Mask]) -> None: ...
    def ready(self, handle: Any) -> bool: ...
    def collect(self, handle: Any) -> StepResult: ...


class StepInFlight(NamedTuple):
    """A launched step whose result was not collected yet.

    handle: the runner's.
    planned, launched: seconds of the pipeline's clock, before `schedule` and after `launch`.
    """

    step: Step
    handle: Any
    planned: float
    launched: float


class AppliedStep(NamedTuple):
    """A step whose result the scheduler has taken in.

    progress: what the step made, by request.
    planned, launched: see StepInFlight.
    collected: seconds of the pipeline's clock, between `collect` and `apply`.
    """

    step: Step
    result: StepResult
    progress: list[Progress]
    planned: float
    launched: float
    collected: float


class StepPipeline:
    """Steps between their plan and the use of their result.

    depth: maximum number of steps in flight. With 2, a step is planned and launched while the device computes the one
        before it; with 1, a step is planned after the one before it was applied.
    clock: seconds, of the clock of Request.arrival.
    structured_output: fills the masks; None if no request has a constraint.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        depth: int,
        clock: Callable[[], float] = time.monotonic,
        structured_output: StructuredOutputManager | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._clock = clock
        self._steps: deque[StepInFlight] = deque()  # the oldest first
        self._structured_output = StructuredOutputManager() if structured_output is None else structured_output
        self._constrained: list[Sequence] = []  # of the step that was planned last, until it is sampled
        self._planned = 0.0
        self._ended = 0.0  # end of the last collected step on the device, as the host estimates it
        self._is_starved = False  # the last plan had no rows

    def __len__(self) -> int:
        """Return the number of steps in flight."""
        return len(self._steps)

    @property
    def oldest(self) -> StepInFlight:
        """The step that `collect` takes next. IndexError if no step is in flight."""
        return self._steps[0]

    @property
    def oldest_began(self) -> float:
        """Estimate when the device began the oldest step, in seconds of the clock. IndexError if none is in flight.

        The estimate is not later than the truth if the host collected the step before late: a wait for the oldest step
        that is derived from it does not repeat the delay of the wait before.
        """
        return max(self.oldest.launched, self._ended)

    @property
    def must_collect(self) -> bool:
        """True if the oldest step must be collected before another is planned: the pipeline is full, or the last plan
        was empty and only a result can change that."""
        return bool(self._steps) and (self._is_starved or len(self._steps) == self._depth)

    @property
    def needs_tokens(self) -> bool:
        """True if the step launched last is sampled, or the next one planned, only after the oldest was collected."""
        return bool(self._constrained) or (bool(self._steps) and self._scheduler.waits_for_tokens)

    def wait_for_masks(self) -> None:
        """Wait until each deferred row can be planned again. For loops that have nothing else to do."""
        self._structured_output.wait_for_masks()

    def plan(self) -> Plan:
        """Plan the next step. `launch` it if it has rows; otherwise there is nothing to compute.

        Copies to and from host memory begin without rows too: no result belongs to them, so that they are not in flight
        here.
        """
        self._planned = self._clock()
        plan = self._scheduler.schedule(self._planned)
        if (plan.step.saves or plan.step.loads) and not plan.step.rows:
            self._runner.launch(plan.step)
        self._is_starved = not plan.step.rows
        self._constrained = plan.constrained
        return plan

    def launch(self, step: Step) -> StepInFlight:
        """Launch the step that was planned last. Its constrained rows wait for the result of the step before it."""
        handle = self._runner.launch(step)
        launched = StepInFlight(step, handle, self._planned, self._clock())
        self._steps.append(launched)
        if self._constrained and len(self._steps) == 1:
            self._prepare(self._constrained)
            self._sample()
        return launched

    def collect(self) -> AppliedStep:
        """Wait for the oldest step, and apply its result. IndexError if no step is in flight."""
        step, handle, planned, launched = self._steps.popleft()
        result = self._runner.collect(handle)
        collected = self._clock()
        self._ended = min(max(launched, self._ended) + result.device_seconds, collected)
        progress = self._scheduler.apply(step, result, collected)
        constrained = [part.sequence for part in progress if part.sequence.matcher is not None]
        if constrained or self._constrained:
            self._prepare(self._constrained + constrained)
            progress = [self._with_forced(part) for part in progress]
        if self._constrained:
            self._sample()
        return AppliedStep(step, result, progress, planned, launched, collected)

    def advance(self) -> AppliedStep | None:
        """Plan a step and launch it unless it is empty, then collect the oldest step if that must be done now.

        Return the step that was collected, None if none was. Each call launches or collects, unless there is nothing to
        compute and nothing in flight. Dropped requests are not reported: use `plan` and `launch` if there may be any.
        """
        step = self.plan().step
        if step.rows:
            self.launch(step)
        elif not self._steps:
            self.wait_for_masks()
        return self.collect() if self.must_collect else None

    def _masks_along(self, sequence: Sequence, matcher: AnswerMatcher) -> Mask | None:
        """Return a mask for each sample of the row with drafts launched last; None if nothing may follow.

        Samples without a mask of their own are not valid. Those after a draft that is not allowed are never reached.
        """
        row = next(row for row in self._steps[-1].step.rows if row.request_id == sequence.id)
        masks = matcher.masks_along(row.token_ids[len(row.token_ids) - row.samples + 1 :])
        if not masks:
            return None
        sequence.num_valid_samples = len(masks)
        return np.stack(masks)

    def _prepare(self, sequences: Iterable[Sequence]) -> None:
        """Prepare what follows in constrained answers, and wait for it within the limit."""
        self._structured_output.prepare(
            [sequence.matcher for sequence in sequences if sequence.state is not State.ENDED and sequence.matcher],
            self._scheduler.expected_seconds)

    def _with_forced(self, progress: Progress) -> Progress:
        """Append the forced tokens that follow a request's progress, if they are known."""
        matcher = progress.sequence.matcher
        if matcher is None or not matcher.has_forced or not progress.token_ids:
            return progress
        return self._scheduler.append_forced(progress)

    def _sample(self) -> None:
        """Sample the step that was launched last, whose rows are constrained by the tokens before it.

        A row has no mask if its request has ended or ends with its next token, or if this token was appended as a
        forced one. Otherwise it is deferred.
        """
        masks: dict[int, Mask] = {}
        for sequence in self._constrained:
            if sequence.state is State.ENDED or sequence.matcher is None or not sequence.num_pending_tokens:
                continue
            if sequence.is_preparing or not sequence.matcher.is_prepared:
                sequence.defer()
                metrics.deferred_rows_total.inc()
            elif sequence.has_drafts:
                if (drafted := self._masks_along(sequence, sequence.matcher)) is not None:
                    masks[sequence.id] = drafted
            elif (mask := sequence.matcher.mask()) is not None:
                masks[sequence.id] = mask
        metrics.constrained_tokens_total.inc(len(masks))
        self._runner.sample(self._steps[-1].handle, masks)
        self._constrained = []
