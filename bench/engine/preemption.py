"""Simulation of `bench/reliability/fairness.py` with the real scheduler and a clock, without a model.

    python bench/engine/preemption.py [--seconds 60] [--no-prefix-cache]

The costs of a step, of a row and of a chunk's tokens are like those of the built-in model on two cores. Two steps are
in flight, as in the engine. Tokens that are computed again are not counted. For each case the program prints all
tokens per second, the newcomer's time to first token (median, 99th percentile, maximum), the longest pause of a
stream, the median of the longest pauses of all streams, and the preemptions per second. It runs with the interpreter
of any checkout, so that two schedulers can be compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from dataclasses import dataclass, field

from npuserve.npu.step import SamplingParams, StepResult
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.step_plan import Plan

STEP_SECONDS = 2e-3
ROW_SECONDS = 7.5e-5
CHUNK_TOKEN_SECONDS = 8e-5
CONTEXT_TOKEN_SECONDS = 4e-8
"""Attention: seconds for each row and each token of its context; a chunk counts as one row for each 8 of its tokens."""
PAUSE_SECONDS = 0.2
WARM_UP_SECONDS = 3.0


@dataclass(frozen=True)
class Case:
    """One column of figures.

    tenants: with the newcomer. streams: of each other tenant. prompt, output: tokens of their requests.
    newcomer_prompt, newcomer_output: tokens of the newcomer's. blocks: of 16 tokens.
    """

    name: str
    tenants: int
    streams: int
    prompt: int
    output: int
    blocks: int
    newcomer_prompt: int = 8
    newcomer_output: int = 8


CASES = (
    Case("two, slots", 2, 64, 16, 400, 4096),
    Case("five, slots", 5, 64, 16, 400, 4096),
    Case("two, blocks", 2, 4, 5000, 1500, 1024),
    Case("five, blocks", 5, 4, 5000, 1500, 1024),
    Case("two, long newcomer", 2, 4, 5000, 1500, 1024, 3000, 50),
    Case("two, long answers", 2, 64, 16, 4000, 20000, 8, 200),
)


@dataclass
class Stream:
    """A client's closed loop. first_tokens, pauses: seconds. idle_until: time of its next request."""

    client: str
    prompt: int
    output: tuple[int, int]
    pause: float = 0.0
    idle_until: float = 0.0
    began: float = 0.0
    last: float = 0.0
    longest: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    live: bool = False


class Simulation:
    """One round of a case."""

    def __init__(self, case: Case, prefix_cache: bool) -> None:
        self.random = random.Random(1)
        self.scheduler = Scheduler(
            BlockManager(case.blocks, 16, prefix_cache), max_num_seqs=64, max_num_batched_tokens=512, max_queue=1024,
            aging_seconds=10.0)
        self.now = 100.0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.in_flight: deque[Plan] = deque()
        self.by_id: dict[int, Stream] = {}
        output = (case.output * 3 // 4, case.output)
        self.newcomer = Stream(
            "newcomer", case.newcomer_prompt, (case.newcomer_output,) * 2, PAUSE_SECONDS,
            self.now + WARM_UP_SECONDS)
        self.streams = [Stream(f"tenant {tenant}", case.prompt, output)
                        for tenant in range(1, case.tenants) for _ in range(case.streams)]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            for stream in (*self.streams, self.newcomer):
                if not stream.live and stream.idle_until <= self.now:
                    self._send(stream)
            plan = self.scheduler.schedule(self.now)
            if plan.step.rows:
                self.in_flight.append(plan)
            if len(self.in_flight) == 2 or (self.in_flight and not plan.step.rows):
                self._apply()
            elif not self.in_flight:
                self.now += 1e-3

    def _send(self, stream: Stream) -> None:
        stream.live, stream.began, stream.last = True, self.now, 0.0
        prompt = [self.random.randrange(3, 2000) for _ in range(stream.prompt)]
        request = Request("r", prompt, self.random.randint(*stream.output), self.now, SamplingParams(),
                          client=stream.client)
        sequence = self.scheduler.add(request, (b"", 0), self.now).sequence
        self.by_id[sequence.id] = stream

    def _apply(self) -> None:
        plan = self.in_flight.popleft()
        self.now += _seconds(plan)
        result = StepResult({row.request_id: [5] for row in plan.step.rows if row.samples}, {}, {}, 0.0)
        for progress in self.scheduler.apply(plan.step, result, self.now):
            stream = self.by_id[progress.sequence.id]
            if stream.last:
                stream.longest = max(stream.longest, self.now - stream.last)
            else:
                stream.first_tokens.append(self.now - stream.began)
                self.prompt_tokens += progress.sequence.num_prompt_tokens
            self.generated_tokens += len(progress.token_ids)
            stream.last = self.now
            if progress.reason:
                stream.live, stream.idle_until = False, self.now + stream.pause


def _seconds(plan: Plan) -> float:
    """Return the duration of a step."""
    seconds = STEP_SECONDS
    for row in plan.step.rows:
        count = len(row.token_ids)
        seconds += ROW_SECONDS if count == 1 else CHUNK_TOKEN_SECONDS * count
        seconds += CONTEXT_TOKEN_SECONDS * row.start * max(1, count // 8)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("--seconds", type=float, default=60, help="of a round (default: %(default)s)")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--case", default="", help="part of the name of the cases to run")
    args = parser.parse_args()
    print(f"{'case':20} {'tokens/s':>8} {'gen/s':>6}  {'TTFT ms p50':>11} {'p99':>6} {'max':>6}  "
          f"{'pause max s':>11} {'median':>6} {'preemptions/s':>13}")
    for case in CASES:
        if args.case not in case.name:
            continue
        simulation = Simulation(case, not args.no_prefix_cache)
        simulation.run(args.seconds)
        first = sorted(1000 * seconds for seconds in simulation.newcomer.first_tokens) or [float("nan")]
        if simulation.newcomer.live and not simulation.newcomer.last:
            first.append(1000 * (simulation.now - simulation.newcomer.began))
            first.sort()
        pauses = sorted(stream.longest for stream in simulation.streams)
        tokens = (simulation.prompt_tokens + simulation.generated_tokens) / args.seconds
        print(f"{case.name:20} {tokens:8.0f} {simulation.generated_tokens / args.seconds:6.0f}  "
              f"{statistics.median(first):11.0f} {first[round(0.99 * (len(first) - 1))]:6.0f} {first[-1]:6.0f}  "
              f"{pauses[-1]:11.2f} {statistics.median(pauses):6.2f} "
              f"{simulation.scheduler.preemptions / args.seconds:13.2f}", flush=True)


if __name__ == "__main__":
    main()
