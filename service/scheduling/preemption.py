"""Which requests are preempted: for the blocks of running requests, and for a waiting request of another client.

Shortage of blocks. If the next rows of the running requests need more blocks than are available, a paused request is
preempted, else the youngest request of the client that holds most blocks, of the clients that run several requests.
If each client runs one, the youngest request is preempted. So each client keeps one as long as possible, ages decide
between the requests of one client, and no priority takes the last blocks of an older request.

Fairness. If the head, a waiting request of client C, lacks a slot (max_num_seqs run) or blocks, running requests of
other clients may yield to it. The head is the first small newcomer, see fair_queue.py, else the queue's next request. A
request of client M yields if

1. it has generated MIN_RUN_TOKENS since it was admitted; or it computes its prompt, has not yielded in it before, has
   more tokens left to compute than the head, and the head is a newcomer;
2. C runs nothing; or M keeps at least as much of what is lacking, slots or blocks, as C will have, so that no swap is
   ever reversed;
3. M is ahead of C in virtual time, without negative priorities, by LEAD_PER_RECOMPUTE tokens for each token that will
   be computed again. If the head is no newcomer, by MIN_LEAD_TOKENS more for each running request of M. If it is one,
   the first SMALL_TOKENS that will be computed again are free.

The client with most of what is lacking yields first, and of its requests the one with the fewest computed tokens. All
requests that must yield do so in one step, or none does. Each takes the next free place, see fair_queue.py. Therefore
it pauses until the newcomer's request ends, or another one before. Blocks of a preempted request stay in the prefix
cache until others need them. Therefore nothing is computed again if the head lacks a slot only, and little if it is a
small newcomer: rule 3 counts none. Otherwise, and without the prefix cache, it counts all computed tokens. That bounds
the cost: clients that displace each other's long requests lose at most one in LEAD_PER_RECOMPUTE tokens.

Every request ends. An admitted request has blocks for all its tokens, so it needs a further block only after it has got
a token. A request yields only after a token, or once in a prompt. Tokens are never lost. Therefore there are
finitely many preemptions between two tokens, of whatever requests. After the last of them the running requests compute
their tokens. If none runs, the next request is admitted, since each fits alone. So tokens are generated as long as
requests are live, and their number is bounded by max_tokens. Loads from host memory use blocks too, and are not
preempted. But each ends by itself, and a request begins at most MAX_LOADS of them before it is admitted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Ordered
from typing import NamedTuple

from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.fair_queue import PRIORITY_TOKENS, SMALL_TOKENS, is_newcomer, is_small_newcomer, start
from npuserve.service.scheduling.sequence import Account, Sequence

MIN_RUN_TOKENS = 8
"""Minimum number of tokens that a request generates between its admission and its yield."""
MIN_LEAD_TOKENS = 256
"""Minimum number of tokens by which a client is ahead, for each of its running requests, if one of them yields to a
request that is no newcomer. More is needed for tokens that are computed again."""
LEAD_PER_RECOMPUTE = 8
"""Minimum number of tokens by which a client is ahead, for each token that is computed again if its request yields."""


class Share(NamedTuple):
    """Numbers of running requests and of blocks that other clients are expected to yield to a client."""

    slots: int
    blocks: int


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
    paused: requests that are paused or unpaused. Both are the scheduler's own collections, which change between calls.
    """

    def __init__(
        self, running: Ordered[Sequence], paused: Mapping[int, Sequence], blocks: BlockManager, max_num_seqs: int,
    ):
        self._running = running
        self._paused = paused
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs

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

    def yielding(self, head: Sequence, returning: Sequence | None) -> list[Sequence]:
        """Return the requests that must yield so that a waiting request can be admitted. [] if it lacks nothing, and if
        they may not yield now.

        returning: the preempted request that takes the next free place; None if none. The blocks that it needs are left
            to it, unless the head is a small newcomer.
        """
        client = head.account
        if client.running == len(self._running):
            return []
        lack = self._lack(head, None if is_small_newcomer(head) or returning is head else returning)
        if not lack.slots and lack.blocks <= 0:
            return []
        ahead = self._accounts_ahead(head)
        if not ahead:
            return []
        candidates: defaultdict[Account, list[Sequence]] = defaultdict(list)
        held: Counter[Account] = Counter()
        for sequence in self._running:
            account = sequence.account
            held[account] += len(sequence.block_ids)
            if account in ahead and _has_run_enough(sequence, head):
                candidates[account].append(sequence)
        for sequences in candidates.values():
            sequences.sort(key=_yields_last_key)
        return self._choose(head, lack, candidates, held)

    def _accounts_ahead(self, head: Sequence) -> set[Account]:
        """Return the other clients that are far enough ahead of the head's, if nothing is computed again."""
        head_start = start(head)
        accounts = {sequence.account for sequence in self._running}
        accounts.discard(head.account)
        for account in accounts:
            if not account.is_waiting:  # it has no claim on the tokens that it did not ask for
                account.virtual_time = max(account.virtual_time, head_start)
        return {account for account in accounts if _lead(account, head) >= _min_lead(account, head, 0)}

    def _choose(
        self, head: Sequence, lack: _Lack, candidates: Mapping[Account, list[Sequence]], held: Counter[Account]
    ) -> list[Sequence]:
        """Return the requests that must yield for what the head lacks; [] if the rules do not allow all of them.

        candidates: requests that may yield, by client, the first to yield last. Changed.
        held: blocks of the running requests, by client. Changed.
        """
        client = head.account
        slots = Counter({account: account.running for account in (client, *candidates)})
        blocks_needed = self._blocks.missing(head.blocks, head.num_tokens)
        takes_few_blocks = lack.blocks <= 0 or is_small_newcomer(head)
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
                if (is_balanced or not client.running) and _lead(account, head) >= _min_lead(
                        account, head, self._num_recomputed(sequences[-1], takes_few_blocks)):
                    allowed.append(account)
            if not allowed:
                return []
            account = max(allowed, key=lambda account: (
                not candidates[account][-1].num_steps_in_flight, usage[account], account.virtual_time))
            sequence = candidates[account].pop()
            chosen.append(sequence)
            slots[account] -= 1
            held[account] -= len(sequence.block_ids)

    def _num_recomputed(self, sequence: Sequence, takes_few_blocks: bool) -> int:
        """Return the tokens of a running request that count as computed again if it yields to the head.

        takes_few_blocks: the head needs no blocks, or few.
        """
        is_cached = takes_few_blocks and self._blocks.is_shared(sequence.blocks) and sequence.uses_prefix_cache
        return 0 if is_cached else sequence.num_computed_tokens

    def share(self, account: Account) -> Share:
        """Return what others are expected to yield to a client: what they have above an equal share.

        A client that runs nothing gets at least the place of a small request.
        """
        slots: Counter[Account] = Counter()
        held: Counter[Account] = Counter()
        for sequence in self._running:
            if sequence.account is not account:
                slots[sequence.account] += 1
                held[sequence.account] += len(sequence.block_ids)
        if not slots:
            return Share(0, 0)
        clients = len(slots) + 1
        equal_slots = self._max_num_seqs // clients
        equal_blocks = self._blocks.num_blocks // clients
        spare_slots = sum(max(0, count - equal_slots) for count in slots.values())
        spare_blocks = sum(max(0, count - equal_blocks) for count in held.values())
        if not account.running:
            spare_slots = max(spare_slots, 1)
            spare_blocks = max(spare_blocks, min(SMALL_TOKENS // self._blocks.block_size, *held.values()))
        return Share(spare_slots, spare_blocks)

    def _lack(self, head: Sequence, returning: Sequence | None) -> _Lack:
        """Return what a waiting request lacks, after the running ones have grown by the next step. The blocks of paused
        requests are available to it, but not those that the returning request needs."""
        blocks = self._blocks
        running = len(self._running)
        slots = int(running >= self._max_num_seqs)
        claimed = blocks.missing(returning.blocks, returning.num_tokens) if returning else 0
        max_growth = running  # a request's next row begins at most one block, except after forced tokens
        # Cheap test: nothing is lacking even if no prefix is cached and no paused request gives its blocks.
        if blocks.shortage(head.blocks, head.num_tokens, (), spare=running + max_growth + claimed) <= 0:
            return _Lack(slots, 0)
        prefix = blocks.find_prefix(head.blocks, head.token_ids) if head.uses_prefix_cache else []
        growth = sum(blocks.missing(s.blocks, s.num_tokens) for s in self._running if s.needs_row)
        paused = blocks.released((s.blocks for s in self._paused.values()), prefix)
        shortage = blocks.shortage(head.blocks, head.num_tokens, prefix, spare=running + growth + claimed)
        return _Lack(slots, max(0, shortage - paused), prefix)

    def _suffices(self, lack: _Lack, chosen: Ordered[Sequence]) -> bool:
        """Return whether the head can be admitted after these requests have yielded."""
        if len(chosen) < lack.slots:
            return False
        missing = lack.blocks - len(chosen)  # each running request needs a spare block less
        if missing > sum(len(s.block_ids) for s in chosen):
            return False
        return missing <= 0 or missing <= self._blocks.released((s.blocks for s in chosen), lack.prefix)

    def _without_superfluous(self, lack: _Lack, chosen: list[Sequence]) -> list[Sequence]:
        for sequence in tuple(chosen):
            others = [other for other in chosen if other is not sequence]
            if self._suffices(lack, others):
                chosen = others
        return chosen


def _has_run_enough(sequence: Sequence, head: Sequence) -> bool:
    """Return whether a running request may yield by rule 1."""
    if sequence.num_tokens_of_run >= MIN_RUN_TOKENS:
        return True
    is_first_in_prompt = sequence.is_prefilling and sequence.num_tokens_at_yield != len(sequence.token_ids)
    return is_first_in_prompt and is_newcomer(head) and sequence.num_uncomputed_tokens > head.num_missing_tokens


def _lead(account: Account, head: Sequence) -> float:
    """Return the tokens by which a client is ahead of the head's, without negative priorities."""
    return account.virtual_time - head.account.virtual_time - max(0, head.request.priority) * PRIORITY_TOKENS


def _min_lead(account: Account, head: Sequence, num_recomputed: int) -> int:
    """Return the lead that rule 3 demands of a client if `num_recomputed` tokens of its request are computed again."""
    if is_newcomer(head):
        return LEAD_PER_RECOMPUTE * max(0, num_recomputed - SMALL_TOKENS)
    return LEAD_PER_RECOMPUTE * num_recomputed + MIN_LEAD_TOKENS * account.running


def _yields_last_key(sequence: Sequence) -> tuple[bool, bool, int, tuple[float, int]]:
    """Return the sort key in the order in which a client's requests yield, the first to yield last."""
    is_in_flight = sequence.num_steps_in_flight > 0
    return not is_in_flight, not sequence.is_prefilling, -sequence.num_computed_tokens, sequence.age_key
