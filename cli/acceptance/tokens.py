"""Tokens for `npuserve check --accept`: prompts and greedy answers, and their agreement with the CPU.

Prompts of several lengths arrive while earlier requests decode, with the engine's scheduler and runner. The CPU does
not need to decode: the answer equals its own greedy answer if each token is the argmax after all previous tokens,
which one pass over prompt and answer shows.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from npuserve.npu.step import Row, SamplingParams, Step, TokenLogprobs
from npuserve.service.engine.pipeline import StepPipeline
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.state_slots import StateSlots
from npuserve.service.text.model_folder import open_folder

if TYPE_CHECKING:
    from torch import Tensor

    from npuserve.cli.acceptance.reference import Loaded
    from npuserve.npu.execution.runner import Runner

ANSWER = 64
BUDGET = 64
"""Maximum tokens of a step; longer prompts are computed in chunks."""

STEPS_APART = 3
"""Steps between two arrivals."""

TEXTS = (
    "Once upon a time there was a little girl named Lily. She had a small red ball and a big brown dog. Every day"
    " after breakfast they went to the park together, and the dog ran after the ball until it was tired. One day "
    "the ball rolled down the hill and into the river. Lily was very sad and began to cry. The dog looked at her,"
    " barked twice and jumped into the water. It swam and swam until it had the ball. \"Thank you, you are the "
    "best dog in the world,\" said Lily, and they went home to tell her mother what had happened. Her mother "
    "smiled and gave the dog a bone. In the evening it began to rain. Lily sat at the window, the dog slept at "
    "her feet, and the red ball lay in its basket. She thought of the river and of how fast the water had been. "
    "\"Tomorrow,\" she told the dog, \"we will play in the garden.\" The dog opened one eye and wagged its tail. "
    "Then the moon came up over the trees, and Lily",
    "Once upon a time", "The capital of France is", "One day, a little boy named Tom found a key in the garden.",
    "The sun was shining and the birds were singing. Tim wanted to play outside, but his mother said",
    "There was once a farmer who had a cow, a pig and three white hens. In the morning the cow gave milk and the hens "
    "laid eggs, and the pig did nothing but eat and sleep in the mud. One evening the farmer came into the stable with "
    "a lamp in his hand. He sat down on the straw, looked at the animals one after the other, and asked them",
    "Sara likes apples. Ben likes",
)
"""Simple stories, which even small models continue with high probabilities. The first needs several chunks."""


def prompts_of(folder: Path, vocabulary: int, longest: int) -> list[list[int]]:
    """Return prompts of 1 to `longest` token ids; random ids if the folder has no tokenizer.

    The last prompt begins with the whole first prompt, whose full blocks are in the prefix cache.

    vocabulary: number of token ids of the model.
    """
    tokenizer = open_folder(folder, "", "").tokenizer
    if tokenizer:
        prompts = [[i for i in tokenizer.encode(text) if i < vocabulary] or [0] for text in TEXTS]
    else:
        draw = random.Random(0)
        prompts = [[draw.randrange(vocabulary) for _ in text.split()] for text in TEXTS]
    return [ids[:longest] for ids in (*prompts, prompts[0] + prompts[1])]


@dataclass
class Answers:
    """Answers, and the steps that computed them.

    tokens: answer of each prompt.
    rows: rows of each step. Their request_id is the prompt's number, and a token that was sampled before is PENDING.
    decodes: number of decode tokens; without those of steps with chunks if such steps are never captured.
    captured: number of these tokens from captured steps.
    alone: number of decode tokens of steps without chunks.
    whole: number of these tokens that one captured dispatch computed and sampled.
    logprobs, prompt_logprobs: reports of each answer's and prompt's tokens, where requested.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    rows: list[list[Row]] = field(default_factory=list, compare=False)
    decodes: int = 0
    captured: int = 0
    alone: int = 0
    whole: int = 0

    @property
    def steps(self) -> list[list[int]]:
        """Number of tokens of each row of each step."""
        return [[len(row.token_ids) for row in rows] for rows in self.rows]


def answers(
    runner: Runner, prompts: Sequence[list[int]], count: int, depth: int, sampling: Sequence[SamplingParams] = ()
) -> Answers:
    """Return `count` tokens for each prompt.

    depth: number of steps in flight.
    sampling: parameters of each prompt; () for greedy answers.
    """
    blocks = BlockManager(runner.num_blocks, runner.block_size)
    scheduler = Scheduler(
        blocks, max_num_seqs=len(prompts), max_num_batched_tokens=BUDGET,
        max_queue=0, aging_seconds=1.0, slots=StateSlots.of(runner.num_slots, blocks))
    pipeline = StepPipeline(scheduler, runner, depth)
    answered = Answers([[] for _ in prompts], logprobs=[[] for _ in prompts], prompt_logprobs=[[] for _ in prompts])
    greedy = SamplingParams(temperature=0.0)
    mixed = runner.backend.captures_chunks(runner.cache_dtype)
    arriving = deque(enumerate(prompts))
    places: dict[int, int] = {}
    while arriving or scheduler.has_work:
        while arriving and (
            len(answered.rows) + len(pipeline) >= STEPS_APART * arriving[0][0] or not scheduler.has_work
        ):
            place, prompt = arriving.popleft()
            request = Request("", prompt, count, float(place), sampling[place] if sampling else greedy)
            places[scheduler.add(request, (b"", place), time.monotonic()).sequence.id] = place
        if (done := pipeline.advance()) is None:
            continue
        answered.rows.append([replace(row, request_id=places[row.request_id], block_ids=list(row.block_ids))
                          for row in done.step.rows])
        decodes = sum(row.is_decode for row in done.step.rows)
        if mixed or decodes == len(done.step.rows):
            answered.decodes += decodes
            answered.captured += done.result.captured_decodes + done.result.decoder_decodes
        if decodes == len(done.step.rows):
            answered.alone += decodes
            answered.whole += done.result.captured_decodes
        for progress in done.progress:
            place = places[progress.sequence.id]
            answered.tokens[place] += progress.token_ids
            answered.logprobs[place] += progress.logprobs or []
            answered.prompt_logprobs[place] += progress.prompt_logprobs or []
    runner.collect(runner.launch(Step([], ended=scheduler.take_ended())))
    return answered


@dataclass
class Agreement:
    """Agreement with a reference.

    positions: number of positions of all sequences.
    equal: number of positions with the reference's argmax.
    difference: largest difference of a logit; infinite for NaN.
    tokens: number of answered tokens.
    likeliest: number of answered tokens that are the reference's argmax after the previous tokens.
    gap: largest difference between the reference's logits of its argmax and of an answered token.
    worst: (prompt, index in its answer, token, the reference's argmax) of `gap`; None if all tokens are the argmax.
    """

    positions: int = 0
    equal: int = 0
    difference: float = 0.0
    tokens: int = 0
    likeliest: int = 0
    gap: float = 0.0
    worst: tuple[int, int, int, int] | None = None

    @property
    def share(self) -> float:
        return self.equal / self.positions

    def compare(self, reference: Tensor, logits: Tensor) -> None:
        """Add the logits [tokens, vocabulary] of some positions."""
        self.positions += len(reference)
        self.equal += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        self.difference = max(self.difference, float((logits - reference).abs().nan_to_num(nan=float("inf")).max()))

    def judge(self, reference: Tensor, number: int, place: int, token: int) -> None:
        """Add an answered token. reference: logits [vocabulary] before it. number, place: as in `worst`."""
        want = int(reference.argmax())
        self.tokens += 1
        self.likeliest += token == want
        gap = float(reference[want] - reference[token])
        if token != want and gap >= self.gap:
            self.gap = gap
            self.worst = (number, place, token, want)


def rounding_dtype(loaded: Loaded) -> str:
    """Return the dtype by whose rounding on the CPU the model's results are judged: the model's own dtype.

    For float8 activations in float32 it is bfloat16. Sums in another order round some of them to the next float8, which
    is up to an eighth away, and that changes most later activations.
    """
    from npuserve.kernels.quantized import FLOAT8

    dtype = loaded.runner.dtype_name
    return "bfloat16" if dtype == "float32" and FLOAT8 in loaded.model.weights.quantized_inputs else dtype


def agreement(
    reference: Iterable[Tensor], others: Iterable[Tensor], prompts: Sequence[list[int]], tokens: Sequence[list[int]],
) -> Agreement:
    """Compare logits and answers with a reference.

    reference, others: logits [tokens, vocabulary] of each prompt with its answer, consumed in parallel.
    tokens: answer of each prompt.
    """
    compared = Agreement()
    pairs = zip(reference, others, prompts, tokens, strict=True)
    for number, (golden, logits, prompt, answer) in enumerate(pairs):
        compared.compare(golden, logits)
        for place, token in enumerate(answer):
            compared.judge(golden[len(prompt) + place - 1], number, place, token)
    return compared


def computed_steps(answered: Answers, prompts: Sequence[list[int]]) -> list[list[Row]]:
    """Return the rows of each step with their token ids, without PENDING."""
    sequences = [prompt + answer for prompt, answer in zip(prompts, answered.tokens, strict=True)]
    return [[replace(row, token_ids=sequences[row.request_id][row.start : row.start + len(row.token_ids)])
             for row in rows] for rows in answered.rows]


def step_agreement(
    others: Iterable[Tensor], reference: Iterable[Tensor], steps: Sequence[Sequence[Row]],
    prompts: Sequence[list[int]], tokens: Sequence[list[int]],
) -> Agreement:
    """Compare logits and answers with a reference, step by step.

    others, reference: logits [tokens, vocabulary] of each step. Those of a step are read from `others` first.
    steps: rows of each step, as `computed_steps` returns them.
    tokens: answer of each prompt.
    """
    compared = Agreement()
    for logits, golden, rows in zip(others, reference, steps, strict=True):
        compared.compare(golden, logits)
        end = 0
        for row in rows:
            end += len(row.token_ids)
            if row.samples:
                place = row.start + len(row.token_ids) - len(prompts[row.request_id])
                compared.judge(golden[end - 1], row.request_id, place, tokens[row.request_id][place])
    return compared
