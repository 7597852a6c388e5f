"""Which request killed the engine: counted over the engine's lives by what was in the steps in flight at each death.

- A request that was in a fatal step gets one death more. In the next life it is on trial: it makes TRIAL_TOKENS tokens
  apart from all others (quarantine.py) before it runs beside them again.
- A request is the killer if it was alone in two fatal steps in a row, at the same place, and has MIN_DEATHS deaths. The
  same place is near the same token of the answer, or after about as many tokens of each life. A killer among up to
  MAX_TRIAL_STEPS // TRIAL_TOKENS requests is found at the third death: in company, alone, alone.
- A request that passed its trial in two lives, and was in a fatal step nevertheless, has a longer trial: as many tokens
  as it made in the last life, and TRIAL_TOKENS more. So a request that kills after that many tokens of each life is
  found, too. After one such life the killer may be another request, and the trial stays short.
- A request that made CLEAR_TOKENS tokens since its last death begins anew.

The counts are in a file beside the step log, which is replaced as a whole once in a life.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from npuserve.npu.step import Step
from npuserve.service import logs
from npuserve.service.engine.step_log import StepLog, name_of
from npuserve.service.errors import EngineKiller
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.quarantine import TRIAL_TOKENS
from npuserve.service.scheduling.sequence import Sequence

log = logging.getLogger(__name__)

MIN_DEATHS = 3
"""Deaths of the engine before a request is failed for them."""
NEAR_TOKENS = 2 * TRIAL_TOKENS
"""Two deaths this many tokens apart count as at the same place: tokens of the steps in flight are lost."""
CLEAR_TOKENS = 256
MAX_ENTRIES = 4096
"""The oldest are forgotten beyond this."""


class Entry(msgspec.Struct, array_like=True):
    """One request's deaths.

    deaths: of the engine, while the request was in a step in flight.
    trial: tokens to make apart from others, after the last death.
    tokens: of its answer at the last death.
    made: of these, in the life that ended so.
    is_alone: nobody else was in the steps in flight then.
    has_passed: it had passed a trial before one of the deaths.
    is_killer: it was found to be the killer.
    """

    deaths: int
    trial: int
    tokens: int
    made: int
    is_alone: bool = False
    has_passed: bool = False
    is_killer: bool = False


class Blame:
    """Judge of the requests that the engine's last life left.

    path: of the step log; "" keeps nothing. The counts are in `path`.counts.
    rows, places: see StepLog.
    found: called once for each killer.
    OSError where the files cannot be used.
    """

    def __init__(self, path: str = "", rows: int = 0, places: int = 0, found: Callable[[], None] = lambda: None):
        self._steps = StepLog(path, rows, places)
        self._file = Path(f"{path}.counts") if path else None
        self._found = found
        self._fatal = self._steps.read()
        self._judged: set[int] = set()  # in this life
        self._changed = False
        self._entries: dict[int, Entry] = {}
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            if self._file:
                self._entries = msgspec.msgpack.decode(self._file.read_bytes(), type=dict[int, Entry])

    def launched(self, step: Step, sequence: Callable[[int], Sequence], is_first: bool) -> None:
        """Note a step before its launch. See StepLog.write."""
        self._steps.write(step, sequence, is_first)

    def idle(self) -> None:
        """No step is in flight: a death is nobody's fault."""
        self._steps.clear()

    def judge(self, request: Request, tokens: int) -> Entry | None:
        """Return the deaths of a request that continues after `tokens` of its answer; None if it has no trial.

        Raises EngineKiller if it is the killer.
        """
        name = name_of(request)
        entry = self._entries.get(name)
        if name in self._fatal and name not in self._judged:
            self._judged.add(name)
            entry = self._entries[name] = self._blame(entry, tokens)
            self._changed = True
            if entry.is_killer:
                self._found()
                logs.event(log, "a request ends: the engine died of it", level=logging.ERROR, id=request.request_id,
                           deaths=entry.deaths, tokens=tokens)
        if entry is None:
            return None
        if entry.is_killer:
            raise EngineKiller(
                f"the engine died {entry.deaths} times while it ran this request, the last two times with no other")
        return entry if tokens - entry.tokens < entry.trial else None

    def save(self) -> None:
        """Write what `judge` has changed. A full disk is logged: the next life then judges by the old counts."""
        if not self._changed or self._file is None:
            return
        self._changed = False
        while len(self._entries) > MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]
        new = self._file.with_suffix(".new")
        try:
            new.write_bytes(msgspec.msgpack.encode(self._entries))
            os.replace(new, self._file)
        except OSError as error:
            logs.event(log, "deaths of the engine cannot be noted", level=logging.ERROR, error=str(error))

    def _blame(self, entry: Entry | None, tokens: int) -> Entry:
        """Return the entry after one more death."""
        is_alone = len(self._fatal) == 1
        if entry is None:
            return Entry(1, TRIAL_TOKENS, tokens, tokens, is_alone)
        made = tokens - entry.tokens
        if made >= CLEAR_TOKENS:
            return Entry(1, TRIAL_TOKENS, tokens, made, is_alone)
        passes = made >= entry.trial
        trial = made + TRIAL_TOKENS if passes and entry.has_passed else entry.trial
        near = made <= NEAR_TOKENS or abs(made - entry.made) <= TRIAL_TOKENS
        deaths = entry.deaths + 1
        return Entry(deaths, trial, tokens, made, is_alone, entry.has_passed or passes,
                     is_killer=is_alone and entry.is_alone and near and deaths >= MIN_DEATHS)
