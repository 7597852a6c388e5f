"""Inter-token latency of streams beside requests that pool, without the wire.

    python bench/engine/pooled_beside.py MODEL [--streams 8] [--texts 4] [--tokens 64] [-- SETTINGS]

A served model either generates or pools. The engine computes both in one step, which is measured here with a model that
generates: streams alone ("alone"), beside requests that pool ("pooled"), and beside requests of the same prompts that
generate one token ("prompts"). --texts of them are queued at any time. The three take turns.

Prints p50 and p99 of the inter-token latency in milliseconds by arm, the requests a second beside the streams, and the
ratio of the p99 to that of the other arms, as medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.serving.server import arguments
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import SamplingParams, Step
from npuserve.service import settings
from npuserve.service.config import ServerConfig
from npuserve.service.engine.pipeline import StepPipeline
from npuserve.service.ipc.messages import PoolingParams, Request
from npuserve.service.ranks.load import load_model
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.state_slots import StateSlots
from npuserve.service.text.model_path import resolve

ARMS = "alone", "pooled", "prompts"
GREEDY = SamplingParams(temperature=0.0)


class Arm:
    """One run of an arm: streams of `length` tokens, and the texts beside them until the streams end."""

    def __init__(self, runner: Runner, config: ServerConfig, arm: str, args: argparse.Namespace, seed: int):
        blocks = BlockManager(runner.num_blocks, runner.block_size, prefix_cache=False)
        self._scheduler = Scheduler(
            blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
            max_queue=100, aging_seconds=config.priority_aging_seconds,
            target_itl_seconds=config.target_itl_seconds, slots=StateSlots.of(runner.num_slots, blocks))
        self._runner = runner
        self._pipeline = StepPipeline(self._scheduler, runner, 2)
        self._random = random.Random(seed)
        self._vocabulary = runner.config.vocab_size
        self._numbers = itertools.count()
        self._arm = arm
        self._texts = args.texts if arm != "alone" else 0
        self._tokens = args.tokens
        self.done = 0  # texts beside the streams
        self._live = 0
        streams = [Request(f"s{i}", self._ids(args.prompt), args.length, time.monotonic(), GREEDY)
                   for i in range(args.streams)]
        self.arrivals: dict[int, list[float]] = {
            self._scheduler.add(stream, (b"", 0), time.monotonic()).sequence.id: [] for stream in streams}
        self._length = args.length

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(count)]

    def _add_text(self) -> None:
        ids = self._ids(self._random.randint(1, 2 * self._tokens - 1))
        name, now = f"t{next(self._numbers)}", time.monotonic()
        pools = self._arm == "pooled"
        request = Request(name, ids, 0 if pools else 1, now, GREEDY, pooling=PoolingParams(1) if pools else None)
        self._scheduler.add(request, (b"", 0), now)
        self._live += 1

    def run(self) -> tuple[list[float], float]:
        """Return the inter-token latencies of the streams in seconds, and the texts a second beside them."""
        while not all(self.arrivals.values()):
            self._advance()
        began = time.monotonic()
        while any(len(arrivals) < self._length for arrivals in self.arrivals.values()):
            while self._live < self._texts:
                self._add_text()
            self._advance()
        seconds, done = time.monotonic() - began, self.done
        while self._scheduler.has_work or self._pipeline:
            self._advance()
        self._runner.launch(Step([], ended=self._scheduler.take_ended()))
        gaps = [b - a for arrivals in self.arrivals.values() for a, b in itertools.pairwise(arrivals)]
        return gaps, done / seconds

    def _advance(self) -> None:
        applied = self._pipeline.advance()
        for progress in applied.progress if applied else ():
            arrivals = self.arrivals.get(progress.sequence.id)
            if arrivals is not None:
                arrivals.append(time.monotonic())
            elif progress.reason:
                self.done += 1
                self._live -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a stream's prompt (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a stream (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=4, help="texts in the engine at any time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="mean tokens of a text (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    args, given = arguments(parser)
    known = argparse.ArgumentParser()
    settings.add_arguments(known)
    config = settings.load(known.parse_args([args.model, *given]), os.environ)
    runner = load_model(config, str(resolve(config.model)), lambda *_: None)
    figures: dict[str, list[tuple[float, float, float]]] = {arm: [] for arm in ARMS}
    for number in range(args.rounds + 1):
        for arm in ARMS[number % 3 :] + ARMS[: number % 3]:
            gaps, rate = Arm(runner, config, arm, args, number).run()
            ordered = sorted(gaps)
            if number:
                figures[arm].append((1e3 * statistics.median(gaps), 1e3 * ordered[len(ordered) * 99 // 100], rate))
    for arm, rounds in figures.items():
        p50, p99, rate = (round(statistics.median(values), 2) for values in zip(*rounds, strict=True))
        print(json.dumps({"arm": arm, "itl_p50_ms": p50, "itl_p99_ms": p99, "texts_per_second": rate}))
    for other in ("alone", "prompts"):
        ratios = sorted(ours[1] / theirs[1] for ours, theirs in zip(figures["pooled"], figures[other], strict=True))
        print(json.dumps({f"p99 of pooled to {other}": round(statistics.median(ratios), 2),
                          "range": [round(ratios[0], 2), round(ratios[-1], 2)]}))


if __name__ == "__main__":
    main()
