"""Queue of the constraints that wait to be compiled, fair among clients."""

from __future__ import annotations

from typing import NamedTuple

from npuserve.service.client_queue import ClientQueue, ClientShares
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
        self._waiting: ClientQueue[Constraint] = ClientQueue(max_waiting)
        self._running = ClientShares()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, constraint: Constraint) -> bool:
        return bool(self._waiting.clients_of(constraint))

    def add(self, constraint: Constraint, client: str) -> None:
        """Queue a constraint. If it waits for another client already, it is compiled at the first turn of both.

        Raises CompilerFull.
        """
        if self._waiting.has(client, constraint):
            return
        match self._waiting.shares.exceeded(client):
            case "client_limit":
                waiting = self._waiting.shares.items(client)
                raise CompilerFull(f"{waiting} constraints of this client wait to be compiled")
            case "queue_full":
                raise CompilerFull(f"{self._max_waiting} constraints wait to be compiled")
        self._waiting.append(client, constraint)

    def take(self) -> WaitingConstraint | None:
        """Remove and return the next constraint; None if there is none or its client has enough running ones.

        Call `end` when it is compiled.
        """
        waiting = (
            WaitingConstraint(constraint, client) for client, constraint in self._waiting.firsts()
            if self._running.items(client) < MAX_RUNNING_PER_CLIENT)
        taken = next(waiting, None)
        if taken is None:
            return None
        self._waiting.take(taken.client, taken.constraint)
        for other in self._waiting.clients_of(taken.constraint):
            self._waiting.remove(other, taken.constraint)
        self._running.add(taken.client)
        return taken

    def end(self, client: str) -> None:
        """Record that a taken constraint of a client is compiled."""
        self._running.remove(client)

    def clear(self) -> None:
        """Remove all waiting constraints."""
        self._waiting.clear()
