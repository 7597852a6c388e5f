"""Requests on trial: they may have killed the engine before, and run apart from others for some tokens.

While requests are on trial, only one group of them runs. Requests with the most deaths come first. Groups are as small
as possible while all trials together take about MAX_TRIAL_STEPS steps. A group has at most half of the requests, so
that each death leaves fewer. The usual trial of TRIAL_TOKENS tokens runs each request alone, where there are at most
MAX_TRIAL_STEPS // TRIAL_TOKENS of them. A request that has made its tokens waits until the others have made theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

from npuserve.service.scheduling.sequence import Sequence

TRIAL_TOKENS = 4
"""At least three: the steps in flight may lose two, and the first token of a life is made without a decode step."""
MAX_TRIAL_STEPS = 512


class Quarantine:
    """The requests on trial, by the sequences' ids. True while there are any."""

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}
        self._left: dict[int, int] = {}  # tokens
        self._group: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._left)

    def add(self, sequence_id: int, deaths: int, tokens: int) -> None:
        """Put a request on trial until it has made `tokens` more."""
        self._deaths[sequence_id], self._left[sequence_id] = deaths, tokens

    def made(self, sequence_id: int) -> None:
        """Count a token of any request."""
        if sequence_id in self._left:
            self._left[sequence_id] -= 1
            if not self._left[sequence_id]:
                self.clear(sequence_id)

    def clear(self, sequence_id: int) -> None:
        """End its trial: it passed, ended, or is paused for its reader."""
        if self._left.pop(sequence_id, None) is not None:
            del self._deaths[sequence_id]
            self._group.discard(sequence_id)

    def admits(self, sequence_id: int) -> bool:
        """Return whether a request may run now."""
        if not self._left:
            return True
        if not self._group:
            most = max(self._deaths.values())
            level = [one for one, deaths in self._deaths.items() if deaths == most]
            groups = max(2, MAX_TRIAL_STEPS // max(self._left[one] for one in level))
            self._group = set(level[: -(-len(level) // groups)])
        return sequence_id in self._group

    def part(self, running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Split the running requests into those that may run now and the others."""
        may: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in running:
            (may if self.admits(sequence.id) else others).append(sequence)
        return may, others
