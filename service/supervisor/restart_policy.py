"""When a child of the supervisor that ended is started again, and when the server ends instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from npuserve.service.ipc.child import NODE_FAULT, UNUSABLE, is_transient

Why = Literal["died", "hung", "unusable", "not_started"]
"""Why a life ended: by itself or a signal; killed for standing still; exit code 2; no process could be started."""
MAX_DOUBLINGS = 30


@dataclass(frozen=True)
class Restarts:
    """Pauses in seconds before a child is started again, by the number of its short lives: a life of `healthy` seconds
    starts the count anew.

    Of lives that never were ready, or hung, in a row: `first`, doubling up to `longest`, and after `deaths` there is no
    further start. Others died at work: most likely of a request, which is found (blame.py), or by somebody's hand.
    To start again is likely to help, and streams wait for it: `again` times their number, up to `again_longest`, and
    after `deaths_at_work` there is no further start.
    """

    first: float = 0.5
    longest: float = 30.0
    healthy: float = 60.0
    deaths: int = 10
    again: float = 0.1
    again_longest: float = 5.0
    deaths_at_work: int = 100

    def pause(self, stillborn: int, at_work: int) -> float | None:
        """None: give up. stillborn: 0 after a life that was ready and did not hang."""
        if stillborn >= self.deaths or at_work >= self.deaths_at_work:
            return None
        if stillborn:
            return self.pause_of_repair(stillborn)
        return min(self.again * at_work, self.again_longest)

    def pause_of_repair(self, attempts: int) -> float:
        """Return the pause after so many attempts in a row that only a repair outside the server can end."""
        return float(min(self.first * 2 ** min(attempts - 1, MAX_DOUBLINGS), self.longest))


RESTARTS = Restarts()


@dataclass(frozen=True)
class Life:
    """One life of a child that ended.

    code: exit code, negative for a signal; an error if no process could be started. seconds: how long it was up and did
    not hang. hung: whether it was killed for that. worked: whether it was ready and did not hang. forgiven: whether the
    request was found and ended of which the lives before it died.
    """

    code: int | BaseException
    seconds: float = 0.0
    hung: bool = False
    worked: bool = False
    forgiven: bool = False

    @property
    def why(self) -> Why:
        if isinstance(self.code, BaseException):
            return "not_started"
        if self.hung:
            return "hung"
        return "unusable" if self.code == UNUSABLE else "died"


class ExitPolicy:
    """Policy for one child: the pause after each of its lives. `deaths` counts the short ones."""

    def __init__(self, restarts: Restarts):
        self._restarts = restarts
        self._stillborn = 0
        self._at_work = 0
        self._repairs = 0

    @property
    def deaths(self) -> int:
        return self._stillborn + self._at_work

    def pause(self, life: Life, was_ready: bool) -> float | None:
        """Return the seconds until the next start; None if there is none.

        was_ready: whether the server has been ready once. Its configuration and model are good then, so what makes a
        child unusable now, or keeps the system from starting it, is waited out, however long it takes.
        """
        if life.code == NODE_FAULT:
            return None
        if life.seconds >= self._restarts.healthy or life.forgiven:
            self._stillborn = self._at_work = self._repairs = 0
        if life.why in ("unusable", "not_started"):
            if was_ready:
                self._repairs += 1
                return self._restarts.pause_of_repair(self._repairs)
            if isinstance(life.code, int) or not is_transient(life.code):
                return None
        self._repairs = 0
        if life.worked:
            self._stillborn, self._at_work = 0, self._at_work + 1
        else:
            self._stillborn += 1
        return self._restarts.pause(self._stillborn, self._at_work)
