"""Which requests compute how many tokens in the next step.

States of a request: sequence.py. Its life and preemption: the package's docstring. Overlapping steps: step_plan.py.

Plan. Decode rows come first, then chunks of forced tokens (`AnswerMatcher`), prefill chunks that have begun, and
admissions. Rows are in order of age, admissions in the order of the queue (fair_queue.py). Clients share the budget of
the prefill chunks: those of the lowest virtual time come first, and admissions of a client before the chunks of one
ahead of it. At most as many requests run as the budget has tokens, so every decode row fits in every step, and chunks
share the rest, or a part of it where all of it would delay the streams too much (prompt_bound.py). Admission stops at
the first request that does not fit; smaller ones behind it do not pass it. It leaves one block free per running
request, so that an admitted request is not preempted as soon as the others grow.

Drafts (drafting.py, service/speculation). Two steps are in flight, unless decode rows may have drafts: these need the
last token on the host, and those of a model's head are in the result of the step before. Then all rows wait
(`waits_for_tokens`): the plan is empty until the step in flight is applied. No row waits in quarantine, and with `auto`
where drafts bring less than the overlap.

Which requests are preempted for others: preemption.py. They are chosen before any row of a step is planned. One with
steps in flight gets no row, and is preempted once they are applied.

This file is long, since all methods here read and move the same sequences. What needs less of them is beside it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from npuserve.npu.step import Step, StepResult
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.admission import Admission, Load
from npuserve.service.scheduling.block_manager import BlockManager, IntegrityError
from npuserve.service.scheduling.deadlines import Deadlines, DroppedRequest
from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.fair_queue import FairQueue, start
from npuserve.service.scheduling.head_contexts import HeadContexts
from npuserve.service.scheduling.host_tier import HostTier
from npuserve.service.scheduling.latency_estimator import LatencyEstimator
from npuserve.service.scheduling.load_waits import LoadWaits
from npuserve.service.scheduling.preemption import Preemption
from npuserve.service.scheduling.prompt_bound import PromptBound
from npuserve.service.scheduling.quarantine import Quarantine
from npuserve.service.scheduling.sample_groups import SampleGroups
from npuserve.service.scheduling.sequence import Account, Progress, Sequence, State
from npuserve.service.scheduling.sequence_memory import SequenceMemory
from npuserve.service.scheduling.state_slots import StateSlots
from npuserve.service.scheduling.step_plan import Plan, StepBuilder
from npuserve.service.structured_output.answer_matcher import AnswerMatcher

_age_key = attrgetter("age_key")

_STATES = {
    "waiting": (State.WAITING, State.PREEMPTED),
    "followers": (State.FOLLOWING,),
    "compiling": (State.COMPILING,),
    "running": (State.RUNNING,),
    "loading": (State.LOADING,),
    "paused": (State.PAUSED, State.PAUSED_WITHOUT_BLOCKS, State.UNPAUSED),
}
"""States of the sequences in each collection of the scheduler."""


class AddedRequest(NamedTuple):
    """A queued request, and the request that was displaced from a full queue for it, if any."""

    sequence: Sequence
    displaced: DroppedRequest | None


class Scheduler:
    """Owner of the sequences and their memory. Not thread-safe: the engine's loop calls it.

    max_num_seqs: maximum number of running requests; at most max_num_batched_tokens take effect.
    max_num_batched_tokens: maximum number of tokens in a step.
    max_queue: maximum number of requests beyond max_num_seqs. Preempted and paused requests count like running ones.
    aging_seconds: waiting time that is worth one unit of priority.
    target_itl_seconds: target of the inter-token latency; infinity for none.
    max_model_len: maximum tokens of a prompt and its answer; None: what the KV cache holds.
    min_forced: minimum length of a run of forced tokens that one step computes; 0: each is sampled.
    slots: slots of fixed state; None for a model without.
    message_end_ids: tokens that end messages of a chat; see checkpoints.py.
    drafting: drafts of the requests; None for none.
    tier: evicted blocks and states in host memory; None for none.

    All times are seconds of the clock of Request.arrival.

    preemptions, forced_tokens: number since the start. No step sampled a forced token.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_queue: int,
        aging_seconds: float,
        target_itl_seconds: float = math.inf,
        max_model_len: int | None = None,
        min_forced: int = 0,
        slots: StateSlots | None = None,
        message_end_ids: Set[int] = frozenset(),
        drafting: Drafting | None = None,
        tier: HostTier | None = None,
    ) -> None:
        self.memory = SequenceMemory(blocks, slots, message_end_ids, tier)
        self.blocks = blocks
        self.tier = tier
        self.slots = slots
        self.drafting = drafting or Drafting()
        self._heads = HeadContexts(blocks.block_size) if self.drafting.can_stop_head else None
        self.preemptions = 0
        self.forced_tokens = 0
        self.quarantine = Quarantine()
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._aging_seconds = aging_seconds
        self._min_forced = min_forced
        self._ids = itertools.count()
        self._sequences: dict[int, Sequence] = {}  # all that have not ended
        self._queue = FairQueue(self._max_num_seqs + max_queue)  # WAITING and PREEMPTED
        self._samples = SampleGroups(self._queue, blocks)  # FOLLOWING
        self._compiling: dict[int, Sequence] = {}  # COMPILING
        # `_preemption` reads these two collections, so they are never replaced by others.
        self._running: Final[list[Sequence]] = []  # RUNNING, the oldest first
        self._paused: Final[dict[int, Sequence]] = {}  # PAUSED, PAUSED_WITHOUT_BLOCKS and UNPAUSED
        self._ended: list[int] = []  # not yet reported to the runner
        self._has_forced = False  # forced tokens were appended since the blocks were checked
        self._successor: Sequence | None = None  # waiting request to which others have yielded in this step
        self._prompt_bound = PromptBound(max_num_batched_tokens, target_itl_seconds)
        self._estimator = LatencyEstimator(max_num_batched_tokens, self._prompt_bound)
        self._admission = Admission(self._estimator, blocks, self._max_num_seqs, max_queue, max_model_len)
        self._preemption = Preemption(self._running, self._paused, blocks, self._max_num_seqs)
        self.deadlines = Deadlines(self._estimator)
        self.loads = LoadWaits(self.memory, self._queue, self.deadlines)  # LOADING

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue, also preempted ones, and of requests that wait for a prompt, a grammar or
        a prefix from host memory."""
        return len(self._queue) + len(self._samples) + len(self._compiling) + len(self.loads)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def has_work(self) -> bool:
        """True if there is anything to compute: a request has not ended and is not paused."""
        return bool(self._running or self._queue or self.loads)

    @property
    def expected_seconds(self) -> float:
        """Estimated duration of the oldest step in flight; 0 until a step was measured."""
        return self._estimator.expected_seconds

    def sequence(self, sequence_id: int) -> Sequence:
        """Return a request. KeyError if it has ended."""
        return self._sequences[sequence_id]

    def add(
        self, request: Request, origin: tuple[bytes, int], now: float, prepare: Callable[[], None] | None = None
    ) -> AddedRequest:
        """Queue a request, or let it wait for its grammar (`constrain`) or for another sample of its call.

        prepare: called if the request is admitted, before any change. Its error refuses the request.

        Raises InvalidField, QueueFull or DeadlineExceeded for a request that may not enter (admission.py), and the
        error of `prepare`.
        """
        account = self._queue.account(request.client)
        displaced = self._check_admission(request, account, now)
        if prepare:
            prepare()
        if displaced:
            self._end(displaced.sequence)
        scope = self._samples.scope(request)
        sequence = Sequence(next(self._ids), origin, request, self._aging_seconds, account, scope)
        self._sequences[sequence.id] = sequence
        self._queue.add_live(account)
        self._samples.add(sequence)
        if sequence.needs_matcher:
            self._compiling[sequence.id] = sequence
        else:
            self._samples.enter(sequence)
        self.deadlines.set(sequence)
        return AddedRequest(sequence, displaced)

    def constrain(self, sequence: Sequence, matcher: AnswerMatcher) -> None:
        """End a live request's wait for its grammar. A paused request enters the queue after its pause.

        matcher: advanced over the request's output_ids.
        """
        is_compiling = self._compiling.pop(sequence.id, None)
        sequence.constrain(matcher)
        if is_compiling:
            self._samples.enter(sequence)

    def change_reader(self, sequence: Sequence, origin: tuple[bytes, int], deadline: float | None) -> None:
        """Give a request's output to another front end, with another deadline, and end its pause."""
        sequence.origin = origin
        sequence.deadline = deadline
        self.deadlines.set(sequence)
        self.unpause(sequence.id)

    def cancel(self, sequence_id: int) -> Sequence | None:
        """End a request in any state, free its blocks and return it; None if it has ended before."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence)
        return sequence

    def pause(self, sequence_id: int) -> None:
        """Give a request no further row until `unpause`. Nothing if it has ended or is paused."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        self.quarantine.release(sequence_id)
        self._take_out(sequence)
        self._paused[sequence_id] = sequence
        sequence.pause()
        self._samples.replace_leader(sequence)

    def isolate(self, sequence: Sequence, crashes: int, tokens: int) -> None:
        """Put a request into quarantine, see Quarantine.add. It waits for no other sample."""
        if sequence.state is State.FOLLOWING:
            self._samples.enter_queue(sequence)
        self.quarantine.add(sequence.id, crashes, tokens)

    def unpause(self, sequence_id: int) -> None:
        """End a pause. Nothing if the request has ended or is not paused."""
        sequence = self._paused.get(sequence_id)
        if sequence is not None and sequence.is_paused:
            sequence.unpause()
            if sequence.is_queued:
                del self._paused[sequence_id]
                self._queue.push(sequence)
            elif sequence.needs_matcher:
                self._compiling[sequence_id] = self._paused.pop(sequence_id)

    def expire(self, now: float) -> list[DroppedRequest]:
        """End and return the requests whose deadlines are due or cannot be met."""
        return [self._drop_late(sequence) for sequence in self.deadlines.late(now)]

    def schedule(self, now: float) -> Plan:
        """Plan a step. One without rows and loads need not be launched. Read block_ids in the launch only: the lists
        may grow."""
        self.loads.end()
        if self.waits_for_tokens:
            return Plan(Step([]), [], [])
        self._successor = None  # that of the last plan may have ended
        self._run_unpaused(now)
        running = self._running
        leaving = self._yield_to_next() if self._queue else []
        if self.quarantine:
            leaving = self._preempt_outside_quarantine()
        if self._has_forced or self.blocks.num_available < len(running):
            leaving = self._secure_blocks(leaving)
        if leaving:
            running = [sequence for sequence in running if sequence not in leaving]
        head_depth = self.drafting.plan_head(may_draft=not self.quarantine)
        if self._heads is not None:
            self._heads.begin_step(is_computed=head_depth is not None)
        plan = StepBuilder(
            self._max_num_batched_tokens, self.blocks.block_size, self.slots, head_depth, self._heads)
        drafts = self.drafting.choose(
            self._decoding(running), self._max_num_batched_tokens, is_beside_prompts=self._is_beside_prompts)
        num_more = self._plan_decodes(plan, running, drafts)
        decodes = len(plan.rows)
        has_streams = plan.has_streams
        if has_streams:
            plan.bound_prompts(self._prompt_bound.plan())
        self._plan_chunks(plan, running, now)
        self._admit_waiting(plan, now)
        saves, loads = self.loads.take_copies(has_rows=bool(plan.rows))
        if self._heads is not None:
            self._heads.end_step(saves, (copy for load in loads for copy in load.copies))
        if not plan.rows:
            return Plan(Step([], saves=saves, loads=loads), plan.dropped, [])
        prompts = self._max_num_batched_tokens - plan.budget - decodes - num_more
        pools = all(self._sequences[row.request_id].pools for row in plan.rows[decodes:])
        self._estimator.step_planned(decodes, prompts, now, has_streams=has_streams, pools=pools)
        step = Step(plan.rows, plan.new, self.take_ended(), saves, loads)
        self.drafting.planned(step)
        return Plan(step, plan.dropped, plan.constrained)

    def _begin_load(self, sequence: Sequence) -> bool:
        """Let a request from the queue wait for its prefix from host memory. Return False if there is none to load."""
        return not self.quarantine and self.loads.begin(sequence, spare=len(self._running))

    def apply(self, step: Step, result: StepResult, now: float) -> list[Progress]:
        """Take in the result of the oldest step. Return the progress of each request that got a token or reports."""
        progress: list[Progress] = []
        if step.rows:
            self._estimator.step_applied(now)
        for row in step.rows:
            sequence = self._sequences.get(row.request_id)
            if sequence is None:  # ended since
                continue
            is_deferred = sequence.is_deferred and row.samples > 0
            increment = sequence.apply(row, result, now)
            num_accepted = len(increment.token_ids) if increment is not None else 0
            num_computed_tokens = sequence.num_computed_by(row, is_deferred=is_deferred)
            if row.samples > 1 and self.slots is not None:
                self.slots.settle(sequence.slots)
            self.memory.register(sequence, num_computed_tokens)
            if sequence.id in self._samples.leaders and num_computed_tokens >= sequence.num_prompt_tokens:
                self._samples.prompt_computed(sequence)
            if self.quarantine and row.samples and not is_deferred:
                self.quarantine.count_tokens(sequence.id, max(1, num_accepted))
            if increment is not None:
                progress.append(increment)
                if num_accepted:
                    self.drafting.extend(sequence, increment.token_ids, row.samples - 1)
                    self.drafting.replace_predicted(sequence, result.drafts_after(row, num_accepted))
                self._end_complete(increment)
        if step.rows:
            self.drafting.step_applied(
                self._decoding(self._running), self._max_num_batched_tokens, now,
                is_beside_prompts=self._is_beside_prompts, head_seconds=result.head_seconds)
        return progress

    @property
    def waits_for_tokens(self) -> bool:
        """True if the next step is planned only after those in flight are applied, since it may have drafts."""
        return self.drafting.must_wait(self._decoding(self._running))

    def _decoding(self, running: list[Sequence]) -> list[Sequence]:
        """Return the running requests if their rows may have drafts; [] in quarantine."""
        return [] if self.drafting.speculator is None or self.quarantine else running

    @property
    def _is_beside_prompts(self) -> bool:
        """Whether the next step may compute prompts: some are not computed whole, or can be admitted."""
        if self.drafting.speculator is None:
            return False
        is_admitting = bool(self._queue) and len(self._running) < self._max_num_seqs
        return is_admitting or any(sequence.is_prefilling for sequence in self._running)

    def append_forced(self, progress: Progress) -> Progress:
        """Append the run of forced tokens that follows the progress of a step. Return the progress with them."""
        if not self._min_forced or progress.reason is not None:
            return progress
        sequence = progress.sequence
        run = sequence.append_forced(self._min_forced)
        if not run:
            return progress
        self.forced_tokens += len(run)
        self._has_forced = True
        self.memory.plan_forced_checkpoint(sequence)
        self.drafting.extend(sequence, run, is_forced=True)
        token_ids = [*progress.token_ids, *run]
        progress = msgspec.structs.replace(progress, token_ids=token_ids, reason=sequence.finish_reason())
        self._end_complete(progress)
        return progress

    def _end_complete(self, progress: Progress) -> None:
        """End a request if a step has ended it."""
        sequence = progress.sequence
        if progress.reason is not None and not sequence.pools:
            self._estimator.record_answer(
                sequence.timer.computing_seconds, len(sequence.request.prompt_ids), sequence.num_generated_tokens)
        if progress.reason is not None or progress.error is not None:
            self._end(sequence)

    def take_ended(self) -> list[int]:
        """Return the ended requests that no step has reported to the runner. The next step does not report them."""
        ended = self._ended
        self._ended = []
        return ended

    def audit(self) -> Iterator[None]:
        """Check the whole state in parts, with a yield after each. Nothing may change before its end.

        The first part compares counts, in constant time. Raises IntegrityError unless

        - every sequence that has not ended is in the one collection that its state names,
        - the compiling sequences have a constraint and no matcher, and no running or queued one lacks its matcher,
        - the clients' counts of running sequences are right,
        - samples that wait for a prompt have a leader that computes it,
        - deadlines are set for exactly the sequences that have one,
        - the used blocks belong to exactly the loads and the sequences whose state holds blocks, and each slot has one
          holder.
        """
        for fault in self._count_faults():
            raise IntegrityError(fault)
        yield
        for fault in itertools.chain(self._queue.faults(), self._samples.faults(), self._faults()):
            raise IntegrityError(fault)
        for sequence in self._sequences.values():
            for fault in sequence.faults(self.blocks.block_size):
                raise IntegrityError(fault)
        yield
        if self.slots is not None:
            self.slots.check_integrity(sequence.slots for sequence in self._sequences.values())
        yield
        holders = [s.blocks for s in self._sequences.values() if s.holds_blocks]
        if self.tier is not None:
            self.tier.check_integrity()
            holders += self.tier.tables
        yield from self.blocks.audit(holders)

    def _count_faults(self) -> Iterator[str]:
        """Yield contradictions between the sizes of the collections."""
        if len(self._running) > self._max_num_seqs:
            yield f"{len(self._running)} sequences run, at most {self._max_num_seqs} may"
        if self.num_waiting + self.num_running + self.num_paused != len(self._sequences):
            yield (f"{len(self._sequences)} sequences, but {len(self._queue)} are waiting, {len(self._samples)} are "
                   f"followers, {len(self._compiling)} are compiling, {len(self.loads)} are loading, "
                   f"{len(self._running)} are running, {len(self._paused)} are paused")
        if not self._sequences and self.blocks.counts.used and not self.loads.has_loads:
            yield f"{self.blocks.counts.used} blocks are used, but no sequence is left"

    def _faults(self) -> Iterator[str]:
        """Yield contradictions between the sequences, the collections, the accounts and the deadlines."""
        if any(a.age_key >= b.age_key for a, b in itertools.pairwise(self._running)):
            yield f"the running sequences are not in order of age: {[s.age_key for s in self._running]}"
        count = Counter(sequence.account for sequence in self._running)
        loading = Counter(sequence.account for sequence in self.loads)
        for account in {sequence.account for sequence in self._sequences.values()}:
            if account.loading != loading[account]:
                yield f"a client has {account.loading} loading, but {loading[account]} are among the loading"
            if account.running != count[account]:
                yield f"a client has {account.running} running, but {count[account]} are among the running"
        members: dict[str, Iterable[Sequence]] = {
            "waiting": self._queue,
            "followers": self._samples,
            "compiling": self._compiling.values(),
            "loading": self.loads,
            "running": self._running,
            "paused": self._paused.values(),
        }
        for name, sequences in members.items():
            states = _STATES[name]
            for sequence in sequences:
                if self._sequences.get(sequence.id) is not sequence or sequence.state not in states:
                    yield f"sequence {sequence.id} is among the {name}, but is {sequence.state.value}"
        if {s.id for s in self._sequences.values() if s.deadline is not None} != self.deadlines.ids:
            yield f"deadlines are set for the sequences {sorted(self.deadlines.ids)}, not for all that have one"

    def check_integrity(self) -> None:
        """Run the whole audit. For tests."""
        for _ in self.audit():
            pass

    def _check_admission(self, request: Request, account: Account, now: float) -> DroppedRequest | None:
        """Return the request that must leave the queue for a new one, with its error; None if there is space.

        account: of the request's client.

        Raises InvalidField, QueueFull or DeadlineExceeded for a request that may not enter.
        """
        admission = self._admission
        admission.check_size(request)
        if request.progress.accepted:
            return None
        admission.check_client(request, account, now)
        if request.deadline is not None:
            admission.check_deadline(self._first_token_seconds(request, account), request.deadline - now)
        if not admission.is_full(self.num_running + self.num_waiting + self.num_paused):
            return None
        retry_seconds = self._estimator.retry_seconds(now, self.num_running)
        outside = itertools.chain(self._samples, self._compiling.values())
        return admission.check_place(self._queue.displaced_by(account, outside), self.num_waiting, retry_seconds)

    def _first_token_seconds(self, request: Request, account: Account) -> float:
        """Estimate the time to a new request's first token.

        A sample of a call waits for the followers before it, too, and computes only the part of the prompt that it does
        not share.
        """
        followers, num_shared_tokens = self._samples.sharing(request)
        num_own_tokens = len(request.prompt_ids) + len(request.output_ids) - num_shared_tokens
        requests, tokens = self._queue.ahead(account, request.priority, self._estimator.answer_tokens)
        return self._admission.first_token_seconds(
            self._load(), requests + followers, tokens, num_own_tokens, partial(self._preemption.share, account))

    def predicted_ttft_seconds(self) -> float:
        """Estimate the time to the first token of a request that arrives now and waits for all that wait.

        Its prompt is as long as those of the latest answers. 0 until steps are measured.
        """
        return self._admission.first_token_seconds(
            self._load(), self.num_waiting, self._queue.num_missing_tokens(), round(self._estimator.prompt_tokens))

    def _load(self) -> Load:
        """Return what there is to do before a new request."""
        running = self.num_running
        paused_blocks = sum(len(sequence.block_ids) for sequence in self._paused.values())
        return Load(
            running, self.num_waiting, self.num_paused, free_slots=self._max_num_seqs - running,
            free_blocks=max(0, self.blocks.num_available + paused_blocks - running),
            prompt_tokens=sum(n for sequence in self._running if (n := sequence.num_uncomputed_tokens) > 1))

    def _preempt_outside_quarantine(self) -> list[Sequence]:
        """Preempt the requests that may not run beside those in quarantine. Return the ones with steps in flight."""
        others = [sequence for sequence in self._running if not self.quarantine.may_run(sequence.id)]
        for sequence in others:
            if not sequence.num_steps_in_flight:
                self._preempt(sequence)
        return [sequence for sequence in others if sequence.num_steps_in_flight]

    def _yield_to_next(self) -> list[Sequence]:
        """Preempt the requests that yield to a waiting one, or return them if they have steps in flight.

        The waiting request is admitted before all others. So is a small newcomer that needs no yield, unless preempted
        requests can return.
        """
        if self.quarantine:
            return []
        newcomer = self._queue.newcomer()
        returning = self._queue.returning
        head = newcomer or self._queue.next()
        leaving = self._preemption.yielding(head, returning) if head is not None else []
        if leaving and head is not None and self._begin_load(head):
            return []
        if any(sequence.num_steps_in_flight for sequence in leaving):
            return leaving
        if leaving:
            self._successor = head
        elif returning is None or self._lacks_blocks(returning):
            self._successor = newcomer
        for sequence in leaving:
            sequence.num_tokens_at_yield = len(sequence.token_ids)
            self._preempt(sequence)
        return []

    def _lacks_blocks(self, sequence: Sequence) -> bool:
        """Return whether too few blocks are available for a waiting request."""
        return self.blocks.shortage(sequence.blocks, sequence.num_tokens, (), len(self._running)) > 0

    def _secure_blocks(self, leaving: Collection[Sequence]) -> list[Sequence]:
        """Preempt requests until the others have blocks for their next rows.

        leaving: running requests that get no row, and will be preempted. They are returned, with further ones that have
            steps in flight.
        """
        self._has_forced = False
        leaving = list(leaving)
        others = [sequence for sequence in self._running if sequence not in leaving]
        while True:
            missing = sum(self.blocks.missing(s.blocks, s.num_tokens) for s in others if s.needs_row)
            if missing <= self.blocks.num_available + self.blocks.released(s.blocks for s in leaving):
                return leaving
            victim = self._preemption.paused_victim(leaving) or self._preemption.shortage_victim(others)
            if victim.num_steps_in_flight:
                leaving.append(victim)
            else:
                self._preempt(victim)
            if victim in others:
                others.remove(victim)

    def _run_unpaused(self, now: float) -> None:
        """Run the requests whose pause has ended. Preempt those beyond max_num_seqs."""
        for sequence in [s for s in self._paused.values() if s.state is State.UNPAUSED]:
            if len(self._running) < self._max_num_seqs:
                del self._paused[sequence.id]
                sequence.run_again(now)
                self._add_running(sequence)
            elif not sequence.num_steps_in_flight:
                self._preempt(sequence)

    def _plan_decodes(self, plan: StepBuilder, running: list[Sequence], drafts: Mapping[int, list[int]]) -> int:
        """Add the decode rows of the running requests, and allocate blocks for all their tokens. Return the number of
        tokens of these rows beyond one each.

        A request whose block is held by one that is about to be preempted gets no row. Drafts that lack a block or a
        slot are left out, also if a running request may lack a block then, or a token of the budget: a mask can become
        ready after drafts were chosen.

        drafts: by sequence id. A row with drafts may have several known tokens.
        """
        num_more = 0
        # Requests that may take rows after those with drafts.
        later = {sequence.id for sequence in running
                 if drafts and (sequence.num_uncomputed_tokens == 1 or sequence.id in drafts)}
        for sequence in running:
            later.discard(sequence.id)
            if not sequence.needs_row:
                continue
            num_tokens = sequence.num_tokens
            has_blocks = self.memory.grow(sequence, num_tokens)
            known = num_tokens - sequence.num_computed_tokens
            row_drafts = drafts.get(sequence.id)
            if row_drafts and (
                    plan.budget < known + len(row_drafts) + len(later)
                    or not self.memory.grow_for_drafts(sequence, num_tokens + len(row_drafts), len(running))):
                row_drafts = None
            if not has_blocks or (known > 1 and not row_drafts):
                continue
            num_more += known - 1 + len(row_drafts or ())
            plan.add_row(sequence, known, row_drafts)
        return num_more

    def _plan_chunks(self, plan: StepBuilder, running: list[Sequence], now: float) -> None:
        """Add the chunks of forced tokens, then the next chunks of prompts that have begun, and admit requests of
        clients with a lower virtual time before each of these."""
        chunks = [sequence for sequence in running if sequence.num_uncomputed_tokens > 1]
        for sequence in sorted(chunks, key=_chunk_key):
            if sequence.is_prefilling:
                self._admit_waiting(plan, now, before=sequence.account)
            budget = plan.prompt_budget(sequence) if sequence.is_prefilling else plan.budget
            if budget > 0 and self.blocks.covers(sequence.blocks, sequence.num_tokens):
                plan.add_row(sequence, budget)

    def _admit_waiting(self, plan: StepBuilder, now: float, before: Account | None = None) -> None:
        """Admit requests from the queue while they fit, and add their first chunks. Drop late ones.

        before: admits only requests of other clients whose start is before this client's virtual time; None for all.
        """
        may_run = self.quarantine.may_run if self.quarantine else None
        if may_run and not all(may_run(sequence.id) for sequence in self._running):
            return  # others have steps in flight
        while plan.budget and self._queue and len(self._running) + len(self.loads) < self._max_num_seqs:
            urgent = None if may_run else self._successor or self._queue.returning
            sequence = urgent or self._queue.next(may_run)
            if sequence is None:
                break
            is_behind = before and (sequence.account is before or start(sequence) >= before.virtual_time)
            if is_behind and not urgent:
                break
            if plan.prompt_budget(sequence) <= 0:
                break
            self._successor = None
            if self._estimator.last_moment(sequence, self._max_num_batched_tokens - plan.budget) < now:
                plan.dropped.append(self._drop_late(sequence))
                continue
            if self._begin_load(sequence):
                continue
            is_new = not sequence.was_admitted
            if not self._admit(sequence, now):
                break
            if is_new:
                plan.add_new(sequence)
            plan.add_row(sequence, plan.prompt_budget(sequence))
            if may_run is not None:
                break

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Run a request from the queue, with blocks for all its tokens. False if there are not enough blocks."""
        uses_cache = sequence.uses_prefix_cache
        while (num_cached_tokens := self.memory.take(sequence, spare=len(self._running))) is None:
            paused = self._preemption.paused_victim()
            if paused is None or paused.num_steps_in_flight:
                return False
            self._preempt(paused)  # which may free blocks of the prefix whose duplicates are used
        is_new = not sequence.was_admitted and sequence.request.progress.cached_tokens is None
        self._queue.admit(sequence, sequence.num_tokens - num_cached_tokens)
        sequence.admit(num_cached_tokens, now)
        self.memory.plan_checkpoints(sequence)
        if is_new and uses_cache:
            self.memory.count_lookup(sequence, num_cached_tokens)
        self._add_running(sequence)
        return True

    def _add_running(self, sequence: Sequence) -> None:
        insort(self._running, sequence, key=_age_key)
        sequence.account.running += 1

    def _preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a request, which must have no step in flight. It is queued again unless it is paused."""
        if not sequence.is_paused:
            self._take_out(sequence)
        self.memory.free(sequence)
        sequence.preempt()
        self.preemptions += 1
        if sequence.is_queued:
            self._queue.push(sequence)

    def _drop_late(self, sequence: Sequence) -> DroppedRequest:
        """End a request whose deadline has come, or comes before its first token."""
        self._end(sequence)
        return self.deadlines.drop(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        """Remove a sequence from the collection that its state names."""
        if sequence.is_queued:
            self._queue.remove(sequence)
        elif sequence.state is State.FOLLOWING:
            self._samples.remove(sequence)
        elif sequence.state is State.COMPILING:
            del self._compiling[sequence.id]
        elif sequence.state is State.LOADING:
            self.loads.remove(sequence)
        elif sequence.state is State.RUNNING:
            del self._running[bisect_left(self._running, sequence.age_key, key=_age_key)]
            sequence.account.running -= 1
        else:
            del self._paused[sequence.id]

    def _end(self, sequence: Sequence) -> None:
        """Forget a request and free its blocks. The next step reports it to the runner if the runner knows it."""
        self._take_out(sequence)
        self.drafting.end(sequence)
        sequence.end()
        self.deadlines.forget(sequence.id)
        self._queue.remove_live(sequence.account)
        del self._sequences[sequence.id]
        self.quarantine.release(sequence.id)
        self.memory.free(sequence)
        self._samples.end(sequence)
        if sequence.was_admitted:
            self._ended.append(sequence.id)


def _chunk_key(sequence: Sequence) -> tuple[bool, float]:
    """Return the sort key of a sequence in the order of chunks: forced tokens first."""
    return (True, sequence.account.virtual_time) if sequence.is_prefilling else (False, 0.0)
