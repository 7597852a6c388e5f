"""The step loop with the real scheduler and a real runner, for tests that cannot import transformers."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import PENDING, Step, TokenLogprobs
from npuserve.service.engine.pipeline import StepPipeline
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.host_tier import HostTier
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.scheduling.state_slots import StateSlots
from npuserve.service.scheduling.store_tier import StoreTier
from npuserve.service.store.connector import StoreConnector
from npuserve.service.store.setup import max_saves
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.manager import StructuredOutputManager


@dataclass(frozen=True)
class Ask:
    """A request. tick: of its arrival. cancel: ticks from the arrival to its cancel; None for no cancel."""

    tick: int
    cancel: int | None
    fields: dict[str, object]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    grammar_completed: bool = False


def masks_of(runner: Runner, mask_seconds: float) -> StructuredOutputManager:
    return StructuredOutputManager(vocabulary_size=runner.config.vocab_size, mask_seconds=mask_seconds)


def serve(
    runner: Runner, all_asks: list[Ask], depth: int, pool: int, seats: int, budget: int,
    matcher: Callable[[Request], AnswerMatcher] | None = None, min_forced: int = 0, mask_seconds: float = math.inf,
    **settings: Any,
) -> tuple[list[Answer], Scheduler]:
    """Answer all requests, as the engine does without a socket. Return the answers and the scheduler.

    matcher: of a request with a constraint, after its output. mask_seconds: see StructuredOutputManager.
    settings: further ones of `_scheduler_of` and Scheduler."""
    scheduler = _scheduler_of(runner, pool, max_num_seqs=seats, max_num_batched_tokens=budget, min_forced=min_forced,
                              **settings)
    answers, live = [Answer() for _ in all_asks], dict[int, Sequence]()
    tick = pending = 0
    pipeline = StepPipeline(scheduler, runner, depth, lambda: float(tick), masks_of(runner, mask_seconds))

    def collect() -> None:
        for progress in pipeline.collect().progress:
            answer = answers[progress.sequence.id]
            assert answer.reason is None
            answer.tokens += progress.token_ids
            answer.logprobs += progress.logprobs or []
            answer.prompt_logprobs += progress.prompt_logprobs or []
            answer.reason = progress.reason
            if progress.reason:
                answer.grammar_completed = progress.sequence.finish(progress.reason).grammar_completed
                del live[progress.sequence.id]

    cancels, ids = defaultdict[int, list[int]](list), dict[int, int]()
    order = sorted(range(len(all_asks)), key=lambda i: all_asks[i].tick)
    for tick in range(2000 + 20 * len(all_asks)):
        while order and all_asks[order[0]].tick <= tick:
            index = order.pop(0)
            request = Request(**{"request_id": f"r{index}", "arrival": float(index)} | all_asks[index].fields)  # type: ignore[arg-type]
            sequence = scheduler.add(request, (b"", 0), float(tick)).sequence
            if request.constraint and matcher:
                scheduler.constrain(sequence, matcher(request))
            ids[sequence.id] = index
            live[sequence.id] = sequence
            if (after := all_asks[index].cancel) is not None:
                cancels[tick + after].append(sequence.id)
        for sequence_id in cancels.pop(tick, []):
            if live.pop(sequence_id, None):
                scheduler.cancel(sequence_id)
                answers[sequence_id].reason = "cancelled"
        step = pipeline.plan().step
        scheduler.check_integrity()
        if step.rows:
            pending += sum(row.token_ids == [PENDING] for row in step.rows)
            pipeline.launch(step)
        elif not pipeline:
            pipeline.wait_for_masks()
            time.sleep(0.001 * scheduler.loads.has_loads)
        if pipeline.must_collect:
            collect()
        if not (live or order or pipeline or scheduler.loads.has_loads):
            break
    assert not live, "requests never end"
    check_ended(runner, scheduler)
    assert (pending > 0) <= (depth == 2)
    return [answers[key] for key in sorted(ids, key=ids.__getitem__)], scheduler


def _scheduler_of(
    runner: Runner, num_blocks: int, num_slots: int | None = None, store: StoreConnector | None = None, **settings: Any
) -> Scheduler:
    """Return a scheduler.

    num_slots: of fixed state; None for all that the runner has.
    store: behind the runner's host memory; None for none.
    """
    host = runner.host_blocks
    tier = None
    if host is not None:
        slots = host.describe()
        store_tier = StoreTier(store, host, max_saves(slots.num_slots, slots.block_bytes)) if store else None
        tier = HostTier(slots, host.take_ended_loads, store=store_tier)
    blocks = BlockManager(num_blocks, runner.block_size, evicted=tier, key=b"shared" if store else None)
    states = StateSlots.of(runner.num_slots if num_slots is None else num_slots, blocks)
    return Scheduler(blocks, max_queue=100, aging_seconds=1.0, slots=states, tier=tier, **settings)


def check_ended(runner: Runner, scheduler: Scheduler) -> None:
    """Raise AssertionError if ended requests have left blocks, slots or sampling state."""
    assert scheduler.blocks.counts.used == 0, "blocks leaked"
    assert scheduler.slots is None or scheduler.slots.num_used == 0, "slots leaked"
    runner.launch(Step([], ended=scheduler.take_ended()))
    assert not runner._sampler._states
