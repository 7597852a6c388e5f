"""What the engine process puts on the metrics page, and the load that it reports to the front ends."""

from __future__ import annotations

import time

from npuserve.npu.step import Step, StepResult
from npuserve.service import metrics
from npuserve.service.block_manager import BlockCounts
from npuserve.service.errors import DuplicateRequest, QueueFull, ServeError
from npuserve.service.messages import Load
from npuserve.service.scheduler import Scheduler

RATE_SECONDS = 2.0
PAGE_SECONDS = 0.1
"""Gauges, and counters that the scheduler keeps, reach the page no more often while steps run."""

# Looked up once, since to find a child by its labels costs as much as to count with it.
STEP_SECONDS = {phase: metrics.step_seconds.labels(phase, "eager") for phase in ("prefill", "mixed", "decode")}
STEP_TOKENS = {phase: metrics.step_tokens.labels(phase) for phase in STEP_SECONDS}
BLOCKS = [metrics.kv_cache_blocks.labels(state) for state in BlockCounts._fields]


class EngineMetrics:
    """Reads the scheduler's counts; owns nothing but what it last reported."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._reported = (0, 0, 0)
        self._idle_since: float | None = None
        self._generated = 0
        self._rate = 0.0
        self._rate_since = time.monotonic()
        self._paged = 0.0
        self.load = Load()
        self.heartbeat()

    def launching(self, step: Step) -> float:
        """Call just before a step's launch; returns the time for `stepped`."""
        now = time.monotonic()
        if self._idle_since is not None:
            metrics.step_host_gap_seconds.observe(now - self._idle_since)
        for new in step.new:
            arrival = self._scheduler.arrival_of(new.request_id)
            metrics.queue_time_seconds.observe(max(0.0, now - arrival))
            metrics.prompt_tokens_total.inc(len(new.prompt_ids))
        return now

    def stepped(self, step: Step, result: StepResult, launched: float, collected: float) -> None:
        """Call after a step was applied."""
        decodes = [row.is_decode for row in step.rows].count(True)
        phase = "decode" if decodes == len(step.rows) else "mixed" if decodes else "prefill"
        STEP_SECONDS[phase].observe(collected - launched)
        STEP_TOKENS[phase].observe(step.num_tokens)
        metrics.generation_tokens_total.inc(len(result.token_ids))
        self._generated += len(result.token_ids)
        # The gap counts only while there is something to do next.
        self._idle_since = launched + result.device_seconds if self._scheduler.has_work else None
        self._update(collected)

    def cancelled(self, seconds: float) -> None:
        metrics.cancel_to_free_seconds.observe(seconds)
        self._update(time.monotonic())

    def rejected(self, error: ServeError) -> None:
        why = {QueueFull: "queue_full", DuplicateRequest: "duplicate"}.get(type(error), "too_large")
        metrics.queue_rejections_total.labels(why).inc()

    def heartbeat(self) -> None:
        metrics.engine_heartbeat_timestamp.set(time.time())
        self._paged = 0.0
        self._update(time.monotonic())

    def _update(self, now: float) -> None:
        scheduler = self._scheduler
        if now - self._rate_since >= RATE_SECONDS:
            self._rate = self._generated / (now - self._rate_since)
            self._generated, self._rate_since = 0, now
        blocks = scheduler.blocks.counts
        usage = blocks.used / scheduler.blocks.num_blocks
        self.load = Load(scheduler.num_running, scheduler.num_waiting, 1.0 - usage, self._rate)
        if now - self._paged >= PAGE_SECONDS or not scheduler.has_work:
            self._paged = now
            self._page(blocks, usage)

    def _page(self, blocks: BlockCounts, usage: float) -> None:
        metrics.requests_running.set(self.load.running)
        metrics.requests_waiting.set(self.load.waiting)
        metrics.kv_cache_usage_ratio.set(usage)
        for state, count in zip(BLOCKS, blocks, strict=True):
            state.set(count)
        counts = (self._scheduler.preemptions, self._scheduler.prefix_queries, self._scheduler.prefix_hits)
        counters = (metrics.preemptions_total, metrics.prefix_cache_queries_total, metrics.prefix_cache_hits_total)
        for counter, count, before in zip(counters, counts, self._reported, strict=True):
            counter.inc(count - before)
        self._reported = counts
