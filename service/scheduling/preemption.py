"""Which requests are preempted: for the blocks of running requests, and for a waiting request of another client.

Shortage of blocks. If the next rows of the running requests need more blocks than are available, a paused request is
preempted, else the youngest request of the client that holds most blocks, of the clients that run several requests.
If each client runs one, the youngest request is preempted. So each client keeps one as long as possible, ages decide
between the requests of one client, and no priority takes the last blocks of an older request.

Fairness. The queue's next request, of client C, may take the place of running requests of other clients if it lacks a
slot (max_num_seqs run) or blocks. A running request of client M yields if

1. it has generated MIN_RUN_TOKENS since it was admitted; or it computes its prompt, has not yielded in it before, has
   more tokens left to compute than the waiting request, and that one is a newcomer: C runs nothing, and the request has
   no token yet;
2. M keeps at least as much of what is lacking, slots or blocks, as C will have, so that no swap is ever reversed; or C
   runs nothing;
3. M is ahead of C by MIN_LEAD_TOKENS for each of its running requests, by virtual time; no negative priority counts.
   Requests that end earlier give their slots to C without a preemption. M need not be ahead of a newcomer if it holds
   what that one needs, so that its first token does not wait. If that one lacks blocks, the tokens of its prompt beyond
   MIN_LEAD_TOKENS are the lead, since long prompts that yield are expensive;
4. the pace allows it: the seconds in which yielded requests compute their tokens again are at most 1 /
   RUN_PER_RECOMPUTE of the time. After each readmission nobody yields for RUN_PER_RECOMPUTE times the seconds of its
   recomputation; times of several readmissions add up to at most MAX_REST_SECONDS.

The client with most of what is lacking yields first, and of its requests the one with the fewest computed tokens. All
requests that must yield do so in one step, or none does. If C runs nothing and the others run one request each, rule 3
makes the clients take turns of MIN_LEAD_TOKENS.

Every request ends. An admitted request has blocks for all its tokens, so it needs a further block only after it has got
a token. A request yields only after a token, or once in a prompt. Tokens are never lost. Therefore there are finitely
many preemptions between two tokens, of whatever requests. After the last of them the running requests compute their
tokens. If none runs, the next request is admitted, since each fits alone. So tokens are generated as long as requests
are live, and their number is bounded by max_tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Ordered
from typing import NamedTuple

from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.fair_queue import PRIORITY_TOKENS, start
from npuserve.service.scheduling.latency_estimator import LatencyEstimator
from npuserve.service.scheduling.sequence import Account, Sequence

MIN_RUN_TOKENS = 8
"""Minimum number of tokens that a request generates between its admission and its yield."""
MIN_LEAD_TOKENS = 256
"""Minimum number of tokens by which a client is ahead, for each of its running requests, if one of them yields to a
request that has tokens or a running peer."""
RUN_PER_RECOMPUTE = 32
"""Minimum ratio of the time without yields to the time of the recomputation before it."""
MAX_REST_SECONDS = 10.0
"""Maximum time without yields after several recomputations. A single longer one has its own."""


class Share(NamedTuple):
    """What running requests of other clients are expected to yield to a client.

    slots, blocks: numbers of running requests, and of blocks.
    seconds: time until the first of them yields.
    """

    slots: int
    blocks: int
    seconds: float


class _Lack(NamedTuple):
    """What the queue's next request lacks for its admission.

    slots: 1 if max_num_seqs requests run, else 0.
    blocks: number of blocks that must be released.
    prefix: cached blocks that it will share.
    """

    slots: int
    blocks: int
    prefix: Ordered[int] = ()


class Preemption:
    """Choice of the requests to preempt. Raises virtual times of clients, and changes nothing else.

    running: the running requests, the oldest first.
    paused: requests that are paused or resumed. Both are owned by the scheduler.
    """

    def __init__(
        self, running: Ordered[Sequence], paused: Mapping[int, Sequence], blocks: BlockManager,
        estimator: LatencyEstimator, max_num_seqs: int,
    ):
        self._running = running
        self._paused = paused
        self._blocks = blocks
        self._estimator = estimator
        self._max_num_seqs = max_num_seqs
        self._rest_until = 0.0

    def paused_victim(self, excluded: Collection[Sequence] = ()) -> Sequence | None:
        """Return the paused request to preempt first, the youngest without steps in flight if any; None if none."""
        holders = [sequence for sequence in self._paused.values()
                   if sequence.holds_blocks and sequence not in excluded]
        return max(holders, key=lambda s: (not s.num_steps_in_flight, s.age_key), default=None)

    def shortage_victim(self, candidates: Iterable[Sequence]) -> Sequence:
        """Return the running request to preempt next for want of blocks.

        candidates: running requests, at least one.
        """
        running: Counter[Account] = Counter()
        held: Counter[Account] = Counter()
        candidates = list(candidates)
        for sequence in candidates:
            running[sequence.account] += 1
            held[sequence.account] += len(sequence.block_ids)

        def key(sequence: Sequence) -> tuple[int, tuple[float, int]]:
            return held[sequence.account] if running[sequence.account] > 1 else 0, sequence.age_key

        return max(candidates, key=key)

    def yielding(self, head: Sequence, now: float) -> list[Sequence]:
        """Return the requests that must yield so that the queue's next request can be admitted. [] if it lacks nothing,
        and if they may not yield now."""
        client = head.account
        if client.running == len(self._running) or now < self._rest_until:
            return []
        lack = self._lack(head)
        if not lack.slots and lack.blocks <= 0:
            return []
        head_start = start(head)
        candidates: defaultdict[Account, list[Sequence]] = defaultdict(list)
        held: Counter[Account] = Counter()
        for sequence in self._running:
            account = sequence.account
            held[account] += len(sequence.block_ids)
            if account is not client and _has_run_enough(sequence, head):
                candidates[account].append(sequence)
        for account, sequences in candidates.items():
            if not account.waiting:  # it has no claim on the tokens that it did not ask for
                account.virtual_time = max(account.virtual_time, head_start)
            sequences.sort(key=_yields_last_key)
        return self._choose(head, lack, candidates, held)

    def _choose(
        self, head: Sequence, lack: _Lack, candidates: Mapping[Account, list[Sequence]], held: Counter[Account]
    ) -> list[Sequence]:
        """Return the requests that must yield for what the head lacks; [] if the rules do not allow all of them.

        candidates: requests that may yield, by client, the first to yield last. Changed.
        held: blocks of the running requests, by client. Changed.
        """
        client = head.account
        without_priority = client.virtual_time + max(0, head.request.priority) * PRIORITY_TOKENS
        slots = Counter({account: account.running for account in (client, *candidates)})
        held_before = Counter(held)
        blocks_needed = self._blocks.missing(head.blocks, head.num_tokens)
        newcomer_lead = max(0, head.num_missing_tokens - MIN_LEAD_TOKENS) if lack.blocks else 0
        chosen: list[Sequence] = []
        while True:
            lacks_slot = lack.slots > len(chosen)
            if not lacks_slot and self._suffices(lack, chosen):
                return self._without_superfluous(lack, chosen)
            usage, need = (slots, 1) if lacks_slot else (held, blocks_needed)
            allowed: list[Account] = []
            for account, sequences in candidates.items():
                if not sequences:
                    continue
                amount = 1 if lacks_slot else len(sequences[-1].block_ids)
                is_balanced = usage[account] - amount >= usage[client] + need
                may_begin = _is_newcomer(head) and (lacks_slot or held_before[account] >= need)
                lead = account.virtual_time - without_priority
                if (is_balanced or not client.running) and lead >= (
                        newcomer_lead if may_begin else MIN_LEAD_TOKENS * account.running):
                    allowed.append(account)
            if not allowed:
                return []
            account = max(allowed, key=lambda account: (
                not candidates[account][-1].num_steps_in_flight, usage[account], account.virtual_time))
            sequence = candidates[account].pop()
            chosen.append(sequence)
            slots[account] -= 1
            held[account] -= len(sequence.block_ids)

    def readmitted(self, sequence: Sequence, num_recomputed: int, now: float) -> None:
        """Keep the pace if a request is admitted again after it yielded.

        num_recomputed: its tokens that are computed again.
        """
        if sequence.num_tokens_at_yield == len(sequence.token_ids):
            rest = RUN_PER_RECOMPUTE * self._estimator.chunk_seconds(num_recomputed)
            total = min(max(self._rest_until, now) + rest, now + MAX_REST_SECONDS)
            self._rest_until = max(now + rest, total)

    def share(self, account: Account, now: float) -> Share:
        """Return what others are expected to yield to a client: what they have above an equal share.

        A client that runs nothing gets at least the place of one request.
        """
        slots: Counter[Account] = Counter()
        held: Counter[Account] = Counter()
        for sequence in self._running:
            if sequence.account is not account:
                slots[sequence.account] += 1
                held[sequence.account] += len(sequence.block_ids)
        if not slots:
            return Share(0, 0, 0.0)
        clients = len(slots) + 1
        equal_slots, equal_blocks = self._max_num_seqs // clients, self._blocks.num_blocks // clients
        spare_slots = sum(max(0, count - equal_slots) for count in slots.values())
        spare_blocks = sum(max(0, count - equal_blocks) for count in held.values())
        if not account.running:
            spare_slots = max(spare_slots, 1)
            spare_blocks = max(spare_blocks, *held.values())
        return Share(spare_slots, spare_blocks, max(0.0, self._rest_until - now))

    def _lack(self, head: Sequence) -> _Lack:
        """Return what the queue's next request lacks, after the running ones have grown by the next step. The blocks of
        paused requests are available to it."""
        blocks, running = self._blocks, len(self._running)
        slots = int(running >= self._max_num_seqs)
        if blocks.shortage(head.blocks, head.num_tokens, (), spare=2 * running) <= 0:
            return _Lack(slots, 0)
        prefix = blocks.find_prefix(head.blocks, head.token_ids) if head.uses_prefix_cache else []
        growth = sum(blocks.missing(s.blocks, s.num_tokens) for s in self._running if s.needs_row)
        paused = blocks.released((s.blocks for s in self._paused.values()), prefix)
        shortage = blocks.shortage(head.blocks, head.num_tokens, prefix, spare=running + growth)
        return _Lack(slots, max(0, shortage - paused), prefix)

    def _suffices(self, lack: _Lack, chosen: Ordered[Sequence]) -> bool:
        """Return whether the head can be admitted after these requests have yielded."""
        if len(chosen) < lack.slots:
            return False
        released = self._blocks.released((s.blocks for s in chosen), lack.prefix)
        return lack.blocks <= released + len(chosen)  # each running request needs a spare block less

    def _without_superfluous(self, lack: _Lack, chosen: list[Sequence]) -> list[Sequence]:
        for sequence in tuple(chosen):
            others = [other for other in chosen if other is not sequence]
            if self._suffices(lack, others):
                chosen = others
        return chosen


def _is_newcomer(head: Sequence) -> bool:
    """Return whether the queue's next request has no token yet, and its client runs nothing."""
    return not head.account.running and not head.num_generated_tokens


def _has_run_enough(sequence: Sequence, head: Sequence) -> bool:
    """Return whether a running request may yield to the queue's next request by rule 1."""
    if sequence.num_tokens_of_run >= MIN_RUN_TOKENS:
        return True
    return (
        sequence.is_prefilling and sequence.num_tokens_at_yield != len(sequence.token_ids)
        and sequence.num_uncomputed_tokens > head.num_missing_tokens and _is_newcomer(head))


def _yields_last_key(sequence: Sequence) -> tuple[bool, bool, int, tuple[float, int]]:
    """Return the sort key in the order in which a client's requests yield, the first to yield last."""
    is_in_flight = sequence.num_steps_in_flight > 0
    return not is_in_flight, not sequence.is_prefilling, -sequence.num_computed_tokens, sequence.age_key
