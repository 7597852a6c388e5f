"""Bounds of the prompt tokens beside streams, with steps of simulated seconds."""

from __future__ import annotations

import math

import pytest

from npuserve.npu.step import SamplingParams, Step, StepResult
from npuserve.service.ipc.messages import PoolingParams, Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.prompt_bound import (
    FIRST_TOKEN_SLOWDOWN,
    MAX_MIXED_STEPS,
    MIN_TOKENS,
    POOLED_SLOWDOWN,
    PromptBound,
)
from npuserve.service.scheduling.scheduler import Scheduler

BUDGET = 512
STREAMS = 8


def step_seconds(tokens: int, light: float = 0.04, token: float = 0.001) -> float:
    """Return the seconds of a step: the same for few tokens, which wait for the weights, then more for each token."""
    return light + token * max(0, tokens - 12)


class Simulation:
    """Scheduler with streams, whose clock advances by the seconds of each step."""

    def __init__(self, target_seconds: float = math.inf, light: float = 0.04):
        self.scheduler = Scheduler(
            BlockManager(4096, 16), max_num_seqs=64, max_num_batched_tokens=BUDGET, max_queue=1000, aging_seconds=10.0,
            target_itl_seconds=target_seconds)
        self.now = 0.0
        self.ended: list[str] = []
        self._light = light
        self._count = 0

    def add(self, tokens: int, answer: int, *, pools: bool = False) -> None:
        self._count += 1
        request = Request(
            f"r{self._count}", [self._count % 97] * tokens, answer, self.now, SamplingParams(temperature=0.0),
            pooling=PoolingParams() if pools else None, bypass_prefix_cache=True)
        self.scheduler.add(request, (b"", 0), self.now)

    def step(self) -> tuple[Step, float]:
        """Compute one step. Return it with its seconds."""
        step = self.scheduler.schedule(self.now).step
        seconds = step_seconds(step.num_tokens, self._light)
        self.now += seconds
        result = StepResult({row.request_id: [1] * row.samples for row in step.rows if row.samples}, {}, {}, seconds,
                            hidden={row.request_id: None for row in step.rows if row.pools})  # type: ignore[misc]
        for progress in self.scheduler.apply(step, result, self.now):
            if progress.reason:
                self.ended.append(progress.reason)
        return step, seconds


def beside_streams(simulation: Simulation, steps: int, *, tokens: int, pools: bool, waiting: int = 4) -> list[float]:
    """Return the seconds of steps beside streams, while `waiting` prompts are always there."""
    for _ in range(STREAMS):
        simulation.add(8, 100_000 // STREAMS)
    while simulation.step()[0].num_decodes < STREAMS:
        pass
    seconds = []
    for _ in range(steps):
        while simulation.scheduler.num_running + simulation.scheduler.num_waiting < STREAMS + waiting:
            simulation.add(tokens, 0 if pools else 1, pools=pools)
        seconds.append(simulation.step()[1])
    return seconds


def test_prompts_that_pool_lengthen_steps_of_streams_a_little() -> None:
    simulation = Simulation()
    seconds = beside_streams(simulation, 400, tokens=64, pools=True)
    alone = step_seconds(STREAMS)
    assert max(seconds[10:]) <= 1.2 * alone
    assert sum(seconds[50:]) / len(seconds[50:]) > 1.08 * alone  # the bound is used
    assert simulation.ended.count("pooled") > 50  # none starves


def test_prompts_that_pool_take_the_whole_budget_without_streams() -> None:
    simulation = Simulation()
    for _ in range(32):
        simulation.add(64, 0, pools=True)
    assert [simulation.step()[0].num_tokens for _ in range(4)] == [BUDGET] * 4


def test_prompts_that_generate_keep_the_target_of_the_inter_token_latency() -> None:
    simulation = Simulation(target_seconds=0.2)
    seconds = beside_streams(simulation, 200, tokens=400, pools=False)
    assert max(seconds) > 0.4  # until such steps are measured
    assert max(seconds[20:]) <= 0.22
    assert sum(seconds[20:]) / len(seconds[20:]) > 0.16


def test_prompts_that_generate_double_a_step_that_is_longer_than_the_target() -> None:
    simulation = Simulation(target_seconds=0.02)
    seconds = beside_streams(simulation, 200, tokens=400, pools=False)
    alone = step_seconds(STREAMS)
    assert max(seconds[20:]) <= 1.1 * FIRST_TOKEN_SLOWDOWN * alone
    assert sum(seconds[20:]) / len(seconds[20:]) > 0.85 * FIRST_TOKEN_SLOWDOWN * alone


@pytest.mark.parametrize("target_seconds", [math.inf, 2.0])
def test_prompts_that_generate_take_the_whole_budget_within_the_target(target_seconds: float) -> None:
    simulation = Simulation(target_seconds)
    seconds = beside_streams(simulation, 60, tokens=400, pools=False)
    assert set(seconds[2:]) == {step_seconds(BUDGET)}


def test_streams_are_measured_alone_between_steps_with_prompts() -> None:
    bound = PromptBound(BUDGET)
    assert bound.plan().pooled == 0
    bound.record(0, 0.04, pools=True)
    planned = [bound.plan().pooled for _ in range(2 * MAX_MIXED_STEPS + 2)]
    assert [index for index, tokens in enumerate(planned) if not tokens] == [MAX_MIXED_STEPS, 2 * MAX_MIXED_STEPS + 1]


def test_bound_follows_a_machine_that_becomes_slower_and_faster() -> None:
    bound = PromptBound(BUDGET)
    bounds = []
    for token_seconds in (0.0003, 0.004, 0.0001):
        for _ in range(200):
            prompts = bound.plan().pooled
            bound.record(prompts, 0.04 + token_seconds * prompts, pools=True)
        bounds.append(bound.plan().pooled or bound.plan().pooled)
    added = (POOLED_SLOWDOWN - 1) * 0.04
    assert bounds == pytest.approx([added / 0.0003, MIN_TOKENS, added / 0.0001], rel=0.15)


def test_one_very_long_step_changes_the_bound_little() -> None:
    bound = PromptBound(BUDGET)
    bound.record(0, 0.04, pools=True)
    before = bound.plan().pooled
    bound.record(before, 4.0, pools=True)
    assert before > bound.plan().pooled >= before // 2
