"""Wake-ups of the event loop by grpc.aio's poller thread."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import grpc.aio
import pytest

from npuserve.service.rpc import poller


async def test_joined_wakeups_call_the_reader_once_for_all_bytes() -> None:
    loop, calls = asyncio.get_running_loop(), []
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def read(name: str) -> None:
            calls.append((name, ours.recv(1)))

        with poller.joined_wakeups():
            loop.add_reader(ours, read, "reader")
        for count, total in ((5, 1), (1, 2), (poller.MAX_WAKEUPS + 1, 4)):
            theirs.send(b"1" * count)
            for _ in range(10):
                await asyncio.sleep(0)
            assert calls == [("reader", b"1")] * total
        loop.remove_reader(ours)


async def test_joined_wakeups_end_with_the_block_and_leave_other_readers() -> None:
    loop, calls = asyncio.get_running_loop(), []
    ours, theirs = os.pipe()
    with poller.joined_wakeups():
        loop.add_reader(ours, lambda: calls.append(os.read(ours, 1)))
    os.write(theirs, b"123")
    for _ in range(10):
        await asyncio.sleep(0)
    loop.remove_reader(ours)
    assert calls == [b"1", b"2", b"3"]
    assert "add_reader" not in vars(loop)


async def test_grpc_adds_a_socket_to_the_loop_when_it_starts(monkeypatch: Any) -> None:
    """`joined_wakeups` has no effect if grpc.aio wakes the loop in another way."""
    added: list[Any] = []
    loop = asyncio.get_running_loop()
    add_reader = loop.add_reader
    with monkeypatch.context() as patch:
        patch.setattr(loop, "add_reader", lambda source, *args: (added.append(source), add_reader(source, *args)))
        grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]
    try:
        assert [type(source) for source in added] == [socket.socket]
    finally:
        grpc.aio.shutdown_grpc_aio()  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has batch threads")
async def test_batch_thread_policy_is_restored() -> None:
    before = os.sched_getscheduler(0)
    with poller._batch_thread():
        assert os.sched_getscheduler(0) in (os.SCHED_BATCH, before)
    assert os.sched_getscheduler(0) == before
