"""Constrained answers of a hybrid: the next turn continues the state within them, bit for bit as if computed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from npuserve.kernels import native
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import SamplingParams
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.constraint import Constraint
from tests.npu.execution.test_runner import load
from tests.support.fake_grammar import answer_matcher
from tests.support.hybrids import VOCABULARY, prompts, random_hybrid
from tests.support.loop import Answer, Ask, serve
from tests.support.models import saved

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")

CONSTRAINTS = [Constraint("regex", f"{kind}{key} 40") for key, kind in enumerate(["", "forced "] * 3)]
TOKENS = 40
SECOND_TURN_TICK = 400


def matcher(request: Request) -> AnswerMatcher:
    return answer_matcher(request, VOCABULARY, frozenset([2]))


def ask(prompt: list[int], constraint: Constraint, tick: int, *, bypass: bool) -> Ask:
    return Ask(tick, None, {
        "prompt_ids": prompt, "max_tokens": TOKENS, "constraint": constraint, "bypass_prefix_cache": bypass,
        "sampling": SamplingParams(temperature=0.8, seed=len(prompt), logprobs=1)})


def answers(
    runner: Runner, asks: list[Ask], depth: int, mask_seconds: float = math.inf, min_forced: int = 2
) -> tuple[list[Answer], Scheduler]:
    return serve(runner, asks, depth, pool=100, seats=4, budget=32, matcher=matcher, min_forced=min_forced,
                 mask_seconds=mask_seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "mask_seconds"), [(1, math.inf), (2, math.inf), (2, 0.0)])
def test_second_turn_continues_the_constrained_answer(tmp_path: Path, depth: int, mask_seconds: float) -> None:
    """With mask_seconds of 0 rows are deferred: their states are computed again."""
    runner = load(saved(random_hybrid(0), tmp_path), dtype="float32")
    first = prompts(len(CONSTRAINTS), 3)
    alone, _ = answers(
        runner, [ask(prompt, rule, 0, bypass=True) for prompt, rule in zip(first, CONSTRAINTS, strict=True)], 1)
    second = [[*prompt, *answer.tokens, 7, 8, 9] for prompt, answer in zip(first, alone, strict=True)]
    computed, _ = answers(
        runner, [ask(prompt, rule, 0, bypass=True) for prompt, rule in zip(second, CONSTRAINTS, strict=True)], 1)
    turns = [ask(prompt, rule, tick, bypass=False) for tick, asked in ((0, first), (SECOND_TURN_TICK, second))
             for prompt, rule in zip(asked, CONSTRAINTS, strict=True)]
    found, scheduler = answers(runner, turns, depth, mask_seconds)
    assert [(answer.tokens, answer.logprobs) for answer in found] == [
        (answer.tokens, answer.logprobs) for answer in [*alone, *computed]]
    boundaries = [(len(prompt) + len(answer.tokens) - 1) // runner.block_size * runner.block_size
                  for prompt, answer in zip(first, alone, strict=True)]
    assert scheduler.memory.prefix_hits >= sum(boundaries)
