"""Restart policy of the supervisor's children: the pause before each restart, and when to give up."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from npuserve.service.processes.child import EXIT_NODE_FAULT, UNUSABLE, is_transient

Why = Literal["died", "hung", "unusable", "not_started"]
"""Why a run ended: it exited or was killed by a signal; the supervisor killed it for hanging; exit code 2; the system
could not start a process."""
MAX_DOUBLINGS = 30


@dataclass(frozen=True)
class Restarts:
    """Back-off of restarts, in seconds and in numbers of consecutive short runs.

    A run of at least `healthy` seconds resets the counts.

    A run that was never ready or that hung is a failed start. Its pause is `start_pause`, doubled for each further one
    up to `max_start_pause`. After `deaths` failed starts there is no restart.

    A run that was ready has crashed, most likely because of a request, which the engine finds (crash_tracker.py), or
    because somebody killed it. A restart is likely to help, and streams wait for it. Its pause is `crash_pause` times
    the number of crashes, up to `max_crash_pause`, less the time for which it was ready. After `max_crashes` crashes
    there is no restart.

    Once the server was ready, a start that is killed from outside (SIGKILL) is a crash too: the start itself did not
    fail.
    """

    start_pause: float = 0.5
    max_start_pause: float = 30.0
    healthy: float = 60.0
    deaths: int = 10
    crash_pause: float = 0.1
    max_crash_pause: float = 5.0
    max_crashes: int = 100

    def pause(self, failed_starts: int, crashes: int, ready_seconds: float = 0.0) -> float | None:
        """Return the seconds until the restart; None for no restart.

        failed_starts: 0 if the last run crashed.
        ready_seconds: time for which the last run was ready.
        """
        if failed_starts >= self.deaths or crashes >= self.max_crashes:
            return None
        if failed_starts:
            return self.retry_pause(failed_starts)
        return max(0.0, min(self.crash_pause * crashes, self.max_crash_pause) - ready_seconds)

    def retry_pause(self, attempts: int) -> float:
        """Return the pause after consecutive failed attempts, doubled for each, up to `max_start_pause`."""
        return float(min(self.start_pause * 2 ** min(attempts - 1, MAX_DOUBLINGS), self.max_start_pause))


RESTARTS = Restarts()


@dataclass(frozen=True)
class RunEnd:
    """End of one run of a child process.

    code: exit code, negative for a signal; the error if no process could be started.
    seconds: length of the run, without the time for which it hung.
    is_hung: whether it was killed because it hung.
    was_ready: whether it was ready, even if it hung later.
    ready_seconds: time for which it was ready.
    is_killer_found: whether the request that crashed the earlier runs was found and ended.
    """

    code: int | BaseException
    seconds: float = 0.0
    is_hung: bool = False
    was_ready: bool = False
    ready_seconds: float = 0.0
    is_killer_found: bool = False

    @property
    def why(self) -> Why:
        """Return the cause, a label of the metric of restarts."""
        if isinstance(self.code, BaseException):
            return "not_started"
        if self.is_hung:
            return "hung"
        return "unusable" if self.code == UNUSABLE else "died"

    def has_crashed(self, was_server_ready: bool) -> bool:
        """Return whether the run was ready, or killed from outside at its start. Otherwise it is a failed start."""
        return not self.is_hung and (self.was_ready or (was_server_ready and self.code == -signal.SIGKILL))


class RestartPolicy:
    """Restart policy of one child. It counts failed starts, crashes and attempts during a repair.

    join_seconds: maximum time that the child waits for the ranks of other hosts; 0 if there are none.

    is_group_incomplete: whether the last run waited in vain for these ranks, after the server was ready. There is no
        restart then: the server ends, so that all hosts are started again together.
    """

    def __init__(self, restarts: Restarts, join_seconds: float = 0.0):
        self.is_group_incomplete = False
        self._restarts = restarts
        self._join_seconds = join_seconds
        self._failed_starts = 0
        self._crashes = 0
        self._repair_attempts = 0

    @property
    def deaths(self) -> int:
        """Return the number of consecutive short runs."""
        return self._failed_starts + self._crashes

    def pause(self, end: RunEnd, was_server_ready: bool) -> float | None:
        """Return the seconds until the restart; None for no restart.

        was_server_ready: whether the server was ready before, so that its configuration and model are valid. Then a
            child that is unusable or cannot be started is retried without limit, until the cause is repaired.
        """
        is_late = 0 < self._join_seconds <= end.seconds and not end.was_ready
        self.is_group_incomplete = was_server_ready and is_late and end.why in ("hung", "unusable")
        if self.is_group_incomplete or end.code == EXIT_NODE_FAULT:
            return None
        if end.seconds >= self._restarts.healthy or end.is_killer_found:
            self._failed_starts = self._crashes = self._repair_attempts = 0
        if end.why in ("unusable", "not_started"):
            if was_server_ready:
                self._repair_attempts += 1
                return self._restarts.retry_pause(self._repair_attempts)
            if isinstance(end.code, int) or not is_transient(end.code):
                return None
        self._repair_attempts = 0
        if end.has_crashed(was_server_ready):
            self._failed_starts = 0
            self._crashes += 1
        else:
            self._failed_starts += 1
        return self._restarts.pause(self._failed_starts, self._crashes, end.ready_seconds)
