"""Waiting for conditions and for the ends of processes; states of processes; free ports."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MOUNT_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
"""Prefix of a command that runs with mounts of its own."""


_GIVEN: set[int] = set()


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now. Each call returns another one."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in _GIVEN:
            _GIVEN.add(port)
            return port


def until(condition: Callable[[], Any], describe: Callable[[], object] = lambda: "", seconds: float = 30) -> Any:
    """Poll the condition and return its first true value. Raises AssertionError after `seconds`.

    Polling takes at most a fifth of the time, since conditions compute and make servers compute.

    describe: returns what the failure shows.
    """
    deadline = time.monotonic() + seconds
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() < deadline, describe()
        time.sleep(max(0.01, 4 * (time.monotonic() - began)))
        began = time.monotonic()
    return found


def has_mount_namespaces() -> bool:
    """Return True where MOUNT_NAMESPACE is allowed."""
    return subprocess.run([*MOUNT_NAMESPACE, "true"], capture_output=True).returncode == 0


def require_mount_namespaces() -> None:
    """Skip the test where MOUNT_NAMESPACE is not allowed."""
    if not has_mount_namespaces():
        pytest.skip(f"no mount namespaces here: {' '.join(MOUNT_NAMESPACE)} fails")


def is_running(pid: int) -> bool:
    """Return whether the process exists and is no zombie. The files of a zombie are closed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ignores(pid: int, number: int) -> bool:
    """Return whether the process ignores the signal of this number. False if there is no process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    [ignored] = re.findall(r"SigIgn:\s*(\w+)", status)
    return bool(int(ignored, 16) & 1 << number - 1)
