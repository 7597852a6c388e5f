"""Results of the checks that a device makes of its host before the start."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "advice", "warning", "error"]


class Notice(NamedTuple):
    """Result of one check.

    level: error: the server does not start. warning: logged at the start. advice, ok: shown by `npuserve check`.
    said: the value, or one sentence with the remedy.
    """

    level: Level
    name: str
    said: str
