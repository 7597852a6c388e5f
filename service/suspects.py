"""Who may have killed the engine.

A request that ran when an engine died, and made no token since, twice in a row, is a suspect. Suspects run apart: while
there is one, nobody else is admitted, and of those with the most deaths no more than half, so that the next death
halves the suspects again, until the one that kills runs alone. A token clears its request, whose every earlier step is
harmless then. With n requests running, a killer is found after two deaths and at most log2(n) + 1 more.

Those that were cleared run on beside the next suspects. They are not blamed for long: the next engine begins with the
suspects, and nobody else runs then.
"""

from __future__ import annotations

from npuserve.service.messages import Request

DEATHS = 2
"""In a row make a suspect."""


class Suspects:
    """By the sequences' ids. The scheduler tells of each request, and asks before it admits one."""

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}
        self._cohort: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def add(self, sequence_id: int, request: Request) -> None:
        if request.deaths >= DEATHS:
            self._deaths[sequence_id] = request.deaths

    def clear(self, sequence_id: int) -> None:
        """It made a token, or ended, or is to wait for its reader."""
        self._deaths.pop(sequence_id, None)
        self._cohort.discard(sequence_id)

    def admits(self, sequence_id: int) -> bool:
        if not self._deaths:
            return True
        if not self._cohort:
            most = max(self._deaths.values())
            group = [suspect for suspect, deaths in self._deaths.items() if deaths == most]
            self._cohort = set(group[: max(1, len(group) // 2)])
        return sequence_id in self._cohort
