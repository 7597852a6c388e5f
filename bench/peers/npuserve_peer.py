"""npuserve's step, with scheduler and runner as in the engine process. See harness.py."""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version

import harness

from npuserve.npu.execution.in_flight import LaunchedStep
from npuserve.npu.step import SamplingParams, Step
from npuserve.service import settings
from npuserve.service.ipc.messages import Request
from npuserve.service.ranks.load import load_model
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.state_slots import StateSlots

ROWS = 32


class Npuserve(harness.Generator):
    name, version = "npuserve", version("npuserve")

    def __init__(self, args: argparse.Namespace) -> None:
        parser = argparse.ArgumentParser()
        settings.add_arguments(parser)
        config = settings.load(parser.parse_args([
            str(args.model), "--threads", str(args.threads), "--dtype", "bfloat16", "--kv-cache-memory", "1280MiB",
            "--max-num-seqs", str(ROWS)]), os.environ)
        self.runner = load_model(config, config.model)
        self.weight_bytes = self.runner.weights_bytes
        self.budget = config.max_num_batched_tokens
        self.in_flight: deque[tuple[Step, LaunchedStep]] = deque()
        blocks = BlockManager(self.runner.num_blocks, self.runner.block_size, prefix_cache=False)
        self.scheduler = Scheduler(
            blocks, max_num_seqs=ROWS, max_num_batched_tokens=self.budget, max_queue=0,
            aging_seconds=config.priority_aging_seconds, slots=StateSlots.of(self.runner.num_slots, blocks))

    def run(self, prompts: list[list[int]], steps: int, tick: Callable[[], None]) -> None:
        # The first rows decode during the prefill of the others.
        spare = sum(map(len, prompts)) // (self.budget - len(prompts)) + len(prompts) + 1
        now = time.monotonic()
        ids = [self.scheduler.add(Request("", prompt, spare + steps, now, SamplingParams(temperature=0.0)),
                                  (b"", 0), now).sequence.id for prompt in prompts]
        while self.step() < len(prompts):
            pass
        tick()
        for _ in range(steps):
            self.step()
            tick()
        for number in ids:
            self.scheduler.cancel(number)
        while self.in_flight:
            self.step()

    def step(self) -> int:
        """Launch up to two steps, as the engine does; collect the oldest, and return its number of tokens."""
        while len(self.in_flight) < 2:
            step = self.scheduler.schedule(time.monotonic()).step
            if not step.rows:
                break
            self.in_flight.append((step, self.runner.launch(step)))
        step, launched = self.in_flight.popleft()
        result = self.runner.collect(launched)
        self.scheduler.apply(step, result, time.monotonic())
        return len(result.token_ids)


if __name__ == "__main__":
    harness.main(Npuserve)
