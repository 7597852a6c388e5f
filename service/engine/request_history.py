"""History of the latest steps and of the latest ended requests, from which a request's time is explained.

A step costs one entry of a ring, and a request one when it ends. What a request spent its time on is worked out when
somebody asks:

    arrival ─preparation─► received ─grammar─► compiled ─queue─► first step ─prefill, decode─► end
                                                                 (without the waits of preemptions and pauses)

The time from one collected step to the next belongs to each request that is not waiting. In a step with a chunk of the
request's own prompt all of it is prefill. Otherwise it is decode, and what exceeds the usual time of such a step has
a cause: chunks of other prompts, token masks, a device that waited for the host, or a slow step. The usual time is the
median of steps of decode rows alone with a similar batch, outside of the request's life if there are enough.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from npuserve.npu.step import Step
from npuserve.service.ipc.explanations import Cause, Delay, Explanation, KernelComparison
from npuserve.service.scheduling.phase_timer import PhaseTimer, Wait
from npuserve.service.scheduling.sequence import Sequence

MAX_STEPS = 32_768
"""Latest steps that are kept, about 10 MB."""
MAX_ENDED = 4_096
"""Latest ended requests that are kept."""
MIN_USUAL_STEPS = 20
"""Minimum steps of a usual time."""
MAX_USUAL_STEPS = 8_192
"""Latest steps that a usual time is taken from."""
SLOW_RATIO = 1.5
"""A step or a kernel is slow if it takes this many times its usual time."""
MIN_MASK_WAIT_SECONDS = 0.0002
MAX_EXPLAINED = 16
"""Requests of one id that are explained. Each takes about 10 ms of the engine's loop."""

Calls = tuple[int, float]
"""Number of calls, and their seconds."""


class StepRecord(NamedTuple):
    """One step that was collected.

    began: when the device began it, as the host estimates; collected: when the host had its result. Seconds of
        time.monotonic().
    chunks: (id of a sequence, tokens) of the rows that are no decode rows.
    kernels: calls by kernel, if the step was timed.
    """

    began: float
    collected: float
    num_rows: int
    chunks: tuple[tuple[int, int], ...]
    kernels: Mapping[str, Calls] | None


class Life(NamedTuple):
    """What is known of a live or ended request.

    end: when it ended; now for a live one.
    waits: see PhaseTimer, with the one that has not ended.
    """

    id: int
    request_id: str
    client: str
    sample: int
    is_live: bool
    end: float
    timer: PhaseTimer
    waits: list[Wait]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    num_deferred: int

    @classmethod
    def of(cls, sequence: Sequence, end: float, is_live: bool) -> Life:
        request = sequence.request
        timer = sequence.timer
        waits = timer.waits
        if waits and not sequence.num_computed_tokens:
            waits = [*waits, Wait(timer.end, end, sequence.is_paused)]
        return cls(
            sequence.id, request.request_id, request.client, request.index, is_live, end, timer, waits,
            len(request.prompt_ids), sequence.cached_tokens, sequence.num_generated_tokens, sequence.num_deferred)


class RequestHistory:
    """Rings of steps and ended requests, for one thread.

    mask_waits: (end, seconds) of the latest waits of steps for masks.
    """

    def __init__(self) -> None:
        self.mask_waits: deque[tuple[float, float]] = deque(maxlen=MAX_STEPS)
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._ended: deque[Life] = deque(maxlen=MAX_ENDED)
        self._kernels: dict[str, Calls] = {}

    def observe_kernel(self, kernel: str, seconds: float) -> None:
        """Record a timed kernel call of the step collected next. kernel: with its phase, such as "linear, decode"."""
        calls, total = self._kernels.get(kernel, (0, 0.0))
        self._kernels[kernel] = calls + 1, total + seconds

    def take_kernels(self) -> Mapping[str, Calls]:
        """Return the kernel calls since the last call of this method."""
        kernels = self._kernels
        self._kernels = {}
        return kernels

    def observe_masks(self, end: float, seconds: float) -> None:
        """Record a wait of a step for its masks."""
        if seconds >= MIN_MASK_WAIT_SECONDS:
            self.mask_waits.append((end, seconds))

    def add(
        self, step: Step, has_chunks: bool, began: float, collected: float, kernels: Mapping[str, Calls] | None
    ) -> None:
        """Record a step. has_chunks: it has other rows than decode rows."""
        chunks: tuple[tuple[int, int], ...] = ()
        if has_chunks:
            # As Row.is_decode, which is slower as a call for each row.
            chunks = tuple((row.request_id, len(row.token_ids)) for row in step.rows
                           if len(row.token_ids) > row.samples or not row.start)
        self._steps.append(StepRecord(began, collected, len(step.rows), chunks, kernels))

    def end(self, sequence: Sequence, now: float) -> None:
        """Record the end of a request."""
        self._ended.append(Life.of(sequence, now, is_live=False))

    def explain(self, live: Iterable[Sequence], request_id: str, client: str, now: float) -> list[Explanation]:
        """Explain the latest MAX_EXPLAINED requests of an id, the latest arrival first.

        client: of the requests; "" for any. now: seconds of time.monotonic().
        """
        lives = [Life.of(sequence, now, is_live=True) for sequence in live] + list(self._ended)
        matching = [life for life in lives if life.request_id == request_id and client in ("", life.client)]
        matching.sort(key=lambda life: (-life.timer.arrival, life.sample))
        return [self._explain(life) for life in matching[:MAX_EXPLAINED]]

    def _explain(self, life: Life) -> Explanation:
        timer = life.timer
        end = life.end
        shares = _Shares()
        received = min(max(timer.received, timer.arrival), end)
        compiled = min(max(timer.compiled, received), end)
        waits = life.waits
        first = waits[0].end if waits else end
        shares.add("preparation", received - timer.arrival)
        shares.add("grammar", compiled - received)
        shares.add("queue", first - compiled)
        shares.queue_batch = [step.num_rows for step in self._between(compiled, first)]
        for wait in waits[1:]:
            shares.add("slow_reader" if wait.is_pause else "preemption", wait.end - wait.began, 1)
        steps = list(self._steps_of(life, first, end))
        usual = self._usual(first, end)
        masks = deque(wait for wait in self.mask_waits if first < wait[0] <= end)
        for previous, step in steps:
            waited = 0.0
            while masks and masks[0][0] <= step.collected:
                waited += masks.popleft()[1]
            _add_step(shares, life, previous, step, usual, waited)
        shares.divide_deferred(life)
        kernels = self._compare_kernels(steps, first, end)
        known_from = self._steps[0].collected if len(self._steps) == MAX_STEPS else 0.0
        return Explanation(
            life.request_id, life.client, life.sample, life.is_live, end - timer.arrival, life.prompt_tokens,
            life.cached_tokens, life.generated_tokens, len(steps), first >= known_from, shares.delays(kernels), kernels)

    def _between(self, begin: float, end: float) -> list[StepRecord]:
        """Return the steps that were collected after `begin`, at the latest at `end`."""
        steps = list(self._steps)
        low, high = (bisect_right(steps, moment, key=lambda step: step.collected) for moment in (begin, end))
        return steps[low:high]

    def _steps_of(self, life: Life, first: float, end: float) -> Iterator[tuple[float, StepRecord]]:
        """Yield (end of the step before, step) of the steps in which a request was not waiting."""
        waits = life.waits[1:]
        previous = first
        for step in self._between(first, end):
            if any(wait.began < step.collected <= wait.end for wait in waits):
                continue
            began = max([previous, *(wait.end for wait in waits if wait.end <= step.collected)])
            previous = step.collected
            yield began, step

    def _usual(self, first: float, end: float) -> Callable[[int], float]:
        """Return a function of the number of rows: the usual seconds of a step of so many decode rows; 0: unknown."""
        inside: defaultdict[int, list[float]] = defaultdict(list)
        outside: defaultdict[int, list[float]] = defaultdict(list)
        previous = 0.0
        for step in list(self._steps)[-MAX_USUAL_STEPS:]:
            if not step.chunks and previous:
                times = inside if first < step.collected <= end else outside
                times[step.num_rows.bit_length()].append(step.collected - max(step.began, previous))
            previous = step.collected
        usual: dict[int, float] = {}
        for size in {*inside, *outside}:
            times_of = outside[size] if len(outside[size]) >= MIN_USUAL_STEPS else outside[size] + inside[size]
            usual[size] = median(times_of)

        def seconds(num_rows: int) -> float:
            size = num_rows.bit_length()
            nearest = min(usual, key=lambda known: abs(known - size), default=None)
            return 0.0 if nearest is None else usual[nearest]

        return seconds

    def _compare_kernels(
        self, steps: list[tuple[float, StepRecord]], first: float, end: float
    ) -> list[KernelComparison]:
        """Return the kernels of timed steps, the longest first, beside other timed steps."""
        of_request = _total(step.kernels for _, step in steps if step.kernels)
        other = _total(
            step.kernels for step in self._steps if step.kernels and not first < step.collected <= end)
        rows = sorted(of_request.items(), key=lambda item: -item[1][1])
        return [
            KernelComparison(kernel, calls, seconds / calls, other[kernel][1] / other[kernel][0] if kernel in other
                             else 0.0)
            for kernel, (calls, seconds) in rows]


class _Shares:
    """Time of a request by cause, and the figures that explain it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[Cause, float] = defaultdict(float)
        self.steps: defaultdict[Cause, int] = defaultdict(int)
        self.batch: list[int] = []  # rows of the steps in which it decoded
        self.queue_batch: list[int] = []  # rows of the steps while it was queued
        self.neighbour_tokens = 0
        self.num_deferred = 0

    def add(self, cause: Cause, seconds: float, steps: int = 0) -> None:
        self.seconds[cause] += max(0.0, seconds)
        self.steps[cause] += steps

    def divide_deferred(self, life: Life) -> None:
        """Attribute the steps whose row was discarded for want of a mask to masks: they made no token for it."""
        self.num_deferred = min(life.num_deferred, self.steps["decode"])
        if self.num_deferred:
            seconds = self.seconds["decode"] * self.num_deferred / self.steps["decode"]
            self.seconds["decode"] -= seconds
            self.add("masks", seconds, self.num_deferred)

    def delays(self, kernels: list[KernelComparison]) -> list[Delay]:
        """Return the delays, the longest first."""
        details = {
            "queue": _mean("{:.0f} requests ran meanwhile, in the mean of its steps", self.queue_batch),
            "decode": _mean("{:.0f} requests in a step, in the mean", self.batch),
            "neighbour_prefill": f"{self.neighbour_tokens} prompt tokens of other requests",
            "masks": f"{self.num_deferred} rows computed again" if self.num_deferred else "",
            "slow_steps": _slowest(kernels)}
        return [
            Delay(cause, seconds, self.steps[cause], details.get(cause, ""))
            for cause, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]) if seconds > 0]


def _mean(text: str, values: list[int]) -> str:
    return text.format(sum(values) / len(values)) if values else ""


def _slowest(kernels: list[KernelComparison]) -> str:
    """Name the kernel that is most above its usual time, if one is slow."""
    known = [kernel for kernel in kernels if kernel.usual_seconds]
    worst = max(known, key=lambda kernel: kernel.mean_seconds / kernel.usual_seconds, default=None)
    if worst is None or worst.mean_seconds < SLOW_RATIO * worst.usual_seconds:
        return ""
    return f"kernel {worst.kernel}: {1e6 * worst.mean_seconds:.0f} µs, usually {1e6 * worst.usual_seconds:.0f} µs"


def _total(steps: Iterable[Mapping[str, Calls]]) -> dict[str, Calls]:
    """Add up the calls of steps by kernel."""
    total: dict[str, Calls] = {}
    for kernels in steps:
        for kernel, (calls, seconds) in kernels.items():
            before = total.get(kernel, (0, 0.0))
            total[kernel] = before[0] + calls, before[1] + seconds
    return total


def _add_step(
    shares: _Shares, life: Life, previous: float, step: StepRecord, usual: Callable[[int], float], mask_seconds: float
) -> None:
    """Divide the time from `previous` to the end of a step among its causes."""
    left = step.collected - previous
    if any(id == life.id for id, _ in step.chunks):
        shares.add("prefill", left, 1)
        return
    shares.batch.append(step.num_rows)
    normal = min(left, usual(step.num_rows) or left)
    left -= normal
    shares.add("decode", normal, 1)
    if masks := min(left, mask_seconds):
        shares.add("masks", masks, 1)
        left -= masks
    if tokens := sum(tokens for _, tokens in step.chunks):
        shares.neighbour_tokens += tokens
        shares.add("neighbour_prefill", left, 1)
    elif step.began - previous > left / 2 > 0:
        shares.add("host", left, 1)
    elif left > (SLOW_RATIO - 1) * normal:
        shares.add("slow_steps", left, 1)
    else:
        shares.add("decode", left)
