"""A full file system of TMPDIR while a server runs: it costs metrics for a time, and no request."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bench.reliability import full_disk
from bench.serving import server as bench_server
from tests.e2e.brittle import COUNTING, POISON
from tests.e2e.processes import processes, until
from tests.e2e.server import Server, request, serving, streamed
from tests.e2e.test_deaths import wait_until_running
from tests.e2e.test_lifecycle import is_serving

pytestmark = pytest.mark.slow


def children_of(server: Server) -> dict[int, str]:
    """Return process id -> kind of the server's children."""
    return bench_server.children(server.process.pid)


def is_replaced(server: Server, killed: int, kind: str) -> bool:
    living = list(children_of(server).values())
    return killed not in children_of(server) and living.count(kind) == (2 if kind == "frontend" else 1)


@pytest.fixture
def disk() -> Iterator[Path]:
    """Small file system. Skipped for users who may not mount one; CI fails if the test is skipped in every run.

    Its path is short enough for the engine's socket.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="npu")))
        try:
            stack.enter_context(full_disk.small_disk(folder))
        except full_disk.CannotMount as error:
            pytest.skip(f"no file system can be mounted: {error}")
        yield folder


def test_full_disk_while_processes_are_restarted_fails_no_request(disk: Path) -> None:
    """The disk is full before the engine and a front end are killed, and until requests of all kinds were served."""
    process = {"env": {**os.environ, "TMPDIR": str(disk)}}
    filler = full_disk.Filler(disk)
    ask = request("Once upon a time", 200, ignore_eos=True)
    with serving("--frontends", "2", process=process, **COUNTING) as server, contextlib.ExitStack() as stack:
        stack.callback(filler.stop)
        alone = streamed(server.stub, ask)[:2]
        filler.start()
        tokens = server.metric("npuserve_generation_tokens_total")
        answer = server.stub.Generate.future(ask, timeout=100)
        wait_until_running(server)
        for kind in ("engine", "frontend"):
            killed = processes(server, kind)[-1]
            os.kill(killed, signal.SIGKILL)
            until(lambda killed=killed, kind=kind: is_replaced(server, killed, kind), server)
            if kind == "engine":
                assert answer.result().text == alone[0]
        until(lambda: is_serving(server), server)
        living = children_of(server)
        for _ in range(4):
            assert streamed(server.stub, ask)[:2] == alone
        chosen = request("A cat", 20)
        chosen.regex = "red|blue"
        assert server.stub.Generate(chosen, timeout=100).text in ("red", "blue")
        assert filler.is_full
        assert children_of(server) == living
        filler.stop()
        until(lambda: server.metric("npuserve_generation_tokens_total") >= tokens + 4 * 200, server)
        until(lambda: server.metric("npuserve_metrics_files_full_total") == 2, server)
        assert server.metric("npuserve_engine_restarts_total") == 1
        lines = [json.loads(line)["message"] for line in server.log.splitlines()]
        assert lines.count("no space for metrics, which wait in memory") == 2
        until(lambda: server.log.count("metrics are written again") == 2, server)
        assert server.stop() == 0


@pytest.mark.full
def test_full_disk_request_that_kills_the_engine_is_found(disk: Path) -> None:
    """The deaths that it caused are counted in a file under TMPDIR. Alone: tests/service/engine/test_crash_tracker.py.
    """
    process, filler = {"env": {**os.environ, "TMPDIR": str(disk)}}, full_disk.Filler(disk)
    with serving(process=process, **COUNTING) as server, contextlib.ExitStack() as stack:
        stack.callback(filler.stop)
        filler.start()
        poison = server.stub.Generate.future(request([5, POISON, 6], 50, ignore_eos=True), timeout=60)
        with pytest.raises(grpc.RpcError) as failed:
            poison.result()
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert filler.is_full
        assert len(streamed(server.stub, request("A cat", 20, ignore_eos=True))[1]) == 20
