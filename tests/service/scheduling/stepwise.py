"""A scheduler with a fake device, run step by step, with its guarantees checked at each step."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from npuserve.npu.step import PENDING, HostSlots, SamplingParams, Step, TokenLogprobs
from npuserve.service.engine.pipeline import StepPipeline
from npuserve.service.errors import ServeError
from npuserve.service.ipc.messages import FinishReason, Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.checkpoints import DEFAULT_SPACING, Spacing
from npuserve.service.scheduling.deadlines import DroppedRequest
from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.host_tier import HostTier
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.scheduling.state_slots import StateSlots
from npuserve.service.scheduling.store_tier import StoreTier
from npuserve.service.store.setup import max_saves
from npuserve.service.structured_output.manager import StructuredOutputManager
from tests.service.scheduling.fake_store import FakeMemory, FakeStore
from tests.service.scheduling.reference import STATE_PARTS, VOCABULARY, FakeDevice, answer_alone, matcher_of, report
from tests.support.oracle_drafts import Kind, drafting_of

TICK = 1 / 64  # sums of it are exact
AUDITED_REQUESTS = 32


@dataclass
class SchedulerHarness:
    """A scheduler with its device and a clock. Every step is checked.

    depth: maximum number of steps in flight.
    min_forced: see Scheduler.
    mask_seconds: see StructuredOutputManager; rows are deferred unless it is infinite.
    drafts: kind of the drafts; see oracle_drafts.py.
    drafting: replaces that of `drafts`.
    num_slots, spacing: of StateSlots; 0 slots for a model without fixed state.
    message_end_ids: see Scheduler.
    host_slots: of HostTier; 0 for none.
    host: further settings of HostSlots.
    stored: contents of a store (fake_store.py), which schedulers share; None for none.
    """

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    budget: int = 64
    max_queue: int = 1000
    aging: float = 1.0
    prefix_cache: bool = True
    depth: int = 1
    min_forced: int = 2
    max_model_len: int | None = None
    mask_seconds: float = math.inf
    drafts: Kind = "off"
    drafting: Drafting | None = None
    num_slots: int = 0
    spacing: Spacing = DEFAULT_SPACING
    message_end_ids: frozenset[int] = frozenset()
    host_slots: int = 0
    host: dict[str, int] = field(default_factory=dict)
    stored: dict[bytes, Any] | None = None
    now: float = 100.0
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: defaultdict[int, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: defaultdict[int, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    started: dict[int, float] = field(default_factory=dict)
    live: dict[int, Sequence] = field(default_factory=dict)
    dropped: dict[int, ServeError | None] = field(default_factory=dict)
    failed: dict[int, ServeError] = field(default_factory=dict)
    calls: int = 0
    num_unaudited: int = 0

    def __post_init__(self) -> None:
        self.salts: dict[int, str] = {}
        self.device = FakeDevice(self.num_blocks, self.block_size, self.salts, TICK / 2)
        host = HostSlots(self.host_slots, 8, **{"state_parts": STATE_PARTS if self.num_slots else 0, **self.host})
        memory = FakeMemory(self.device)
        self.store = FakeStore(memory, self.stored) if self.stored is not None else None
        store = StoreTier(self.store, memory, max_saves(self.host_slots, 8), lambda: self.now) if self.store else None
        self.tier = HostTier(host, self.device.take_ended_loads, store=store) if self.host_slots else None
        self.blocks = BlockManager(self.num_blocks, self.block_size, self.prefix_cache, evicted=self.tier,
                                   key=b"shared" if store else None)
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.budget,
            max_queue=self.max_queue, aging_seconds=self.aging, max_model_len=self.max_model_len,
            min_forced=self.min_forced, message_end_ids=self.message_end_ids,
            slots=StateSlots(self.num_slots, self.blocks, self.spacing) if self.num_slots else None,
            drafting=self.drafting or drafting_of(
                self.drafts, lambda sequence: answer_alone(sequence.request)[0], VOCABULARY,
                state_block_size=4 * self.block_size if self.num_slots else 0),
            tier=self.tier,
        )
        self.pipeline = StepPipeline(
            self.scheduler, self.device, self.depth, lambda: self.now,
            StructuredOutputManager(vocabulary_size=VOCABULARY, mask_seconds=self.mask_seconds))

    def add(self, prompt: list[int], max_tokens: int = 3, compiling: bool = False, **fields: object) -> Sequence:
        """Add a request. compiling: its constraint is not compiled until `constrain`."""
        fields = {"request_id": "r", "arrival": self.now, **fields}
        request = Request(prompt_ids=prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
        sequence, displaced = self.scheduler.add(request, (b"", 0), self.now)
        scope = sequence.blocks.scope
        self.salts[sequence.id] = f"scope {scope}" if scope else f"salt {request.cache_salt}"
        self.live[sequence.id] = sequence
        if request.constraint and not compiling:
            self.constrain(sequence)
        self.settle([displaced] if displaced else [])
        return sequence

    def add_samples(
        self, prompt: list[int], samples: int, max_tokens: int = 3, sampling: SamplingParams | None = None,
        **fields: object
    ) -> list[Sequence]:
        """Add the samples of one call as a front end does: sample i has seed + i, the first has the prompt_logprobs."""
        self.calls += 1
        sampling = sampling or SamplingParams()
        fields = {"request_id": f"call {self.calls}", "samples": samples, **fields}
        further = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return [self.add(
            prompt, max_tokens, index=index,
            sampling=msgspec.structs.replace(further if index else sampling, seed=sampling.seed + index), **fields)
            for index in range(samples)]

    def constrain(self, sequence: Sequence) -> None:
        """End a request's wait for its grammar. Nothing if it has ended or does not wait."""
        if sequence.id in self.live and sequence.needs_matcher:
            matcher = matcher_of(sequence.request)
            assert matcher
            self.scheduler.constrain(sequence, matcher)
            self.audit()

    def settle(self, dropped: list[DroppedRequest]) -> None:
        """Record the requests that the scheduler has dropped."""
        for sequence, error in dropped:
            del self.live[sequence.id]
            assert sequence.block_ids == []
            assert (error is None) == (sequence.num_generated_tokens > 0)
            self.dropped[sequence.id] = error
        self.audit()

    def pause(self, sequence: Sequence) -> None:
        self.scheduler.pause(sequence.id)
        self.audit()

    def unpause(self, sequence: Sequence) -> None:
        self.scheduler.unpause(sequence.id)
        self.audit()

    def cancel(self, sequence: Sequence) -> None:
        assert (self.scheduler.cancel(sequence.id) is sequence) == (self.live.pop(sequence.id, None) is not None)
        assert sequence.block_ids == []

    def audit(self) -> None:
        """Check the scheduler's state: after each change while it has fewer than 32 requests, and after each 32nd one
        while it has 1000. The time of a check grows with the requests."""
        self.num_unaudited += 1
        if self.num_unaudited * AUDITED_REQUESTS > len(self.live):
            self.num_unaudited = 0
            self.scheduler.check_integrity()

    def plan(self) -> Step:
        """Schedule, check and launch."""
        if expired := self.scheduler.expire(self.now):
            self.settle(expired)
        active = [s for s in self.live.values() if not (s.is_paused or s.needs_matcher)]
        held = [s for s in self.live.values() if s.holds_blocks and s.id in self.scheduler._paused]
        running = [s for s in active if s.holds_blocks and s not in held]
        decoding = [s for s in running if s.num_uncomputed_tokens == 1]
        returning = [s for s in held if not s.is_paused and s.num_uncomputed_tokens == 1]
        preemptions = self.scheduler.preemptions
        planned = {s.id: s.num_tokens for s in self.live.values()}
        plan = self.pipeline.plan()
        step = plan.step
        self.settle(plan.dropped)
        rows = [self.live[row.request_id] for row in step.rows]
        assert step.num_tokens <= self.budget
        assert self.scheduler.num_running <= self.max_num_seqs
        assert [new.request_id for new in step.new] == [s.id for s in rows if s.id not in self.started]
        assert step.rows or not (step.new or step.ended)
        for row, sequence in zip(step.rows, rows, strict=True):
            end = row.start + len(row.token_ids)
            if row.samples > 1:
                assert self.drafts != "off"
                assert len(self.pipeline) == 0, "drafts after a token that is not on the host"
                end -= row.samples - 1
            known = row.token_ids[: end - row.start]
            assert known == (sequence.token_ids[row.start : end] or [PENDING])
            assert bool(row.samples) == (end == planned[sequence.id])
            assert sequence.num_tokens <= sequence.num_prompt_tokens + sequence.request.max_tokens, "beyond max_tokens"
            assert end <= len(sequence.token_ids) + 1, "more than one token beyond what is on the host"
            self.started.setdefault(sequence.id, self.now)
        assert not any(s.is_paused for s in rows), "a row for a slow reader"
        for victim in running:
            if not victim.holds_blocks and victim.num_tokens_at_yield != len(victim.token_ids):
                peers = [s for s in rows if s in running and s.account is victim.account]
                assert all(victim.age_key > s.age_key for s in peers), "preempted by a younger one of its client"
                assert all(not s.holds_blocks or not s.is_paused for s in held), "preempted before the paused requests"
        if self.depth == 1 and self.mask_seconds == math.inf:
            has_loads = self.scheduler.loads.has_loads  # also of requests that do not wait for them any more
            assert step.rows or has_loads or not active, "no request makes progress"
            assert all(not s.holds_blocks or s in rows for s in decoding), "a decode row starves"
            first = min((s for s in active if s.holds_blocks), key=lambda s: s.age_key, default=None)
            is_behind = first is not None and first.is_prefilling and step.num_tokens == self.budget  # forced tokens
            assert first in rows or first is None or is_behind, "the oldest request makes no progress"
            if self.scheduler.preemptions == preemptions:
                decoding = sorted([*decoding, *(s for s in returning if s in rows)], key=lambda s: s.age_key)
                others = [sequence for row, sequence in zip(step.rows, rows, strict=True)
                          if not 1 < row.samples < len(row.token_ids)]  # drafts after several known tokens
                assert others[: len(decoding)] == decoding, "chunks before decodes"
        if step.rows:
            self.pipeline.launch(step)
        elif not self.pipeline:
            self.pipeline.wait_for_masks()
        return step

    def collect(self) -> None:
        """Apply the oldest step in flight."""
        self.now += TICK
        for progress in self.pipeline.collect().progress:
            key = progress.sequence.id
            assert self.live[key] is progress.sequence, "progress of an ended request"
            if progress.error:
                self.failed[key] = progress.error
                assert self.live.pop(key).block_ids == []
                continue
            assert progress.token_ids or progress.prompt_logprobs
            self.tokens[key] += progress.token_ids
            self.logprobs[key] += progress.logprobs or []
            self.prompt_logprobs[key] += progress.prompt_logprobs or []
            if progress.reason:
                self.reasons[key] = progress.reason
                del self.live[key]
                assert progress.sequence.block_ids == []
        self.audit()

    def tick(self) -> Step:
        step = self.plan()
        if self.pipeline.must_collect:
            self.collect()
        self.now += TICK
        return step

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.live and not self.pipeline and not self.scheduler.loads.has_loads:
                break
            self.tick()
        assert not self.live, "requests never end"
        assert not self.scheduler._paused
        assert not self.scheduler.has_work
        assert self.blocks.counts.used == 0, "blocks leaked"
        assert self.scheduler.slots is None or self.scheduler.slots.num_used == 0, "slots leaked"

    def check_answer(self, sequence: Sequence) -> None:
        """Check that a request ended with the same answer as alone."""
        request = sequence.request
        answer, reason = answer_alone(request)
        assert request.output_ids + self.tokens[sequence.id] == answer
        assert self.reasons[sequence.id] == reason
        num_prompt = len(request.prompt_ids)
        finish = sequence.finish(reason)
        if request.constraint:
            matcher = matcher_of(msgspec.structs.replace(request, output_ids=answer))
            assert matcher
            assert matcher.error is None
            assert finish.grammar_completed == matcher.is_complete
        assert (finish.prompt_tokens, finish.generated_tokens) == (num_prompt, len(answer))
        assert 0 <= finish.cached_tokens <= num_prompt
        timing = finish.timing
        assert timing.queue + sum(timing.prefill_chunks) + timing.decode == timing.last_step_end - request.arrival
        assert timing.device + timing.host == sum(timing.prefill_chunks) + timing.decode
        if request.sampling.logprobs is not None:
            all_tokens = request.prompt_ids + answer
            begin = num_prompt + len(request.output_ids)
            assert self.logprobs[sequence.id] == [report(all_tokens[p], p) for p in range(begin, len(all_tokens))]
        if request.sampling.prompt_logprobs is not None:
            assert finish.cached_tokens == 0
            expected = [report(request.prompt_ids[p], p) for p in range(1, num_prompt)]
            assert self.prompt_logprobs[sequence.id] == expected


def crowded(**fields: object) -> SchedulerHarness:
    return SchedulerHarness(num_blocks=6, block_size=2, **fields)  # type: ignore[arg-type]
