"""Requests that may have crashed the engine: they run apart from all others until they have made some tokens.

While the quarantine has requests, only one group of them runs. The requests with the most crashes come first. A group
is as small as possible, so that a crash shows which request is at fault, while all groups together take about
MAX_QUARANTINE_STEPS steps. A group has at most half of the requests, so that each crash leaves fewer candidates. With
the usual QUARANTINE_TOKENS tokens, up to MAX_QUARANTINE_STEPS // QUARANTINE_TOKENS requests run one at a time. A
request that has made its tokens waits until the others have made theirs.

The scheduler preempts all requests outside the current group. It admits the group, one request per step, once none of
the others has a step in flight.
"""

from __future__ import annotations

QUARANTINE_TOKENS = 4
"""At least three: a crash may lose two steps in flight, and a request's first token is made without a decode step."""
MAX_QUARANTINE_STEPS = 512


class Quarantine:
    """Requests in quarantine, by sequence id. True if there are any."""

    def __init__(self) -> None:
        self._crashes: dict[int, int] = {}
        self._tokens_left: dict[int, int] = {}
        self._group: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._tokens_left)

    def add(self, sequence_id: int, crashes: int, tokens: int) -> None:
        """Put a request into quarantine until it has made `tokens` more tokens.

        crashes: number of engine crashes while the request was in a step.
        """
        self._crashes[sequence_id] = crashes
        self._tokens_left[sequence_id] = tokens

    def count_tokens(self, sequence_id: int, tokens: int) -> None:
        """Count tokens of any request, and release the request after its last one."""
        if sequence_id in self._tokens_left:
            self._tokens_left[sequence_id] -= tokens
            if self._tokens_left[sequence_id] <= 0:
                self.release(sequence_id)

    def release(self, sequence_id: int) -> None:
        """Remove a request: it made its tokens, ended, or was paused for its reader. Nothing if it is not there."""
        if self._tokens_left.pop(sequence_id, None) is not None:
            del self._crashes[sequence_id]
            self._group.discard(sequence_id)

    def may_run(self, sequence_id: int) -> bool:
        """Return whether a request may run now."""
        if not self._tokens_left:
            return True
        if not self._group:
            max_crashes = max(self._crashes.values())
            candidates = [id for id, crashes in self._crashes.items() if crashes == max_crashes]
            groups = max(2, MAX_QUARANTINE_STEPS // max(self._tokens_left[id] for id in candidates))
            self._group = set(candidates[: -(-len(candidates) // groups)])
        return sequence_id in self._group
