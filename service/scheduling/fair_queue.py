"""The queue: whose turn it is among clients, and which of a client's requests is next.

Requests that wait stand in lines, one for each client, in order of their turns (sequence.py): by priority and waiting.
Those that ran before stand in a line of their own, in order of rank: by age alone, as they were preempted.

    client a   ▢▢▢▢▢▢    the client is served for whom the fewest tokens were computed, give or take what the priority
    client b   ▢▢        of its next request is worth; of it, that request. One that ran before had its turn, and is
    client c   ▢         first.

Fairness is that of start-time fair queueing (Goyal, Vin and Cheng 1996), by tokens as they are computed, as in the
virtual token counter (Sheng et al. 2024), since nobody knows an answer's length. A client's time is the number of
tokens computed for it; the queue's time is that of the last client who had a turn. A client who comes with nothing in
line is lifted to the queue's time: nobody saves up turns by asking for little. So two clients who both have requests in
line get equal numbers of tokens, but for what is running already.

Priority is that of borrowed virtual time (Duda and Cheriton 1999): a request of priority p is served as if its client's
time were p * PRIORITY_TOKENS later. A negative priority borrows turns and does not multiply them: the queue's time is
the one with what was borrowed, so a client that has borrowed all it can gets its equal share and no more, and a client
who comes meanwhile is not behind it. A positive priority lets others go first by as many tokens. So in whatever time
two clients wait, neither gets more than the other by more than (the difference of their priorities) * PRIORITY_TOKENS
and one request. Within a client's own line priorities decide alone.

None starves. A client who waits has a fixed time, but for what its running requests, which end, add to it. Each turn
before its own goes to a client of no later time and adds to that time; and it moves the queue's time on by a share of
its tokens, 1 / places, so that clients who are new at each turn, however many, soon come after it too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter, ge
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npuserve.service.scheduling.sequence import Sequence

REMEMBERED = 1024
"""Clients without requests whose time is later than the queue's."""
PRIORITY_TOKENS = 16
"""Tokens that a step of priority is worth: a request of 100 tokens is 6 steps."""


class Account:
    """A client's. time: tokens computed for it. live: its requests that have not ended. waiting: those in its lines."""

    __slots__ = ("client", "live", "time", "waiting")

    def __init__(self, client: str, time: float = 0.0):
        self.client = client
        self.time = time
        self.live = 0
        self.waiting = 0


class FairQueue:
    """Owns the lines and the accounts; the scheduler adds the tokens that it plans to `Account.time`. places: requests
    that live at most, to within a few."""

    def __init__(self, places: int):
        self._places = places
        self._lines: dict[Account, list[Sequence]] = {}  # no line is empty
        self._accounts: dict[str, Account] = {}
        self._again = Account("", -math.inf)  # in whose lines the preempted stand
        self._time = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for line in self._lines.values() for sequence in line)

    def account(self, client: str) -> Account:
        """The client's; a new one counts only once it is joined."""
        return self._accounts.get(client) or Account(client)

    def join(self, account: Account) -> None:
        """One more request of the client lives."""
        self._accounts[account.client] = account
        account.live += 1

    def leave(self, account: Account) -> None:
        """One of its requests has ended."""
        account.live -= 1
        if account.live:
            return
        if account.time <= self._time:  # as if it came anew
            del self._accounts[account.client]
        elif len(self._accounts) > self._places + REMEMBERED:
            idle = sorted((a for a in self._accounts.values() if not a.live), key=attrgetter("time"))
            for one in idle[: len(idle) // 2 + 1]:
                del self._accounts[one.client]

    def push(self, sequence: Sequence) -> None:
        account = sequence.account
        if not sequence.had_turn and not account.waiting:
            account.time = max(account.time, self._time)
        account.waiting += 1
        self._length += 1
        insort(self._lines.setdefault(self._owner(sequence), []), sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        sequence.account.waiting -= 1
        self._length -= 1
        owner = self._owner(sequence)
        line = self._lines[owner]
        del line[bisect_left(line, _place(sequence), key=_place)]
        if not line:
            del self._lines[owner]

    def first(self, admits: Callable[[int], bool] | None = None) -> Sequence | None:
        """Whose turn it is; None if nobody waits. admits: only of the sequences whose ids it lets pass."""
        lines = self._lines if admits is None else self._passing(admits)
        if len(lines) < 2:
            return next((line[0] for line in lines.values()), None)
        return min(lines.items(), key=lambda item: (_start(*item), item[1][0].turn))[1][0]

    def had_turn(self, sequence: Sequence, tokens: int) -> None:
        """Take the sequence out, which is admitted with so many tokens to compute."""
        if not sequence.had_turn:
            time = sequence.account.time + min(0, sequence.request.priority) * PRIORITY_TOKENS
            self._time = max(self._time, time) + tokens / self._places
        self.remove(sequence)

    def displaced_by(self, account: Account) -> Sequence | None:
        """Who is to leave a full queue for one more request of this client: the last in line that has nothing yet, of
        the client with the most live requests. None unless that client still has no fewer than this one afterwards."""
        candidates = {
            sequence.account: sequence for line in self._lines.values() for sequence in line
            if not (sequence.met or sequence.request.output_ids)
        }
        if not candidates:
            return None
        most = max(candidates, key=lambda owner: (owner.live, owner.waiting))
        return candidates[most] if most.live > account.live + 1 else None

    def ahead(self, account: Account, priority: int, answer: float) -> tuple[float, int]:
        """About how many requests, and tokens of theirs, have their turns before one more of this client and priority.
        answer: tokens that one is expected to make."""
        own = [s for s in self._lines.get(account, []) if s.request.priority <= priority]
        time = account.time if account.waiting else max(account.time, self._time)
        time += sum(s.num_tokens + answer for s in own) + priority * PRIORITY_TOKENS
        requests, tokens = float(len(own)), float(sum(s.num_tokens for s in own))
        for owner, line in self._lines.items():
            if owner is not account:
                known = sum(s.num_tokens for s in line)
                share = min(1.0, max(0.0, (time - _start(owner, line)) / (known + answer * len(line))))
                requests += share * len(line)
                tokens += share * known
        return requests, int(tokens)

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with it, for integrity checks, in one pass over the lines."""
        waiting: Counter[Account] = Counter()
        for owner, line in self._lines.items():
            places = [_place(s) for s in line]
            if not line or any(map(ge, places, places[1:])):
                yield f"a line is empty or not in order: {places}"
            if any(self._owner(s) is not owner for s in line):
                yield f"a sequence stands in another's line: {[s.id for s in line]}"
            waiting.update(s.account for s in line)
        if waiting.total() != self._length:
            yield f"{waiting.total()} sequences stand in lines, {self._length} were counted"
        for account in self._accounts.values():
            standing = waiting.get(account, 0)
            if account.waiting != standing or account.live < standing:
                yield f"a client has {account.live} live and {account.waiting} waiting, but {standing} stand in lines"
        if strangers := [a.client for a in waiting if self._accounts.get(a.client) is not a]:
            yield f"the clients {strangers} have no accounts"

    def _owner(self, sequence: Sequence) -> Account:
        return self._again if sequence.had_turn else sequence.account

    def _passing(self, admits: Callable[[int], bool]) -> dict[Account, list[Sequence]]:
        return {owner: found for owner, line in self._lines.items() if (found := [s for s in line if admits(s.id)])}


def _place(sequence: Sequence) -> tuple[float, int]:
    """Its place in its line."""
    return sequence.rank if sequence.had_turn else sequence.turn


def _start(account: Account, line: list[Sequence]) -> float:
    """When the next request of a client starts, in the queue's time."""
    return account.time + line[0].request.priority * PRIORITY_TOKENS
