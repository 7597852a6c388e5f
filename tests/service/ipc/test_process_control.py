"""Process attributes, each tested in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.processes import is_running, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")


def run(script: str) -> str:
    return subprocess.run([sys.executable, "-c", f"from npuserve.service.ipc.process_control import *\n{script}"],
                          capture_output=True, text=True, check=True, timeout=60).stdout


def test_die_with_parent_kills_stopped_child() -> None:
    child = ("from npuserve.service.ipc.process_control import *; import time; die_with_parent(); "
             "print(os.getpid(), flush=True); time.sleep(600)")
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        process.kill()
        process.wait()
        until(lambda: not is_running(pid))


def test_dumpable_returns_set_value() -> None:
    assert run("print(is_dumpable()); set_dumpable(False); print(is_dumpable()); set_dumpable(True); "
               "print(is_dumpable())").split() == ["True", "False", "True"]


def test_orphan_reaper_reaps_orphans_and_leaves_its_own() -> None:
    """Two calls reap 40 orphans. A child that is listed as own keeps its exit code."""
    assert run("""
import subprocess, time
adopt_orphans()
own = subprocess.Popen(["sh", "-c", "exit 7"])
subprocess.run(["sh", "-c", "for i in $(seq 40); do (sleep 0.2) & done"])
reaper, reaped = OrphanReaper(), 0
deadline = time.monotonic() + 30
while reaped < 40 and time.monotonic() < deadline:
    time.sleep(0.3)
    reaped += reaper.reap({own.pid})
print(reaped, own.wait())
""").split() == ["40", "7"]
