"""The queue: whose turn it is, among priorities and among clients.

Requests that wait stand in lines, one for each priority and client, in order of rank (scheduler.py).

    priority 0    client a   ▢▢▢▢▢▢        the priority whose oldest request has the lowest rank is served;
                  client b   ▢▢            in it, the client for whom the fewest tokens were computed;
    priority 5    client a   ▢             of it, its oldest request. One that ran before had its turn, and is first.

Fairness is that of start-time fair queueing (Goyal, Vin and Cheng 1996), by tokens as they are computed, as in the
virtual token counter (Sheng et al. 2024), since nobody knows an answer's length. A client's time is the number of
tokens computed for it; the queue's time is that of the last client who had a turn. A client who comes with nothing in
line is lifted to the queue's time: nobody saves up turns by asking for little. So two clients who both have requests in
line get equal numbers of tokens, but for what is running already.

None starves. A client who waits has a fixed time, but for what its running requests, which end, add to it. Each turn
before its own goes to a client of no later time and adds to that time; and it moves the queue's time on by a share of
its tokens, 1 / places, so that clients who are new at each turn, however many, soon come after it too. Of priorities
the oldest rank decides, and only requests that arrive within a fixed time have a lower one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npuserve.service.sequence import Sequence

REMEMBERED = 1024
"""Clients without requests whose time is later than the queue's."""
_rank = attrgetter("rank")


class Account:
    """A client's. time: tokens computed for it. live: its requests that have not ended. waiting: those in its lines."""

    __slots__ = ("client", "live", "time", "waiting")

    def __init__(self, client: str, time: float = 0.0):
        self.client = client
        self.time = time
        self.live = 0
        self.waiting = 0


Lines = dict[Account, list["Sequence"]]


class FairQueue:
    """Owns the lines and the accounts; the scheduler adds the tokens that it plans to `Account.time`. places: requests
    that live at most, to within a few."""

    def __init__(self, places: int):
        self._places = places
        self._lines: dict[int, Lines] = {}  # by priority; no line is empty
        self._accounts: dict[str, Account] = {}
        self._again = Account("", -math.inf)  # in whose lines the preempted stand
        self._time = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for lines in self._lines.values() for line in lines.values() for sequence in line)

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
        lines = self._lines.setdefault(sequence.request.priority, {})
        insort(lines.setdefault(self._owner(sequence), []), sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        sequence.account.waiting -= 1
        self._length -= 1
        priority, owner = sequence.request.priority, self._owner(sequence)
        lines = self._lines[priority]
        line = lines[owner]
        del line[bisect_left(line, sequence.rank, key=_rank)]
        if not line:
            del lines[owner]
            if not lines:
                del self._lines[priority]

    def first(self, admits: Callable[[int], bool] | None = None) -> Sequence | None:
        """Whose turn it is; None if nobody waits. admits: only of the sequences whose ids it lets pass."""
        groups = list(self._lines.values()) if admits is None else self._passing(admits)
        if not groups:
            return None
        lines = groups[0] if len(groups) == 1 else min(groups, key=_oldest)
        if len(lines) == 1:
            return next(iter(lines.values()))[0]
        return min(lines.items(), key=lambda item: (item[0].time, item[1][0].rank))[1][0]

    def had_turn(self, sequence: Sequence, tokens: int) -> None:
        """Take the sequence out, which is admitted with so many tokens to compute."""
        if not sequence.had_turn:
            self._time = max(self._time, sequence.account.time) + tokens / self._places
        self.remove(sequence)

    def displaced_by(self, account: Account, priority: int) -> Sequence | None:
        """Who is to leave a full queue for one more request of this client and priority: the newest request that has
        nothing yet and is no more urgent, of the client with the most live requests. None unless that client still has
        no fewer than this one afterwards."""
        candidates = {
            sequence.account: sequence for urgency in sorted(self._lines) if urgency >= priority
            for line in self._lines[urgency].values() for sequence in line
            if not (sequence.met or sequence.request.output_ids)
        }
        if not candidates:
            return None
        most = max(candidates, key=lambda owner: (owner.live, owner.waiting))
        return candidates[most] if most.live > account.live + 1 else None

    def ahead(self, account: Account, priority: int, answer: float) -> tuple[float, int]:
        """About how many requests, and tokens of theirs, have their turns before one more of this client and priority.
        answer: tokens that one is expected to make."""
        own = self._lines.get(priority, {}).get(account, [])
        time = account.time if account.waiting else max(account.time, self._time)
        time += sum(s.num_tokens + answer for s in own)
        requests = tokens = 0.0
        for urgency, lines in self._lines.items():
            if urgency > priority:
                continue
            for owner, line in lines.items():
                known = sum(s.num_tokens for s in line)
                share = 1.0
                if urgency == priority and owner is not account and owner is not self._again:
                    share = min(1.0, max(0.0, (time - owner.time) / (known + answer * len(line))))
                requests += share * len(line)
                tokens += share * known
        return requests, int(tokens)

    def faults(self) -> Iterator[str]:
        """What is wrong with it, for integrity checks."""
        standing = list(self)
        if len(standing) != self._length:
            yield f"{len(standing)} sequences stand in lines, {self._length} were counted"
        for priority, lines in self._lines.items():
            if not lines:
                yield f"priority {priority} has no lines"
            for owner, line in lines.items():
                ranks = [s.rank for s in line]
                if not line or ranks != sorted(set(ranks)):
                    yield f"a line is empty or not in order of rank: {ranks}"
                if any(s.request.priority != priority or self._owner(s) is not owner for s in line):
                    yield f"a sequence stands in another's line: {[s.id for s in line]}"
        for account in self._accounts.values():
            waiting = sum(s.account is account for s in standing)
            if account.waiting != waiting or account.live < waiting:
                yield f"a client has {account.live} live and {account.waiting} waiting, but {waiting} stand in lines"
        if strangers := [s.id for s in standing if self._accounts.get(s.account.client) is not s.account]:
            yield f"the clients of {strangers} have no accounts"

    def _owner(self, sequence: Sequence) -> Account:
        return self._again if sequence.had_turn else sequence.account

    def _passing(self, admits: Callable[[int], bool]) -> list[Lines]:
        groups: list[Lines] = []
        for lines in self._lines.values():
            passing = {owner: found for owner, line in lines.items() if (found := [s for s in line if admits(s.id)])}
            if passing:
                groups.append(passing)
        return groups


def _oldest(lines: Lines) -> tuple[float, int]:
    return min(line[0].rank for line in lines.values())
