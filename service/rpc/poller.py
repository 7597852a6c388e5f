"""Scheduling and wake-ups of grpc.aio's poller thread, which waits for operations and wakes the event loop.

grpc.aio has no options for either. Both functions take effect where grpc.aio starts: in the first call to it in a
process, and in the first one on each event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio

from npuserve.service.processes import process_control

SLICE_SECONDS = 0.003
"""Time slice of gRPC's thread: longer than the default, so that it waits until a step's messages are written."""
MAX_WAKEUPS = 4096
"""Maximum number of wake-ups that are handled as one."""


def start() -> None:
    """Start gRPC's poller thread as a batch thread, so that it does not preempt the running event loop.

    gRPC wakes this thread after each write. By default the thread would preempt ours, which still has the messages of
    other streams to write: that is a quarter of the cost of a message (bench/serving/stream_cost.py). As a batch
    thread, it takes an idle processor or waits. Its time slice is longer than ours, which is the default. With a
    shorter slice it would be scheduled sooner, and preempted as soon.

    A thread inherits the scheduling policy and the slice of the thread that starts it.
    """
    with joined_wakeups(), _batch_thread():
        grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _batch_thread() -> Iterator[None]:
    """Let the calling thread, and the threads that it starts, be batch threads in the block. Nothing outside Linux."""
    if sys.platform != "linux":
        yield
        return
    policy = os.sched_getscheduler(0)
    parameters = os.sched_getparam(0)
    process_control.request_slice(SLICE_SECONDS)  # kept when the policy changes
    with contextlib.suppress(OSError):  # forbidden in a sandbox
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, parameters)
        process_control.request_slice(0)


@contextlib.contextmanager
def joined_wakeups() -> Iterator[None]:
    """Let the running event loop handle all waiting completions in one iteration. grpc.aio must start in the block.

    The poller writes a byte to a socket for each completed operation. For each byte, the loop calls grpc.aio's reader,
    which reads one byte and then handles all completions. With 32 messages in a step, 31 iterations of the loop would
    find nothing to do. Here the reader is called after all bytes but one are read. A byte is written after its
    completion is queued, so none is lost.
    """
    loop = asyncio.get_running_loop()
    add_reader = loop.add_reader

    def add_joined_reader(source: Any, handle: Callable[..., object], *args: Any) -> None:
        if not isinstance(source, socket.socket):
            add_reader(source, handle, *args)
            return

        def handle_all() -> None:
            if (count := len(source.recv(MAX_WAKEUPS, socket.MSG_PEEK))) > 1:
                source.recv(count - 1)
            handle(*args)

        add_reader(source, handle_all)

    loop.add_reader = add_joined_reader  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del loop.add_reader
