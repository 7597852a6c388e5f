"""Child processes of a real server, and waiting for a condition."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bench.serving import server as bench_server
from tests.e2e.server import Server, request
from tests.support import processes as support


def until(condition: Callable[[], object], server: Server | None = None, seconds: float = 100) -> None:
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


def ids_while_the_engine_is_killed(
    server: Server, prompts: list[list[int]], count: int, rank: int | None = None
) -> list[list[int]]:
    """Return the greedy token ids of streams at the same time; the engine is killed once the first stream has tokens.

    rank: process to kill instead, whose death ends the engine.
    A message may have any number of tokens. Returns after the supervisor has counted the engine's death.
    """
    restarts = server.metric("npuserve_engine_restarts_total")

    def ids(index: int) -> list[int]:
        received: list[int] = []
        for part in server.stub.StreamGenerate(request(prompts[index], count, ignore_eos=True), timeout=100):
            if index == 0 and part.token_ids and not received:
                os.kill(rank or engine_of(server), signal.SIGKILL)
            received += part.token_ids
        return received

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ids, range(len(prompts))))
    until(lambda: server.metric("npuserve_engine_restarts_total") == restarts + 1, server)
    return answers
