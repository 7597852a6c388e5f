"""What the supervisor and its children agree on: arguments on stdin, events on stdout, and the parent's death.

The supervisor writes the arguments as one JSON line on a child's stdin and keeps it open, for orders, one JSON object a
line; end of file there means that the parent is gone. A child says what the parent waits for as one JSON object a line
on stdout.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

Arguments = TypeVar("Arguments")

UNUSABLE = 2
"""A child's exit code where starting it again would not help: the configuration or the model is at fault."""

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


def read_arguments(kind: type[Arguments]) -> Arguments:
    """The line that the parent wrote. msgspec.ValidationError if it is not of that kind."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # reads no further than the line: orders may follow
        return msgspec.json.decode(stdin.readline(), type=kind)


def listen(gone: Callable[[], None], ordered: Callable[[dict[str, Any]], None] = lambda order: None) -> None:
    """From a thread of its own: `ordered` with each order of the parent, `gone` once, when the parent is."""

    def wait() -> None:
        data = b""
        while more := os.read(0, 1 << 16):  # sys.stdin's lock, held by a thread, would abort the process at its end
            *lines, data = (data + more).split(b"\n")
            for line in lines:
                ordered(msgspec.json.decode(line, type=dict[str, Any]))
        gone()

    threading.Thread(target=wait, name="parent", daemon=True).start()


def unusable(error: Exception) -> int:
    """Tell the parent what is wrong, which it prints once all its children have ended, and return the exit code."""
    report("unusable", error=str(error))
    return UNUSABLE


def report(event: str, **fields: object) -> None:
    """Tell the parent: {"event": event, ...fields}."""
    print(json.dumps({"event": event, **fields}), flush=True)
