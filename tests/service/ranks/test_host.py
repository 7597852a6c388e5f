"""Ranks of a host that is not the first: what a new group learns from the end of the last one."""

from __future__ import annotations

import errno
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from npuserve.service.config import ServerConfig
from npuserve.service.ranks import host, processes
from npuserve.service.ranks.world import NAMES, World
from tests.support.processes import until

RANK = """
import json, sys, time
given = json.loads(sys.stdin.readline())
with open(sys.argv[1], "a") as journal:
    print(json.dumps([given["rank"], given["capture"]]), file=journal)
while sum(json.loads(line)[1] == given["capture"] for line in open(sys.argv[1])) < 2:
    time.sleep(0.01)
if given["capture"]:
    print(json.dumps({"event": "unusable", "error": "the end of the test"}))
    sys.exit(2)
if given["rank"] == 2:
    print(json.dumps({"event": "capture_failed", "error": "no graphs here", "next_mode": "off"}))
    sys.exit(3)
sys.stdin.read()
"""
"""Both ranks are in the journal before one ends, which ends the other. Rank 2 cannot capture."""

READY = """
import sys
print('{"event": "ready", "shared_weights": null}', flush=True)
sys.stdin.readline()
sys.stdin.read()
"""

ENDING = """
import sys
with open(sys.argv[1], "a+") as journal:
    print("started", file=journal)
    journal.seek(0)
    lives = len(journal.readlines())
print('{"event": "ready", "shared_weights": null}', flush=True)
if lives == 3:
    print('{"event": "unusable", "error": "the end of the test"}', flush=True)
    sys.exit(2)
sys.exit(int(sys.argv[2]))
"""
"""The third process ends the test."""


WEIGHTS = """
import json, os, sys
given = json.loads(sys.stdin.readline())
os.fstat(given["weights"])
with open(sys.argv[1], "a+") as journal:
    print(json.dumps(given["shared_weights"]), file=journal)
    journal.seek(0)
    lives = len(journal.readlines())
print(json.dumps({"event": "ready", "shared_weights": {"life": lives}}), flush=True)
sys.exit(2 if lives == 4 else 1)
"""
"""The fourth process ends the test."""


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each started rank's number, and the reason why it must not capture."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's handlers stay
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", RANK, str(tmp_path / "journal")))
    monkeypatch.setattr(host, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(host, "END_SECONDS", 0.1)
    return tmp_path / "journal"


def test_group_after_a_failed_capture_captures_no_steps(journal: Path) -> None:
    world = World(1, 2, "127.0.0.1", 29500, NAMES[0])
    assert host.Host(ServerConfig(tensor_parallel_size=4), Path(), world).run() == 2
    started = sorted(json.loads(line) for line in journal.read_text().splitlines())
    assert started == [[2, ""], [2, "off"], [3, ""], [3, "off"]]


@pytest.mark.parametrize("code", [0, 1])
def test_ranks_of_a_group_that_has_ended_wait_for_the_next(
    journal: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """With 0 the first host stopped, with 1 the group broke."""
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", ENDING, str(journal), str(code)))
    world = World(1, 2, "127.0.0.1", 29500, NAMES[0])
    assert host.Host(ServerConfig(tensor_parallel_size=2), Path(), world).run() == 2
    assert journal.read_text() == "started\n" * 3


@pytest.mark.parametrize(("short", "reused"), [(0.0, [None, 1, 2, 3]), (60.0, [None, 1, None, None])])
def test_rank_reuses_the_last_weights_until_two_runs_were_short(
    journal: Path, monkeypatch: pytest.MonkeyPatch, short: float, reused: list[int | None]
) -> None:
    """Each group waits for the address of the first host, which may be another one."""
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", WEIGHTS, str(journal)))
    monkeypatch.setattr(host, "SHORT_SECONDS", short)
    monkeypatch.setattr(host, "MAX_MEMORY_REUSES", 2)
    resolved: list[float] = []
    monkeypatch.setattr(World, "resolve", lambda world, seconds, stopped: resolved.append(seconds))
    world = World(1, 2, "127.0.0.1", 29500, NAMES[0])
    assert host.Host(ServerConfig(tensor_parallel_size=2, load_seconds=70.0), Path(), world).run() == 2
    given = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [contents and contents["life"] for contents in given] == reused
    assert resolved == [70.0] * 4


@pytest.mark.usefixtures("without_nohup")
def test_second_signal_ends_a_host_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first one its ranks run until the group ends. SIGHUP is neither: systemd may send it with SIGTERM."""
    handlers: dict[int, Callable[[int], None]] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", READY))
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(1) as thread:
        world = World(1, 2, "127.0.0.1", 29500, NAMES[0])
        running = thread.submit(host.Host(ServerConfig(tensor_parallel_size=2), Path(), world).run)
        until(lambda: "rank is ready" in caplog.text)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            handlers[number](number)
        try:
            assert not wait([running], 0.5).done
        finally:
            handlers[signal.SIGTERM](signal.SIGTERM)
        assert running.result(10) == 0


def test_stop_while_the_ranks_start_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", READY))
    made = host.Host(ServerConfig(tensor_parallel_size=2), Path(), World(1, 2, "127.0.0.1", 29500, NAMES[0]))
    start = host.RankProcess

    def started(args: processes.RankArgs) -> processes.RankProcess:
        made._stopped.set()
        return start(args)

    monkeypatch.setattr(host, "RankProcess", started)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(made.run)
        try:
            assert running.result(20) == 0
        finally:
            made._kill()


def test_signal_while_the_main_thread_has_a_lock_ends_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler runs between any two operations of the main thread, also within Event.wait."""
    handlers: dict[int, Callable[[int], None]] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(host, "PAUSE_SECONDS", 60.0)
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", ""))
    made = host.Host(ServerConfig(tensor_parallel_size=2), Path(), World(1, 2, "127.0.0.1", 29500, NAMES[0]))

    def interrupted() -> None:
        with made._stopped._cond:  # type: ignore[attr-defined]
            handlers[signal.SIGTERM](signal.SIGTERM)

    running = threading.Thread(target=made.run, daemon=True)
    running.start()
    until(lambda: signal.SIGTERM in handlers)
    handling = threading.Thread(target=interrupted, daemon=True)
    handling.start()
    for thread in (handling, running):
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, "Resource temporarily unavailable"),
                                   RuntimeError("can't start new thread")])
def test_host_that_cannot_start_a_rank_tries_again(
    journal: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    errors, start = [error], host.RankProcess

    def started(args: processes.RankArgs) -> processes.RankProcess:
        if args.rank == 3 and errors:
            raise errors.pop()
        return start(args)

    monkeypatch.setattr(host, "RankProcess", started)
    world = World(1, 2, "127.0.0.1", 29500, NAMES[0])
    assert host.Host(ServerConfig(tensor_parallel_size=4), Path(), world).run() == 2
    fields = [record.fields for record in caplog.records if record.message.startswith("ranks ended")]  # type: ignore[attr-defined]
    assert fields[0] == {"code": 1, "error": f"a rank cannot be started: {error}"}


@pytest.mark.parametrize(("setting", "capture", "may_drop"), [
    ("auto", "", True), ("auto", "decoder", True), ("decoder", "", True), ("auto", "off", False), ("on", "", False)])
def test_rank_reports_a_failed_capture_while_it_captures(setting: str, capture: str, may_drop: bool) -> None:
    """A rank that captures nothing has other errors; with capture on the server ends."""
    config = ServerConfig(tensor_parallel_size=4, capture=setting)  # type: ignore[arg-type]
    args = processes.RankArgs(config, ".", 2, "127.0.0.1:1", 2, capture=capture)  # type: ignore[arg-type]
    assert args.may_drop_captures is may_drop
