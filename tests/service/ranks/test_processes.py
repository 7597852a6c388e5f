"""Processes of the ranks as rank 0 checks them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from npuserve.npu import parallel
from npuserve.service.ranks import processes


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
