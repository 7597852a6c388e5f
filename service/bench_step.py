"""`npuserve bench step`: the engine's step without the wire, scheduler and runner as the engine process has them.

For each batch size, so many requests are prefilled to the context and decoded in step with each other; then a single
prompt is prefilled, alone, a few times. One JSON object a line with --json, else a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npuserve.npu.step import SamplingParams
from npuserve.service import settings
from npuserve.service.arguments import number
from npuserve.service.block_manager import BlockManager
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.engine_process import load_model
from npuserve.service.messages import Request
from npuserve.service.model_folder import resolve
from npuserve.service.scheduler import Scheduler

if TYPE_CHECKING:
    from npuserve.npu.runner import Runner

WARM_UP = 3
REPEATS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    count = number(int, 1)
    add("--batch", type=_counts, default=[1, 8, 32], help="rows, comma-separated (default: 1,8,32)")
    add("--context", type=count, default=512, help="tokens of each row before decoding (default: %(default)s)")
    add("--prompt", type=count, default=512, help="tokens of a prompt that is prefilled alone (default: %(default)s)")
    add("--tokens", type=count, default=32, help="decode steps that are timed (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object a line")
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """ConfigError where the settings leave no room for what is asked."""
    from npuserve.npu.memory import ITEMSIZE

    config = settings.load(args, os.environ)
    bench = Bench.load(config, args.batch, args.context, args.prompt, args.tokens)
    if not args.json:
        print(f"{'batch':>6}{'context':>9}{'decode tok/s':>14}{'step ms':>9}{'prefill tok/s':>15}{'TTFT ms':>9}")
    ttft = statistics.median(bench.prefill(args.prompt) for _ in range(REPEATS))
    for batch in args.batch:
        steps = bench.decode(batch, args.context, args.tokens)
        row = {
            "batch": batch, "context": args.context,
            "decode_tokens_per_second": batch * len(steps) / sum(steps),
            "step_ms_p50": 1e3 * statistics.median(steps),
            "prefill_tokens_per_second": args.prompt / ttft, "ttft_ms_p50": 1e3 * ttft,
            "weights_bytes": bench.runner.parameters * ITEMSIZE[bench.runner.dtype_name],
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            print(f"{batch:6}{args.context:9}{row['decode_tokens_per_second']:14.1f}{row['step_ms_p50']:9.2f}"
                  f"{row['prefill_tokens_per_second']:15.1f}{row['ttft_ms_p50']:9.1f}", flush=True)
    return 0


@dataclass
class Bench:
    """runner, scheduler: as the engine process makes them, without a prefix cache, so that each prompt is computed.
    budget: tokens a step."""

    runner: Runner
    scheduler: Scheduler

    budget: int

    @classmethod
    def load(cls, config: ServerConfig, batches: list[int], context: int, prompt: int, steps: int) -> Bench:
        """With room for the largest batch. ConfigError if there is none."""
        rows = max(batches)
        budget = max(config.max_num_batched_tokens, rows + 1)
        length = max(context + spare(rows, context, budget) + WARM_UP + steps, prompt + 1)
        runner = load_model(config, str(resolve(config.model)))
        blocks = BlockManager(runner.num_blocks, runner.block_size, prefix_cache=False)
        if length > runner.max_model_len:
            raise ConfigError(f"context, prompt: {length} tokens are needed, max_model_len is {runner.max_model_len}")
        if -(-length // runner.block_size) * rows > runner.num_blocks:
            raise ConfigError(f"batch: {rows} rows of {length} tokens are more than the {blocks.capacity} tokens that "
                              "the KV cache holds; see kv_cache_memory")
        scheduler = Scheduler(
            blocks, max_num_seqs=rows, max_num_batched_tokens=budget, max_queue=0,
            aging_seconds=config.priority_aging_seconds)
        return cls(runner, scheduler, budget)

    def add(self, tokens: int, answer: int) -> int:
        """A request of so many random prompt tokens that answers with so many greedy ones; its id."""
        now, vocabulary = time.monotonic(), self.runner.config.vocab_size
        prompt = [random.randrange(vocabulary) for _ in range(tokens)]
        request = Request("", prompt, answer, now, SamplingParams(temperature=0.0))
        return self.scheduler.add(request, (b"", 0), now).id

    def step(self) -> int:
        """One step; the number of its rows that sampled."""
        step = self.scheduler.schedule(time.monotonic())
        result = self.runner.collect(self.runner.launch(step))
        self.scheduler.apply(step, result, time.monotonic())
        return len(result.token_ids)

    def prefill(self, tokens: int) -> float:
        """Seconds from the request to its first token."""
        self.add(tokens, 1)
        began = time.perf_counter()
        while self.scheduler.has_work:
            self.step()
        return time.perf_counter() - began

    def decode(self, rows: int, context: int, steps: int) -> list[float]:
        """Seconds of each of `steps` steps in which all rows decode."""
        ids = [self.add(context, spare(rows, context, self.budget) + WARM_UP + steps) for _ in range(rows)]
        while self.step() < rows:
            pass
        seconds = []
        for _ in range(WARM_UP + steps):
            began = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - began)
        for sequence_id in ids:
            self.scheduler.cancel(sequence_id)
        return seconds[WARM_UP:]


def spare(rows: int, context: int, budget: int) -> int:
    """Tokens that the first of the rows may decode while the others are still being prefilled."""
    return rows * context // max(budget - rows, 1) + rows + 1


def _counts(text: str) -> list[int]:
    return [int(number(int, 1)(part)) for part in text.split(",")]
