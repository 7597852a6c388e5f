"""Ranks of a host that is not the first: what a new group learns from the end of the last one."""

from __future__ import annotations

import json
import logging
import signal
import sys
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
    print(json.dumps([given["rank"], given["capture_failed"]]), file=journal)
while sum(json.loads(line)[1] == given["capture_failed"] for line in open(sys.argv[1])) < 2:
    time.sleep(0.01)
if given["capture_failed"]:
    print(json.dumps({"event": "unusable", "error": "the end of the test"}))
    sys.exit(2)
if given["rank"] == 2:
    print(json.dumps({"event": "capture_failed", "error": "no graphs here"}))
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
    assert host.run(ServerConfig(tensor_parallel_size=4), Path(), world) == 2
    started = sorted(json.loads(line) for line in journal.read_text().splitlines())
    assert started == [[2, ""], [2, "no graphs here"], [3, ""], [3, "no graphs here"]]


@pytest.mark.parametrize("code", [0, 1])
def test_ranks_of_a_group_that_has_ended_wait_for_the_next(
    journal: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """With 0 the first host stopped, with 1 the group broke."""
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", ENDING, str(journal), str(code)))
    world = World(1, 2, "127.0.0.1", 29500, NAMES[0])
    assert host.run(ServerConfig(tensor_parallel_size=2), Path(), world) == 2
    assert journal.read_text() == "started\n" * 3


def test_second_signal_ends_a_host_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first one its ranks run until the group ends."""
    handlers: dict[int, Callable[[], None]] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", READY))
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(1) as thread:
        world = World(1, 2, "127.0.0.1", 29500, NAMES[0])
        running = thread.submit(host.run, ServerConfig(tensor_parallel_size=2), Path(), world)
        until(lambda: "rank is ready" in caplog.text)
        handlers[signal.SIGTERM]()
        try:
            assert not wait([running], 0.5).done
        finally:
            handlers[signal.SIGTERM]()
        assert running.result(10) == 0


@pytest.mark.parametrize(("capture", "failed", "may_drop"), [("auto", "", True), ("auto", "why", False),
                                                             ("on", "", False)])
def test_rank_reports_a_failed_capture_once(capture: str, failed: str, may_drop: bool) -> None:
    """A rank that captures nothing has other errors; with capture on the server ends."""
    config = ServerConfig(tensor_parallel_size=4, capture=capture)  # type: ignore[arg-type]
    args = processes.RankArgs(config, ".", 2, "127.0.0.1:1", 2, capture_failed=failed)
    assert args.may_drop_captures is may_drop
