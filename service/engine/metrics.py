"""Metrics of the engine process, and the load that it reports to the front ends."""

from __future__ import annotations

import time
from collections.abc import Mapping

from npuserve.npu.step import Step, StepResult
from npuserve.service import metrics
from npuserve.service.engine.request_history import Calls, RequestHistory
from npuserve.service.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineKiller,
    InvalidField,
    QueueFull,
    ServeError,
)
from npuserve.service.ipc.messages import Load
from npuserve.service.scheduling.block_manager import BlockCounts
from npuserve.service.scheduling.drafting import HEAD_STATES, REASONS
from npuserve.service.scheduling.host_tier import HostTier
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence_memory import MISS_REASONS
from npuserve.service.speculation.request_drafter import KINDS
from npuserve.service.store.connector import FAILURES

RATE_SECONDS = 2.0
LOAD_SECONDS = 0.01
"""Maximum age of the KV cache's use in the load that is sent to front ends and in the gauges, while there is work."""
PAGE_SECONDS = 0.1
"""Minimum time between two updates of the metrics page while steps run."""

# Looked up once: finding a child by its labels costs as much as counting with it.
PHASES = ("prefill", "mixed", "decode")
MODES = ("captured", "eager")
STEP_SECONDS = {(phase, mode): metrics.tally(metrics.step_seconds, phase, mode) for phase in PHASES for mode in MODES}
STEP_TOKENS = {phase: metrics.tally(metrics.step_tokens, phase) for phase in PHASES}
HOST_GAP = metrics.tally(metrics.step_host_gap_seconds)
TIMED_SECONDS = {phase: metrics.timed_step_seconds_total.labels(phase) for phase in PHASES}
DECODE_MODES = ("captured", "decoder", "eager")
DECODE_TOKENS = {mode: metrics.decode_tokens_total.labels(mode) for mode in DECODE_MODES}
SLOTS = [metrics.state_slots.labels(state) for state in ("used", "checkpoint", "free")]
ACCEPTANCE = {kind: metrics.tally(metrics.acceptance_length_tokens, kind) for kind in KINDS}
DRAFTS = {kind: metrics.draft_tokens_total.labels(kind) for kind in KINDS}
ACCEPTED_DRAFTS = {kind: metrics.accepted_draft_tokens_total.labels(kind) for kind in KINDS}
HEAD_STEPS = {state: metrics.head_steps_total.labels(state) for state in HEAD_STATES}
UNDRAFTED = {reason: metrics.undrafted_tokens_total.labels(reason) for reason in REASONS}
MISSES = {reason: metrics.prefix_cache_misses_total.labels(reason) for reason in MISS_REASONS}
OFFLOADED = [metrics.kv_offload_bytes_total.labels(direction) for direction in ("save", "load")]
STORED = [metrics.kv_store_bytes_total.labels(direction) for direction in ("save", "load")]
STORE_FAILURES = [metrics.kv_store_failures_total.labels(reason) for reason in FAILURES]
OFFLOAD_MEMORY = [metrics.kv_offload_memory_bytes.labels(state) for state in ("used", "free")]
BLOCKS = [metrics.kv_cache_blocks.labels(state) for state in BlockCounts._fields]


def _offload_counts(tier: HostTier | None) -> tuple[int, int, int, int, int, int]:
    """Return tokens looked up and found, bytes saved and loaded, corrupt and dropped blocks, since the start."""
    if tier is None:
        return 0, 0, 0, 0, 0, 0
    return (tier.queries, tier.hits, tier.num_saved * tier.block_bytes, tier.num_loaded * tier.block_bytes,
            tier.num_corrupt, tier.num_dropped)


def _store_counts(tier: HostTier | None) -> tuple[int, ...]:
    """Return tokens looked up and found, bytes saved and loaded, retries, and failures by reason, since the
    start."""
    store = tier.store if tier is not None else None
    if tier is None or store is None:
        return (0,) * (5 + len(FAILURES))
    return (store.queries, store.hits, store.num_saved * tier.block_bytes,
            store.num_loaded * tier.block_bytes, store.num_retried,
            *(store.connector.failures[reason] for reason in FAILURES))


class EngineMetrics:
    """Exporter of the scheduler's counts and of the steps' durations. Owns only the last reported values."""

    def __init__(self, scheduler: Scheduler, history: RequestHistory | None = None):
        self._scheduler = scheduler
        self._history = history or RequestHistory()
        self._reported: tuple[float, ...] = (0,) * (17 + len(FAILURES) + 2 * len(KINDS) + len(HEAD_STATES))
        self._requests = (-1, -1, -1)  # running, waiting and paused, as published
        self._blocks: BlockCounts | None = None  # as published
        self._tokens = 0  # tokens since the last update of the load
        self._updated = 0.0  # last update of the load
        # Steps since the last page: (step, its result, launched, collected, whether more work was left, its kernels).
        self._steps: list[tuple[Step, StepResult, float, float, bool, Mapping[str, Calls] | None]] = []
        self._ended = 0.0  # end of the last step on the device, as the host estimates it
        self._busy = False
        self._generated = 0
        self._rate = 0.0
        self._rate_since = time.monotonic()
        self._paged = 0.0
        self.load = Load()
        blocks = scheduler.blocks
        metrics.kv_cache_config_info.labels(str(blocks.block_size), str(blocks.num_blocks)).set(1)
        self.heartbeat()

    def refresh(self, now: float) -> None:
        """Publish what an endpoint picker reads, if it has changed: the counts of requests at once, the use of
        the KV cache at most every LOAD_SECONDS. Call it whenever that may have changed.
        """
        scheduler = self._scheduler
        load = self.load
        requests = scheduler.num_running, scheduler.num_waiting, scheduler.num_paused
        if requests != self._requests:
            self._requests = requests
            running, waiting, paused = requests
            metrics.requests_running.set(running)
            metrics.requests_waiting.set(waiting)
            self.load = Load(running, waiting, load.free_kv_ratio, load.tokens_per_second, paused)
        if now - self._updated >= LOAD_SECONDS:
            self._update(now)

    def launched(self, step: Step, now: float) -> None:
        """Record the launch of a step at `now`."""
        for new in step.new:
            request = self._scheduler.sequence(new.request_id).request
            if request.progress.cached_tokens is None:  # otherwise it continues after a restart or a resume
                metrics.queue_time_seconds.observe(max(0.0, now - request.arrival))
                metrics.prompt_tokens_total.inc(len(new.prompt_ids))
        self.refresh(now)

    def stepped(self, step: Step, result: StepResult, tokens: int, launched: float, collected: float) -> None:
        """Record an applied step. tokens: number of its tokens for requests that have not ended."""
        # Counted with the next page, all at once: here cold caches would multiply the cost of each line.
        busy = self._scheduler.has_work
        kernels = self._history.take_kernels() if result.timed else None
        self._steps.append((step, result, launched, collected, busy, kernels))
        self._tokens += tokens
        if not busy:
            self._update(collected)
        self.refresh(collected)

    def cancelled(self, seconds: float) -> None:
        metrics.cancel_to_free_seconds.observe(seconds)
        self._update(time.monotonic())

    def rejected(self, error: ServeError) -> None:
        """Count a refused request. A request that crashes the engine was counted when that was found."""
        named = {DeadlineExceeded: "deadline", DuplicateRequest: "duplicate", InvalidField: "too_large"}
        if why := error.why if isinstance(error, QueueFull) else named.get(type(error)):
            metrics.queue_rejections_total.labels(why).inc()
        elif not isinstance(error, EngineKiller):  # its constraint cannot be compiled on this server
            metrics.grammar_errors_total.labels("compile").inc()

    def heartbeat(self) -> None:
        metrics.engine_heartbeat.set(time.monotonic())
        self._paged = 0.0
        self._update(time.monotonic())

    def _update(self, now: float) -> None:
        scheduler = self._scheduler
        self._updated = now
        metrics.generation_tokens_total.inc(self._tokens)
        self._generated += self._tokens
        self._tokens = 0
        if now - self._rate_since >= RATE_SECONDS:
            self._rate = self._generated / (now - self._rate_since)
            self._generated = 0
            self._rate_since = now
        blocks = scheduler.blocks.counts
        usage = blocks.used / scheduler.blocks.num_blocks
        self.load = Load(
            scheduler.num_running, scheduler.num_waiting, 1.0 - usage, self._rate, scheduler.num_paused)
        if blocks != self._blocks:
            self._blocks = blocks
            metrics.kv_cache_usage_ratio.set(usage)
            for state, count in zip(BLOCKS, blocks, strict=True):
                state.set(count)
        if now - self._paged >= PAGE_SECONDS or not scheduler.has_work:
            self._paged = now
            self._page()

    def _page(self) -> None:
        metrics.requests_paused.set(self._scheduler.num_paused)
        metrics.predicted_ttft_seconds.set(self._scheduler.predicted_ttft_seconds())
        scheduler = self._scheduler
        drafting = scheduler.drafting
        memory = scheduler.memory
        counts = (
            scheduler.preemptions, memory.prefix_queries, memory.prefix_hits, scheduler.deadlines.tokens_in_vain,
            scheduler.forced_tokens, drafting.seconds, *_offload_counts(scheduler.tier),
            *_store_counts(scheduler.tier),
            *(drafting.drafted_by_kind[kind] for kind in KINDS),
            *(drafting.accepted_by_kind[kind] for kind in KINDS),
            *(drafting.head_steps[state] for state in HEAD_STATES))
        counters = (
            metrics.preemptions_total, metrics.prefix_cache_queries_total, metrics.prefix_cache_hits_total,
            metrics.tokens_in_vain_total, metrics.forced_tokens_total, metrics.drafting_seconds_total,
            metrics.kv_offload_queries_total, metrics.kv_offload_hits_total, *OFFLOADED,
            metrics.kv_offload_corrupt_blocks_total, metrics.kv_offload_dropped_blocks_total,
            metrics.kv_store_queries_total, metrics.kv_store_hits_total, *STORED, metrics.kv_store_retries_total,
            *STORE_FAILURES,
            *DRAFTS.values(), *ACCEPTED_DRAFTS.values(), *HEAD_STEPS.values())
        for (kind, length), rows in drafting.take_lengths().items():
            for _ in range(rows):
                ACCEPTANCE[kind].observe(length)
        for reason, tokens in drafting.take_skipped().items():
            UNDRAFTED[reason].inc(tokens)
        for reason, misses in scheduler.memory.take_misses().items():
            MISSES[reason].inc(misses)
        used = checkpoints = free = 0
        if (slots := scheduler.slots) is not None:
            used = slots.num_used
            checkpoints = slots.num_checkpoints
            free = slots.num_slots - used - checkpoints
        for gauge, number in zip(SLOTS, (used, checkpoints, free), strict=True):
            gauge.set(number)
        if (tier := scheduler.tier) is not None:
            used = tier.num_used * tier.block_bytes
            for gauge, number in zip(OFFLOAD_MEMORY, (used, tier.num_slots * tier.block_bytes - used), strict=True):
                gauge.set(number)
            if tier.store is not None:
                metrics.kv_store_available.set(tier.store.connector.is_available)
        for counter, count, before in zip(counters, counts, self._reported, strict=True):
            counter.inc(count - before)
        self._reported = counts
        self.count_steps()
        metrics.flush()

    def count_steps(self) -> None:
        """Count the steps since the last call, and add them to the history."""
        decoded = dict.fromkeys(DECODE_MODES, 0)
        for step in self._steps:
            self._count(decoded, *step)
        self._steps.clear()
        for mode, tokens in decoded.items():
            DECODE_TOKENS[mode].inc(tokens)

    def _count(
        self, decoded: dict[str, int], step: Step, result: StepResult, launched: float, collected: float, busy: bool,
        kernels: Mapping[str, Calls] | None
    ) -> None:
        """Count a step. decoded: tokens of decode rows by mode, to which its own are added."""
        phase = step.phase
        # It began when the step before ended, if it had to wait. A step of single kernels begins while the host is
        # still launching them.
        began = max(min(launched, collected - result.device_seconds), self._ended)
        if self._busy:
            HOST_GAP.observe(began - self._ended)
        self._ended = min(began + result.device_seconds, collected)
        self._busy = busy  # a gap counts only if there is work
        self._history.add(step, phase != "decode", began, collected, kernels)
        STEP_SECONDS[phase, "captured" if result.captured else "eager"].observe(collected - began)
        STEP_TOKENS[phase].observe(step.num_tokens)
        if result.timed:
            TIMED_SECONDS[phase].inc(result.device_seconds)
        decoded["captured"] += result.captured_decodes
        decoded["decoder"] += result.decoder_decodes
        decoded["eager"] += step.num_decodes - result.captured_decodes - result.decoder_decodes
