"""The step loop of all who run it: plan a step, launch it, collect the oldest step in flight, apply its result."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from npuserve.npu.step import Step, StepResult
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Progress
from npuserve.service.scheduling.step_plan import Plan


class Runner(Protocol):
    """Methods of npuserve.npu.execution.runner.Runner that the loop calls. A handle stands for one launched step."""

    def launch(self, step: Step) -> Any: ...
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
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, depth: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._clock = clock
        self._steps: deque[StepInFlight] = deque()  # the oldest first
        self._planned = 0.0
        self._is_starved = False  # the last plan had no rows

    def __len__(self) -> int:
        """Return the number of steps in flight."""
        return len(self._steps)

    @property
    def oldest(self) -> StepInFlight:
        """The step that `collect` takes next. IndexError if no step is in flight."""
        return self._steps[0]

    @property
    def must_collect(self) -> bool:
        """True if the oldest step must be collected before another is planned: the pipeline is full, or the last plan
        was empty and only a result can change that."""
        return bool(self._steps) and (self._is_starved or len(self._steps) == self._depth)

    def plan(self) -> Plan:
        """Plan the next step. `launch` it if it has rows; otherwise there is nothing to compute."""
        self._planned = self._clock()
        plan = self._scheduler.schedule(self._planned)
        self._is_starved = not plan.step.rows
        return plan

    def launch(self, step: Step) -> StepInFlight:
        """Launch the step that was planned last."""
        handle = self._runner.launch(step)
        launched = StepInFlight(step, handle, self._planned, self._clock())
        self._steps.append(launched)
        return launched

    def collect(self) -> AppliedStep:
        """Wait for the oldest step, and apply its result. IndexError if no step is in flight."""
        step, handle, planned, launched = self._steps.popleft()
        result = self._runner.collect(handle)
        collected = self._clock()
        progress = self._scheduler.apply(step, result, collected)
        return AppliedStep(step, result, progress, planned, launched, collected)

    def advance(self) -> AppliedStep | None:
        """Plan a step and launch it unless it is empty, then collect the oldest step if that must be done now.

        Return the step that was collected, None if none was. Each call launches or collects, unless there is nothing to
        compute and nothing in flight. Dropped requests are not reported: use `plan` and `launch` if there may be any.
        """
        step = self.plan().step
        if step.rows:
            self.launch(step)
        return self.collect() if self.must_collect else None
