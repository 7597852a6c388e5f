"""Protocol between a process of the server and its child: arguments and orders on stdin, events on stdout.

Children are the engine and the front ends, of the supervisor; the other ranks, of the engine; and the download of a
model. Input that may be hostile is computed in a sandbox instead (sandbox.py).

The parent writes the arguments as one JSON line on the child's stdin (`encode_line`). It keeps stdin open for orders,
one JSON object per line. The child reports events as one JSON object per line on stdout (`parse_event`), between lines
that libraries print there. Heartbeats are events of the child's main loop.

A child never outlives its parent: the kernel kills it (`die_with_parent`), even while it is stopped. If the parent dies
before the child has asked the kernel for this, the child exits at end of file on stdin.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from npuserve.service.processes import process_control

Arguments = TypeVar("Arguments")

UNUSABLE = 2
"""Exit code of a child whose configuration or model is unusable.

The server exits with it only before it was ready for the first time. Later the supervisor retries, because the cause
may be repaired.
"""

EXIT_DEVICE_FAULT = 3
"""Exit code of the engine after a device error that a restart cures."""
EXIT_NODE_FAULT = 4
"""Exit code of the engine after a device error that no restart cures."""

FINAL_STATUS_SECONDS = 2.0
"""After the drain of a front end: time to send the final status of the calls that it ends."""
STOP_SECONDS = 1.0
"""Then: time for gRPC to drop the calls of clients that read nothing."""
TRACES_SECONDS = 2.0
"""Then: time to export the last traces. Traces that a slow collector has not accepted are dropped."""
EXIT_SECONDS = 2.0
"""Then: time to exit on a busy machine."""
FRONTEND_STOP_SECONDS = FINAL_STATUS_SECONDS + STOP_SECONDS + TRACES_SECONDS + EXIT_SECONDS
"""Seconds from the end of the drain to SIGKILL: the sum of the times above."""

HEARTBEAT_SECONDS = 0.25
"""Minimum time between two heartbeats of a process. The supervisor checks for one every second or less often."""
HEARTBEAT = "heartbeat"
"""Name of the event."""

TRANSIENT = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of system calls that may succeed later: the machine is short of processes, files or memory."""


def is_transient(error: BaseException) -> bool:
    """Return whether the error is one of TRANSIENT."""
    return isinstance(error, OSError) and error.errno in TRANSIENT


def encode_line(value: object) -> bytes:
    """Return the line of a child's arguments or of an order, for the parent."""
    return msgspec.json.encode(value) + b"\n"


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line that a child wrote, for the parent; None for a line that a library printed."""
    try:
        event = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return event if "event" in event else None


def read_arguments(kind: type[Arguments]) -> Arguments:
    """Tie this process to its parent's life and return the arguments that the parent wrote.

    Raises msgspec.ValidationError if they do not match `kind`. Exits if the parent is dead.
    """
    process_control.die_with_parent()
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # unbuffered: orders may follow the line
        line = stdin.readline()
    if not line:
        os._exit(1)
    return msgspec.json.decode(line, type=kind)


def listen(ordered: Callable[[dict[str, Any]], None] = lambda order: None) -> None:
    """Start a thread that calls `ordered` with each order, and that exits the process when the parent dies."""

    def wait() -> None:
        data = b""
        while more := os.read(0, 1 << 16):  # a thread that holds sys.stdin's lock would abort the exit
            *lines, data = (data + more).split(b"\n")
            for line in lines:
                ordered(msgspec.json.decode(line, type=dict[str, Any]))
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def report_unusable(error: Exception) -> int:
    """Report to the parent why this process is unusable, and return the exit code.

    Before the server was ready for the first time, the parent prints the reason and exits. Later it logs the reason and
    retries.
    """
    report("unusable", error=str(error))
    return UNUSABLE


def report(event: str, **fields: object) -> None:
    """Report an event to the parent: {"event": event, ...fields}."""
    print(json.dumps({"event": event, **fields}), flush=True)


class Heartbeat:
    """Sender of heartbeats on stdout, for the thread of the main loop alone: they stop while the loop stands still.

    A heartbeat is dropped while the parent has unread events of this process. So heartbeats never fill the pipe, where
    later events would block, and sending one never blocks the loop. An unread event also shows the parent that this
    process was alive when it was sent.
    """

    def __init__(self, is_enabled: bool = True):
        """is_enabled: False sends none, for a process without a supervisor."""
        self._next = 0.0 if is_enabled else float("inf")  # time.monotonic() seconds
        self._pipe = _open_nonblocking(1) if is_enabled else -1

    def beat(self) -> None:
        """Send a heartbeat if the last one is HEARTBEAT_SECONDS old. Otherwise it costs one reading of the clock."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + HEARTBEAT_SECONDS
        with contextlib.suppress(OSError):
            if not _unread_bytes(self._pipe):
                os.write(self._pipe, _HEARTBEAT_LINE)


_HEARTBEAT_LINE = json.dumps({"event": HEARTBEAT}).encode() + b"\n"


def _open_nonblocking(descriptor: int) -> int:
    """Open a pipe again, so that O_NONBLOCK does not affect its other writers. Without /proc, duplicate it."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return os.dup(descriptor)


def _unread_bytes(descriptor: int) -> int:
    """Return the number of bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
