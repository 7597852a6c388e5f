"""Processes of the ranks as rank 0 checks and ends them."""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu import parallel
from npuserve.service.config import ServerConfig
from npuserve.service.ranks import processes

HANGING = "import sys, time; sys.stdin.readline(); time.sleep(100)"


class FakeGroup:
    """Group that counts the messages to its ranks. is_lost: a rank of it is lost."""

    def __init__(self, is_lost: bool = False):
        self.is_lost = is_lost
        self.messages = 0

    def broadcast(self, message: bytes) -> bytes:
        if self.is_lost:
            raise RuntimeError("Connection closed by peer")
        self.messages += 1
        return message


def ranks_of(group: Any, started: list[processes.RankProcess], has_other_hosts: bool = True) -> processes.RankProcesses:
    made = processes.RankProcesses.__new__(processes.RankProcesses)
    made.group, made._processes, made._stopping = group, started, False
    made._has_other_hosts, made._next_check = has_other_hosts, 0.0
    return made


def hanging(monkeypatch: pytest.MonkeyPatch, count: int) -> list[processes.RankProcess]:
    """Start processes that do not end by themselves."""
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", HANGING))
    return [processes.RankProcess(processes.RankArgs(ServerConfig(), ".", rank, "127.0.0.1:1", count + 1))
            for rank in range(1, count + 1)]


def test_stop_ends_the_ranks_of_a_group_that_has_lost_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine then ends as it does with all ranks."""
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.01)
    (rank,) = started = hanging(monkeypatch, 1)
    ranks_of(FakeGroup(is_lost=True), started).stop()
    assert rank.run() == -9
    assert "a rank was lost before the end" in caplog.text


def test_output_of_libraries_in_a_rank_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", "input(); print(5); print('no JSON')"))
    rank = processes.RankProcess(processes.RankArgs(ServerConfig(), ".", 1, "127.0.0.1:1", 2))
    with caplog.at_level(logging.INFO):
        assert rank.run() == 0
    assert [record.fields["text"] for record in caplog.records] == ["5", "no JSON"]  # type: ignore[attr-defined]
    assert rank.error == {}


def test_hanging_ranks_end_within_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit for each would exceed the supervisor's limit for the engine."""
    clock, waits = [100.0], []

    class Hanging:
        def kill(self, seconds: float) -> None:
            waits.append(seconds)
            clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    hung: Any = [Hanging(), Hanging(), Hanging()]
    processes.end_processes(hung, 5.0)
    assert waits == [5.0, 0.0, 0.0]


def test_check_sends_to_other_hosts_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, group = [100.0], FakeGroup()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    ranks = ranks_of(group, [])
    ranks.check()
    ranks.check()
    assert group.messages == 1
    clock[0] += processes.CHECK_SECONDS
    ranks.check()
    assert group.messages == 2
    clock[0] += processes.CHECK_SECONDS
    group.is_lost = True
    with pytest.raises(RuntimeError, match="closed by peer"):
        ranks.check()
    ranks_of(group, [], has_other_hosts=False).check()


def test_second_process_of_a_rank_cannot_join() -> None:
    """It would wait forever for the connections of the others, which have those of the first."""
    store, address = parallel.serve("127.0.0.1:0", 2, 10)
    parallel.join(address, 2, 10).set("rank-1", "1")
    parallel.wait_for_ranks(store, 0, 2, 10)
    with pytest.raises(parallel.TakenRank, match="another process has joined the group as rank 1"):
        parallel.wait_for_ranks(parallel.join(address, 2, 10), 1, 2, 10)


def test_second_process_of_a_rank_replaces_one_that_has_ended_before_the_group_was_complete() -> None:
    """No rank has connections yet."""
    store, address = parallel.serve("127.0.0.1:0", 3, 10)
    with pytest.raises(parallel.MissingRanks, match=r"^ranks 0, 2 of 3 did not join within 0 s$"):
        parallel.wait_for_ranks(parallel.join(address, 3, 10), 1, 3, 0)
    with ThreadPoolExecutor(3) as threads:
        stores = [store, *(parallel.join(address, 3, 10) for _ in range(2))]
        for _ in threads.map(parallel.wait_for_ranks, stores, range(3), [3] * 3, [10.0] * 3):
            pass

def test_torch_that_a_rank_cannot_import_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host then ends. It started the rank again without end."""
    (tmp_path / "torch.py").write_text('raise OSError("no library")\n')
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    rank = processes.RankProcess(processes.RankArgs(ServerConfig(tensor_parallel_size=2), ".", 1, "127.0.0.1:1", 1))
    assert rank.run() == 2
    assert rank.error["error"] == "torch cannot be imported: no library"
