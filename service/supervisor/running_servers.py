"""Description of a running server, which its supervisor keeps in its private folder for commands of the same user."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from npuserve.service import logs
from npuserve.service.config import ServerConfig
from npuserve.service.supervisor.private_folder import PREFIX, is_held

log = logging.getLogger(__name__)

FILE = "server.json"
MAX_FILE_BYTES = 1 << 20


class RunningServer(msgspec.Struct, frozen=True):
    """Description of a server.

    pid: process id of its supervisor.
    address: host:port of gRPC. metrics: URL of the metrics page.
    settings: its settings; those of another version may have other names.
    """

    pid: int
    version: str
    address: str
    metrics: str
    started: float
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"the server with process id {self.pid}, which listens on {self.address}"


def write_description(folder: Path, config: ServerConfig, address: str, metrics: str, started: float) -> None:
    """Write this process's description to its private folder. A failure is logged: the server needs it for nothing."""
    server = RunningServer(
        os.getpid(), version("npuserve"), address, metrics, started, msgspec.to_builtins(config))
    partial = folder / f".{FILE}"
    try:
        partial.write_bytes(msgspec.json.encode(server))
        partial.rename(folder / FILE)
    except OSError as error:
        logs.event(log, "npuserve collect will not find this server", level=logging.WARNING, error=error.strerror)


def running_servers() -> Iterator[RunningServer]:
    """Yield the servers whose folder under TMPDIR this process may read, in order of their start."""
    servers: list[RunningServer] = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if is_held(folder):
                with (folder / FILE).open("rb") as file:
                    servers.append(msgspec.json.decode(file.read(MAX_FILE_BYTES), type=RunningServer))
    yield from sorted(servers, key=lambda server: server.started)
