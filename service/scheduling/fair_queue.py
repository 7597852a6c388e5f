"""The waiting requests: which client is next, and which of its requests.

Each client has a queue of its own. Requests that ran before come first, in order of age. The others follow in order of
effective priority: priority - waited_seconds / aging_seconds, lower is earlier. Waiting is counted from the arrival and
never restarts. All requests age alike, so the order of two requests is constant: they are sorted by queue_key,
(priority * aging_seconds + arrival, id). A request is overtaken only by requests of its client that arrive within
(its priority - theirs) * aging_seconds after it.

    client a   ▢▢▢▢▢▢    The next client is the one with the lowest virtual time, after the priority of its first
    client b   ▢▢        request is added. Its first request is the next request.
    client c   ▢

Fairness is start-time fair queueing (Goyal, Vin and Cheng 1996). Since the length of an answer is unknown, tokens are
counted as they are computed, as in the virtual token counter (Sheng et al. 2024). The virtual time of a client is the
number of tokens computed for it. When a client without waiting requests adds one, its virtual time is raised to the
lowest start of the clients that wait: a client earns no credit while it asks for nothing. If no request waits, it is
raised to the highest virtual time of all clients: nobody had to wait, so all begin alike from here. Two clients that
both have waiting requests therefore get equal numbers of tokens, except for requests that run already. Those give way
as preemption.py describes.

Priority is that of borrowed virtual time (Duda and Cheriton 1999). A request of priority p is served as if the virtual
time of its client were p * PRIORITY_TOKENS later. A negative priority borrows tokens and does not add any: the start of
a client includes the borrowed tokens. A client that has borrowed all it can gets its equal share and no more, and a
client that arrives meanwhile is not behind it. A positive priority lets other clients go first by as many tokens.
While two clients wait, neither gets more than the other by more than (difference of their priorities) * PRIORITY_TOKENS
and one request. Within the queue of one client only priorities and age decide.

Two kinds of requests may pass the next one:

- A preempted request takes the next free place, the oldest first. No other request gets its place or the blocks that it
  needs, so that its prefix stays in the cache and its pause is short.
- A small newcomer has at most SMALL_TOKENS to compute before its first token, and its client runs nothing. It does not
  wait for a longer request that lacks blocks. Its client may be ahead of the next one by MAX_PASSING_TOKENS.

No client starves. The virtual time of a waiting client is constant, except for its running requests, which end. Every
request that is served first belongs to a client of no later virtual time and increases that time. It also advances the
virtual time of the queue, the minimum start of new clients, by a share of its tokens, 1 / max_requests. Therefore the
start times of new clients, however many arrive, soon exceed the waiting client's, also by MAX_PASSING_TOKENS. Preempted
requests pass it only until they end.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, ge

from npuserve.service.scheduling.sequence import Account, Sequence

MAX_IDLE_ACCOUNTS = 1024
"""Maximum number of clients without requests whose virtual time is kept."""
SMALL_TOKENS = 256
"""Maximum number of tokens that a small newcomer computes before its first token."""
MAX_PASSING_TOKENS = 1024
"""Maximum number of tokens by which the client of a small newcomer is ahead of the next one, if it passes that."""
PRIORITY_TOKENS = 16
"""Tokens that one unit of priority is worth: a request of 100 tokens is 6 units."""


class FairQueue:
    """Owner of the queues and the accounts. The scheduler adds planned tokens to `Account.virtual_time`.

    A client starts at its virtual time plus the tokens that the priority of its first request is worth.

    max_requests: maximum number of live requests, to within a few.
    """

    def __init__(self, max_requests: int):
        self._max_requests = max_requests
        self._queues: dict[Account, list[Sequence]] = {}  # none is empty
        self._accounts: dict[str, Account] = {}
        self._virtual_time = 0.0
        self._length = 0
        self._live = 0  # requests that have not ended

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def account(self, client: str) -> Account:
        """Return the account of a client. A new one is kept by `add_live`."""
        return self._accounts.get(client) or Account(client)

    def add_live(self, account: Account) -> None:
        """Count one more live request of the client."""
        self._accounts[account.client] = account
        account.live += 1
        self._live += 1

    def remove_live(self, account: Account) -> None:
        """Count one live request less. Forget the accounts if none is left, and idle ones beyond a limit."""
        account.live -= 1
        self._live -= 1
        if account.live:
            return
        if not self._live:
            self._accounts.clear()
        elif len(self._accounts) > self._max_requests + MAX_IDLE_ACCOUNTS:
            idle = sorted((a for a in self._accounts.values() if not a.live), key=attrgetter("virtual_time"))
            for account in idle[: len(idle) // 2 + 1]:
                del self._accounts[account.client]

    @property
    def returning(self) -> Sequence | None:
        """The oldest preempted request, which takes the next free place whatever the virtual times; None if none."""
        return min((queue[0] for queue in self._queues.values() if queue[0].was_admitted),
                   key=attrgetter("age_key"), default=None)

    def push(self, sequence: Sequence) -> None:
        """Add a request to the queue of its client."""
        account = sequence.account
        account.virtual_time = self._start_of_new(account)
        if not self._queues:
            self._virtual_time = max(self._virtual_time, account.virtual_time)
            self._accounts = {client: other for client, other in self._accounts.items() if other.live}
        self._insert(sequence)

    def begin_load_wait(self, sequence: Sequence) -> None:
        """Remove a request that waits for blocks from host memory. Its client counts as waiting."""
        self.remove(sequence)
        sequence.account.loading += 1

    def end_load_wait(self, sequence: Sequence) -> None:
        """End the count of `begin_load_wait`."""
        sequence.account.loading -= 1

    def push_loaded(self, sequence: Sequence) -> None:
        """Return a request to its place after its load. The virtual time of its client stays."""
        self.end_load_wait(sequence)
        self._insert(sequence)

    def _insert(self, sequence: Sequence) -> None:
        account = sequence.account
        account.waiting += 1
        self._length += 1
        insort(self._queues.setdefault(account, []), sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request from its queue. `has_run` must be the same as at its `push`."""
        account = sequence.account
        account.waiting -= 1
        self._length -= 1
        queue = self._queues[account]
        del queue[bisect_left(queue, _key(sequence), key=_key)]
        if not queue:
            del self._queues[account]

    def next(self, may_run: Callable[[int], bool] | None = None) -> Sequence | None:
        """Return the next request; None if there is none.

        may_run: considers only the sequences whose ids it accepts; None for all.
        """
        queues = self._queues if may_run is None else self._filtered(may_run)
        if len(queues) < 2:
            return next((queue[0] for queue in queues.values()), None)
        return min((queue[0] for queue in queues.values()), key=lambda first: (start(first), first.queue_key))

    def newcomer(self) -> Sequence | None:
        """Return the first small newcomer, if it may pass the next request; else None."""
        small = [queue[0] for queue in self._queues.values() if is_small_newcomer(queue[0])]
        if not small:
            return None
        first = min(small, key=lambda sequence: (start(sequence), sequence.queue_key))
        limit = min(start(queue[0]) for queue in self._queues.values()) + MAX_PASSING_TOKENS
        return first if start(first) <= limit else None

    def admit(self, sequence: Sequence, tokens: int) -> None:
        """Remove a request that is admitted, and advance the virtual time. Call it before Sequence.admit.

        tokens: the request's uncomputed tokens.
        """
        virtual_start = _start_without_delay(sequence.account, sequence)
        if sequence.was_admitted or is_small_newcomer(sequence):  # it may have passed others
            virtual_start = min(virtual_start, self._level())
        self._virtual_time = max(self._virtual_time, virtual_start) + tokens / self._max_requests
        self.remove(sequence)

    def displaced_by(self, account: Account, others: Iterable[Sequence]) -> Sequence | None:
        """Return the request that must leave a full queue for one more request of this client.

        It is the last in the queue without tokens, of the client with the most live requests. None unless that client
        still has at least as many requests as this one afterwards.

        others: waiting requests outside the queue.
        """
        candidates: dict[Account, Sequence] = {}
        for sequence in itertools.chain(self, others):
            if not (sequence.was_admitted or sequence.request.output_ids):
                last = candidates.setdefault(sequence.account, sequence)
                if last.queue_key < sequence.queue_key:
                    candidates[sequence.account] = sequence
        if not candidates:
            return None
        largest = max(candidates, key=lambda owner: (owner.live, owner.waiting))
        return candidates[largest] if largest.live > account.live + 1 else None

    def ahead(self, account: Account, priority: int, answer_tokens: float) -> tuple[float, int]:
        """Estimate how many requests, and how many of their tokens, come before a new request.

        account, priority: account and priority of the new request.
        answer_tokens: expected tokens of an answer.
        """
        earlier = [s for s in self._queues.get(account, []) if s.has_run or s.request.priority <= priority]
        time = self._start_of_new(account)
        time += sum(s.num_missing_tokens + answer_tokens for s in earlier) + priority * PRIORITY_TOKENS
        requests = float(len(earlier))
        tokens = float(sum(s.num_missing_tokens for s in earlier))
        for owner, queue in self._queues.items():
            if owner is not account:
                known = sum(s.num_missing_tokens for s in queue)
                share = min(1.0, max(0.0, (time - start(queue[0])) / (known + answer_tokens * len(queue))))
                requests += share * len(queue)
                tokens += share * known
        return requests, int(tokens)

    def num_missing_tokens(self) -> int:
        """Return the tokens that the waiting requests lack before their next token."""
        return sum(s.num_missing_tokens for queue in self._queues.values() for s in queue)

    def faults(self) -> Iterator[str]:
        """Yield inconsistencies, for integrity checks, in one pass over the queues."""
        if (live := sum(a.live for a in self._accounts.values())) != self._live:
            yield f"the clients have {live} live requests, {self._live} were counted"
        waiting: Counter[Account] = Counter()
        for owner, queue in self._queues.items():
            keys = [_key(s) for s in queue]
            if not queue or any(map(ge, keys, keys[1:])):
                yield f"a client's queue is empty or not in order: {keys}"
            if any(s.account is not owner for s in queue):
                yield f"a sequence is in the queue of another client: {[s.id for s in queue]}"
            waiting.update(s.account for s in queue)
        if waiting.total() != self._length:
            yield f"{waiting.total()} sequences are in queues, {self._length} were counted"
        for account in self._accounts.values():
            queued = waiting.get(account, 0)
            if account.waiting != queued or account.live < queued:
                yield f"a client has {account.live} live and {account.waiting} waiting, but {queued} are in its queue"
        if unknown := [a.client for a in waiting if self._accounts.get(a.client) is not a]:
            yield f"the clients {unknown} have no accounts"

    def _start_of_new(self, account: Account) -> float:
        """Return the virtual time of a client after it has added a request."""
        if account.is_waiting:
            return account.virtual_time
        if self._queues:
            level = self._level()
        else:
            level = max((other.virtual_time for other in self._accounts.values()), default=0.0)
        return max(account.virtual_time, self._virtual_time, level)

    def _level(self) -> float:
        """Return the lowest start of the waiting clients, at least one."""
        return min(_start_without_delay(owner, queue[0]) for owner, queue in self._queues.items())

    def _filtered(self, may_run: Callable[[int], bool]) -> dict[Account, list[Sequence]]:
        return {owner: left for owner, queue in self._queues.items() if (left := [s for s in queue if may_run(s.id)])}


def start(sequence: Sequence) -> float:
    """Return the virtual time at which a client is served whose first request is this one."""
    return sequence.account.virtual_time + sequence.request.priority * PRIORITY_TOKENS


def is_newcomer(sequence: Sequence) -> bool:
    """Return whether a waiting request has no token yet, and its client runs nothing."""
    return not sequence.account.running and not sequence.num_generated_tokens


def is_small_newcomer(sequence: Sequence) -> bool:
    """Return whether a newcomer has at most SMALL_TOKENS to compute."""
    return is_newcomer(sequence) and sequence.num_missing_tokens <= SMALL_TOKENS


def _start_without_delay(account: Account, first: Sequence) -> float:
    """Return the start of a client, without the tokens by which a positive priority lets others go first."""
    return account.virtual_time + min(0, first.request.priority) * PRIORITY_TOKENS


def _key(sequence: Sequence) -> tuple[bool, float, int]:
    """Return the sort key in the sequence's queue."""
    return (False, *sequence.age_key) if sequence.has_run else (True, *sequence.queue_key)
