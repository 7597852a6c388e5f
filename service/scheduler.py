"""Which requests compute how many tokens in the next step.

The life of a request here:

1. `add` refuses it (queue full, or it could never fit the KV cache) or puts it into the queue, in order of rank.
2. `schedule` admits it once a seat and blocks for all its known tokens are free. A prefix that the cache holds is
   shared and counts as computed. The runner meets it through `Step.new`.
3. Every `schedule` gives it a row: its uncomputed tokens, as many as the token budget leaves. There are no phases:
   one uncomputed token is a decode row, several are a prefill chunk, and the row that reaches the last known token
   samples the next one.
4. `apply` appends what was sampled, lets other requests find its full blocks and decides whether it has ended.
5. If blocks run out it may be preempted: its blocks are freed, its tokens stay, and it is back at 2 to compute them
   again. Its hashed prefix may still be there then.
6. It ends once: by its own token in `apply`, or by `cancel`. Its blocks are free at once, and the runner is told to
   forget it through `Step.ended` of the next step. What a step in flight still makes of it is dropped.

Order. The effective priority of a request is priority - waited_seconds / aging_seconds, lower is earlier, where
waiting is counted from arrival on and never anew. All requests age alike, so the order of two never changes: it is
that of the constant rank (priority * aging_seconds + arrival, id). Hence a request is overtaken only by those that
arrive within (its priority - theirs) * aging_seconds after it, however many come later; none starves.

Plan. Decode rows first, then prefill chunks that have begun, then admissions; each group in order of rank. There are
never more seats than tokens in the budget, so every decode row fits in every step, and chunks share the rest of it.
Admission stops at the first request that does not fit: none is passed by smaller ones behind it. It leaves one block
per running request free, so that what was just admitted is not preempted as soon as those grow.

Preemption. Only a running request that needs one more block preempts, and only the request of the last rank among
the running, itself included. As ranks are constant, no two requests evict each other in turn, and the first of all
always goes on: it is never a victim, and alone it fits. A victim with a step in flight gets no further row until its
ids are here, and is preempted then.

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
from operator import attrgetter

import msgspec

from npuserve.npu.step import PENDING, NewRequest, Row, Step, StepResult, TokenLogprobs
from npuserve.service.block_manager import BlockManager, IntegrityError
from npuserve.service.errors import InvalidField, QueueFull
from npuserve.service.messages import FinishReason, Request
from npuserve.service.sequence import Sequence

_rank = attrgetter("rank")


class Progress(msgspec.Struct, frozen=True):
    """What one step made for one request. reason: set if it ended with this step.

    logprobs: one per token of token_ids, where asked for. prompt_logprobs: the reports of prompt tokens that follow
    those reported before; recomputed ones are not repeated.
    """

    sequence: Sequence
    token_ids: list[int]
    reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class Scheduler:
    """Owns the sequences, and is the only one to allocate from `blocks`. Not thread-safe: the engine's loop calls it.

    max_num_seqs: requests that run at once; no more than max_num_batched_tokens take effect.
    max_num_batched_tokens: tokens that one step computes at most.
    max_queue: requests that may wait beyond the free seats, so that max_num_seqs + max_queue live at most. A preempted
        request stays one of them, so preemption turns no newcomer away.
    aging_seconds: waiting that is worth one unit of priority.
    All times are seconds of the clock of Request.arrival.

    preemptions, prefix_queries, prefix_hits: counts since the start; the latter two are prompt tokens looked up and
    found, each request counted once.
    """

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_queue: int,
        aging_seconds: float,
    ) -> None:
        self.blocks = blocks
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_queue = max_queue
        self._aging_seconds = aging_seconds
        self._ids = itertools.count()
        self._sequences: dict[int, Sequence] = {}  # all that have not ended: the waiting and the running
        self._waiting: list[Sequence] = []  # in order of rank
        self._running: list[Sequence] = []  # in order of rank
        self._ended: list[int] = []  # not yet reported to the runner
        self._seat_seconds = 0.0  # a moving average of how long a finished request computed

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """A request has not ended."""
        return bool(self._sequences)

    def arrival_of(self, sequence_id: int) -> float:
        """When a request that has not ended arrived at the front end; KeyError for any other."""
        return self._sequences[sequence_id].request.arrival

    def add(self, request: Request, origin: tuple[bytes, int], now: float) -> Sequence:
        """Queue a request.

        Raises InvalidField if it has no prompt, nothing left to generate or could never fit the KV cache, QueueFull
        (with an estimate of when a seat is free) if too many wait.
        """
        self._check(request)
        if len(self._sequences) >= self._max_num_seqs + self._max_queue:
            waits = f"{len(self._waiting)} requests wait already, max_queue is {self._max_queue}"
            retry = min(max(self._seat_seconds / max(len(self._running), 1), 0.1), 30.0) if self._seat_seconds else None
            raise QueueFull(f"queue full: {waits}", retry)
        sequence = Sequence(next(self._ids), origin, request, self._aging_seconds)
        self._sequences[sequence.id] = sequence
        insort(self._waiting, sequence, key=_rank)
        return sequence

    def cancel(self, sequence_id: int) -> Sequence | None:
        """End a request, wherever it is, and free its blocks now; None if it has ended before."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence)
        return sequence

    def schedule(self, now: float) -> Step:
        """Plan a step. Without rows there is nothing to do, the step says nothing at all and need not be launched.

        A row's block_ids may be the sequence's own list, which grows later: it is to be read during the launch only.
        """
        budget = self._max_num_batched_tokens
        rows: list[Row] = []
        new: list[NewRequest] = []

        victim: Sequence | None = None  # is to be preempted once its steps in flight are applied
        for sequence in tuple(self._running):
            if sequence.waits or sequence is victim:  # the last of the running, as all that are behind it wait
                break
            if sequence.num_uncomputed_tokens == 1 and sequence.may_go_on:
                blocked = self._grow(sequence)
                if blocked is None:
                    rows.append(self._plan(sequence, 1))
                    budget -= 1
                else:
                    victim = blocked

        for sequence in self._running:
            if budget and sequence is not victim and sequence.num_uncomputed_tokens > 1:
                rows.append(self._plan(sequence, budget))
                budget -= len(rows[-1].token_ids)

        while budget and self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            known = sequence.met
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
        return Step(rows, new, ended)

    def apply(self, step: Step, result: StepResult, now: float) -> list[Progress]:
        """Take in a step's result; steps are applied in the order in which they were planned.

        Only requests with news are in the answer: a chunk that sampled nothing and reported nothing is not.
        """
        progress: list[Progress] = []
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
                reason = sequence.finish_reason()
                logprobs = result.logprobs.get(row.request_id)
                if reason is not None:
                    seconds = sum(sequence.prefill_chunks) + sequence.decode
                    self._seat_seconds += (seconds - self._seat_seconds) * (0.1 if self._seat_seconds else 1.0)
                    self._end(sequence)
                progress.append(Progress(sequence, [token], reason, [logprobs] if logprobs else None, reports))
            elif reports:
                progress.append(Progress(sequence, [], prompt_logprobs=reports))
        return progress

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every sequence is in one place and the blocks are exactly those of the running.
        For tests and idle moments."""
        for name, queue in (("waiting", self._waiting), ("running", self._running)):
            if any(a.rank >= b.rank for a, b in itertools.pairwise(queue)):
                raise IntegrityError(f"the {name} are not in order of rank: {[s.rank for s in queue]}")
            for sequence in queue:
                if self._sequences.get(sequence.id) is not sequence or sequence.waits != (name == "waiting"):
                    raise IntegrityError(f"sequence {sequence.id} is among the {name}, but ended or elsewhere too")
        if len(self._waiting) + len(self._running) != len(self._sequences):
            where = f"{len(self._waiting)} wait and {len(self._running)} run"
            raise IntegrityError(f"{len(self._sequences)} sequences, but {where}")
        if len(self._running) > self._max_num_seqs:
            raise IntegrityError(f"{len(self._running)} sequences run, {self._max_num_seqs} may")
        for sequence in self._waiting:
            if sequence.block_ids or sequence.num_computed_tokens or sequence.in_flight:
                raise IntegrityError(f"sequence {sequence.id} waits, but holds blocks or has rows in flight")
        for sequence in self._running:
            held = len(sequence.block_ids) * self.blocks.block_size
            if not sequence.num_computed_tokens <= min(held, sequence.num_tokens):
                computed = f"{sequence.num_computed_tokens} tokens computed of {sequence.num_tokens}"
                raise IntegrityError(f"sequence {sequence.id}: {computed}, with blocks for {held}")
        self.blocks.check_integrity(sequence.blocks for sequence in self._running)

    def _check(self, request: Request) -> None:
        if not request.prompt_ids:
            raise InvalidField("prompt", "must have at least 1 token")
        if len(request.output_ids) >= request.max_tokens:
            raise InvalidField(
                "stopping.max_tokens", f"must be more than the {len(request.output_ids)} tokens generated before, "
                f"got {request.max_tokens}")
        # The last token is sampled, never computed, so it needs no room.
        prompt, room = len(request.prompt_ids), self.blocks.capacity + 1
        if prompt >= room:
            raise InvalidField("prompt", f"must be at most {room - 1} tokens, what the KV cache holds, got {prompt}")
        if prompt + request.max_tokens > room:
            raise InvalidField(
                "stopping.max_tokens", f"must be at most {room - prompt} after a prompt of {prompt} tokens, since the "
                f"KV cache holds {room - 1}; got {request.max_tokens}")

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
        sequence.in_flight += 1
        return Row(
            sequence.id, tokens[start:end] or [PENDING], start,
            block_ids if len(block_ids) == num_blocks else block_ids[:num_blocks], samples)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Give the first of the queue a seat and blocks for all its tokens; False if they are not there."""
        looks = self.blocks.prefix_cache and sequence.uses_prefix_cache
        prefix = self.blocks.find_prefix(sequence.blocks, sequence.token_ids) if looks else []
        if not self.blocks.allocate(sequence.blocks, sequence.num_tokens, prefix, spare=len(self._running)):
            return False
        known = sequence.met
        sequence.admit(len(prefix) * self.blocks.block_size, now)
        if looks and not known:
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += sequence.cached_tokens
        del self._waiting[0]
        insort(self._running, sequence, key=_rank)
        return True

    def _grow(self, sequence: Sequence) -> Sequence | None:
        """Give it a block for its next token, preempting from the last rank up. None if it has one now; otherwise the
        request for which it must wait: that with steps in flight, or itself, preempted."""
        while not self.blocks.allocate(sequence.blocks, sequence.num_tokens):
            victim = self._running[-1]
            if victim.in_flight:
                return victim
            del self._running[-1]
            self.blocks.free(victim.blocks)
            victim.preempt()
            insort(self._waiting, victim, key=_rank)
            self.preemptions += 1
            if victim is sequence:
                return victim
        return None

    def _end(self, sequence: Sequence) -> None:
        """Forget it and free its blocks; the runner hears of it if it has met it."""
        queue = self._waiting if sequence.waits else self._running
        del queue[bisect_left(queue, sequence.rank, key=_rank)]
        del self._sequences[sequence.id]
        self.blocks.free(sequence.blocks)
        if sequence.met:
            self._ended.append(sequence.id)
