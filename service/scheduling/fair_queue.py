"""The waiting requests: which client is next, and which of its requests.

Each client has a queue of its own, in order of the effective priority of its requests: priority - waited_seconds /
aging_seconds, lower is earlier. Waiting is counted from the arrival and never restarts. All requests age alike, so the
order of two requests is constant: they are sorted by queue_key, (priority * aging_seconds + arrival, id). A request
is overtaken only by requests of its client that arrive within (its priority - theirs) * aging_seconds after it.

Requests that ran before are in a queue of their own, in order of age. It comes before all others.

    client a   ▢▢▢▢▢▢    The next client is the one with the lowest virtual time, after the priority of its first
    client b   ▢▢        request is added. Its first request is the next request.
    client c   ▢

Fairness is start-time fair queueing (Goyal, Vin and Cheng 1996). Since the length of an answer is unknown, tokens are
counted as they are computed, as in the virtual token counter (Sheng et al. 2024). The virtual time of a client is the
number of tokens computed for it. The virtual time of the queue is the one of the client that was served last. When a
client without waiting requests adds one, its virtual time is raised to the queue's: an idle client earns no credit.
When no request is left, all clients begin alike after that. Two clients that both have waiting requests therefore get
equal numbers of tokens, except for requests that run already.

Priority is that of borrowed virtual time (Duda and Cheriton 1999). A request of priority p is served as if the virtual
time of its client were p * PRIORITY_TOKENS later. A negative priority borrows tokens and does not add any: the virtual
time of the queue includes the borrowed tokens. A client that has borrowed all it can gets its equal share and no more,
and a client that arrives meanwhile is not behind it. A positive priority lets other clients go first by as many tokens.
While two clients wait, neither gets more than the other by more than (difference of their priorities) * PRIORITY_TOKENS
and one request. Within the queue of one client only priorities and age decide.

No client starves. The virtual time of a waiting client is constant, except for its running requests, which end. Every
request that is served first belongs to a client of no later virtual time and increases that time. It also advances the
virtual time of the queue by a share of its tokens, 1 / max_requests. Therefore the start times of new clients, however
many arrive, soon exceed the waiting client's.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, ge

from npuserve.service.scheduling.sequence import Account, Sequence

MAX_IDLE_ACCOUNTS = 1024
"""Maximum number of clients without requests whose virtual time is kept."""
PRIORITY_TOKENS = 16
"""Tokens that one unit of priority is worth: a request of 100 tokens is 6 units."""


class FairQueue:
    """Owner of the queues and the accounts. The scheduler adds planned tokens to `Account.virtual_time`.

    max_requests: maximum number of live requests, to within a few.
    """

    def __init__(self, max_requests: int):
        self._max_requests = max_requests
        self._queues: dict[Account, list[Sequence]] = {}  # none is empty
        self._accounts: dict[str, Account] = {}
        self._resumed = Account("", -math.inf)  # key of the queue of requests that ran before
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
            for one in idle[: len(idle) // 2 + 1]:
                del self._accounts[one.client]

    def push(self, sequence: Sequence) -> None:
        """Add a request to the queue of its client, or to the queue of the requests that ran before."""
        account = sequence.account
        if not account.waiting:
            account.virtual_time = max(account.virtual_time, self._virtual_time)
        account.waiting += 1
        self._length += 1
        insort(self._queues.setdefault(self._owner(sequence), []), sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request from its queue. `has_run` must be the same as at its `push`."""
        sequence.account.waiting -= 1
        self._length -= 1
        owner = self._owner(sequence)
        queue = self._queues[owner]
        del queue[bisect_left(queue, _key(sequence), key=_key)]
        if not queue:
            del self._queues[owner]

    def next(self, may_run: Callable[[int], bool] | None = None) -> Sequence | None:
        """Return the next request; None if there is none.

        may_run: considers only the sequences whose ids it accepts; None for all.
        """
        queues = self._queues if may_run is None else self._filtered(may_run)
        if len(queues) < 2:
            return next((queue[0] for queue in queues.values()), None)
        return min(queues.items(), key=lambda item: (_start(*item), item[1][0].queue_key))[1][0]

    def admit(self, sequence: Sequence, tokens: int) -> None:
        """Remove a request that is admitted, and advance the virtual time. Call it before Sequence.admit.

        tokens: the request's uncomputed tokens.
        """
        if not sequence.has_run:
            start = sequence.account.virtual_time + min(0, sequence.request.priority) * PRIORITY_TOKENS
            self._virtual_time = max(self._virtual_time, start) + tokens / self._max_requests
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
        most = max(candidates, key=lambda owner: (owner.live, owner.waiting))
        return candidates[most] if most.live > account.live + 1 else None

    def ahead(self, account: Account, priority: int, answer_tokens: float) -> tuple[float, int]:
        """Estimate how many requests, and how many of their tokens, come before a new request.

        account, priority: account and priority of the new request.
        answer_tokens: expected tokens of an answer.
        """
        own = [s for s in self._queues.get(account, []) if s.request.priority <= priority]
        time = account.virtual_time if account.waiting else max(account.virtual_time, self._virtual_time)
        time += sum(s.num_missing_tokens + answer_tokens for s in own) + priority * PRIORITY_TOKENS
        requests, tokens = float(len(own)), float(sum(s.num_missing_tokens for s in own))
        for owner, queue in self._queues.items():
            if owner is not account:
                known = sum(s.num_missing_tokens for s in queue)
                share = min(1.0, max(0.0, (time - _start(owner, queue)) / (known + answer_tokens * len(queue))))
                requests += share * len(queue)
                tokens += share * known
        return requests, int(tokens)

    def faults(self) -> Iterator[str]:
        """Yield inconsistencies, for integrity checks, in one pass over the queues."""
        if (live := sum(a.live for a in self._accounts.values())) != self._live:
            yield f"the clients have {live} live requests, {self._live} were counted"
        waiting: Counter[Account] = Counter()
        for owner, queue in self._queues.items():
            keys = [_key(s) for s in queue]
            if not queue or any(map(ge, keys, keys[1:])):
                yield f"a client's queue is empty or not in order: {keys}"
            if any(self._owner(s) is not owner for s in queue):
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

    def _owner(self, sequence: Sequence) -> Account:
        """Return the key of the sequence's queue."""
        return self._resumed if sequence.has_run else sequence.account

    def _filtered(self, may_run: Callable[[int], bool]) -> dict[Account, list[Sequence]]:
        return {owner: left for owner, queue in self._queues.items() if (left := [s for s in queue if may_run(s.id)])}


def _key(sequence: Sequence) -> tuple[float, int]:
    """Return the sort key in the sequence's queue."""
    return sequence.age_key if sequence.has_run else sequence.queue_key


def _start(account: Account, queue: list[Sequence]) -> float:
    """Return the virtual time at which the client's next request is served."""
    return account.virtual_time + queue[0].request.priority * PRIORITY_TOKENS
