"""Supervisor with fake children (tests/support/fake_child.py), in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.supervisor.supervisor import Restarts, Supervisor
from tests.support.processes import free_port, is_running, until

FAKE = Path(__file__).parents[2] / "support" / "fake_child.py"

DRIVER = """
import asyncio, json, sys
import msgspec
from npuserve.service import logs
from npuserve.service.supervisor import supervisor, watchdog
from npuserve.service.config import ServerConfig
journal, fake, front, engine, settings = sys.argv[1:]
settings = json.loads(settings)
hang = settings.pop("hang_seconds", 60.0)
check = settings.pop("check_seconds", watchdog.CHECK_SECONDS)
stop = settings.pop("stop_seconds", 10.0)
config = ServerConfig(model=".", metrics_port=0, log_format="json", **settings)
msgspec.structs.force_setattr(config, "hang_seconds", hang)  # below the minimum: the fake sends heartbeats quickly
logs.setup(config, "supervisor")
supervisor.FRONTEND_STOP_SECONDS = supervisor.ENGINE_STOP_SECONDS = stop
watchdog.CHECK_SECONDS = check
command = lambda name, behaviour: [sys.executable, "-S", fake, name, journal, *behaviour.split()]
sys.exit(asyncio.run(supervisor.Supervisor(
    config, frontend=command("front", front), engine=command("engine", engine),
    restarts=supervisor.Restarts(
        start_pause=0.01, max_start_pause=0.04, deaths=5, crash_pause=0.01, max_crash_pause=0.04)).run()))
"""


class Run:
    """Running supervisor, with its log and the journal of its children."""

    def __init__(self, folder: Path, front: str, engine: str, settings: dict[str, Any]):
        self.journal_file, self.log_file = folder / "journal", folder / "log"
        self.journal_file.touch()
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, self.journal_file, FAKE, front, engine, json.dumps(settings)],
                stderr=log, stdout=log)

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def said(self, pattern: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if re.search(pattern, line["message"])]

    def journal(self, name: str = "", what: str = "") -> list[tuple[str, str, dict[str, Any]]]:
        entries = [tuple(json.loads(line)) for line in self.journal_file.read_text().splitlines()]
        return [entry for entry in entries if entry[0].startswith(name) and entry[1].startswith(what)]

    def until(self, condition: Callable[[], Any]) -> Any:
        def found() -> Any:
            with contextlib.suppress(json.JSONDecodeError):  # the last line may be incomplete
                return condition()

        return until(found, lambda: (self.log_file.read_text(), self.journal_file.read_text()))

    def until_up(self, fronts: int = 1) -> None:
        self.until(lambda: self.said("ready in") and self.said("listening on"))
        self.until(lambda: len(self.journal("front", "started")) >= fronts)

    def folder(self) -> Path:
        return Path(self.journal("", "started")[0][2]["metrics"])

    def suspend(self, name: str) -> None:
        """Send SIGSTOP to the last process of that name, once it has sent a heartbeat."""
        self.until(lambda: self.journal(name)[-1][1] == "beating")
        os.kill(self.journal(name, "started")[-1][2]["pid"], signal.SIGSTOP)

    def alive(self) -> list[int]:
        return [facts["pid"] for _, _, facts in self.journal("", "started") if is_running(facts["pid"])]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs = []

    def start(front: str = "live", engine: str = "live", **settings: Any) -> Run:
        runs.append(Run(tmp_path, front, engine, {"port": 0, "drain_seconds": 5} | settings))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        if run.journal("", "started"):
            shutil.rmtree(run.folder(), ignore_errors=True)


def test_restarts_failed_starts_double_pause_until_limit() -> None:
    restarts = Restarts(start_pause=0.5, max_start_pause=30, healthy=60, deaths=10)
    assert [restarts.pause(n, 7) for n in range(1, 11)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, None]


def test_restarts_crashes_have_short_pauses_and_higher_limit() -> None:
    restarts = Restarts(crash_pause=0.5, max_crash_pause=2, max_crashes=7)
    assert [restarts.pause(0, n) for n in range(1, 8)] == [0.5, 1, 1.5, 2, 2, 2, None]


def test_supervisor_children_get_arguments_and_private_folder(supervise: Callable[..., Run]) -> None:
    run = supervise(max_num_seqs=3)
    run.until_up()
    (_, _, front), (_, _, engine) = run.journal("front", "started")[0], run.journal("engine", "started")[0]
    address = f"{run.folder()}/engine.sock"
    config = front["arguments"].pop("config")
    assert config["max_num_seqs"] == 3
    assert abs(front["arguments"].pop("start_date") - time.time()) < 600
    assert 0 <= time.monotonic() - front["arguments"].pop("started") < 600
    assert front["arguments"] == {
        "index": 0, "engine_address": address, "port": 0, "heartbeat": True,
        "folder": ".", "last_good": str(run.folder()),
        "gateway_pid": 0, "gateway_port": -1}
    assert engine["arguments"].pop("memory") >= -1
    assert abs(engine["arguments"].pop("start_date") - time.time()) < 600
    assert 0 <= time.monotonic() - engine["arguments"].pop("started") < 600
    assert [engine["arguments"].pop(name) for name in ("rank_memory", "shared_weights", "kernels")] == [[], None, None]
    assert engine["arguments"] == {
        "config": config, "folder": ".", "address": address, "epoch": 1, "heartbeat": True,
        "served_name": Path.cwd().name, "capture_failed": "", "capture": ""}
    assert front["mode"] == "0o40700"
    assert front["metrics"] == engine["metrics"]
    assert (front["spin"], engine["spin"]) == (None, "1000")
    # The terminal's Ctrl-C reaches only the supervisor's process group. One session is one scheduling group.
    assert all(facts["group"] == facts["pid"] for facts in (front, engine))
    assert all(facts["session"] == os.getsid(0) for facts in (front, engine))
    assert run.said("listening on 127.0.0.1:4242$")
    description = json.loads((run.folder() / "server.json").read_text())  # for npuserve collect
    assert (description["pid"], description["address"], description["settings"]["max_num_seqs"]) == (
        run.process.pid, "127.0.0.1:4242", 3)
    assert run.said(r"ready in \d+\.\d s")[0]["kv_cache_tokens"] == 77
    assert run.said("engine said")[0]["text"] == "output of a library"
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 0
    assert not run.folder().exists()


def test_supervisor_drain_stops_front_ends_before_engine(supervise: Callable[..., Run]) -> None:
    run = supervise(front="live:0.3")
    run.until_up()
    run.process.terminate()
    assert run.process.wait(60) == 0
    assert [entry for entry in run.journal() if entry[1] not in ("started", "beating")] == [
        ("front", "stopping", {"drain": 5.0}), ("front", "stopped", {}),
        ("engine", "stopping", {"stop": True}), ("engine", "stopped", {})]


@pytest.mark.slow
def test_supervisor_drain_requested_by_front_end(supervise: Callable[..., Run]) -> None:
    """AdminService.Drain starts the drain. A first signal after it changes nothing."""
    run = supervise(front="live drain:7", frontends=2, engine="live:0.3")
    run.until(lambda: run.journal("engine", "stopping"))
    run.process.terminate()
    assert run.process.wait(60) == 0
    assert [facts for _, _, facts in run.journal("front", "stopping")] == [{"drain": 7.0}] * 2
    assert len(run.journal("engine", "stopped")) == 1


@pytest.mark.slow
def test_supervisor_hung_child_is_restarted(supervise: Callable[..., Run]) -> None:
    """A main loop that is blocked in a call, from its first step on, and a suspended process. Others keep running."""
    run = supervise(engine="hang:0 live", front="hang live", hang_seconds=1.0)
    run.until(lambda: len(run.journal("engine", "started")) == len(run.journal("front", "started")) == 2)
    run.until_up()
    hung = {line["message"] for line in run.said("hangs")}
    assert hung == {"engine hangs, killing it", "frontend-0 hangs, killing it"}
    assert all(line["seconds"] >= 1.0 for line in run.said("hangs"))
    assert {line["code"] for line in run.said("died")} == {-signal.SIGKILL}
    run.until(lambda: len(run.said("ready in")) >= 2)
    run.suspend("engine")
    run.until(lambda: len(run.journal("engine", "started")) == 3)
    assert len(run.journal("front", "started")) == 2
    page = urllib.request.urlopen(run.said("listening on")[0]["metrics"]).read().decode()
    assert "npuserve_engine_restarts_total 2.0" in page
    # The checks that find the front end hanging also check the third engine, which sends heartbeats.
    run.suspend("front")
    run.until(lambda: len(run.journal("front", "started")) == 3)
    assert len(run.journal("engine", "started")) == 3


@pytest.mark.slow
def test_supervisor_death_in_long_step_counts_as_crash(supervise: Callable[..., Run]) -> None:
    """An engine that was ready and dies in a step longer than the check interval counts as crashed."""
    run = supervise(engine="step:0.15", check_seconds=0.02)
    run.until(lambda: len(run.journal("engine", "started")) == 7)  # more than the five failed starts that are allowed
    assert [line["pause"] for line in run.said("engine died")][:6] == [0.0] * 6
    assert not run.said("giving up")


@pytest.mark.slow
def test_supervisor_restarted_engine_gets_kernels_of_first(supervise: Callable[..., Run]) -> None:
    """Later engines get the CPU kernels of the first engine that was ready, whatever they report themselves."""
    run = supervise(engine="exit:1 step:0.05 step:0.05 step:0.05 live")
    run.until(lambda: len(run.journal("engine", "started")) == 5)
    given = [facts["arguments"]["kernels"] for _, _, facts in run.journal("engine", "started")]
    assert given == [None, None, {"run": 2}, {"run": 2}, {"run": 2}]


@pytest.mark.slow
def test_supervisor_engines_after_failed_capture_get_the_reason_and_the_mode(supervise: Callable[..., Run]) -> None:
    run = supervise(engine="exit:1 uncaptured:3 step:0.05 live")
    run.until(lambda: len(run.journal("engine", "started")) == 4)
    given = [(facts["arguments"]["capture_failed"], facts["arguments"]["capture"])
             for _, _, facts in run.journal("engine", "started")]
    assert given == [("", ""), ("", ""), ("no graphs here", "decoder"), ("no graphs here", "decoder")]


@pytest.mark.slow
def test_supervisor_suspended_machine_is_no_hang(supervise: Callable[..., Run]) -> None:
    """A suspended supervisor does not take the time as silence of its children, whether they are suspended too or not.
    """
    hang = 0.8
    run = supervise(front="live", engine="live", hang_seconds=hang)
    run.until_up()
    for pids in ([run.process.pid], [run.process.pid, *run.alive()]):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.2 * hang)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        time.sleep(hang / 2)  # two checks
    assert not run.said("hangs")
    assert len(run.journal("", "started")) == 2


@pytest.mark.slow
def test_supervisor_noisy_child_is_no_hang(supervise: Callable[..., Run]) -> None:
    """Heartbeats reach the supervisor between the lines of other output."""
    run = supervise(engine="noisy", hang_seconds=0.5)
    run.until_up()
    run.until(lambda: len(run.said("engine said")) > 900)
    time.sleep(0.8)
    assert not run.said("hangs")


@pytest.mark.slow
def test_supervisor_repeated_hangs_gives_up(supervise: Callable[..., Run]) -> None:
    run = supervise(engine="hang:2", hang_seconds=0.2)
    assert run.process.wait(60) == 1
    assert len(run.journal("engine", "started")) == 5
    # Without an engine there is nothing to drain.
    assert [facts for _, _, facts in run.journal("front", "stopping")] == [{"drain": 0.0}]


def test_supervisor_engine_death_restarts_engine(supervise: Callable[..., Run]) -> None:
    run = supervise(engine="exit:1 exit:-9 live")
    run.until_up()
    assert [facts["arguments"]["epoch"] for _, _, facts in run.journal("engine", "started")] == [1, 2, 3]
    assert len(run.journal("front", "started")) == 1
    assert [line["pause"] for line in run.said("engine died")] == [0.01, 0.02]
    page = urllib.request.urlopen(run.said("listening on")[0]["metrics"]).read().decode()
    assert "npuserve_engine_restarts_total 2.0" in page
    assert re.search(r'npuserve_build_info\{backend="cpu",model="[^"]+",torch="[\d.]+.*",version="[\d.]+"\} 1.0', page)


def test_supervisor_restarted_front_end_gets_same_port(supervise: Callable[..., Run]) -> None:
    run = supervise()
    run.until_up()
    os.kill(run.journal("front", "started")[0][2]["pid"], signal.SIGKILL)
    run.until(lambda: len(run.journal("front", "started")) == 2)
    assert [facts["arguments"]["port"] for _, _, facts in run.journal("front", "started")] == [0, 4242]
    assert run.said("frontend-0 died")[0]["code"] == -signal.SIGKILL
    assert len(run.journal("engine", "started")) == 1


@pytest.mark.slow
def test_supervisor_repeated_crashes_are_restarted(supervise: Callable[..., Run]) -> None:
    run = supervise()
    for count in range(1, 9):  # more than the five failed starts that are allowed
        run.until(lambda count=count: len(run.said("^ready in")) == count)
        os.kill(run.journal("engine", "started")[-1][2]["pid"], signal.SIGKILL)
    run.until(lambda: len(run.journal("engine", "started")) == 9)
    assert all(line["pause"] < 0.04 for line in run.said("engine died"))


@pytest.mark.slow
def test_supervisor_repeated_failed_starts_gives_up(supervise: Callable[..., Run]) -> None:
    run = supervise(engine="exit:3")
    assert run.process.wait(60) == 1
    assert len(run.journal("engine", "started")) == 5
    assert [line["pause"] for line in run.said("engine died")] == [0.01, 0.02, 0.04, 0.04]
    (last,) = run.said("giving up")
    assert (last["level"], last["code"]) == ("error", 3)
    assert not run.alive()


@pytest.mark.slow
def test_supervisor_crashes_of_a_found_request_do_not_count(supervise: Callable[..., Run]) -> None:
    """Four crashes, then one of the run that found the request, twice. Five in a row end the server."""
    run = supervise(engine="exit:3 exit:3 exit:3 exit:3 killer exit:3 exit:3 exit:3 killer exit:3")
    assert run.process.wait(60) == 1
    assert len(run.journal("engine", "started")) == 13
    assert [line["pause"] for line in run.said("engine died")][4] == 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("children", "code"), [({"engine": "exit:2"}, 2), ({"front": "exit:2"}, 2),
                                                ({"engine": "exit:4"}, 4)])
def test_supervisor_fatal_exit_code_stops_server(
    supervise: Callable[..., Run], children: dict[str, str], code: int
) -> None:
    """An unusable configuration, or a device fault."""
    run = supervise(**children)
    assert run.process.wait(60) == code
    assert all(len(run.journal(name, "started")) <= 1 for name in ("front", "engine"))
    assert not run.alive()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["front", "engine"])
def test_supervisor_unusable_after_ready_is_retried(
    supervise: Callable[..., Run], name: str
) -> None:
    """It is retried more often than a process may fail to start."""
    run = supervise(**{name: f"live {'exit:2 ' * 7}live"})
    run.until_up()
    run.until(lambda: run.said("^ready in"))
    os.kill(run.journal(name, "started")[0][2]["pid"], signal.SIGKILL)
    run.until(lambda: len(run.said("^ready in")) == 2)
    assert len(run.journal(name, "started")) == 9
    assert [line["why"] for line in run.said("died")] == ["died", *["unusable"] * 7]
    assert [line["pause"] for line in run.said("died")][1:] == [0.01, 0.02] + [0.04] * 5
    run.process.terminate()
    assert run.process.wait(60) == 0


@pytest.mark.slow
def test_supervisor_drain_timeout_kills_children(supervise: Callable[..., Run]) -> None:
    run = supervise(front="deaf", engine="deaf", drain_seconds=0.1, stop_seconds=0.2)
    run.until_up()
    run.process.terminate()
    assert run.process.wait(60) == 1
    assert not run.alive()
    assert not run.folder().exists()


@pytest.mark.slow
def test_supervisor_second_signal_kills_children(supervise: Callable[..., Run]) -> None:
    run = supervise(front="live:600", drain_seconds=600)
    run.until_up()
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: run.journal("front", "stopping"))
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 1
    assert not run.alive()


@pytest.mark.slow
def test_supervisor_signal_during_restart_stops_server(supervise: Callable[..., Run]) -> None:
    run = supervise(engine="exit:1")
    run.until(lambda: run.journal("engine", "started"))
    run.process.terminate()
    assert run.process.wait(60) == 0
    assert not run.alive()


def test_supervisor_death_ends_children(supervise: Callable[..., Run]) -> None:
    run = supervise(frontends=2)
    run.until_up(fronts=2)
    run.process.kill()
    run.until(lambda: len(run.journal("", "orphaned")) == 3)
    run.until(lambda: not run.alive())


@pytest.mark.slow
def test_supervisor_front_ends_share_port_of_first(supervise: Callable[..., Run]) -> None:
    run = supervise(frontends=3)
    run.until_up(fronts=3)
    ports = {facts["arguments"]["index"]: facts["arguments"]["port"] for _, _, facts in run.journal("front", "started")}
    assert ports == {0: 0, 1: 4242, 2: 4242}
    assert len(run.said("listening on")) == 1
    run.process.terminate()
    assert run.process.wait(60) == 0
    assert len(run.journal("front", "stopped")) == 3


def serve(*arguments: str) -> tuple[int, list[str]]:
    """Run `npuserve serve`. Return its exit code, and the lines of stderr that are not log lines."""
    command = [sys.executable, "-m", "npuserve.cli", "serve", "--port", "0", "--log-format", "json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("{")]


async def test_supervisor_full_disk_refuses_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 30, 0, 5 << 10))
    with pytest.raises(ConfigError, match=r"^TMPDIR: .* has 5 KiB free; 16 MiB are needed$"):
        await Supervisor(ServerConfig(port=free_port(), metrics_port=0)).run()


def test_serve_missing_model_prints_one_line(tmp_path: Path) -> None:
    code, lines = serve(str(tmp_path / "none"), "--metrics-port", "0")
    assert code == 2
    assert f"npuserve: model: there is no folder {tmp_path}/none" in lines


@pytest.mark.slow
def test_serve_taken_metrics_port_prints_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, lines = serve(str(tmp_path), "--metrics-port", str(port))
    assert (code, lines) == (2, [f"npuserve: metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use; "
                                 "end the program that has the port, or set another port"])
