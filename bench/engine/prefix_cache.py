"""Prefix cache of a hybrid beside that of an attention model: share of prompt tokens.

    python bench/engine/prefix_cache.py mooncake_conversation_trace.jsonl

The real scheduler, block manager and state slots run over a trace, with a simulated device. A line of the trace has a
request's time, its numbers of tokens, and ids that stand for equal 512 tokens. All lengths are divided by 32, so that
an id is a block of 16 tokens. The columns of the hybrid:

    same memory    its states take a part of the memory that the attention model has for keys and values
    same blocks    its states have memory of their own
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from npuserve.npu.execution.memory_plan import STATE_SHARE
from npuserve.npu.step import SamplingParams, StepResult
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.checkpoints import DEFAULT_SPACING, Spacing
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.state_slots import StateSlots
from npuserve.service.scheduling.step_plan import Plan

BLOCK = 16
SCALE = 512 // BLOCK
"""Tokens of the trace for each token here."""
STEP_SECONDS = 0.02 * SCALE
"""A step samples one scaled token, which stands for SCALE tokens of 20 ms."""
BUDGET = 2048
"""Scaled tokens of a step: 100,000 tokens of the trace a second, so that requests do not queue."""
MAX_NUM_SEQS = 64
SPACING = Spacing(BLOCK, DEFAULT_SPACING.middle // SCALE)


@dataclass(frozen=True)
class Share:
    """Result of a trace. hits, queries: prompt tokens. misses: requests by reason."""

    hits: int
    queries: int
    misses: Counter[str]

    @property
    def value(self) -> float:
        return self.hits / self.queries


@dataclass(frozen=True)
class Arrival:
    seconds: float
    prompt: list[int]
    output: int


def arrivals(trace: Path, limit: int) -> Iterator[Arrival]:
    """Yield the requests of a trace, scaled. Equal ids become equal blocks; the last one may be shorter."""
    with trace.open() as lines:
        for index, line in enumerate(lines):
            if limit and index >= limit:
                return
            entry = json.loads(line)
            length = max(1, entry["input_length"] // SCALE)
            prompt = [BLOCK * (number % (1 << 27)) + place for number in entry["hash_ids"] for place in range(BLOCK)]
            yield Arrival(entry["timestamp"] / 1000, prompt[:length], max(1, entry["output_length"] // SCALE))


def simulate(trace: Path, limit: int, tokens: int, num_slots: int) -> Share:
    """Return the share of prompt tokens that the prefix cache holds.

    limit: number of requests; 0: all.
    tokens: tokens of keys and values that fit into the blocks.
    num_slots: slots of fixed state; 0 for an attention model.
    """
    blocks = BlockManager(tokens // SCALE // BLOCK, BLOCK)
    slots = StateSlots(num_slots, blocks, SPACING) if num_slots else None
    scheduler = Scheduler(blocks, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET, max_queue=1 << 20,
                          aging_seconds=10.0, slots=slots)
    in_flight: deque[Plan] = deque()
    misses: Counter[str] = Counter()
    waiting = deque(arrivals(trace, limit))
    now = 0.0
    while waiting or scheduler.has_work or in_flight:
        while waiting and waiting[0].seconds <= now:
            arrival = waiting.popleft()
            if len(arrival.prompt) + arrival.output > blocks.capacity:
                continue
            request = Request("r", arrival.prompt, arrival.output, arrival.seconds, SamplingParams())
            scheduler.add(request, (b"", 0), now)
        plan = scheduler.schedule(now)
        if plan.step.rows:
            in_flight.append(plan)
        if len(in_flight) == 2 or (in_flight and not plan.step.rows):
            step = in_flight.popleft().step
            sampled = {row.request_id: [5] for row in step.rows if row.samples}
            scheduler.apply(step, StepResult(sampled, {}, {}, 0.0), now)
        elif not in_flight and waiting:
            now = max(now, waiting[0].seconds)
            continue
        now += STEP_SECONDS
        misses += scheduler.memory.take_misses()
    return Share(scheduler.memory.prefix_hits, scheduler.memory.prefix_queries, misses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="file of Mooncake's form")
    parser.add_argument("--memory", type=int, nargs="+", default=[1000, 4000, 16000],
                        help="of the cache, in thousands of tokens of keys and values (default: %(default)s)")
    parser.add_argument("--state-tokens", type=int, default=1600,
                        help="tokens of keys and values in the memory of a state (default: %(default)s, as in 0.8B)")
    parser.add_argument("--state-share", type=float, default=STATE_SHARE,
                        help="least share of the memory that states take (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=0, help="of the trace; 0: all")
    args = parser.parse_args()
    print(f"{'1000 tokens':>11} {'attention':>9} {'same memory':>11} {'ratio':>5} {'same blocks':>11} {'ratio':>5}  "
          "misses with the same memory")
    for memory in args.memory:
        tokens = 1000 * memory
        slots = max(2 * MAX_NUM_SEQS, int(tokens * args.state_share) // args.state_tokens)  # as in memory_plan.py
        states = slots * args.state_tokens
        attention, same_memory, same_blocks = (
            simulate(args.trace, args.requests, *sizes)
            for sizes in ((tokens, 0), (tokens - states, slots), (tokens, slots)))
        print(f"{memory:11} {attention.value:9.3f} {same_memory.value:11.3f} "
              f"{same_memory.value / attention.value:5.2f} {same_blocks.value:11.3f} "
              f"{same_blocks.value / attention.value:5.2f}  {dict(same_memory.misses)}", flush=True)


if __name__ == "__main__":
    main()
