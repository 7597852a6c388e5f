"""Constrained requests with the real grammar library, and the answers that each must have in every order of work.

An answer is a function of its request. It does not depend on the other rows, on steps in flight, or on preemptions.
Nor does it depend on the death of an engine, after which the request is queued again with its tokens so far.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jsonschema

from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import SamplingParams
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.structured_output.constraint import Constraint
from tests.npu.backends.small import ids_of
from tests.support.grammars import LONGER, answer_matcher, vocabulary
from tests.support.loop import Answer, Ask, serve

VOCABULARY = vocabulary().size
MAX_TOKENS = 32
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["ab", "n"],
    "properties": {"ab": {"enum": ["abc", "é", "日本"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}}}
FORCED = {
    "type": "object", "additionalProperties": False, "required": ["abc123", "n"],
    "properties": {"abc123": {"const": "日本abc"}, "n": {"enum": ["bbbb", "bcab"]}}}
"""Schema of answers of which most tokens are forced."""
REGEX = "[a-c]{2,9}é(日本|abc)?"
SUM = 'root ::= "(" root ")" | "ab" | [0-9] root'
CHOICES = ["abc 1", "abab 123", "日本 {}"]
TAG = {"type": "structural_tag", "format": {
    "type": "tag", "begin": "<call>", "end": "</a>", "content": {"type": "json_schema", "json_schema": SCHEMA}}}
CONSTRAINTS = {
    "json_schema": Constraint("json_schema", json.dumps(SCHEMA)), "regex": Constraint("regex", REGEX),
    "grammar": Constraint("grammar", SUM), "choices": Constraint("choices", json.dumps(CHOICES)),
    "structural_tag": Constraint("structural_tag", json.dumps(TAG)), "none": None,
    "forced": Constraint("json_schema", json.dumps(FORCED))}
BLANKS = dict.fromkeys([*b" \t\r\n", *(259 + LONGER.index(text) for text in ("  ", "\n  "))], -100.0)
"""Bias against blanks, of which a random model writes many in JSON."""
SAMPLINGS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.2, "top_p": 0.95},
             "penalized": {"temperature": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.2}}


def is_sum(text: str) -> bool:
    """Return whether a text follows SUM."""
    while (shorter := re.sub(r"\(S\)|ab|[0-9]S", "S", text)) != text:
        text = shorter
    return text == "S"


def is_valid(kind: str, text: str) -> bool:
    """Return whether a complete answer satisfies its constraint, without the grammar library."""
    if kind in ("json_schema", "structural_tag"):
        body = text.removesuffix("</a>").removeprefix("<call>")  # the begin may also be a special token without text
        assert kind == "json_schema" or text.endswith("</a>")
        return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(body))
    if kind == "forced":
        return jsonschema.Draft202012Validator(FORCED).is_valid(json.loads(text))
    return {"regex": bool(re.fullmatch(REGEX, text)), "grammar": is_sum(text), "choices": text in CHOICES}[kind]


class Case(NamedTuple):
    """Request of a kind of CONSTRAINTS and of SAMPLINGS. length: tokens of its prompt."""

    kind: str
    sampling: str
    length: int

    def ask(self, tick: int = 0, output_ids: Sequence[int] = ()) -> Ask:
        """Return the request, with the tokens of an earlier engine."""
        number = list(CONSTRAINTS).index(self.kind)
        ends = frozenset() if self.kind == "none" else vocabulary().end_ids
        return Ask(tick, None, {
            "prompt_ids": ids_of(self.length, number, VOCABULARY), "max_tokens": MAX_TOKENS, "eos_token_ids": ends,
            "constraint": CONSTRAINTS[self.kind], "output_ids": list(output_ids),
            "sampling": SamplingParams(
                seed=7 + number, logit_bias=BLANKS if self.kind in ("json_schema", "structural_tag", "forced") else {},
                **SAMPLINGS[self.sampling])})  # type: ignore[arg-type]

    def check(self, answer: Answer) -> None:
        """Raise AssertionError if an answer violates its constraint."""
        if self.kind == "none":
            assert (answer.reason, len(answer.tokens)) == ("length", MAX_TOKENS)
            return
        state = answer_matcher(Request("r", arrival=0.0, **self.ask().fields))  # type: ignore[arg-type]
        for token_id in answer.tokens:
            state.advance(token_id)
        assert state.error is None
        assert answer.grammar_completed == state.is_complete == (answer.reason == "eos")
        if answer.reason == "eos":
            data = vocabulary().data.tokens
            assert is_valid(self.kind, b"".join(data[token_id] for token_id in answer.tokens).decode())


def cases(block_size: int) -> list[Case]:
    """Return a case of each kind and sampling. Most answers need a block that their prompts have not."""
    return [Case(kind, sampling, block_size - 6 + 3 * number)
            for sampling in SAMPLINGS for number, kind in enumerate(CONSTRAINTS)]


Alone = Callable[[Case], Answer]
"""Function that returns the expected answer of a case."""


def answered(
    runner: Runner, chosen: Sequence[Case], alone: Alone, *, depth: int, pool: int, seats: int, budget: int,
    is_restored: bool = False, min_forced: int = 2, mask_seconds: float = math.inf, drafting: Drafting | None = None,
) -> tuple[list[Answer], Scheduler]:
    """Return the whole answers of requests that arrive one after the other, and the scheduler.

    mask_seconds: see StructuredOutputManager.
    is_restored: an engine died before. The requests have no token, a fourth of their tokens, or all but the last one.
    """
    held = []
    for place, case in enumerate(chosen):
        tokens = alone(case).tokens if is_restored else []
        held.append(tokens[: (len(tokens) // 4, 0, -1)[place % 3]])
    asks = [case.ask(0 if is_restored else place // 4, tokens)
            for place, (case, tokens) in enumerate(zip(chosen, held, strict=True))]
    found, scheduler = serve(
        runner, asks, depth, pool, seats, budget, answer_matcher, min_forced, mask_seconds,
        drafting=drafting)
    for answer, tokens in zip(found, held, strict=True):
        answer.tokens[:0] = tokens
    return found, scheduler


def expected_by(runner: Runner, pool: int) -> Alone:
    """Return a function that answers each case once, alone, with one step in flight and enough blocks. Every token is
    sampled, also the forced ones."""
    known: dict[Case, Answer] = {}

    def alone(case: Case) -> Answer:
        if case not in known:
            (known[case],), _ = serve(runner, [case.ask()], 1, pool, 1, 64, answer_matcher)
            case.check(known[case])
        return known[case]

    return alone


