"""Child processes of a real server, and waiting for a condition."""

from __future__ import annotations

from collections.abc import Callable

from bench.serving import server as bench_server
from tests.e2e.server import Server
from tests.support import processes as support


def until(condition: Callable[[], object], server: Server | None = None, seconds: float = 60) -> None:
    """Wait until `condition` is true; AssertionError, with the log of `server` if given, after `seconds`."""
    support.until(condition, lambda: server and server.log, seconds)


def processes(server: Server, kind: str) -> list[int]:
    """Return the process ids of the server's living children of a kind, "engine" or "frontend"."""
    return [pid for pid, found in bench_server.children(server.process.pid).items() if found == kind]


def children(server: Server) -> dict[str, int]:
    """Return kind -> process id of the server's children; the last one of several of a kind."""
    return {kind: pid for pid, kind in bench_server.children(server.process.pid).items()}


def engine_of(server: Server) -> int:
    """Return the process id of the engine, 0 while there is none."""
    return bench_server.engine_of(server.process.pid)
