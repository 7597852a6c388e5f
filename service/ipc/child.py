"""Protocol between the supervisor and its children: arguments on stdin, events on stdout, and the parent's death.

The supervisor writes the arguments as one JSON line on a child's stdin and keeps stdin open for orders, one JSON object
a line. A child reports events as one JSON object a line on stdout.

A child never outlives the supervisor: the kernel kills it (`die_with_parent`), also while it is stopped. End of file on
stdin covers a supervisor that died before the child asked the kernel for that.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from npuserve.service.ipc import process_control

Arguments = TypeVar("Arguments")

UNUSABLE = 2
"""A child's exit code where the configuration or the model is at fault. The server ends with it only before it was
ready once; what is broken later may be repaired while it serves."""

DEVICE_FAULT, NODE_FAULT = 3, 4
"""The engine's exit codes after an error of its device: starting it again mends it; it would not."""

LAST_WORDS_SECONDS = 2.0
"""After a front end's drain: to send the last status of the calls that it cuts off."""
STOP_SECONDS = 1.0
"""Then: for gRPC to drop the calls of clients that read nothing."""
TRACES_SECONDS = 2.0
"""Then: to export the last traces. What a slow collector has not taken is dropped after it."""
EXIT_SECONDS = 2.0
"""Then: to end, on a busy machine."""
FRONTEND_MARGIN = LAST_WORDS_SECONDS + STOP_SECONDS + TRACES_SECONDS + EXIT_SECONDS
"""Seconds from a drain's end to SIGKILL: all that a front end may still take."""


TRANSIENT = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of system calls that a later attempt may not meet: the machine is short of processes, files or memory."""


def is_transient(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in TRANSIENT


def read_arguments(kind: type[Arguments]) -> Arguments:
    """Tie this process to its parent's life and return the arguments that the parent wrote.

    Raises msgspec.ValidationError if they are not of that kind. Exits if the parent is dead.
    """
    process_control.die_with_parent()
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # reads no further than the line: orders may follow
        line = stdin.readline()
    if not line:
        os._exit(1)
    return msgspec.json.decode(line, type=kind)


def listen(ordered: Callable[[dict[str, Any]], None] = lambda order: None) -> None:
    """Call `ordered` with each order of the parent, in a thread of its own. Exit at once when the parent is dead."""

    def wait() -> None:
        data = b""
        while more := os.read(0, 1 << 16):  # sys.stdin's lock, held by a thread, would abort the process at its end
            *lines, data = (data + more).split(b"\n")
            for line in lines:
                ordered(msgspec.json.decode(line, type=dict[str, Any]))
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def unusable(error: Exception) -> int:
    """Report to the parent why this process cannot be used, and return the exit code.

    Before the server was ready once, the parent prints the reason and exits. Later it logs it and tries again.
    """
    report("unusable", error=str(error))
    return UNUSABLE


def report(event: str, **fields: object) -> None:
    """Tell the parent: {"event": event, ...fields}."""
    print(json.dumps({"event": event, **fields}), flush=True)
