"""Watchdog with a fake child, in whole seconds of counted time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from npuserve.service.config import ServerConfig
from npuserve.service.processes import process_control
from npuserve.service.processes.child import EXIT_NODE_FAULT
from npuserve.service.supervisor.child_process import ChildProcess
from npuserve.service.supervisor.metrics_page import MetricsPage
from npuserve.service.supervisor.supervisor import Supervisor
from npuserve.service.supervisor.watchdog import MIN_START_SECONDS, Watchdog


class FakeChild(ChildProcess):
    """Child that always runs and never sends a heartbeat. killed_at: its age when it was killed."""

    killed_at = 0.0

    def __init__(self, name: str):
        super().__init__(name, (), {}, dict, lambda child, event: None)

    @property
    def is_running(self) -> bool:
        return True

    def kill_hung(self) -> None:
        self.is_hung, self.killed_at = True, self.age


class FakePage:
    def loading(self, seconds: float) -> None:
        pass


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs the watchdog until a child cannot be killed, at most 1000 seconds."""
    monkeypatch.setattr(process_control.OrphanReaper, "reap", lambda reaper, pids: None)

    def run(engine: ChildProcess, front: ChildProcess, hang_seconds: float) -> None:
        seconds = 0

        async def sleep(every: float) -> None:
            nonlocal seconds
            seconds += 1
            if seconds == 1000:
                raise asyncio.CancelledError

        monkeypatch.setattr(asyncio, "sleep", sleep)
        one = Watchdog(ServerConfig(hang_seconds=hang_seconds), engine, lambda: [engine, front])
        asyncio.run(one.run(cast(MetricsPage, cast(Any, FakePage()))))

    return run


def test_watchdog_load_limit_has_its_minimum() -> None:
    """Hosts wait longer for each other than an engine usually loads."""
    engine = FakeChild("engine")
    one = Watchdog(ServerConfig(), engine, lambda: [engine], min_load_seconds=600.0)
    engine.started_at = time.monotonic()
    one.engine_ready()
    assert one.load_limit == 600.0


@pytest.mark.parametrize(("hang_seconds", "limit"), [(5.0, MIN_START_SECONDS), (60.0, 60.0)])
def test_watchdog_front_end_without_first_heartbeat_is_killed(
    watch: Callable[..., None], hang_seconds: float, limit: float
) -> None:
    """An engine may load for longer."""
    engine, front = FakeChild("engine"), FakeChild("frontend-0")
    watch(engine, front, hang_seconds)
    assert front.killed_at == limit
    assert not engine.is_hung


def test_watchdog_front_end_with_heartbeats_may_wait_for_the_engine(watch: Callable[..., None]) -> None:
    class Beating(FakeChild):
        def tick(self, seconds: float) -> None:
            self._heartbeats += 1
            super().tick(seconds)

    front = Beating("frontend-0")
    with pytest.raises(asyncio.CancelledError):
        watch(FakeChild("engine"), front, 5.0)
    assert not front.is_hung


async def test_supervisor_watchdog_that_fails_is_logged_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """The second run finds a child that cannot be killed, which ends the server."""
    runs: list[Exception | ChildProcess] = [ValueError("bug"), FakeChild("engine")]

    class FailingWatchdog:
        async def run(self, page: object) -> ChildProcess:
            if isinstance(found := runs.pop(0), Exception):
                raise found
            return found

    supervisor = Supervisor(ServerConfig())
    supervisor._watchdog, supervisor._page = cast(Watchdog, FailingWatchdog()), cast(MetricsPage, cast(Any, FakePage()))
    supervisor._exit_code = asyncio.get_running_loop().create_future()
    await supervisor._watch()
    assert supervisor._exit_code.result() == EXIT_NODE_FAULT
    failed, stuck = caplog.records
    assert (failed.message, stuck.message) == ("watchdog: failed, starting again", "engine cannot be killed, giving up")
    assert failed.__dict__["fields"]["exception_type"] == "ValueError"
