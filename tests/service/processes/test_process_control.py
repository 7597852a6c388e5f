"""Process attributes, each tested in a process of its own, and scheduler slices as the kernel reports them."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from npuserve.service.processes import process_control
from npuserve.service.processes.process_control import SLICE_ATTRIBUTES, SLICE_SECONDS, request_slice
from tests.support.processes import is_running, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")

GET_ATTRIBUTES = {"x86_64": 315, "aarch64": 275}


def run(script: str) -> str:
    return subprocess.run([sys.executable, "-c", f"from npuserve.service.processes.process_control import *\n{script}"],
                          capture_output=True, text=True, check=True, timeout=60).stdout


def test_die_with_parent_kills_stopped_child() -> None:
    child = ("from npuserve.service.processes.process_control import *; import time; die_with_parent(); "
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
deadline = time.monotonic() + 60
while reaped < 40 and time.monotonic() < deadline:
    time.sleep(0.3)
    reaped += reaper.reap({own.pid})
print(reaped, own.wait())
""").split() == ["40", "7"]


def test_orphan_reaper_reaps_what_was_a_zombie_at_two_calls(tmp_path: Path) -> None:
    """Until then another thread may wait for it. Its name looks like the fields that follow a name in /proc."""
    name = tmp_path / "a) R b"
    name.symlink_to(shutil.which("cat") or "/bin/cat")
    assert run(f"""
import subprocess
child, reaper = subprocess.Popen([{str(name)!r}], stdin=subprocess.PIPE), OrphanReaper()
running = reaper.reap(())
child.stdin.close()
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
print(running, [reaper.reap(()) for _ in range(3)])
""") == "0 [0, 1, 0]\n"


def slice_and_nice() -> tuple[float, int]:
    attributes = ctypes.create_string_buffer(SLICE_ATTRIBUTES.size)
    number = GET_ATTRIBUTES[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, attributes, SLICE_ATTRIBUTES.size, 0) == 0
    found = SLICE_ATTRIBUTES.unpack(attributes.raw)
    return found[5] / 1e9, found[3]


def in_a_thread(work: object) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))  # type: ignore[operator]
    thread.start()
    thread.join()
    return found


def test_request_slice_applies_to_thread_and_its_threads_only() -> None:
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    if platform.system() != "Linux" or platform.machine() not in GET_ATTRIBUTES or release < (6, 12):
        pytest.skip("needs Linux 6.12 on x86_64 or aarch64")
    before = slice_and_nice()

    def asking() -> object:
        assert request_slice()
        found = slice_and_nice(), in_a_thread(slice_and_nice)
        assert request_slice(0)
        return *found, slice_and_nice()

    asked = (SLICE_SECONDS, os.getpriority(os.PRIO_PROCESS, 0))
    assert in_a_thread(asking) == [(asked, [asked], before)]
    assert slice_and_nice() == before != asked


def test_request_slice_keeps_another_scheduling_policy() -> None:
    assert run("os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); "
               "print(request_slice(), os.sched_getscheduler(0) == os.SCHED_BATCH)").split() == ["False", "True"]


def test_request_slice_unsupported_system_returns_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_control.platform, "machine", lambda: "riscv64")
    assert not request_slice()
    monkeypatch.undo()
    monkeypatch.setattr(process_control.platform, "system", lambda: "Darwin")
    assert not request_slice()
