"""The supervisor with children that live, die and obey as told (fake_child.py), in a process of its own."""

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

FAKE = Path(__file__).parents[2] / "support" / "fake_child.py"

DRIVER = """
import asyncio, json, sys
import msgspec
from npuserve.service import logs
from npuserve.service.supervisor import supervisor
from npuserve.service.config import ServerConfig
journal, fake, front, engine, settings = sys.argv[1:]
settings = json.loads(settings)
hang = settings.pop("hang_seconds", 60.0)
look = settings.pop("look_seconds", supervisor.LOOK_SECONDS)
config = ServerConfig(model=".", metrics_port=0, log_format="json", **settings)
msgspec.structs.force_setattr(config, "hang_seconds", hang)  # less than it takes: the fake's heart beats quickly
logs.setup(config, "supervisor")
supervisor.FRONTEND_MARGIN = supervisor.ENGINE_PATIENCE = 0.5
supervisor.LOOK_SECONDS = look
command = lambda name, behaviour: [sys.executable, "-S", fake, name, journal, *behaviour.split()]
sys.exit(asyncio.run(supervisor.Supervisor(
    config, frontend=command("front", front), engine=command("engine", engine),
    restarts=supervisor.Restarts(first=0.01, longest=0.04, deaths=5, again=0.01, again_longest=0.04)).run()))
"""


class Run:
    """A supervisor at work; its log and its children's journal."""

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
        deadline = time.monotonic() + 30
        while True:
            # Its last line may be half written.
            with contextlib.suppress(json.JSONDecodeError):
                if found := condition():
                    return found
            assert time.monotonic() < deadline, (self.log_file.read_text(), self.journal_file.read_text())
            time.sleep(0.01)

    def until_up(self, fronts: int = 1) -> None:
        self.until(lambda: self.said("ready in") and self.said("listening on"))
        self.until(lambda: len(self.journal("front", "started")) >= fronts)

    def folder(self) -> Path:
        return Path(self.journal("", "started")[0][2]["metrics"])

    def stop_beating(self, name: str) -> None:
        """SIGSTOP to the last process of that name, once it has beaten."""
        facts = self.journal(name, "started")[-1][2]
        self.until(lambda: any(Path(facts["arguments"]["pulse"]).read_bytes()))
        os.kill(facts["pid"], signal.SIGSTOP)

    def alive(self) -> list[int]:
        return [facts["pid"] for _, _, facts in self.journal("", "started") if Path(f"/proc/{facts['pid']}").exists()]


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


def test_pauses_double_up_to_the_longest_and_end() -> None:
    restarts = Restarts(first=0.5, longest=30, healthy=60, deaths=10)
    assert [restarts.pause(n, 7) for n in range(1, 11)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, None]


def test_who_dies_at_work_is_back_soon_and_often() -> None:
    restarts = Restarts(again=0.5, again_longest=2, deaths_at_work=7)
    assert [restarts.pause(0, n) for n in range(1, 8)] == [0.5, 1, 1.5, 2, 2, 2, None]


def test_children_get_their_arguments_and_a_private_folder(supervise: Callable[..., Run]) -> None:
    run = supervise(max_num_seqs=3)
    run.until_up()
    (_, _, front), (_, _, engine) = run.journal("front", "started")[0], run.journal("engine", "started")[0]
    address = f"{run.folder()}/engine.sock"
    config = front["arguments"].pop("config")
    assert config["max_num_seqs"] == 3
    assert front["arguments"] == {
        "index": 0, "engine_address": address, "port": 0, "pulse": f"{run.folder()}/frontend-0.pulse",
        "folder": ".", "last_good": str(run.folder())}
    assert engine["arguments"].pop("memory") >= -1
    assert engine["arguments"].pop("left") is None
    assert engine["arguments"].pop("kernels") is None
    assert engine["arguments"] == {
        "config": config, "folder": ".", "address": address, "epoch": 1, "pulse": f"{run.folder()}/engine.pulse"}
    assert front["mode"] == "0o40700"
    assert front["metrics"] == engine["metrics"]
    assert (front["spin"], engine["spin"]) == (None, "1000")
    # The terminal's Ctrl-C goes to the supervisor's session alone.
    assert all(facts["session"] == facts["pid"] for facts in (front, engine))
    assert run.said("listening on 127.0.0.1:4242$")
    assert run.said(r"ready in \d+\.\d s")[0]["kv_cache_tokens"] == 77
    assert run.said("engine said")[0]["text"] == "a library's chatter"
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(20) == 0
    assert not run.folder().exists()


def test_drain_ends_the_front_ends_before_the_engine(supervise: Callable[..., Run]) -> None:
    run = supervise(front="live:0.3")
    run.until_up()
    run.process.terminate()
    assert run.process.wait(20) == 0
    assert [entry for entry in run.journal() if entry[1] != "started"] == [
        ("front", "asked", {"drain": 5.0}), ("front", "left", {}), ("engine", "asked", {}), ("engine", "left", {})]


def test_a_front_end_asks_for_a_drain(supervise: Callable[..., Run]) -> None:
    """AdminService.Drain; the first signal after it changes nothing."""
    run = supervise(front="live drain:7", frontends=2, engine="live:0.3")
    run.until(lambda: run.journal("engine", "asked"))
    run.process.terminate()
    assert run.process.wait(20) == 0
    assert [facts for _, _, facts in run.journal("front", "asked")] == [{"drain": 7.0}] * 2
    assert len(run.journal("engine", "left")) == 1


def test_who_hangs_is_killed_and_started_again(supervise: Callable[..., Run]) -> None:
    """Its loop stands still, be it stuck in a call or stopped; nobody else is touched."""
    run = supervise(engine="hang live", front="hang live", hang_seconds=1.0)
    run.until(lambda: len(run.journal("engine", "started")) == len(run.journal("front", "started")) == 2)
    run.until_up()
    hung = {line["message"] for line in run.said("hangs")}
    assert hung == {"engine hangs, killing it", "frontend-0 hangs, killing it"}
    assert all(line["seconds"] >= 1.0 for line in run.said("hangs"))
    assert {line["code"] for line in run.said("died")} == {-signal.SIGKILL}
    run.until(lambda: len(run.said("ready in")) >= 2)
    run.stop_beating("engine")
    run.until(lambda: len(run.journal("engine", "started")) == 3)
    assert len(run.journal("front", "started")) == 2
    page = urllib.request.urlopen(run.said("listening on")[0]["metrics"]).read().decode()
    assert "npuserve_engine_restarts_total 2.0" in page
    # The looks that find the front end hanging are looks at the third engine too, and find that it beats.
    run.stop_beating("front")
    run.until(lambda: len(run.journal("front", "started")) == 3)
    assert len(run.journal("engine", "started")) == 3


def test_supervisor_death_in_a_long_step_counts_as_death_at_work(supervise: Callable[..., Run]) -> None:
    """An engine that was ready and dies in a step longer than a look is started again as one that worked."""
    run = supervise(engine="step:0.4", look_seconds=0.02)
    run.until(lambda: len(run.journal("engine", "started")) == 7)  # five may die before they are ready
    assert [line["pause"] for line in run.said("engine died")][:6] == [0.01, 0.02, 0.03, 0.04, 0.04, 0.04]
    assert not run.said("giving up")


def test_supervisor_engine_restarted_gets_choice_of_first(supervise: Callable[..., Run]) -> None:
    """Of the CPU kernels, whatever later engines say; an engine that was never ready has chosen nothing."""
    run = supervise(engine="exit:1 step:0.2 step:0.2 step:0.2 live")
    run.until(lambda: len(run.journal("engine", "started")) == 5)
    given = [facts["arguments"]["kernels"] for _, _, facts in run.journal("engine", "started")]
    assert given == [None, None, {"life": 2}, {"life": 2}, {"life": 2}]


def test_nobody_hangs_before_it_beats_nor_while_all_stand_still(supervise: Callable[..., Run]) -> None:
    """Loading takes as long as it takes, and a pause of the supervisor is not its children's."""
    run = supervise(front="live", engine="live", hang_seconds=1.0)
    run.until_up()
    pids = [run.process.pid, *run.alive()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    time.sleep(1)
    assert not run.said("hangs")
    assert len(run.journal("", "started")) == 2


def test_hangs_in_a_row_are_given_up(supervise: Callable[..., Run]) -> None:
    run = supervise(engine="hang", hang_seconds=0.2)
    assert run.process.wait(30) == 1
    assert len(run.journal("engine", "started")) == 5
    # There is no engine to end for: whoever still waits is told at once.
    assert [facts for _, _, facts in run.journal("front", "asked")] == [{"drain": 0.0}]


def test_an_engine_that_dies_is_started_again(supervise: Callable[..., Run]) -> None:
    run = supervise(engine="exit:1 exit:-9 live")
    run.until_up()
    assert [facts["arguments"]["epoch"] for _, _, facts in run.journal("engine", "started")] == [1, 2, 3]
    assert len(run.journal("front", "started")) == 1
    assert [line["pause"] for line in run.said("engine died")] == [0.01, 0.02]
    page = urllib.request.urlopen(run.said("listening on")[0]["metrics"]).read().decode()
    assert "npuserve_engine_restarts_total 2.0" in page
    assert re.search(r'npuserve_build_info\{backend="cpu",model="\w+",torch="[\d.]+.*",version="[\d.]+"\} 1.0', page)


def test_a_front_end_that_dies_gets_its_port_back(supervise: Callable[..., Run]) -> None:
    run = supervise()
    run.until_up()
    os.kill(run.journal("front", "started")[0][2]["pid"], signal.SIGKILL)
    run.until(lambda: len(run.journal("front", "started")) == 2)
    assert [facts["arguments"]["port"] for _, _, facts in run.journal("front", "started")] == [0, 4242]
    assert run.said("frontend-0 died")[0]["code"] == -signal.SIGKILL
    assert len(run.journal("engine", "started")) == 1


def test_an_engine_killed_at_work_again_and_again_is_not_given_up(supervise: Callable[..., Run]) -> None:
    run = supervise()
    for life in range(1, 9):  # more than the five that may die before they are ready
        run.until(lambda life=life: len(run.said("^ready in")) == life)
        os.kill(run.journal("engine", "started")[-1][2]["pid"], signal.SIGKILL)
    run.until(lambda: len(run.journal("engine", "started")) == 9)
    assert [line["pause"] for line in run.said("engine died")] == [0.01 * n for n in range(1, 5)] + [0.04] * 4


def test_gives_up_after_quick_deaths_in_a_row(supervise: Callable[..., Run]) -> None:
    run = supervise(engine="exit:3")
    assert run.process.wait(30) == 1
    assert len(run.journal("engine", "started")) == 5
    assert [line["pause"] for line in run.said("engine died")] == [0.01, 0.02, 0.04, 0.04]
    (last,) = run.said("giving up")
    assert (last["level"], last["code"]) == ("error", 3)
    assert not run.alive()


def test_supervisor_deaths_of_a_request_that_was_found_do_not_count(supervise: Callable[..., Run]) -> None:
    """Four deaths, then one more of the life that found the killer, twice; five in a row end the server."""
    run = supervise(engine="exit:3 exit:3 exit:3 exit:3 killer exit:3 exit:3 exit:3 killer exit:3")
    assert run.process.wait(30) == 1
    assert len(run.journal("engine", "started")) == 13
    assert [line["pause"] for line in run.said("engine died")][4] == 0.01


@pytest.mark.parametrize(("children", "code"), [({"engine": "exit:2"}, 2), ({"front": "exit:2"}, 2),
                                                ({"engine": "exit:4"}, 4)])
def test_what_no_restart_mends_stops_everything(
    supervise: Callable[..., Run], children: dict[str, str], code: int
) -> None:
    """A wrong configuration, a device at fault."""
    run = supervise(**children)
    assert run.process.wait(20) == code
    assert all(len(run.journal(name, "started")) <= 1 for name in ("front", "engine"))
    assert not run.alive()


@pytest.mark.parametrize("name", ["front", "engine"])
def test_supervisor_unusable_after_the_server_was_ready_is_tried_again(
    supervise: Callable[..., Run], name: str
) -> None:
    """Also more often than a process may die: a repair takes as long as it takes."""
    run = supervise(**{name: f"live {'exit:2 ' * 7}live"})
    run.until_up()
    run.until(lambda: run.said("^ready in"))
    os.kill(run.journal(name, "started")[0][2]["pid"], signal.SIGKILL)
    run.until(lambda: len(run.said("^ready in")) == 2)
    assert len(run.journal(name, "started")) == 9
    assert [line["why"] for line in run.said("died")] == ["died", *["unusable"] * 7]
    assert [line["pause"] for line in run.said("died")][1:] == [0.01, 0.02] + [0.04] * 5
    run.process.terminate()
    assert run.process.wait(20) == 0


def test_who_does_not_leave_is_killed(supervise: Callable[..., Run]) -> None:
    run = supervise(front="deaf", engine="deaf", drain_seconds=0.1)
    run.until_up()
    run.process.terminate()
    assert run.process.wait(20) == 1
    assert not run.alive()
    assert not run.folder().exists()


def test_a_second_signal_kills(supervise: Callable[..., Run]) -> None:
    run = supervise(front="live:600", drain_seconds=600)
    run.until_up()
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: run.journal("front", "asked"))
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(20) == 1
    assert not run.alive()


def test_a_signal_during_a_pause_or_a_start(supervise: Callable[..., Run]) -> None:
    run = supervise(engine="exit:1")
    run.until(lambda: run.journal("engine", "started"))
    run.process.terminate()
    assert run.process.wait(20) == 0
    assert not run.alive()


def test_children_see_their_parent_die(supervise: Callable[..., Run]) -> None:
    run = supervise(frontends=2)
    run.until_up(fronts=2)
    run.process.kill()
    run.until(lambda: len(run.journal("", "orphaned")) == 3)
    run.until(lambda: not run.alive())


def test_later_front_ends_take_the_first_ones_port(supervise: Callable[..., Run]) -> None:
    run = supervise(frontends=3)
    run.until_up(fronts=3)
    ports = {facts["arguments"]["index"]: facts["arguments"]["port"] for _, _, facts in run.journal("front", "started")}
    assert ports == {0: 0, 1: 4242, 2: 4242}
    assert len(run.said("listening on")) == 1
    run.process.terminate()
    assert run.process.wait(20) == 0
    assert len(run.journal("front", "left")) == 3


def serve(*arguments: str) -> tuple[int, list[str]]:
    """Exit code and stderr's lines of `npuserve serve`, without log lines."""
    command = [sys.executable, "-m", "npuserve.service.cli", "serve", "--port", "0", "--log-format", "json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("{")]


async def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 30, 0, 5 << 10))
    with pytest.raises(ConfigError, match=r"^TMPDIR: .* has 5 KiB free; 16 MiB are needed$"):
        await Supervisor(ServerConfig()).run()


def test_a_model_that_is_not_there_is_said(tmp_path: Path) -> None:
    code, lines = serve(str(tmp_path / "none"), "--metrics-port", "0")
    assert code == 2
    assert f"npuserve: model: there is no folder {tmp_path}/none" in lines


def test_a_taken_metrics_port_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, lines = serve(str(tmp_path), "--metrics-port", str(port))
    assert (code, lines) == (2, [f"npuserve: metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use"])
