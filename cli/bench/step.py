"""`npuserve bench step`: time the engine's step without gRPC, with the engine process's scheduler and runner.

First, single prompts are prefilled alone, each several times. Then, for each context and batch size, a batch of
requests is prefilled to the context, and all its rows decode together. Each step is launched before the previous step
is collected, except with --no-double-buffering. With --json each line is one object; otherwise the output is a table.
With --tensor-parallel-size a group of ranks runs the steps; bytes and kernels are of rank 0 alone.

With --layers, --lm-head or --dump, the kernels of a step are checked instead: see trace.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from npuserve.cli.bench import trace as bench_trace
from npuserve.npu.large_import import import_torch
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.step import SamplingParams
from npuserve.service import settings
from npuserve.service.arguments import number
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.engine.pipeline import StepPipeline
from npuserve.service.ipc.messages import Request
from npuserve.service.ranks.lead import LeadRunner
from npuserve.service.ranks.load import load_model
from npuserve.service.ranks.processes import RankProcesses
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.state_slots import StateSlots
from npuserve.service.text.model_path import resolve

if TYPE_CHECKING:
    from npuserve.kernels.bench.ceilings import Ceilings
    from npuserve.npu.execution.runner import Runner

WARM_UP = 3
REPEATS = 5
TIMED_EVERY = 4
"""Interval between steps with timed kernels. Those steps measure the time in kernels and nothing else."""

CEILING_PASSES = 3

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch", type=_counts, default=[1, 8, 32], help="batch sizes, comma-separated (default: 1,8,32)")
    add("--context", type=_counts,
        help="tokens of each row before decoding, comma-separated (default: 512; 256 for the built-in model)")
    add("--prompt", type=_counts,
        help="tokens of each prompt that is prefilled alone, comma-separated (default: as for --context)")
    add("--tokens", type=number(int, 1), default=32, help="number of timed decode steps (default: %(default)s)")
    add("--ceilings", action="store_true",
        help="measure the machine's ceiling for each figure; needs 1 GiB of memory")
    add("--json", action="store_true", help="print one JSON object a line")
    bench_trace.add_arguments(parser)
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return the exit code. Raise ConfigError if the batch does not fit, or the model cannot be loaded."""
    config = settings.load(args, os.environ)
    length = 512 if config.model else 256  # the built-in model has a context of 512 tokens
    args.context = args.context or [length]
    args.prompt = args.prompt or [length]
    import_torch()
    if args.layers or args.lm_head or args.dump:
        return bench_trace.run(args, config)
    bench = Bench.load(config, args.batch, max(args.context), max(args.prompt), args.tokens)
    rss = _peak_rss()
    ceilings = None
    if args.ceilings:
        from npuserve.kernels.bench.ceilings import Ceilings
        from npuserve.npu.backends.machine import machine_of

        ceilings = Ceilings(machine=machine_of(bench.runner.backend))
    kernels = bench.runner.cpu_kernels
    if not args.json:
        if kernels:
            from npuserve.kernels.native.choice import describe

            print(*describe(kernels), sep="\n")
        print(f"{'batch':>6}{'context':>9}{'decode tok/s':>14}{'step ms':>9}{'GB/s':>7}{'share':>7}{'host us':>9}"
              f"{'kernels':>9} |{'prompt':>7}{'prefill tok/s':>15}{'TTFT ms':>9}{'GFLOP/s':>9}{'share':>7}")
    for row in _rows(bench, args, ceilings):
        row |= {"weights_bytes": bench.runner.weights_bytes, "cpu_kernels": kernels and asdict(kernels),
                "peak_rss_bytes": max(rss, _peak_rss() - (ceilings.read_bytes if ceilings else 0))}
        print(json.dumps(row) if args.json else _line(row), flush=True)
    if bench.ranks:
        bench.ranks.stop()
    return 0


def _rows(bench: Bench, args: argparse.Namespace, ceilings: Ceilings | None) -> Iterator[Row]:
    """Yield a row for each context and batch, with the first prompt's figures, then one for each further prompt."""
    first, *others = (_prefill(bench, tokens, ceilings) for tokens in args.prompt)
    for context in args.context:
        for batch in args.batch:
            yield {"batch": batch, "context": context, **_decode(bench, batch, context, args.tokens, ceilings), **first}
    yield from others


def _prefill(bench: Bench, tokens: int, ceilings: Ceilings | None) -> Row:
    products = "int8" if bench.runner.config.quantization else bench.runner.dtype_name
    samples, peak = _measure_with_ceiling(
        lambda: [bench.prefill(tokens) for _ in range(REPEATS)],
        lambda: ceilings.peak_of(products) if ceilings else 0.0)
    seconds = statistics.median(samples)
    speed = bench.prefill_operations(tokens) / seconds
    row = {"prompt": tokens, "prefill_tokens_per_second": tokens / seconds, "ttft_ms_p50": 1e3 * seconds,
           "prefill_gflops": speed / 1e9}
    return row | ({"matrix_ceiling_gflops": peak / 1e9, "matrix_share": speed / peak} if peak else {})


def _decode(bench: Bench, batch: int, context: int, tokens: int, ceilings: Ceilings | None) -> Row:
    steps, ceiling = _measure_with_ceiling(
        lambda: bench.decode(batch, context, tokens), lambda: ceilings.read() if ceilings else 0.0)
    timed = [step for step in steps if step.in_kernels]
    plain = [step for step in steps if not step.in_kernels] or steps
    seconds = sum(step.seconds for step in plain)
    size = sum(bench.decode_bytes(step.context, batch) for step in plain)
    speed = size / seconds
    row = {
        "decode_tokens_per_second": batch * len(plain) / seconds,
        "step_ms_p50": 1e3 * statistics.median(step.seconds for step in plain),
        "kernel_share": statistics.median(step.in_kernels / step.whole for step in timed) if timed else None,
        "host_us": 1e6 * statistics.median(step.whole - step.in_kernels for step in timed) if timed else None,
        "decode_gbs": speed / 1e9,
    }
    if not ceiling:
        return row
    from npuserve.kernels.bench.measure import COLD_BYTES

    cached = size < COLD_BYTES * len(plain)  # memory bandwidth is no ceiling for data in caches
    return row | {"read_ceiling_gbs": ceiling / 1e9, "read_share": None if cached else speed / ceiling}


def _measure_with_ceiling(measure: Callable[[], Any], ceiling: Callable[[], float]) -> tuple[Any, float]:
    """Return the measurement, and the best ceiling measured directly before and after it."""
    before = [ceiling() for _ in range(CEILING_PASSES)]
    measured = measure()
    return measured, max(before + [ceiling() for _ in range(CEILING_PASSES)])


@dataclass(frozen=True, slots=True)
class StepTime:
    """Durations and size of one step.

    seconds: from planning the step, or collecting the previous step if later, to its result.
    sampled: rows that sampled a token.
    context: tokens whose keys and values were read, over all rows.
    in_kernels: seconds in kernels; 0 if they were not timed.
    on_device: seconds from the first kernel to the end of the step, on the device's clock.
    """

    seconds: float
    sampled: int
    context: int
    in_kernels: float
    on_device: float

    @property
    def whole(self) -> float:
        """Return the seconds that include all kernels of the step.

        The device begins a step while the host still collects the previous step. If that is late, `seconds` includes
        only a part of the kernels' time.
        """
        return max(self.seconds, self.on_device)


@dataclass
class Bench:
    """Engine step without the engine process.

    runner, scheduler: as in the engine process, but without a prefix cache, so that each prompt is computed.
    ranks: the other ranks of the model; None if there are none.
    budget: maximum tokens of a step.
    depth: maximum number of steps in flight.
    calls: (kernel, seconds) of the last step's kernel calls, in order, if timed.
    collected: time of the last collection.
    """

    runner: Runner
    scheduler: Scheduler
    budget: int
    depth: int
    calls: list[tuple[str, float]]
    collected: float = 0.0
    ranks: RankProcesses | None = None

    def __post_init__(self) -> None:
        runner = LeadRunner(self.runner, self.ranks.group) if self.ranks else self.runner
        self.pipeline = StepPipeline(self.scheduler, runner, self.depth)

    @classmethod
    def load(cls, config: ServerConfig, batches: list[int], context: int, prompt: int, steps: int) -> Bench:
        """Load the model with a KV cache for the largest batch. Raise ConfigError if either is impossible."""
        rows = max(batches)
        budget = max(config.max_num_batched_tokens, rows + 1)
        ahead = spare(rows, context, budget)
        length = context + ahead + WARM_UP + steps
        calls: list[tuple[str, float]] = []
        config = msgspec.structs.replace(
            config, max_num_seqs=max(config.max_num_seqs, rows), max_num_batched_tokens=budget,
            kernel_sampling=min(config.kernel_sampling, TIMED_EVERY))
        folder = str(resolve(config.model))
        ranks = RankProcesses(config, folder) if config.tensor_parallel_size > 1 else None
        try:
            runner = load_model(
                config, folder, lambda kernel, phase, label, seconds: calls.append((kernel, seconds)),
                group=ranks.group if ranks else None)
        except (ValueError, OSError, MemoryError) as error:
            raise ConfigError(str(error)) from error
        blocks = BlockManager(runner.num_blocks, runner.block_size, prefix_cache=False)
        if (longest := max(length, prompt + 1)) > runner.max_model_len:
            raise ConfigError(f"context, prompt: {longest} tokens are needed, max_model_len is {runner.max_model_len}")
        if (needed := needed_blocks(rows, context, ahead, length, runner.block_size)) > runner.num_blocks:
            raise ConfigError(
                f"batch: {rows} rows of {length} tokens need {needed} blocks of {runner.block_size} tokens, and the KV "
                f"cache holds {runner.num_blocks}; see kv_cache_memory")
        scheduler = Scheduler(
            blocks, max_num_seqs=rows, max_num_batched_tokens=budget, max_queue=0,
            aging_seconds=config.priority_aging_seconds, slots=StateSlots.of(runner.num_slots, blocks))
        return cls(runner, scheduler, budget, 2 if config.double_buffering else 1, calls, ranks=ranks)

    def decode_bytes(self, context: int, rows: int) -> int:
        """Return the bytes that a decode step must move: all weights once, the keys and values of `context` tokens, and
        the fixed state of `rows` rows, which is read and written.

        An embedding apart from the LM head is not counted, because a step reads only a few of its rows. Of the experts
        of a mixture, those are counted that as many random tokens are expected to choose.
        """
        weights = self.runner.read_bytes - self.runner.unread_expert_bytes(rows)
        return weights + int(self.runner.token_bytes * context) + 2 * rows * self.runner.slot_bytes

    def prefill_operations(self, tokens: int) -> int:
        """Return the operations of the layers' linear products and causal attention, without the LM head's one row."""
        config = self.runner.config
        tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        q_sizes = sum(layer.q_size for layer in config.local_layers if isinstance(layer, Attention))
        attention = 4 * q_sizes * (tokens * (tokens + 1) // 2)
        return 2 * (config.active_parameters - tables) * tokens + attention

    def add(self, tokens: int, answer: int) -> int:
        """Add a request with `tokens` random prompt tokens and `answer` greedy tokens. Return its id."""
        now = time.monotonic()
        vocabulary = self.runner.config.vocab_size
        prompt = [random.randrange(vocabulary) for _ in range(tokens)]
        request = Request("", prompt, answer, now, SamplingParams(temperature=0.0))
        return self.scheduler.add(request, (b"", 0), now).sequence.id

    def step(self) -> StepTime:
        """Launch steps up to the pipeline's depth, and collect the oldest step in flight."""
        self.calls.clear()
        while (done := self.pipeline.advance()) is None:
            assert self.pipeline, "nothing to compute"
        began = max(done.planned, self.collected)
        self.collected = time.monotonic()
        context = sum(row.start + len(row.token_ids) for row in done.step.rows)
        in_kernels = sum(seconds for _, seconds in self.calls)
        return StepTime(
            self.collected - began, len(done.result.token_ids), context, in_kernels, done.result.device_seconds)

    def prefill(self, tokens: int) -> float:
        """Return the seconds from the request to its first token."""
        self.add(tokens, 1)
        began = time.perf_counter()
        while self.scheduler.has_work:
            self.step()
        return time.perf_counter() - began

    def decode(self, rows: int, context: int, steps: int) -> list[StepTime]:
        """Return `steps` timed steps in which all rows decode."""
        ids = [self.add(context, spare(rows, context, self.budget) + WARM_UP + steps) for _ in range(rows)]
        while self.step().sampled < rows:
            pass
        timed = [self.step() for _ in range(WARM_UP + steps)]
        for sequence_id in ids:
            self.scheduler.cancel(sequence_id)
        while self.pipeline:
            self.step()
        return timed[WARM_UP:]


def spare(rows: int, context: int, budget: int) -> int:
    """Return the tokens that the first row can decode while the other rows are still being prefilled."""
    return rows * context // max(budget - rows, 1) + rows + 1


def needed_blocks(rows: int, context: int, ahead: int, length: int, block_size: int) -> int:
    """Return the KV-cache blocks that a batch needs: at its end, or when its last row is admitted.

    The scheduler leaves a free block for each running row when it admits another one.

    ahead: tokens that a row can decode before the last row is admitted.
    length: tokens of a row at its end.
    """
    at_admission = (rows - 1) * (-(-(context + ahead) // block_size) + 1) - (-context // block_size)
    return max(at_admission, rows * -(-length // block_size))


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _line(row: Row) -> str:
    def cell(name: str, width: int, digits: int, scale: float = 1.0) -> str:
        value = row.get(name)
        return f"{'':{width}}" if value is None else f"{value * scale:{width}.{digits}f}"

    return "".join((
        cell("batch", 6, 0), cell("context", 9, 0), cell("decode_tokens_per_second", 14, 1), cell("step_ms_p50", 9, 2),
        cell("decode_gbs", 7, 1), cell("read_share", 7, 2), cell("host_us", 9, 0), cell("kernel_share", 9, 3), " |",
        cell("prompt", 7, 0), cell("prefill_tokens_per_second", 15, 1), cell("ttft_ms_p50", 9, 1),
        cell("prefill_gflops", 9, 0), cell("matrix_share", 7, 2)))


def _counts(text: str) -> list[int]:
    return [int(number(int, 1)(part)) for part in text.split(",")]
