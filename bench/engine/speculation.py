"""Speculative decoding: acceptance and tokens a second, with drafts and without, in turn.

    python bench/engine/speculation.py MODEL [--workloads code summary chat json right wrong adverse]
        [--streams 1 8 32] [--modes off auto suffix mtp] [--tokens 128] [--rounds 3] [--temperature 0]
        [--chat mtbench_question.jsonl] [--dtype auto] [--depth 3] [--acceptance 0.6 0.8 0.9] [--forced-mode mtp]
        [--json]

Workloads:
    code      write a file of this repository again, with a name changed
    summary   summarise a document of this repository with quotations
    chat      second turn of a chat; --chat: MT-Bench's questions, one JSON object with `turns` a line
    story     the beginning of a story, for models of bench/quality/train_mtp.py
    json      a list of objects under a schema (schemas.py)
    right     chat, with drafts that are always right
    wrong     chat, with drafts that are always wrong and look probable
    adverse   chat, with drafts that are right and wrong for 24 tokens in turn, and look probable
    forced    with --forced-mode: the model's head drafts as in a server, and each draft is replaced by the right token
              with the probability --acceptance, by a wrong one otherwise. With auto, the head is stopped where it does
              not pay: `--forced-mode auto --acceptance 0` shows what a wrong head costs.
              `bench/peers/make_model.py qwen3.5-0.8b FOLDER --mtp` writes a model with a head. `expected` is the ratio
              by the model of step costs: with acceptance p and depth k a step yields 1 + p + ... + p^k tokens, and
              takes as long as one whose drafts are all right. It does not count the accepted tokens that a hybrid
              computes twice after a wrong draft

Without drafts, a head is not computed. All modes must give the same tokens, else the program ends with an error.
Printed by workload, number of streams and mode: tokens a second after the first token of the last stream, the sum of
the streams' own rates since some end early (median of the rounds), relative to `off` (median of the rounds' ratios),
the 99th percentile of the seconds between two messages of a stream (median of the rounds), steps, those that computed
the head, tokens a step and stream, drafted and accepted tokens, and the share of time for drafting.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npuserve.npu.execution.load import load_runner
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import SamplingParams, Step
from npuserve.service.engine.pipeline import StepPipeline
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.scheduling.state_slots import StateSlots
from npuserve.service.speculation.drafter import Drafter
from npuserve.service.speculation.request_drafter import RequestDrafter
from npuserve.service.speculation.speculator import MAX_STEP_DRAFTS, Speculator
from npuserve.service.speculation.token_history import TokenHistory
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.manager import StructuredOutputManager
from npuserve.service.structured_output.vocabulary import Vocabulary
from npuserve.service.text.model_folder import ModelFolder, open_folder

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.engine.forced_tokens import compiled_of
from bench.engine.schemas import endless_list

ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = "code", "summary", "chat", "story", "json", "right", "wrong", "adverse", "forced"
MODES = "off", "auto", "suffix", "mtp"
MAX_CHARACTERS = 2400
"""Characters of a file or document in a prompt."""
TURN_TOKENS = 24
"""Tokens for which drafts are right or wrong in turn."""
QUESTIONS = (
    ("Write a short story about a lighthouse.", "Write it again, from the view of the sea."),
    ("What should I see in Lisbon in three days?", "Make it a list by day, with times."),
    ("Explain how a refrigerator works.", "Explain it again to a child of five."),
    ("Give arguments for and against remote work.", "Which of them are strongest, and why?"),
)


@dataclass(frozen=True)
class Prompts:
    """Prompts of a workload, one a stream. constraint: of all answers; None for none."""

    token_ids: list[list[int]]
    constraint: Constraint | None = None


@dataclass
class Run:
    """Answers of all streams. seconds, steps, rate, gaps: after the first token of the last stream.

    gaps: seconds between two messages of a stream.
    by_depth: share of the rows with drafts in which the 1st, 2nd, ... draft was accepted.
    head_steps: steps that computed the head, also for prompts.
    """

    tokens: dict[int, list[int]]
    seconds: float
    steps: int
    generated: int
    drafted: int
    accepted: int
    drafting_seconds: float
    rate: float
    gaps: list[float]
    by_depth: list[float]
    head_steps: int


class OracleDrafter(Drafter):
    """Drafter that predicts from a given answer, with a long match."""

    __slots__ = ("_generated", "_oracle")

    def __init__(self, sequence: Sequence, speculator: Speculator, answer: list[int]):
        super().__init__(sequence.token_ids, None, speculator.rates)
        self._oracle = TokenHistory(answer)
        self._generated = sequence.num_generated_tokens
        self._search(0)

    def extend(self, token_ids: Ordered[int], max_pause: int) -> None:
        self._generated += len(token_ids)
        super().extend(token_ids, max_pause)
        self._search(0)

    def _search(self, max_pause: int) -> None:
        self._source, self._position, self._length = self._oracle, self._generated, 32


class OracleDrafting(Drafting):
    """Drafting from given answers by stream."""

    def __init__(
        self, speculator: Speculator, max_drafts: int, answers: dict[int, list[int]], state_block_size: int = 0
    ):
        super().__init__(speculator, max_drafts, state_block_size=state_block_size)
        self._answers = answers

    def _drafter(self, sequence: Sequence) -> RequestDrafter:
        assert self.speculator
        return RequestDrafter(OracleDrafter(sequence, self.speculator, self._answers[sequence.origin[1]]), None)


class ForcedDrafting(Drafting):
    """Drafting by the model's head, whose drafts are replaced by ones that are right with a given probability.

    answers: right tokens by stream.
    """

    def __init__(
        self, speculator: Speculator, runner: Runner, answers: dict[int, list[int]], acceptance: float
    ) -> None:
        super().__init__(
            speculator, runner.max_drafts, state_block_size=runner.block_size if runner.num_slots else 0)
        self._answers = answers
        self._acceptance = acceptance
        self._random = random.Random(0)

    def replace_predicted(self, sequence: Sequence, drafts: Ordered[int]) -> None:
        first = sequence.num_generated_tokens
        right = self._answers[sequence.origin[1]][first : first + len(drafts)]
        super().replace_predicted(
            sequence, [token if self._random.random() < self._acceptance else token ^ 1 for token in right])


def spoiled(workload: str, answer: list[int]) -> list[int]:
    """Return what the drafts of a workload predict in place of an answer."""
    if workload == "right":
        return answer
    return [token + 1 if workload == "wrong" or place // TURN_TOKENS % 2 else token
            for place, token in enumerate(answer)]


def chats(path: Path | None) -> list[tuple[str, str]]:
    if path is None:
        return list(QUESTIONS)
    all_turns = [json.loads(line)["turns"] for line in path.read_text().splitlines()]
    return [(turns[0], turns[1]) for turns in all_turns if len(turns) > 1]


def prompts_of(workload: str, folder: ModelFolder, streams: int, chat: Path | None) -> Prompts:
    """Return the prompts of a workload."""
    assert folder.tokenizer
    if workload == "code":
        files = sorted((ROOT / "service").rglob("*.py"), key=lambda file: (len(file.name), file))
        texts = [file.read_text() for file in files if len(file.read_text()) > MAX_CHARACTERS]
        asked = [[("user", f"Rename `name` to `label` in this file, and write the whole file:\n```python\n"
                           f"{text[:MAX_CHARACTERS]}\n```")] for text in texts[:streams]]
    elif workload == "summary":
        pages = sorted((ROOT / "docs").glob("*.md"))
        texts = [page.read_text()[start : start + MAX_CHARACTERS] for start in (0, MAX_CHARACTERS, 2 * MAX_CHARACTERS)
                 for page in pages]
        asked = [[("user", f"Quote the three most important sentences word for word, then summarise:\n\n{text}")]
                 for text in texts[:streams]]
    elif workload == "forced":
        draw = random.Random(streams)
        return Prompts([draw.choices(range(256), k=32) for _ in range(streams)])
    elif workload == "story":
        names = ("Tom", "Lily", "Ben", "Mia")
        texts = [f"Once upon a time, there was a {('little', 'big', 'happy', 'sad')[number // 4 % 4]} child named "
                 f"{names[number % 4]}{' and a dog' * (number // 16)}." for number in range(streams)]
        return Prompts([folder.tokenizer.encode(text) for text in texts])
    elif workload == "json":
        asked = [[("user", f"Invent a list of people of town {number}, as JSON.")] for number in range(streams)]
    else:
        questions = chats(chat)
        asked = []
        for number in range(streams):
            first, second = questions[number % len(questions)]
            asked.append([("user", first), ("assistant", f"{first} Let me answer step by step, in simple words."),
                          ("user", f"{second} ({number})")])
    ids = [folder.tokenizer.encode(_rendered(messages)) for messages in asked]
    return Prompts(ids, Constraint("json_schema", endless_list("people")) if workload == "json" else None)


def _rendered(messages: list[tuple[str, str]]) -> str:
    """Return a chat in ChatML, which both models know."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


class Bench:
    """Runs of one model."""

    def __init__(self, runner: Runner, folder: ModelFolder, args: argparse.Namespace):
        assert folder.tokenizer
        self._runner = runner
        self._args = args
        self._vocabulary = Vocabulary.from_tokenizer(
            folder.tokenizer, runner.config.vocab_size, folder.eos_token_ids)
        self._speculators: dict[str, Speculator] = {}
        self._num_runs = 0  # a salt for each, so that no run finds the same answers of the run before

    def drafting(self, workload: str, mode: str, answers: dict[int, list[int]]) -> Drafting:
        """Return the drafting of a run. A mode keeps its speculator, as a server does."""
        if mode == "off":
            return Drafting()
        state_block_size = self._runner.block_size if self._runner.num_slots else 0
        depth = self._args.depth if self._runner.predicts and mode != "suffix" else 0
        speculator = self._speculators.setdefault(
            mode, Speculator(mode, recomputes=state_block_size > 0, depth=depth))  # type: ignore[arg-type]
        if workload in ("right", "wrong", "adverse"):
            spoiled_answers = {stream: spoiled(workload, answer) for stream, answer in answers.items()}
            return OracleDrafting(speculator, self._runner.max_drafts, spoiled_answers, state_block_size)
        return Drafting(speculator, self._runner.max_drafts, state_block_size=state_block_size)

    def run(self, prompts: Prompts, drafting: Drafting) -> Run:
        """Answer all prompts at the same time, as the engine does."""
        self._num_runs += 1
        streams = len(prompts.token_ids)
        blocks = BlockManager(self._runner.num_blocks, self._runner.block_size, prefix_cache=False)
        scheduler = Scheduler(
            blocks, max_num_seqs=streams, max_num_batched_tokens=512, max_queue=0, aging_seconds=1.0,
            min_forced=self._runner.min_forced, slots=StateSlots.of(self._runner.num_slots, blocks), drafting=drafting)
        pipeline = StepPipeline(
            scheduler, self._runner, 2,
            structured_output=StructuredOutputManager(vocabulary_size=self._runner.config.vocab_size))
        sequences: list[Sequence] = []
        compiled = compiled_of(self._vocabulary, prompts.constraint) if prompts.constraint else None
        for stream, token_ids in enumerate(prompts.token_ids):
            sampling = SamplingParams(temperature=self._args.temperature, seed=stream)
            request = Request("", token_ids, self._args.tokens, time.monotonic(), sampling,
                              constraint=prompts.constraint, cache_salt=f"run {self._num_runs}")
            sequences.append(scheduler.add(request, (b"", stream), 0.0).sequence)
            if compiled:
                scheduler.constrain(sequences[-1], AnswerMatcher(request, compiled, self._vocabulary.end_ids))
        tokens: dict[int, list[int]] = defaultdict(list)
        began = 0.0
        steps = 0
        before: dict[int, int] = {}
        ends: dict[int, float] = {}
        last_messages: dict[int, float] = {}
        gaps: list[float] = []
        drafting_before = drafting.seconds
        while scheduler.has_work or pipeline:
            if (done := pipeline.advance()) is None:
                continue
            steps += 1
            for progress in done.progress:
                assert progress.error is None, progress.error
                stream = progress.sequence.origin[1]
                tokens[stream] += progress.token_ids
                now = time.perf_counter()
                if began:
                    gaps.append(now - last_messages[stream])
                last_messages[stream] = now
                if progress.reason:
                    ends[stream] = now
            if not began and len(tokens) == streams:
                began = time.perf_counter()
                before = {stream: len(ids) for stream, ids in tokens.items() if stream not in ends}
                steps = 0
                drafting_before = drafting.seconds
        seconds = time.perf_counter() - began
        self._runner.launch(Step([], ended=scheduler.take_ended()))
        rate = sum((len(tokens[stream]) - count) / (ends[stream] - began) for stream, count in before.items())
        generated = sum(len(tokens[stream]) - count for stream, count in before.items())
        return Run(tokens, seconds, steps, generated, drafting.drafted, drafting.accepted,
                   drafting.seconds - drafting_before, rate, gaps, by_depth(drafting),
                   drafting.head_steps["computed"])

    def compare_forced(self, prompts: Prompts) -> Iterator[dict[str, Any]]:
        """Run without drafts and with each acceptance in turn; yield the results."""
        answers = self.run(prompts, Drafting()).tokens
        speculators: dict[float, Speculator] = {}
        runs: dict[float, list[Run]] = {acceptance: [] for acceptance in (-1.0, *self._args.acceptance, 1.0)}
        for round_ in range(self._args.rounds):
            for acceptance, of_kind in list(runs.items())[:: -1 if round_ % 2 else 1]:
                drafting: Drafting = Drafting()
                if acceptance >= 0:
                    speculator = speculators.setdefault(acceptance, Speculator(
                        self._args.forced_mode, recomputes=self._runner.num_slots > 0, depth=self._args.depth))
                    drafting = ForcedDrafting(speculator, self._runner, answers, acceptance)
                run = self.run(prompts, drafting)
                assert run.tokens == answers, f"acceptance {acceptance}: the tokens differ"
                of_kind.append(run)
        off = runs.pop(-1.0)
        streams = len(prompts.token_ids)
        cost = step_seconds(runs[1.0]) / step_seconds(off)
        for acceptance, of_kind in runs.items():
            tokens = sum(acceptance**number for number in range(self._args.depth + 1))
            ratios = [run.rate / plain.rate for run, plain in zip(of_kind, off, strict=True)]
            yield {"workload": "forced", "mode": self._args.forced_mode, "streams": streams, "acceptance": acceptance,
                   "depth": self._args.depth,
                   **summary(of_kind, off, streams), "ratios": [round(ratio, 2) for ratio in sorted(ratios)],
                   "expected": round(tokens / cost, 2), "step_ms": round(1e3 * step_seconds(runs[1.0]), 1),
                   "step_ms_without": round(1e3 * step_seconds(off), 1)}

    def compare(self, workload: str, prompts: Prompts) -> dict[str, list[Run]]:
        """Run all modes in turn."""
        answers = self.run(prompts, Drafting()).tokens
        runs: dict[str, list[Run]] = {mode: [] for mode in self._args.modes}
        for round_ in range(self._args.rounds):
            for mode in self._args.modes[:: -1 if round_ % 2 else 1]:
                run = self.run(prompts, self.drafting(workload, mode, answers))
                assert run.tokens == answers, f"{workload}, {mode}: the tokens differ"
                runs[mode].append(run)
        return runs


def by_depth(drafting: Drafting) -> list[float]:
    """Return the share of the rows with drafts in which the 1st, 2nd, ... draft was accepted, up to the longest."""
    lengths = Counter[int]()
    for (_, length), rows in drafting.take_lengths().items():
        lengths[length] += rows
    return [round(sum(rows for length, rows in lengths.items() if length >= depth) / lengths.total(), 3)
            for depth in range(1, max(lengths, default=0) + 1)]


def step_seconds(runs: list[Run]) -> float:
    return statistics.median(run.seconds / run.steps for run in runs)


def summary(runs: list[Run], base: list[Run], streams: int) -> dict[str, Any]:
    last = runs[-1]
    return {
        "tokens_per_second": round(statistics.median(run.rate for run in runs), 1),
        "ratio": round(statistics.median(run.rate / off.rate for run, off in zip(runs, base, strict=True)), 2),
        "itl_p99_ms": round(1e3 * statistics.median(statistics.quantiles(run.gaps, n=100)[98] for run in runs), 1),
        "steps": last.steps, "head_steps": last.head_steps,
        "tokens_per_step_and_stream": round(last.generated / last.steps / streams, 2),
        "drafted": last.drafted, "accepted": last.accepted, "acceptance_by_depth": last.by_depth,
        "drafting_share": round(last.drafting_seconds / last.seconds, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("model", type=Path)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS,
                        default=[workload for workload in WORKLOADS if workload != "forced"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    for name, value in (("tokens", 128), ("rounds", 3), ("depth", 3)):
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.6, 0.8, 0.9])
    parser.add_argument("--forced-mode", choices=("mtp", "auto"), default="mtp", help="(default: %(default)s)")
    parser.add_argument("--chat", type=Path, help="questions of MT-Bench")
    parser.add_argument("--dtype", default="auto", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    folder = open_folder(args.model, str(args.model), "")
    runner = load_runner(
        args.model, backend="cpu", dtype=args.dtype, max_num_seqs=max(args.streams), max_model_len=2048,
        max_num_batched_tokens=512, max_drafts=MAX_STEP_DRAFTS, mtp="auto", progress=lambda done, total: None)
    bench = Bench(runner, folder, args)
    print(f"load average {os.getloadavg()[0]:.1f}")
    for workload in args.workloads:
        for streams in args.streams:
            prompts = prompts_of(workload, folder, streams, args.chat)
            if workload == "forced":
                lines = bench.compare_forced(prompts)
            else:
                runs = bench.compare(workload, prompts)
                lines = iter([{"workload": workload, "streams": streams, "mode": mode,
                               **summary(of_mode, runs[args.modes[0]], streams)} for mode, of_mode in runs.items()])
            for line in lines:
                print(json.dumps(line) if args.json else "  ".join(f"{key} {value}" for key, value in line.items()),
                      flush=True)


if __name__ == "__main__":
    main()
