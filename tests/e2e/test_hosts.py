"""Ranks on several hosts: servers that the environment of torchrun or of LeaderWorkerSet joins."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.serving.server import ranks_of
from npuserve.npu.storyteller import FOLDER
from tests.e2e.processes import engine_of, until
from tests.e2e.server import Server, request, streamed
from tests.e2e.test_exactness import STORIES, check
from tests.e2e.test_ranks import answers
from tests.support.models import random_model, saved

pytestmark = pytest.mark.slow
FLAGS = ("--tensor-parallel-size", "2", "--threads", "1", "--dtype", "float32")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def torchrun(rank: int, port: int, size: int = 2) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def leader_worker_set(rank: int, port: int) -> dict[str, str]:
    return {"LWS_WORKER_INDEX": str(rank), "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "127.0.0.1",
            "MASTER_PORT": str(port)}


def host(*flags: str, **variables: str) -> Server:
    return Server(*flags, process={"env": {**os.environ, **variables}})


@contextmanager
def hosts(environment: object = torchrun) -> Iterator[tuple[Server, Server]]:
    """Two hosts of a group; the first is ready."""
    port = free_port()
    with ExitStack() as stack:
        servers = [host(*FLAGS, **environment(rank, port)) for rank in range(2)]  # type: ignore[operator]
        for server in servers:
            stack.callback(server.close)
        servers[0].wait_until_listening()
        servers[0].wait_until_ready()
        yield servers[0], servers[1]


@pytest.mark.parametrize("environment", [torchrun, leader_worker_set])
def test_two_hosts_answer_as_transformers_do(environment: object) -> None:
    with hosts(environment) as (first, second):
        assert not ranks_of(first.process.pid)
        for index in range(3):
            check(first, FOLDER, STORIES, index)
        assert first.stop() == 0
        assert second.process.poll() is None  # it waits for the next group
        assert second.stop() == 0


def test_killed_rank_of_the_other_host_shows_in_no_stream() -> None:
    with hosts() as (first, second):
        alone = streamed(first.stub, request("Once upon a time", 200, ignore_eos=True))[:2]
        call = first.stub.StreamGenerate(request("Once upon a time", 200, ignore_eos=True), timeout=100)
        received = [next(call) for _ in range(5)]
        engine = engine_of(first)
        (rank,) = (int(pid) for pid in Path(f"/proc/{second.process.pid}/task/{second.process.pid}/children")
                   .read_text().split())
        os.kill(rank, signal.SIGKILL)
        received += list(call)
        assert "".join(message.text for message in received) == alone[0]
        assert engine_of(first) not in (0, engine)
        until(lambda: answers(first), first)


def test_missing_rank_is_named_and_ends_the_server() -> None:
    server = host(*FLAGS, "--load-seconds", "2", **torchrun(0, free_port()))
    assert server.process.wait(60) == 2
    assert "tensor_parallel_size: ranks 1 of 2 did not join within 2 s" in server.log
    assert "Traceback" not in server.log


def test_hosts_with_different_models_are_refused(tmp_path: Path) -> None:
    port, other = free_port(), saved(random_model("qwen3"), tmp_path / "other")
    with ExitStack() as stack:
        servers = [host(*FLAGS, **torchrun(0, port)), host(str(other), *FLAGS, **torchrun(1, port))]
        for server in servers:
            stack.callback(server.close)
        assert [server.process.wait(60) for server in servers] == [2, 2]
        assert "rank 1 differs from rank 0 in version, settings or model" in servers[0].log
        assert "rank 1 and rank 0 differ in model" in servers[1].log
        assert not any("Traceback" in server.log for server in servers)


@pytest.mark.parametrize(("variables", "wrong"), [
    ({"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "x"}, "tensor_parallel_size: 2 is not a multiple of 3"),
    ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "x"}, "RANK: 2 is not in [0, 1]"),
    ({"WORLD_SIZE": "two", "RANK": "0", "MASTER_ADDR": "x"}, "WORLD_SIZE: 'two' must be a whole number"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR: is needed with WORLD_SIZE"),
])
def test_wrong_environment_is_refused(variables: dict[str, str], wrong: str) -> None:
    server = host(*FLAGS, **variables)
    assert server.process.wait(60) == 2
    assert wrong in server.log
