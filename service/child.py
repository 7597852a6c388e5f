"""What the supervisor and its children agree on: arguments on stdin, events on stdout, and the parent's death.

The supervisor writes one JSON line on a child's stdin and keeps it open; end of file there means that the parent is
gone. A child says what the parent waits for as one JSON object a line on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

Arguments = TypeVar("Arguments")

UNUSABLE = 2
"""A child's exit code where starting it again would not help: the configuration or the model is at fault."""

DEVICE_FAULT, NODE_FAULT = 3, 4
"""The engine's exit codes after an error of its device: starting it again mends it; it would not."""


def read_arguments(kind: type[Arguments]) -> Arguments:
    """The line that the parent wrote. msgspec.ValidationError if it is not of that kind."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def on_parent_death(call: Callable[[], None]) -> None:
    """Call `call` once, from a thread of its own, when stdin ends."""

    def wait() -> None:
        while os.read(0, 1 << 16):  # sys.stdin's lock, held by a thread, would abort the process at its end
            pass
        call()

    threading.Thread(target=wait, name="parent", daemon=True).start()


def report(event: str, **fields: object) -> None:
    """Tell the parent: {"event": event, ...fields}."""
    print(json.dumps({"event": event, **fields}), flush=True)
