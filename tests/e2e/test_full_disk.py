"""A full file system of TMPDIR while a server runs: it costs metrics for a time, and no request."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving import server as bench_server
from tests.e2e.processes import processes, until
from tests.e2e.server import Server, request, serving, streamed
from tests.e2e.test_deaths import wait_until_running
from tests.e2e.test_lifecycle import is_serving

pytestmark = pytest.mark.slow

SUDO = [] if os.geteuid() == 0 else ["sudo", "-n"]


class Filler:
    """Thread that takes all space of a folder's file system, also what becomes free, until `stop`."""

    def __init__(self, folder: Path):
        self._file = folder / "filler"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()
        until(self.is_full)

    def is_full(self) -> bool:
        state = os.statvfs(self._file.parent)
        return state.f_bavail == 0

    def stop(self) -> None:
        """Free the space."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._file.unlink(missing_ok=True)

    def _run(self) -> None:
        with self._file.open("wb", buffering=0) as file:
            while not self._stopped.wait(0.001):
                with contextlib.suppress(OSError):
                    while file.write(bytes(4096)):
                        pass


def children_of(server: Server) -> dict[int, str]:
    """Return process id -> kind of the server's children."""
    return bench_server.children(server.process.pid)


def is_replaced(server: Server, killed: int, kind: str) -> bool:
    living = list(children_of(server).values())
    return killed not in children_of(server) and living.count(kind) == (2 if kind == "frontend" else 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 20 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size=20m,mode=0700,uid={os.geteuid()}"
    try:
        subprocess.run([*SUDO, "mount", "-t", "tmpfs", "-o", options, "none", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run([*SUDO, "umount", "-l", folder], check=True)


def test_full_disk_while_processes_are_restarted_fails_no_request(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full before the engine and a front end are killed, and until requests of all kinds were served."""
    monkeypatch.setenv("TMPDIR", str(small_disk))
    filler = Filler(small_disk)
    ask = request("Once upon a time", 200, ignore_eos=True)
    with serving("--dtype", "float32", "--frontends", "2") as server, contextlib.ExitStack() as stack:
        stack.callback(filler.stop)
        alone = streamed(server.stub, ask)[:2]
        filler.start()
        tokens = server.metric("npuserve_generation_tokens_total")
        answer = server.stub.Generate.future(ask, timeout=100)
        wait_until_running(server)
        for kind in ("engine", "frontend"):
            killed = processes(server, kind)[-1]
            os.kill(killed, signal.SIGKILL)
            until(lambda killed=killed, kind=kind: is_replaced(server, killed, kind), server)
            if kind == "engine":
                assert answer.result().text == alone[0]
        until(lambda: is_serving(server), server)
        living = children_of(server)
        for _ in range(4):
            assert streamed(server.stub, ask)[:2] == alone
        chosen = request("A cat", 20)
        chosen.regex = "red|blue"
        assert server.stub.Generate(chosen, timeout=100).text in ("red", "blue")
        assert filler.is_full()
        assert children_of(server) == living
        filler.stop()
        until(lambda: server.metric("npuserve_generation_tokens_total") >= tokens + 4 * 200, server)
        until(lambda: server.metric("npuserve_metrics_files_full_total") == 2, server)
        assert server.metric("npuserve_engine_restarts_total") == 1
        lines = [json.loads(line)["message"] for line in server.log.splitlines()]
        assert lines.count("no space for metrics, which wait in memory") == 2
        until(lambda: server.log.count("metrics are written again") == 2, server)
        assert server.stop() == 0
