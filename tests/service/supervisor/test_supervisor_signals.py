"""SIGHUP to a supervisor of fake children, and an engine that fails in a drain."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.service.supervisor.test_supervisor import Run, supervise
from tests.support.processes import ignores

__all__ = ["supervise"]


@pytest.mark.slow
@pytest.mark.usefixtures("without_nohup")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_supervisor_hangup_drains_and_is_no_second_signal(supervise: Callable[..., Run], number: int) -> None:
    """A terminal may send SIGHUP twice, and systemd with SendSIGHUP sends it after SIGTERM."""
    run = supervise(front="live:0.3")
    run.until_up()
    run.process.send_signal(number)
    run.until(lambda: run.journal("front", "stopping"))
    run.process.send_signal(signal.SIGHUP)
    assert run.process.wait(60) == 0
    assert [name for name, what, _ in run.journal() if what == "stopped"] == ["front", "engine"]
    assert not run.folder().exists()


@pytest.mark.slow
def test_supervisor_under_nohup_ignores_hangup(supervise: Callable[..., Run]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the supervisor inherits it
    try:
        run = supervise()
    finally:
        signal.signal(signal.SIGHUP, before)
    run.until_up()
    assert ignores(run.process.pid, signal.SIGHUP)


@pytest.mark.slow
def test_supervisor_engine_failed_for_good_in_a_drain_ends_the_drain(supervise: Callable[..., Run]) -> None:
    run = supervise(front="streaming", engine="live exit:4", drain_seconds=600)
    run.until_up()
    run.process.terminate()
    run.until(lambda: run.journal("front", "draining"))
    os.kill(run.journal("engine", "started")[0][2]["pid"], signal.SIGKILL)
    assert run.process.wait(60) == 4
    assert len(run.journal("front", "stopped")) == 1
