"""Checks of blocks and fixed states in host memory on a device, whose streams run copies as late as they may."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import EndedLoad, HostCopy, HostLoad, NewRequest, Row, SamplingParams, Step
from npuserve.service.scheduling.scheduler import Scheduler
from tests.support.loop import Answer, Ask, serve
from tests.support.memory_store import MemoryStore

POOL = 5
"""Blocks of the device's cache. A prompt has 3 full blocks."""
PROMPTS = 7


def prompt_of(runner: Runner, index: int) -> list[int]:
    return random.Random(index).choices(range(100), k=3 * runner.block_size + 2)


def rounds(runner: Runner, apart: int, **fields: Any) -> list[Ask]:
    """Return requests with each prompt, twice: a working set of four times the cache. apart: ticks between two."""
    sampling = SamplingParams(temperature=0.8, seed=5, logprobs=3)
    return [Ask(apart * (index + PROMPTS * number), None, {
        "prompt_ids": prompt_of(runner, index), "max_tokens": 3, "sampling": sampling, **fields})
        for number in range(2) for index in range(PROMPTS)]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def one_by_one(
    runner: Runner, pool: int, budget: int, num_slots: int | None = None, store: MemoryStore | None = None
) -> tuple[list[Answer], Scheduler]:
    return serve(runner, rounds(runner, 60), 2, pool, 1, budget, num_slots=num_slots, store=store)


def check_bits(load: Callable[[int], Runner], budget: int, num_slots: int | None = None) -> Scheduler:
    """What came back has the bits that a cache without evictions has: ids and log-probabilities are equal.

    load: loads the model with as many bytes of host memory.
    num_slots: few slots of fixed state; None for a model without. The model has enough for all prompts.

    Returns the scheduler with host memory.
    """
    runner = load(1 << 20)
    answers, scheduler = one_by_one(runner, POOL, budget, num_slots)
    roomy = load(0)
    expected, without = one_by_one(roomy, 4 * PROMPTS, budget)
    assert [(answer.tokens, answer.logprobs) for answer in answers] == [
        (answer.tokens, answer.logprobs) for answer in expected]
    assert scheduler.tier is not None
    assert scheduler.tier.num_loaded >= 3 * (PROMPTS - 1)
    assert scheduler.memory.prefix_hits == without.memory.prefix_hits == PROMPTS * 3 * runner.block_size
    _, evicting = one_by_one(roomy, POOL, budget, num_slots)
    assert evicting.memory.prefix_hits < scheduler.memory.prefix_hits / 4
    return scheduler


def check_store(load: Callable[[int], Runner], budget: int, num_slots: int | None = None) -> None:
    """What came from the store has the bits that a cache without evictions has: ids and log-probabilities are equal.

    The arguments are those of `check_bits`.
    """
    expected = [(answer.tokens, answer.logprobs) for answer in one_by_one(load(0), 4 * PROMPTS, budget)[0][PROMPTS:]]
    values: dict[bytes, bytes] = {}
    for number in range(2):
        runner = load(1 << 20)
        assert runner.host_blocks is not None
        store = MemoryStore(runner.host_blocks, values)
        answers, scheduler = one_by_one(runner, POOL, budget, num_slots, store)
        found = [(answer.tokens, answer.logprobs) for answer in answers]
        assert found[PROMPTS:] == expected
        assert scheduler.tier is not None
        assert scheduler.tier.store is not None
        while store.is_busy:
            scheduler.tier.poll()
        if number:
            assert found[:PROMPTS] == expected
            assert scheduler.tier.store.hits >= PROMPTS * 3 * runner.block_size
            assert scheduler.memory.prefix_hits == 2 * PROMPTS * 3 * runner.block_size


def check_pressure(runner: Runner, budget: int, num_slots: int | None = None, pool: int = POOL + 2) -> None:
    """Requests that arrive together, samples of one call, cancels and preemptions: ids are those without the cache.

    The samples need a further block each while others run.
    """
    asks = rounds(runner, 1)
    call = asks[0].fields | {
        "prompt_ids": prompt_of(runner, 0)[: 3 * runner.block_size - 4], "request_id": "call", "arrival": 50.0,
        "samples": 3, "max_tokens": min(2 * runner.block_size, 100)}
    asks += [Ask(12, None, call | {"index": index, "sampling": SamplingParams(seed=index)}) for index in range(3)]
    cancelled = [Ask(9 + index, 2 + index, asks[index].fields) for index in range(4)]
    answers, scheduler = serve(runner, asks + cancelled, 2, pool, 3, budget, num_slots=num_slots)
    alone = [Ask(ask.tick, None, ask.fields | {"bypass_prefix_cache": True}) for ask in asks]
    expected, _ = serve(runner, alone, 2, 4 * PROMPTS, 3, budget)
    assert tokens_of(answers[: len(asks)]) == tokens_of(expected)
    assert scheduler.tier is not None
    assert scheduler.tier.num_loaded > 0
    assert scheduler.preemptions > 0


def check_corruption(runner: Runner, budget: int, num_slots: int | None = None, part: int = 1) -> None:
    """A flipped bit in host memory is a miss, and counted. part: number of the copy of each load that is corrupt."""
    host = runner.host_blocks
    assert host is not None
    asks = rounds(runner, 60)
    answers, _ = serve(runner, asks, 2, POOL, 1, budget, num_slots=num_slots)
    launch_copies = host.launch

    def launch(saves: Any, loads: Any) -> None:
        launch_copies(saves, [])
        while host._saving or not all(future.done() for future in host._checksums.values()):
            host.take_ended_loads()
        for load in loads:
            host._slots[load.copies[part].slot][7] ^= 4
        launch_copies([], loads)

    host.launch = launch  # type: ignore[method-assign]
    found, scheduler = serve(runner, asks, 2, POOL, 1, budget, num_slots=num_slots)
    del host.launch  # type: ignore[method-assign]
    assert tokens_of(found) == tokens_of(answers)
    assert scheduler.tier is not None
    assert scheduler.tier.num_corrupt > 0
    assert scheduler.tier.num_loaded > 0


def check_load_after_step_in_flight(runner: Runner) -> None:
    """A load writes a block after the step in flight, which still writes it for a request that has ended."""
    host = runner.host_blocks
    assert host is not None
    prompts = [random.Random(seed).choices(range(100), k=runner.block_size) for seed in range(2)]
    sampling = SamplingParams(temperature=0.0)

    def step(request: int, block: int, **fields: Any) -> Step:
        row = Row(request, prompts[request], 0, [block], 1, state_slot=-1)
        return Step([row], [NewRequest(request, prompts[request], [], sampling)], **fields)

    runner.collect(runner.launch(step(0, 0)))
    runner.launch(Step([], saves=[HostCopy(0, 0)], loads=[HostLoad(0, [HostCopy(1, 0)])]))
    while not host.take_ended_loads():  # the checksum is known then
        time.sleep(0.001)
    in_flight = runner.launch(step(1, 2))
    runner.launch(Step([], loads=[HostLoad(1, [HostCopy(2, 0)])]))
    loaded: list[EndedLoad] = []
    while not loaded:
        loaded = host.take_ended_loads()
        time.sleep(0.001)
    assert loaded == [EndedLoad(1, 1)]
    runner.collect(in_flight)
    runner.backend.synchronize()
    for tensor in runner._store.paged_tensors:
        saved = tensor[0].cpu()
        assert saved.any()
        assert torch.equal(tensor[1].cpu(), saved)
        assert torch.equal(tensor[2].cpu(), saved)
