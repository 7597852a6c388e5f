"""Child process whose start fails after the system has started it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from npuserve.service.supervisor.child_process import ChildProcess
from tests.support.processes import is_running, until


async def test_child_process_without_a_thread_for_its_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def add_child_handler(watcher: object, pid: int, *_: object) -> None:
        started.append(pid)
        raise RuntimeError("can't start new thread")

    for name, watcher in vars(asyncio.unix_events).items():
        if name.endswith("ChildWatcher"):
            monkeypatch.setattr(watcher, "add_child_handler", add_child_handler, raising=False)
    command = (sys.executable, "-S", "-c", "input()")
    with pytest.raises(RuntimeError, match="new thread"):
        await ChildProcess("child", command, os.environ, dict, lambda *_: None).run()
    await asyncio.to_thread(until, lambda: not is_running(started[0]))


@pytest.mark.parametrize("defers", [False, True])
async def test_child_process_started_again_begins_with_sigterm_blocked(defers: bool) -> None:
    """systemd sends SIGTERM to all processes, also to one that has not chosen yet how to handle it."""
    found: list[list[int]] = []
    program = "import json, signal; blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()); "
    program += "print(json.dumps({'event': 'blocked', 'blocked': sorted(blocked)}))"
    child = ChildProcess("child", (sys.executable, "-S", "-c", program), os.environ, dict,
                         lambda _, event: found.append(event["blocked"]), defers_sigterm=defers)
    for _ in range(2):
        await child.run()
    assert found == [[], [signal.SIGTERM] if defers else []]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
