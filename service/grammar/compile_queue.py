"""Queue of the constraints that wait to be compiled, fair among clients."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from npuserve.service.grammar.errors import CompilerFull
from npuserve.service.ipc.messages import Constraint

MAX_RUNNING_PER_CLIENT = 2
"""Constraints of one client that are compiled at a time. The compiler has one worker more, for other clients."""


class WaitingConstraint(NamedTuple):
    """Constraint to compile, and the client whose turn it is."""

    constraint: Constraint
    client: str


class CompileQueue:
    """Waiting constraints by client. Clients take turns. Not safe to use from several threads at a time.

    max_waiting: maximum number of waiting constraints. One client may have half of them.
    """

    def __init__(self, max_waiting: int):
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[str, OrderedDict[Constraint, None]] = OrderedDict()  # the next client first
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, constraint: Constraint, client: str) -> None:
        """Queue a constraint. If it waits for another client already, it is compiled at the first turn of both.

        Raises CompilerFull.
        """
        own = self._waiting.get(client, OrderedDict())
        if constraint in own:
            return
        if len(own) >= max(1, self._max_waiting // 2):
            raise CompilerFull(f"{len(own)} constraints of this client wait to be compiled")
        if len(self) >= self._max_waiting:
            raise CompilerFull(f"{self._max_waiting} constraints wait to be compiled")
        self._waiting.setdefault(client, own)[constraint] = None

    def __contains__(self, constraint: Constraint) -> bool:
        return any(constraint in own for own in self._waiting.values())

    def take(self) -> WaitingConstraint | None:
        """Remove and return the next constraint; None if there is none or its client has enough running ones.

        Call `end` when it is compiled.
        """
        client = next((one for one in self._waiting if self._running[one] < MAX_RUNNING_PER_CLIENT), None)
        if client is None:
            return None
        constraint = next(iter(self._waiting[client]))
        self._waiting.move_to_end(client)
        for one in list(self._waiting):
            self._waiting[one].pop(constraint, None)
            if not self._waiting[one]:
                del self._waiting[one]
        self._running[client] += 1
        return WaitingConstraint(constraint, client)

    def end(self, client: str) -> None:
        """Record that a taken constraint of a client is compiled."""
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]

    def clear(self) -> None:
        """Remove all waiting constraints."""
        self._waiting.clear()
