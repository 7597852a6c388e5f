"""Steps that forced tokens save: answers under JSON schemas, with runs of forced tokens as chunks, and token by token.

    python bench/engine/forced_tokens.py MODEL [--rows 8] [--tokens 128] [--rounds 3] [--depth 2] [--temperature 1]
        [--schemas people order report] [--dtype auto] [--json]

bench/engine/schemas.py has the schemas. Prompts are random ids, and all answers have `--tokens` tokens. Both
must give the same tokens, else the program ends with an error.

Printed by schema, with chunks and token by token: steps, tokens per step and row, share of forced tokens, and
milliseconds per answer token. Counts are exact. Rounds alternate. `chunks` is the median duration of steps with a chunk
of n tokens, divided by the median of the steps without one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npuserve.npu.execution.load import load_runner
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import SamplingParams, Step
from npuserve.service.engine.pipeline import StepPipeline
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.compile_process import build_matchers
from npuserve.service.structured_output.compiler import Compilation
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.manager import StructuredOutputManager
from npuserve.service.structured_output.translation.translate import translate
from npuserve.service.structured_output.vocabulary import Vocabulary
from npuserve.service.text.model_folder import open_folder

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.engine.schemas import PROPERTIES, endless_list

PROMPT = 32


@dataclass
class Run:
    """Answers of all rows. seconds: of the loop. steps: durations by length of the longest chunk after the prompts."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    forced: int = 0
    seconds: float = 0.0

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.steps.values()))


def compiled_of(vocabulary: Vocabulary, constraint: Constraint) -> Compilation:
    """Compile a constraint in this process."""
    grammar = translate(constraint.kind, constraint.text, vocabulary.data.special)
    compiled = Compilation(vocabulary)
    compiled.build(functools.partial(build_matchers, vocabulary, grammar, constraint.kind))
    compiled.finish()
    return compiled


def answer(
    runner: Runner, compiled: Compilation, constraint: Constraint, end_ids: frozenset[int], args: argparse.Namespace,
    min_forced: int
) -> Run:
    """Answer one request a row at the same time, as the engine does."""
    scheduler = Scheduler(
        BlockManager(runner.num_blocks, runner.block_size, prefix_cache=False), max_num_seqs=args.rows,
        max_num_batched_tokens=512, max_queue=0, aging_seconds=1.0, min_forced=min_forced)
    pipeline = StepPipeline(
        scheduler, runner, args.depth,
        structured_output=StructuredOutputManager(vocabulary_size=runner.config.vocab_size))
    chooser, made = random.Random(0), Run()
    for row in range(args.rows):
        prompt = [chooser.randrange(1000) for _ in range(PROMPT)]
        request = Request("", prompt, args.tokens, time.monotonic(), SamplingParams(
            temperature=args.temperature, seed=row), constraint=constraint)
        scheduler.constrain(scheduler.add(request, (b"", row), 0.0).sequence,
                            AnswerMatcher(request, compiled, end_ids))
    began = before = time.perf_counter()
    while scheduler.has_work or pipeline:
        if (done := pipeline.advance()) is None:
            continue
        now = time.perf_counter()
        made.steps[max(len(row.token_ids) for row in done.step.rows)].append(now - before)
        before = now
        for progress in done.progress:
            assert progress.error is None, progress.error
            made.tokens[progress.sequence.origin[1]] += progress.token_ids
    made.seconds = before - began
    made.forced = scheduler.forced_tokens
    runner.launch(Step([], ended=scheduler.take_ended()))
    return made


def summary(runs: list[Run], args: argparse.Namespace) -> dict[str, Any]:
    tokens = args.rows * args.tokens
    return {"steps": runs[0].num_steps, "tokens_per_step_and_row": round(args.tokens / runs[0].num_steps, 3),
            "forced_share": round(runs[0].forced / tokens, 3),
            "token_ms": round(1e3 * statistics.median(run.seconds for run in runs) / tokens, 3)}


def chunks(runs: list[Run]) -> dict[int, float]:
    """Return the durations of steps with chunks, by length, relative to those without."""
    durations: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for length, seconds in run.steps.items():
            durations[length] += seconds
    base = statistics.median(durations[1])
    return {length: round(statistics.median(seconds) / base, 2) for length, seconds in sorted(durations.items())
            if 1 < length < PROMPT and len(seconds) > 2}


def main() -> None:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("model", type=Path)
    parser.add_argument("--schemas", nargs="+", choices=PROPERTIES, default=[*PROPERTIES])
    for name, value in (("rows", 8), ("tokens", 128), ("rounds", 3), ("depth", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    folder = open_folder(args.model, str(args.model), "")
    assert folder.tokenizer, "the model has no tokenizer"
    runner = load_runner(
        args.model, backend="cpu", dtype=args.dtype, max_num_seqs=args.rows, max_model_len=PROMPT + args.tokens,
        max_num_batched_tokens=512, progress=lambda done, total: None)
    vocabulary = Vocabulary.from_tokenizer(folder.tokenizer, runner.config.vocab_size, folder.eos_token_ids)
    print(f"load average {os.getloadavg()[0]:.1f}")
    for name in args.schemas:
        constraint = Constraint("json_schema", endless_list(name))
        compiled = compiled_of(vocabulary, constraint)
        runs: dict[int, list[Run]] = {0: [], runner.min_forced: []}
        for round_ in range(args.rounds):
            for least in [*runs][:: -1 if round_ % 2 else 1]:
                runs[least].append(answer(runner, compiled, constraint, vocabulary.end_ids, args, least))
        plain, jumped = runs[0], runs[runner.min_forced]
        assert all(run.tokens == plain[0].tokens for run in [*plain, *jumped]), "the tokens differ"
        line = {"schema": name, "plain": summary(plain, args), "forced": summary(jumped, args),
                "chunks": chunks(jumped)}
        print(json.dumps(line) if args.json else "\n".join(f"{key:8} {value}" for key, value in line.items()),
              flush=True)


if __name__ == "__main__":
    main()
