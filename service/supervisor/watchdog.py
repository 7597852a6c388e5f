"""Watchdog of the child processes: kills hanging ones, and reports how long the engine has been loading."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection

from npuserve.service import logs
from npuserve.service.config import ServerConfig
from npuserve.service.processes import process_control
from npuserve.service.supervisor.child_process import ChildProcess
from npuserve.service.supervisor.metrics_page import MetricsPage, cpu_seconds, resident_bytes

log = logging.getLogger("npuserve.service.supervisor.supervisor")

CHECK_SECONDS = 1.0
"""Maximum time between two checks."""
MAX_KILL_SECONDS = 30.0
"""Maximum time from SIGKILL to the exit. A process that still exists is blocked in a driver and holds its device."""
MIN_LOAD_SECONDS = 60.0
"""Default of `min_load_seconds`."""
LOAD_FACTOR = 3
"""The limit is the time of the first load, multiplied by this."""
MIN_START_SECONDS = 30.0
"""Minimum limit of a front end's start, up to its first heartbeat. It takes a second or two on an idle machine."""
LOADING_LOG_SECONDS = 30.0
"""Time between two log lines about an engine that is still loading."""


class Watchdog:
    """Watchdog of the children of one supervisor.

    children: returns the children that were started.
    min_load_seconds: minimum limit of a load that is not the first, if load_seconds is 0.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: ChildProcess,
        children: Callable[[], Collection[ChildProcess]],
        min_load_seconds: float = MIN_LOAD_SECONDS,
    ):
        self._config = config
        self._engine = engine
        self._children = children
        self._min_load_seconds = min_load_seconds
        self._first_load = 0.0  # seconds; 0 until the engine was ready

    def engine_ready(self) -> None:
        """Measure the first load of the engine, for the limit of later ones."""
        self._first_load = self._first_load or time.monotonic() - self._engine.started_at

    @property
    def load_limit(self) -> float:
        """Return the maximum seconds of a load; infinite for the first load."""
        if not self._first_load:
            return math.inf
        return self._config.load_seconds or max(self._min_load_seconds, LOAD_FACTOR * self._first_load)

    @property
    def start_limit(self) -> float:
        """Return the maximum seconds from a front end's start to its first heartbeat."""
        return max(MIN_START_SECONDS, self._config.hang_seconds)

    async def run(self, page: MetricsPage) -> ChildProcess:
        """Kill children that hang, so that they are restarted. Return a child that SIGKILL does not end."""
        every = min(CHECK_SECONDS, self._config.hang_seconds / 4)
        orphans = process_control.OrphanReaper()
        while True:
            await asyncio.sleep(every)
            orphans.reap({child.pid for child in self._children()})
            for child in self._children():
                child.tick(every)
                if child.stopping.is_set():
                    continue
                if child.kill_seconds >= MAX_KILL_SECONDS:
                    return child
                if child.is_running and not child.is_hung:
                    self._kill_if_hung(child)
            self._report_load(every, page)

    def _kill_if_hung(self, child: ChildProcess) -> None:
        is_loading = child is self._engine and child.ready_event is None
        if child.silence >= self._config.hang_seconds:
            what = "hangs"
            seconds = child.silence
        elif is_loading and child.age >= self.load_limit:
            what = "hangs while loading"
            seconds = child.age
        elif child is not self._engine and not child.has_beaten and child.age >= self.start_limit:
            what = "hangs while starting"
            seconds = child.age
        else:
            return
        logs.event(log, f"{child.name} {what}, killing it", level=logging.ERROR, seconds=seconds)
        child.kill_hung()

    def _report_load(self, every: float, page: MetricsPage) -> None:
        """Publish how long the engine has been loading, and log it every LOADING_LOG_SECONDS."""
        engine = self._engine
        loading = engine.age if engine.is_running and engine.ready_event is None else 0.0
        page.loading(loading)
        if loading and loading % LOADING_LOG_SECONDS < every and loading >= LOADING_LOG_SECONDS:
            logs.event(log, "engine is still loading", seconds=loading, cpu_seconds=cpu_seconds(engine.pid),
                       resident_bytes=resident_bytes(engine.pid))
