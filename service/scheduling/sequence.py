"""State of one request in the scheduler: its tokens, the number of computed ones, and its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from npuserve.npu.step import Row, StepResult, TokenLogprobs
from npuserve.service.errors import ServeError
from npuserve.service.ipc.messages import Finish, FinishReason, Request
from npuserve.service.scheduling.block_manager import BlockTable
from npuserve.service.scheduling.phase_timer import PhaseTimer
from npuserve.service.scheduling.state_slots import SlotTable
from npuserve.service.speculation.request_drafter import RequestDrafter
from npuserve.service.structured_output.answer_matcher import AnswerMatcher


class State(Enum):
    """Where a request is in its life. Methods of Sequence make the transitions; the Scheduler calls them.

        WAITING ──admit──► RUNNING ──preempt──► PREEMPTED ──admit──► RUNNING
        RUNNING ──pause──► PAUSED ──unpause──► UNPAUSED ──run_again──► RUNNING
        PAUSED ──preempt──► PAUSED_WITHOUT_BLOCKS ──unpause──► PREEMPTED, or WAITING if never admitted
        UNPAUSED ──preempt──► PREEMPTED
        UNPAUSED ──pause──► PAUSED
        WAITING, PREEMPTED ──wait_for_load──► LOADING ──end_load_wait──► WAITING, or PREEMPTED
        WAITING, PREEMPTED, LOADING ──pause──► PAUSED_WITHOUT_BLOCKS
        WAITING ──follow──► FOLLOWING ──enter_queue──► WAITING
        COMPILING ──constrain──► WAITING, or FOLLOWING
        FOLLOWING, COMPILING ──pause──► PAUSED_WITHOUT_BLOCKS
        PAUSED_WITHOUT_BLOCKS ──unpause──► COMPILING if its grammar is not compiled
        any of them ──end──► ENDED
    """

    WAITING = "waiting"
    """In the queue. Never admitted, holds no blocks."""
    FOLLOWING = "following"
    """Waits for the sample of its call that computes the prompt. Never admitted, holds no blocks, not in the queue."""
    COMPILING = "compiling"
    """Waits for the grammar of its constraint. Never admitted, holds no blocks, not in the queue."""
    LOADING = "loading"
    """Waits for blocks from host memory, as the next in the queue. Holds no blocks, not in the queue."""
    PREEMPTED = "preempted"
    """In the queue. Admitted before, holds no blocks."""
    RUNNING = "running"
    """Holds blocks, and gets rows."""
    PAUSED = "paused"
    """Gets no rows, because its reader is slow. Holds blocks until others need them."""
    PAUSED_WITHOUT_BLOCKS = "paused without blocks"
    """Gets no rows, because its reader is slow. Not in the queue."""
    UNPAUSED = "unpaused"
    """Its reader has caught up. Holds blocks, and runs as soon as fewer than max_num_seqs requests run."""
    ENDED = "ended"
    """Holds no blocks. The scheduler has forgotten it."""


_QUEUED = State.WAITING, State.PREEMPTED
_PAUSED = State.PAUSED, State.PAUSED_WITHOUT_BLOCKS
_HOLDING = State.RUNNING, State.PAUSED, State.UNPAUSED


@dataclass(slots=True, eq=False)
class Account:
    """Account of one client. FairQueue changes it; the scheduler adds planned tokens and counts running requests, the
    estimator sets `promised`.

    client: its name; "" for requests without one.
    virtual_time: tokens computed for the client; see fair_queue.py.
    live: its requests that have not ended.
    waiting: its requests in the queue.
    loading: its requests that left the queue to wait for blocks from host memory.
    running: its running requests.
    promised: retry time of the request that its own limit refused last.
    """

    client: str
    virtual_time: float = 0.0
    live: int = 0
    waiting: int = 0
    loading: int = 0
    running: int = 0
    promised: float = 0.0

    @property
    def is_waiting(self) -> bool:
        """True if a request of the client waits for its admission."""
        return self.waiting + self.loading > 0


class Sequence:
    """Mutable state of one Request. Only the Scheduler changes it; the engine reads it.

    id: increases with every request added, and is never reused.
    origin: the front end's identity and its key for the request.
    deadline: end of the request's use, in seconds of the clock of Request.arrival; None for no deadline.
    age_key: order among running requests: (arrival, id), the oldest first.
    queue_key: order among the waiting requests of one client, by priority and age. Lower is earlier. Both keys are
        constant; see fair_queue.py.
    account: account of the request's client.
    scope: scope of its blocks, see BlockTable.
    slots: slots of its fixed state.
    checkpoint_positions: block boundaries at which a row ends, for a checkpoint of its state; ascending.
    matcher: matcher of its constraint, advanced over the answer; None without a constraint, and until it is compiled.
    token_ids: prompt and answer, without the tokens that are not on the host yet.
    num_pending_tokens: number of tokens that steps in flight are sampling, forced tokens excluded.
    num_computed_tokens: the positions below it are in the KV cache, or will be after the steps in flight.
    num_prefill_tokens: tokens that were known at the last admission.
    num_reported_tokens: prompt tokens that need no log-probability report any more; the first has none.
    num_shared_tokens: prompt tokens that another sample of the call computes for this one. 0 once it was admitted.
    num_deferred: rows that were computed again, since their mask was late.
    num_steps_in_flight: steps that were planned with a row of the request, and are not applied.
    is_deferred: the oldest of these steps computes its last token, and samples nothing; see `defer`.
    cached_tokens: prompt tokens that the prefix cache held at the first admission; reported as `Finish.cached_tokens`.
    load_id: the load from host memory for which it waits; None if it waits for none.
    num_loads: loads that it has begun since it was queued.
    num_fetches: fetches from the store that it has begun or joined since it was queued.
    num_cached_before_load: tokens of the prefix that was cached when its wait for a load began.
    num_cached_after_load: tokens of the prefix that is cached once the load has ended, expected until then; 0 without a
        load since it was queued.
    num_loaded_before_admission: tokens of blocks that came back from host memory before the first admission.
    was_admitted: the request was admitted before, and the runner knows it.
    has_drafts: a step in flight computes drafts of the request, so that it gets no further row.
    num_valid_samples: samples of this row that have a mask of their own, of a constrained request.
    drafter: predicts the next tokens; None for no drafts, and before the first token.
    head_start: `Row.head_start` of its latest row; -1 before the first one since its admission.
    num_drafted, num_accepted: drafts that steps computed, and those that were accepted.
    num_tokens_at_yield: tokens that were known when the request was last preempted for another client; 0: never.
    timer: phases of its time.
    """

    __slots__ = (
        "account",
        "age_key",
        "blocks",
        "cached_tokens",
        "checkpoint_positions",
        "deadline",
        "drafter",
        "has_drafts",
        "head_start",
        "id",
        "is_deferred",
        "load_id",
        "matcher",
        "num_accepted",
        "num_cached_after_load",
        "num_cached_before_load",
        "num_computed_tokens",
        "num_deferred",
        "num_drafted",
        "num_fetches",
        "num_loaded_before_admission",
        "num_loads",
        "num_pending_tokens",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_reported_tokens",
        "num_shared_tokens",
        "num_steps_in_flight",
        "num_tokens_at_yield",
        "num_valid_samples",
        "origin",
        "queue_key",
        "request",
        "slots",
        "state",
        "timer",
        "token_ids",
        "was_admitted",
    )

    def __init__(
        self,
        id: int,
        origin: tuple[bytes, int],
        request: Request,
        aging_seconds: float,
        account: Account,
        scope: int = 0,
    ) -> None:
        self.id = id
        self.origin = origin
        self.request = request
        self.deadline = request.deadline
        self.age_key = (request.arrival, id)
        self.queue_key = (request.priority * aging_seconds + request.arrival, id)
        self.account = account
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_prefill_tokens = 0
        self.num_shared_tokens = 0
        self.num_tokens_at_yield = 0
        progress = request.progress
        self.num_reported_tokens = 1 + progress.num_reported
        self.cached_tokens = progress.cached_tokens or 0
        self.blocks = BlockTable(request.cache_salt, scope)
        self.slots = SlotTable()
        self.checkpoint_positions: list[int] = []
        self.matcher: AnswerMatcher | None = None
        self.state = State.COMPILING if request.constraint else State.WAITING
        self.was_admitted = False
        self.load_id: int | None = None
        self.num_loads = 0
        self.num_fetches = 0
        self.num_cached_before_load = 0
        self.num_cached_after_load = 0
        self.num_loaded_before_admission = 0
        self.num_steps_in_flight = 0
        self.num_deferred = 0
        self.is_deferred = False
        self.has_drafts = False
        self.num_valid_samples = 0
        self.drafter: RequestDrafter | None = None
        self.head_start = -1
        self.num_drafted = 0
        self.num_accepted = 0
        self.timer = PhaseTimer(request.arrival, progress.timing)

    @property
    def is_queued(self) -> bool:
        return self.state in _QUEUED

    @property
    def is_paused(self) -> bool:
        return self.state in _PAUSED

    @property
    def pools(self) -> bool:
        """True if the request generates no token: it ends with the hidden state of its last one."""
        return self.request.pooling is not None

    @property
    def holds_blocks(self) -> bool:
        return self.state in _HOLDING

    @property
    def block_ids(self) -> list[int]:
        return self.blocks.block_ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including the ones that steps in flight sample."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_tokens_of_run(self) -> int:
        """Number of tokens since the last admission."""
        return len(self.token_ids) - self.num_prefill_tokens

    @property
    def needs_row(self) -> bool:
        """True if the next step may compute tokens of the running request."""
        if self.has_drafts or self.is_preparing:
            return False
        num_uncomputed_tokens = self.num_uncomputed_tokens
        return num_uncomputed_tokens > 1 or (num_uncomputed_tokens == 1 and self.can_sample)

    @property
    def is_prefilling(self) -> bool:
        """True until the tokens that were known at the last admission are computed."""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Expected number of tokens to compute before the next one is sampled."""
        return self.num_uncomputed_tokens - max(self.num_shared_tokens, self.num_cached_after_load)

    @property
    def can_sample(self) -> bool:
        """True if a step may sample one more token: max_tokens allows it, and at most one token is pending."""
        pending = self.num_pending_tokens
        return pending < 2 and (
            not pending or len(self.token_ids) + pending - self.num_prompt_tokens < self.request.max_tokens)

    @property
    def has_run(self) -> bool:
        """True if the request ran in this engine or an earlier one. It is admitted before requests of its client that
        did not."""
        return self.was_admitted or (self.request.progress.accepted and bool(self.request.output_ids))

    @property
    def needs_matcher(self) -> bool:
        """True until the grammar of the request's constraint is compiled."""
        return self.matcher is None and self.request.constraint is not None

    @property
    def is_preparing(self) -> bool:
        """True while another thread uses the grammar, so that no token may be sampled or applied."""
        return self.matcher is not None and self.matcher.is_busy

    @property
    def uses_prefix_cache(self) -> bool:
        """False if the whole prompt must be computed: on request, or because every position must be reported.

        A scope holds only what the samples of the call computed, so the request does not exclude it.
        """
        is_allowed = bool(self.blocks.scope) or not self.request.bypass_prefix_cache
        return is_allowed and self.request.sampling.prompt_logprobs is None

    @property
    def can_append_forced(self) -> bool:
        """False if each token needs its own result of a step: its log-probabilities, or its count for penalties."""
        sampling = self.request.sampling
        return self.matcher is not None and sampling.logprobs is None and not sampling.penalized

    def constrain(self, matcher: AnswerMatcher) -> None:
        """End the wait for the grammar. A paused request stays paused."""
        self.matcher = matcher
        if self.state is State.COMPILING:
            self.state = State.WAITING

    def follow(self, num_shared_tokens: int) -> None:
        """Wait for another sample of the call, which computes the first `num_shared_tokens` for this one."""
        self.state = State.FOLLOWING
        self.num_shared_tokens = num_shared_tokens

    def enter_queue(self, is_computed: bool) -> None:
        """End the wait for another sample. is_computed: that sample has computed the shared tokens."""
        self.state = State.WAITING
        if not is_computed:
            self.num_shared_tokens = 0

    def wait_for_load(self, load_id: int, num_cached_before: int, num_cached_after: int) -> None:
        """Wait for a prefix from host memory; the arguments are those of LoadWait."""
        self.state = State.LOADING
        self.load_id = load_id
        self.num_cached_before_load = num_cached_before
        self.num_cached_after_load = num_cached_after

    def end_load_wait(self, num_cached_tokens: int) -> None:
        """End the wait for a prefix from host memory. num_cached_tokens: tokens of the prefix that is cached now."""
        self.state = State.PREEMPTED if self.was_admitted else State.WAITING
        self.load_id = None
        self.num_cached_after_load = num_cached_tokens
        if not self.was_admitted:
            self.num_loaded_before_admission += max(0, num_cached_tokens - self.num_cached_before_load)

    def admit(self, num_cached_tokens: int, now: float) -> None:
        """Run the request, which has blocks for all its tokens. The first `num_cached_tokens` of them are computed."""
        if not self.was_admitted:
            self.was_admitted = True
            if self.request.progress.cached_tokens is None:
                self.cached_tokens = min(num_cached_tokens, self.num_prompt_tokens)
        self.state = State.RUNNING
        self.num_loads = 0
        self.num_fetches = 0
        self.num_cached_after_load = 0
        self.num_shared_tokens = 0
        self.num_computed_tokens = num_cached_tokens
        self.head_start = -1
        self.num_prefill_tokens = len(self.token_ids)
        self.timer.end_queue(now)

    def preempt(self) -> None:
        """Mark all tokens as not computed, after the blocks were freed. The tokens stay."""
        self.state = State.PAUSED_WITHOUT_BLOCKS if self.state is State.PAUSED else State.PREEMPTED
        self.num_computed_tokens = 0

    def pause(self) -> None:
        """Stop a request whose reader is slow. It waits for no load any more."""
        self.load_id = None
        self.num_cached_after_load = 0
        self.state = State.PAUSED if self.holds_blocks else State.PAUSED_WITHOUT_BLOCKS

    def unpause(self) -> None:
        """End the pause: UNPAUSED with blocks, COMPILING without a grammar, else in the queue."""
        if self.state is State.PAUSED:
            self.state = State.UNPAUSED
        elif self.needs_matcher:
            self.state = State.COMPILING
        else:
            self.state = State.PREEMPTED if self.was_admitted else State.WAITING

    def run_again(self, now: float) -> None:
        """Run the request again with its blocks. The time of the pause counts as queue, unless a step is in flight."""
        self.state = State.RUNNING
        if not self.num_steps_in_flight:
            self.timer.end_queue(now, is_pause=True)

    def end(self) -> None:
        self.state = State.ENDED
        if self.matcher is not None:
            self.matcher.discard()

    def defer(self) -> None:
        """Discard what the step launched last samples, for want of a mask.

        A later step computes the last token again, and writes to its block, which is not shared. With a fixed state it
        computes the whole row again, from the state before it. See `num_computed_by`.
        """
        self.num_deferred += 1
        self.num_pending_tokens -= 1
        self.num_computed_tokens = self.slots.retract() if self.slots else self.num_computed_tokens - 1
        self.is_deferred = True

    def apply(self, row: Row, result: StepResult, now: float) -> Progress | None:
        """Take in the result of the request's row in the oldest step, which ended `now`. None if nothing is new."""
        self.num_steps_in_flight -= 1
        self.has_drafts = False
        self.timer.end_step(row.start < self.num_prefill_tokens, result.device_seconds, now)
        reports = result.prompt_logprobs.get(row.request_id)
        if reports:
            reports = self.take_reports(reports, row.start)
        if row.pools:
            return Progress(self, [], "pooled", hidden=result.hidden[row.request_id])
        is_discarded = not row.samples or self.is_deferred
        if row.samples:
            self.is_deferred = False
        if is_discarded:
            return Progress(self, [], prompt_logprobs=reports) if reports else None
        num_drafts = row.samples - 1
        if row.start + len(row.token_ids) - num_drafts < len(self.token_ids):
            return None  # forced tokens were appended while the step was in flight: its token is the first of them
        self.num_pending_tokens -= 1
        drafts = row.token_ids[len(row.token_ids) - num_drafts :]
        accepted: list[int] = []
        reason: FinishReason | None = None
        for place, token in enumerate(result.token_ids[row.request_id]):
            if self.matcher is not None:
                self.matcher.advance(token)
                if self.matcher.error is not None:
                    return Progress(self, [], error=self.matcher.error)
            self.token_ids.append(token)
            accepted.append(token)
            reason = self.finish_reason()
            if reason is not None or place == num_drafts or token != drafts[place]:
                break
            if self.matcher is not None and place + 1 == self.num_valid_samples:
                break
        if self.slots and reason is None and len(accepted) <= num_drafts:
            self.num_computed_tokens = self.slots.retract()
        else:
            self.num_computed_tokens += len(accepted) - 1
        logprobs = result.logprobs.get(row.request_id)
        return Progress(self, accepted, reason, logprobs[: len(accepted)] if logprobs else None, reports)

    def num_computed_by(self, row: Row, *, is_deferred: bool) -> int:
        """Return the number of tokens that are computed for good, also by an applied row.

        is_deferred: `defer` discarded what the row sampled, so that a later row computes its last token again.
        """
        if row.samples > 1:  # no row was planned behind it, and rejected drafts do not count
            return self.num_computed_tokens
        end = row.start + len(row.token_ids)
        if not is_deferred:
            return end
        return row.start if self.slots else end - 1

    def append_forced(self, min_tokens: int) -> list[int]:
        """Append the run of forced tokens that follows, if it has at least `min_tokens`, and return it. The next row
        computes it. If a step in flight samples the next token, the mask for it would allow the first of the run alone.
        """
        if self.matcher is None or not self.can_append_forced:
            return []
        if run := self.matcher.take_forced(min_tokens, self.request.max_tokens - self.num_generated_tokens):
            self.token_ids += run
            self.num_pending_tokens = 0
        return run

    def take_reports(self, reports: list[TokenLogprobs], start: int) -> list[TokenLogprobs]:
        """Return the reports that were not returned before: a row after a preemption repeats some.

        reports: reports of the prompt tokens [start + 1, ...), by a row from position `start` on.
        """
        new = reports[self.num_reported_tokens - start - 1 :]
        self.num_reported_tokens += len(new)
        return new

    def finish_reason(self) -> FinishReason | None:
        """Return the reason for which the last token ends the request, or None. min_tokens does not extend an answer
        that its constraint ends."""
        request = self.request
        generated = self.num_generated_tokens
        if self.matcher is not None and self.matcher.has_ended:
            return "stop_token" if self.token_ids[-1] in request.stop_token_ids else "eos"
        if generated >= request.sampling.min_tokens:
            if self.token_ids[-1] in request.eos_token_ids:
                return "eos"
            if self.token_ids[-1] in request.stop_token_ids:
                return "stop_token"
        return "length" if generated >= request.max_tokens else None

    def finish(self, reason: FinishReason, keep: int | None = None) -> Finish:
        """Return the end of the request.

        keep: generated tokens in the answer, where the front end cut it; None for all. A cut answer does not satisfy
            its constraint.
        """
        generated = self.num_generated_tokens if keep is None else keep
        is_complete = keep is None and self.matcher is not None and self.matcher.is_complete
        return Finish(reason, self.num_prompt_tokens, self.cached_tokens, generated, self.timer.timing, is_complete,
                      self.num_drafted, self.num_accepted)

    @property
    def _in_words(self) -> str:
        return f"sequence {self.id} is {self.state.value}"

    def faults(self, block_size: int) -> Iterator[str]:
        """Yield contradictions between the state and the counts, for integrity checks."""
        if self.is_queued and self.was_admitted != (self.state is State.PREEMPTED):
            yield f"{self._in_words}, and was_admitted is {self.was_admitted}"
        if not self.is_paused and self.needs_matcher != (self.state is State.COMPILING):
            yield f"{self._in_words}, and its matcher is {'missing' if self.needs_matcher else 'there'}"
        if not self.holds_blocks:
            if self.block_ids or self.num_computed_tokens or self.num_steps_in_flight:
                yield f"{self._in_words}, but holds blocks or has rows in flight"
            return
        num_slots = len(self.block_ids) * block_size
        if self.num_computed_tokens > min(num_slots, self.num_tokens):
            computed = f"{self.num_computed_tokens} tokens computed of {self.num_tokens}"
            yield f"{self._in_words}: {computed}, with blocks for {num_slots}"


class Progress(msgspec.Struct, frozen=True):
    """Result of one step for one request.

    token_ids: the sampled tokens, and the forced tokens that were appended to them.
    reason: set if the request ended with this step.
    error: set if it failed with this step; token_ids are empty then.
    logprobs: one report per token of token_ids; None unless requested.
    prompt_logprobs: reports of the prompt tokens that follow those reported before. Recomputed ones are not repeated.
    hidden: last hidden state of a request that pools.
    """

    sequence: Sequence
    token_ids: list[int]
    reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: ServeError | None = None
    hidden: npt.NDArray[np.float32] | None = None
