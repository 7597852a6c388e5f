"""Which requests compute how many tokens in the next step.

The life of a request here:

1. `add` refuses it (admission.py) or puts it into the queue (fair_share.py).
2. `schedule` admits it when it is its turn, and a seat and blocks for all its known tokens are free. A prefix that the
   cache holds is shared and counts as computed. The runner meets it through `Step.new`.
3. Every `schedule` gives it a row: its uncomputed tokens, as many as the token budget leaves. There are no phases:
   one uncomputed token is a decode row, several are a prefill chunk, and the row that reaches the last known token
   samples the next one.
4. `apply` appends what was sampled, lets other requests find its full blocks and decides whether it has ended.
5. If blocks run out it may be preempted: its blocks are freed, its tokens stay, and it is back at 2 to compute them
   again. Its hashed prefix may still be there then.
6. It is paused while its reader is slow: it gets no row, and has no seat. It keeps its blocks until others need them.
7. It ends once: by its own token in `apply`, by `cancel`, or dropped: by its deadline, or displaced in a full queue.
   Its blocks are free at once, and the runner is told to forget it through `Step.ended` of the next step. What a step
   in flight still makes of it is lost.

Order. Clients take turns by the tokens computed for them, and a priority is worth a bounded number of tokens among them
(fair_share.py). Among the requests of one client the effective priority is priority - waited_seconds / aging_seconds,
lower is earlier, where waiting is counted from arrival on and never anew. All requests age alike, so the order of two
never changes: it is that of the constant (priority * aging_seconds + arrival, id), the turn. So a request is overtaken
by those of its client that arrive within (its priority - theirs) * aging_seconds after it, however many come later, and
by other clients' for a bounded number of tokens; none starves. The rank is the order of those with a seat: age alone.

Plan. Decode rows first, then prefill chunks that have begun, then admissions; each group in order of rank. There are
never more seats than tokens in the budget, so every decode row fits in every step, and chunks share the rest of it.
Admission stops at the request whose turn it is if it does not fit: none is passed by smaller ones behind it. It leaves
one block per running request free, so that what was just admitted is not preempted as soon as those grow. Each of these
groups is of unpaused requests alone, and only they have seats.

Preemption. A running request that needs one more block preempts a paused one, else the request of the last rank among
the running, itself included. As ranks are constant, no two running requests evict each other in turn, and the first of
the running always goes on: it is never a victim, and alone it fits. No priority evicts an older request. A preempted
request had its turn and is the next, the oldest of them first. An admission preempts the paused alone: their blocks are
as good as free, so nobody waits for a slow reader. A victim with a step in flight gets no further row until its ids are
here, and is preempted then. A request that is no longer paused runs on if it still has its blocks and there is a seat;
otherwise it is preempted.

Deadlines. A request ends a margin before its deadline, with what it has made; the margin follows the measured gap
between tokens. A request without a token ends when its prompt cannot be computed in time, as far as steps were measured
(deadlines.py), and is not admitted then. The tokens computed for it are counted as tokens_in_vain.

Trials. Requests that may have killed the engine run apart (quarantine.py): while there are any, all requests but the
group on trial are preempted and wait in their order, and the group is admitted once none of them has a step in flight.

Overlap. A step may be planned before the one before it is applied; no more than these two are in flight. `schedule`
does the bookkeeping of computed tokens, `apply` that of sampled ones. A request whose next token is being sampled has
that one planned: it may compute it as PENDING, at a position that is known, so that it is at most one token ahead of
what is on the host. Lengths are known, so no step passes max_tokens; that a token ends its request is known one step
late, and that step's row of it is computed for nothing.

A block is given away at once, though a step in flight may still use it. That is safe, since steps run in the order in
which they were planned:

    in flight: old owner's last reads and writes ──►│ later: new owner writes slots, and reads only what it wrote

and nobody else reads what a step in flight writes: a block is shared only once it is registered, which `apply` does
when all its slots were written by applied steps, and rows of a request write ever higher positions.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter

import msgspec

from npuserve.npu.step import PENDING, NewRequest, Row, Step, StepResult
from npuserve.service.errors import DeadlineExceeded, ServeError
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling import invariants
from npuserve.service.scheduling.admission import Admission
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.deadlines import Deadlines, Pace
from npuserve.service.scheduling.fair_queue import FairQueue
from npuserve.service.scheduling.quarantine import Quarantine
from npuserve.service.scheduling.sequence import Progress, Sequence

_rank = attrgetter("rank")


class Scheduler:
    """Owns the sequences, and is the only one to allocate from `blocks`. Not thread-safe: the engine's loop calls it.

    max_num_seqs: requests that run at once; no more than max_num_batched_tokens take effect.
    max_num_batched_tokens: tokens that one step computes at most.
    max_queue: requests that may wait beyond the free seats, so that max_num_seqs + max_queue live at most. A preempted
        or paused request stays one of them, so preemption turns no newcomer away.
    aging_seconds: waiting that is worth one unit of priority.
    All times are seconds of the clock of Request.arrival.

    preemptions, prefix_queries, prefix_hits, tokens_in_vain: counts since the start; prefix_* are prompt tokens looked
    up and found, each request counted once; tokens_in_vain were computed for requests that their deadline ended without
    a token. quarantine: the requests on trial.
    """

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_queue: int,
        aging_seconds: float,
    ) -> None:
        self.blocks = blocks
        self.preemptions = self.prefix_queries = self.prefix_hits = self.tokens_in_vain = 0
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._aging_seconds = aging_seconds
        self._ids = itertools.count()
        self._sequences: dict[int, Sequence] = {}  # all that have not ended: the waiting and the running
        self._queue = FairQueue(self._max_num_seqs + max_queue)  # those that wait, but the paused
        self._running: list[Sequence] = []  # in order of rank
        self._paused: dict[int, Sequence] = {}  # also those no longer paused that are not yet where they belong
        self._deadlines = Deadlines()
        self._dropped: list[tuple[Sequence, ServeError | None]] = []
        self._planned: deque[tuple[float, int, int]] = deque()  # of steps in flight: (when, decode rows, prompt tokens)
        self._applied = 0.0  # when the last step was
        self._ended: list[int] = []  # not yet reported to the runner
        self.quarantine = Quarantine()
        self._pace = Pace(max_num_batched_tokens)
        self._admission = Admission(
            self._queue, self._running, self._paused, blocks, self._pace, self._max_num_seqs, max_queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included, paused ones not."""
        return len(self._queue)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def has_work(self) -> bool:
        """There is something to compute: a request has not ended and is not paused."""
        return bool(self._running or self._queue)

    @property
    def next_deadline(self) -> float | None:
        """When to call `expire` at the latest."""
        return self._deadlines.next(self._pace.margin)

    @property
    def expected_seconds(self) -> float:
        """Estimated duration of the oldest step in flight; 0 until a step was measured."""
        return self._pace.step_seconds(*self._planned[0][1:]) if self._planned else 0.0

    def arrival_of(self, sequence_id: int) -> float:
        """When a request that has not ended arrived at the front end; KeyError for any other."""
        return self._sequences[sequence_id].request.arrival

    def sequence(self, sequence_id: int) -> Sequence:
        """One that has not ended; KeyError for any other."""
        return self._sequences[sequence_id]

    def adopt(self, sequence: Sequence, origin: tuple[bytes, int], deadline: float | None) -> None:
        """Another reads what it makes from now on, until another deadline."""
        sequence.origin = origin
        sequence.request = msgspec.structs.replace(sequence.request, deadline=deadline)
        self._deadlines.set(sequence.id, self._pace.due(sequence))
        self.unpause(sequence.id)

    def add(self, request: Request, origin: tuple[bytes, int], now: float) -> Sequence:
        """Queue a request.

        Raises InvalidField if it has no prompt, nothing left to generate or could never fit the KV cache. Unless an
        engine before has accepted it, DeadlineExceeded if its first token is expected too late, and QueueFull (with an
        estimate of when a seat is free) if its client has as many as it may, or too many wait and it displaces none.
        """
        account = self._queue.account(request.client)
        displaced = self._admission.displaced_by(request, account, now)
        if displaced:
            self._drop(*displaced)
        sequence = Sequence(next(self._ids), origin, request, self._aging_seconds, account)
        self._sequences[sequence.id] = sequence
        self._queue.join(account)
        self._queue.push(sequence)
        self._deadlines.set(sequence.id, self._pace.due(sequence))
        return sequence

    def cancel(self, sequence_id: int) -> Sequence | None:
        """End a request, wherever it is, and free its blocks now; None if it has ended before."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence)
        return sequence

    def pause(self, sequence_id: int) -> None:
        """Give it no further row, its reader being slow, until `unpause`. Nothing if it has ended or is paused."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.paused:
            return
        sequence.paused = True
        self.quarantine.clear(sequence_id)
        if sequence_id not in self._paused:
            self._leave(sequence)
            self._paused[sequence_id] = sequence

    def unpause(self, sequence_id: int) -> None:
        """Let it go on. Nothing if it has ended or is not paused."""
        sequence = self._paused.get(sequence_id)
        if sequence is not None and sequence.paused:
            sequence.paused = False
            if sequence.waits:
                del self._paused[sequence_id]
                self._queue.push(sequence)

    def expire(self, now: float) -> None:
        """Drop the requests whose deadlines are due or cannot be met."""
        for sequence_id in self._deadlines.due(now, self._pace.margin):
            sequence = self._sequences[sequence_id]
            if self._pace.last_moment(sequence) > now:
                self._deadlines.set(sequence_id, self._pace.due(sequence))  # its first token needs less time now
            else:
                self._drop_late(sequence)

    def dropped(self) -> list[tuple[Sequence, ServeError | None]]:
        """Those that ended otherwise than by a token or `cancel` since the last call. None for an error: their deadline
        came, and what they have made stands."""
        found, self._dropped = self._dropped, []
        return found

    def schedule(self, now: float) -> Step:
        """Plan a step. Without rows there is nothing to do, the step says nothing at all and need not be launched.

        A row's block_ids may be the sequence's own list, which grows later: it is to be read during the launch only.
        """
        if self._paused:
            self._let_go_on(now)
        budget = self._max_num_batched_tokens
        rows: list[Row] = []
        new: list[NewRequest] = []

        running = self._part() if self.quarantine else self._running
        victim: Sequence | None = None  # is to be preempted once its steps in flight are applied; it may be paused
        for sequence in tuple(running):
            if sequence.waits or sequence is victim:  # the last of the running, as all that are behind it wait
                break
            if sequence.num_uncomputed_tokens == 1 and sequence.may_go_on:
                blocked = self._grow(sequence)
                if blocked is None:
                    rows.append(self._plan(sequence, 1))
                    budget -= 1
                else:
                    victim = blocked
        decodes = len(rows)

        for sequence in running:
            if budget and sequence is not victim and sequence.num_uncomputed_tokens > 1:
                rows.append(self._plan(sequence, budget))
                budget -= len(rows[-1].token_ids)

        admits = self.quarantine.admits if self.quarantine else None
        while budget and self._queue and len(running) == len(self._running) < self._max_num_seqs:
            following = self._queue.first(admits)
            if following is None:
                break
            sequence, known = following, following.met
            if self._pace.last_moment(sequence, self._max_num_batched_tokens - budget) < now:
                self._drop_late(sequence)
                continue
            if not self._admit(sequence, now):
                break
            if not known:
                request = sequence.request
                new.append(NewRequest(sequence.id, request.prompt_ids, request.output_ids, request.sampling))
            rows.append(self._plan(sequence, budget))
            budget -= len(rows[-1].token_ids)

        ended: list[int] = []
        if rows:
            ended, self._ended = self._ended, ended
            self._planned.append((now, decodes, self._max_num_batched_tokens - budget - decodes))
        return Step(rows, new, ended)

    def apply(self, step: Step, result: StepResult, now: float) -> list[Progress]:
        """Take in a step's result; steps are applied in the order in which they were planned.

        Only requests with news are in the answer: a chunk that sampled nothing and reported nothing is not.
        """
        progress: list[Progress] = []
        if step.rows:
            planned, decodes, prompts = self._planned.popleft()
            self._pace.step(decodes, prompts, now - max(planned, self._applied))
            self._applied = now
        for row in step.rows:
            sequence = self._sequences.get(row.request_id)
            if sequence is None:  # cancelled since
                continue
            sequence.in_flight -= 1
            sequence.end_step(row.start, result.device_seconds, now)
            self.blocks.register(sequence.blocks, sequence.token_ids, row.start + len(row.token_ids))
            reports = result.prompt_logprobs.get(row.request_id)
            if reports:
                # They are of prompt tokens [start + 1, ...); after a preemption some were reported before.
                reports = reports[max(0, sequence.num_reported_tokens - row.start - 1) :]
                sequence.num_reported_tokens += len(reports)
            if row.samples:
                token = result.token_ids[row.request_id]
                sequence.token_ids.append(token)
                sequence.num_pending_tokens -= 1
                if self.quarantine:
                    self.quarantine.made(sequence.id)
                reason = sequence.finish_reason()
                logprobs = result.logprobs.get(row.request_id)
                if reason is not None:
                    self._pace.answered(
                        sum(sequence.prefill_chunks) + sequence.decode, sequence.num_generated_tokens)
                    self._end(sequence)
                progress.append(Progress(sequence, [token], reason, [logprobs] if logprobs else None, reports))
            elif reports:
                progress.append(Progress(sequence, [], prompt_logprobs=reports))
        return progress

    def audit(self) -> Iterator[None]:
        """Check the whole state in short parts, with a yield after each, the first in constant time; see invariants.py.
        Raises IntegrityError."""
        return invariants.audit(
            self._sequences, self._queue, self._running, self._paused, self.blocks, self._deadlines, self._max_num_seqs)

    def check_integrity(self) -> None:
        """Run the whole audit. For tests."""
        deque(self.audit(), maxlen=0)

    def _part(self) -> list[Sequence]:
        """Preempt the requests that may not run beside those on trial, and return the others."""
        may, others = self.quarantine.part(self._running)
        for sequence in others:
            if not sequence.in_flight:
                self._leave(sequence)
                self._preempt(sequence)
                self._queue.push(sequence)
        return may

    def _let_go_on(self, now: float) -> None:
        """Bring those that are no longer paused, and have their blocks, to where they belong."""
        for sequence in [s for s in self._paused.values() if not s.paused]:
            if len(self._running) < self._max_num_seqs:
                if not sequence.in_flight:
                    sequence.go_on(now)
                del self._paused[sequence.id]
                insort(self._running, sequence, key=_rank)
            elif not sequence.in_flight:
                self._preempt(sequence)

    def _plan(self, sequence: Sequence, budget: int) -> Row:
        """The row of its next uncomputed tokens, at most `budget`; its blocks are there."""
        start, tokens, block_ids = sequence.num_computed_tokens, sequence.token_ids, sequence.blocks.block_ids
        end, planned = start + budget, len(tokens) + sequence.num_pending_tokens
        samples = end >= planned
        if samples:
            end = planned
            sequence.num_pending_tokens += 1
        num_blocks = -(-end // self.blocks.block_size)
        sequence.num_computed_tokens = end
        sequence.account.time += end - start
        sequence.in_flight += 1
        return Row(
            sequence.id, tokens[start:end] or [PENDING], start,
            block_ids if len(block_ids) == num_blocks else block_ids[:num_blocks], samples)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Give the one whose turn it is a seat and blocks for all its tokens; False if they are not there."""
        looks = self.blocks.prefix_cache and sequence.uses_prefix_cache
        prefix = self.blocks.find_prefix(sequence.blocks, sequence.token_ids) if looks else []
        while not self.blocks.allocate(sequence.blocks, sequence.num_tokens, prefix, spare=len(self._running)):
            idle = self._last_paused()
            if idle is None or idle.in_flight:
                return False
            self._preempt(idle)  # what it shares with the prefix stays in the cache
        known = sequence.met
        self._queue.had_turn(sequence, sequence.num_tokens - len(prefix) * self.blocks.block_size)
        sequence.admit(len(prefix) * self.blocks.block_size, now)
        if looks and not known:
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += sequence.cached_tokens
        insort(self._running, sequence, key=_rank)
        return True

    def _grow(self, sequence: Sequence) -> Sequence | None:
        """Give it a block for its next token, preempting the paused and then from the last rank up. None if it has one
        now; otherwise the request for which it must wait: that with steps in flight, or itself, preempted."""
        while not self.blocks.allocate(sequence.blocks, sequence.num_tokens):
            idle = self._last_paused()
            victim = idle or self._running[-1]
            if victim.in_flight:
                return victim
            self._preempt(victim)
            if idle is None:
                del self._running[-1]
                self._queue.push(victim)
            if victim is sequence:
                return victim
        return None

    def _last_paused(self) -> Sequence | None:
        """Of the paused that hold blocks, the first to be preempted: of the last rank, with steps in flight only if all
        have them."""
        held = [sequence for sequence in self._paused.values() if not sequence.waits]
        return max(held, key=lambda s: (not s.in_flight, s.rank), default=None)

    def _preempt(self, sequence: Sequence) -> None:
        """Take its blocks. It has no step in flight, and is to be put where those without blocks are."""
        self.blocks.free(sequence.blocks)
        sequence.preempt()
        self.preemptions += 1
        if sequence.id in self._paused and not sequence.paused:
            del self._paused[sequence.id]
            self._queue.push(sequence)

    def _drop_late(self, sequence: Sequence) -> None:
        """Its deadline has come, or comes before its first token."""
        if sequence.num_generated_tokens:
            self._drop(sequence, None)
            return
        self.tokens_in_vain += max(0, sequence.num_computed_tokens - sequence.cached_tokens)
        self._drop(sequence, DeadlineExceeded("deadline: it comes before the first token"))

    def _drop(self, sequence: Sequence, error: ServeError | None) -> None:
        self._end(sequence)
        self._dropped.append((sequence, error))

    def _leave(self, sequence: Sequence) -> None:
        """Take it from where it is."""
        if sequence.id in self._paused:
            del self._paused[sequence.id]
        elif sequence.waits:
            self._queue.remove(sequence)
        else:
            del self._running[bisect_left(self._running, sequence.rank, key=_rank)]

    def _end(self, sequence: Sequence) -> None:
        """Forget it and free its blocks; the runner hears of it if it has met it."""
        self._leave(sequence)
        self._deadlines.forget(sequence.id)
        self._queue.leave(sequence.account)
        del self._sequences[sequence.id]
        self.quarantine.clear(sequence.id)
        self.blocks.free(sequence.blocks)
        if sequence.met:
            self._ended.append(sequence.id)
