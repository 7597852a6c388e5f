"""CPU time of the host side of a step, in microseconds per running request.

    python bench/engine/host_cost.py [--rows 1,32,256] [--context 1000] [--steps 200] [--drafts 3] [--json]

The scheduler and the runner are the real ones, but the runner's work is enqueued nowhere. `schedule` plans a step,
`launch` builds its batch and its sampling plan, `apply` processes made-up tokens. All rows decode, with two steps in
flight, as in the engine. `greedy` rows take the argmax; `sampled` rows have temperature, top_k and top_p. With --drafts
each row also has so many drafts of a head, all of them right, and one step is in flight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from npuserve.npu import storyteller
from npuserve.npu.backends.base import Pending, T
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.step import SamplingParams, Step, StepResult
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.speculation.speculator import Speculator

BLOCK_SIZE = 16
WARM_UP = 20
PARTS = ("schedule", "launch", "apply")
SAMPLING = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(seed=1, top_k=40, top_p=0.9)}


class NoPending:
    def wait(self) -> Any:
        return None


class NoDevice(CpuBackend):
    """CPU backend whose queue drops all work."""

    def enqueue(self, work: Callable[[], T]) -> Pending[T]:
        return NoPending()


def runner_of(rows: int, length: int, drafts: int) -> Runner:
    device, config = NoDevice(native=False), ModelConfig.from_folder(storyteller.FOLDER)
    weights = load_weights(storyteller.FOLDER, config, torch.float32, device, lambda done, total: None)
    return Runner(device, weights, config, 1, BLOCK_SIZE, max_model_len=length, max_num_seqs=rows,
                  max_num_batched_tokens=max(512, rows * (1 + drafts)), max_drafts=rows * drafts)


def drafting_of(rows: int, drafts: int) -> Drafting | None:
    return Drafting(Speculator("mtp", recomputes=False, depth=drafts), rows * drafts) if drafts else None


def result_of(step: Step) -> StepResult:
    """Return the same token for all samples, and as drafts."""
    return StepResult({row.request_id: [5] * row.samples for row in step.rows}, {}, {}, 0.0,
                      drafts={row.request_id: [5] * row.predicts for row in step.rows if row.predicts})


def measure(rows: int, context: int, steps: int, sampling: SamplingParams, drafts: int = 0) -> dict[str, float]:
    """Return the median of each part, in microseconds per row."""
    length = context + (steps + WARM_UP + 3) * (1 + drafts)
    in_flight_steps = 1 if drafts else 2
    blocks = BlockManager(rows * -(-length // BLOCK_SIZE), BLOCK_SIZE)
    scheduler = Scheduler(blocks, max_num_seqs=rows, max_num_batched_tokens=rows * context, max_queue=0,
                          aging_seconds=10.0, drafting=drafting_of(rows, drafts))
    for row in range(rows):
        scheduler.add(Request("", [row % 7 + 1] * context, length - context, 0.0, sampling), (b"", 0), 0.0)
    runner = runner_of(rows, length, drafts)
    spent: dict[str, list[float]] = {part: [] for part in PARTS}
    in_flight: deque[tuple[Step, StepResult]] = deque()
    first = scheduler.schedule(0.0).step  # all prompts at once: nobody computes them
    for new in first.new:
        runner._sampler.add(new)
    scheduler.apply(first, result_of(first), 0.0)
    for _ in range(WARM_UP + steps):
        begun = time.perf_counter()
        step = scheduler.schedule(0.0).step
        planned = time.perf_counter()
        runner.launch(step)
        launched = time.perf_counter()
        in_flight.append((step, result_of(step)))
        spent["schedule"].append(planned - begun)
        spent["launch"].append(launched - planned)
        if len(in_flight) == in_flight_steps:
            before = in_flight.popleft()
            begun = time.perf_counter()
            scheduler.apply(*before, 0.0)
            spent["apply"].append(time.perf_counter() - begun)
    return {part: 1e6 * statistics.median(seconds[WARM_UP:]) / rows for part, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("--rows", default="1,8,32,256", help="running requests (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1000, help="tokens of each request (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="measured steps (default: %(default)s)")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of each row (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    if not args.json:
        print(f"{'rows':>6}{'':>9}" + "".join(f"{name:>10}" for name in (*PARTS, "all")) + "   us per running request")
    for rows in map(int, args.rows.split(",")):
        for name, sampling in SAMPLING.items():
            found = measure(rows, args.context, args.steps, sampling, args.drafts)
            found["all"] = sum(found.values())
            line = {"rows": rows, "sampling": name, "context": args.context, "drafts": args.drafts, **found}
            print(json.dumps(line) if args.json else
                  f"{rows:>6}{name:>9}" + "".join(f"{value:>10.2f}" for value in found.values()), flush=True)


if __name__ == "__main__":
    main()
