"""Ranks on several hosts: servers that the environment of torchrun or of LeaderWorkerSet joins."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.serving.server import ranks_of
from npuserve.npu.storyteller import FOLDER
from tests.e2e.processes import engine_of, until
from tests.e2e.server import KV_CACHE_MEMORY, Server, request, streamed
from tests.e2e.test_exactness import STORIES, check
from tests.e2e.test_ranks import answers, erase, shares_weights
from tests.npu.backends.small import saved
from tests.support.processes import free_port

pytestmark = pytest.mark.slow
FLAGS = ("--tensor-parallel-size", "2", "--threads", "1", "--dtype", "float32", "--kv-cache-memory", KV_CACHE_MEMORY)


Environment = Callable[[int, int], dict[str, str]]
"""Function from rank and port to the variables of its host."""


def torchrun(rank: int, port: int, size: int = 2) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def leader_worker_set(rank: int, port: int) -> dict[str, str]:
    return {"LWS_WORKER_INDEX": str(rank), "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "127.0.0.1",
            "MASTER_PORT": str(port)}


def host(*flags: str, **variables: str) -> Server:
    return Server(*flags, process={"env": {**os.environ, **variables}})


class Group:
    """Two hosts. first: it has rank 0, and serves; `start_first` starts it again. second: host of rank 1."""

    def __init__(self, stack: ExitStack, environment: Environment, model: Path):
        self._port, self._environment, self._model, self._stack = free_port(), environment, model, stack
        self.second = self._host(1)
        self.start_first()

    def _host(self, rank: int) -> Server:
        server = host(str(self._model), *FLAGS, **self._environment(rank, self._port))
        self._stack.callback(server.close)
        return server

    def start_first(self) -> None:
        """Start the first host, and wait until the group is ready."""
        ready = self.second.log.count("rank is ready")
        self.first = self._host(0)
        self.first.wait_until_listening()
        self.first.wait_until_ready()
        until(lambda: self.second.log.count("rank is ready") > ready, self.second)


@contextmanager
def hosts(environment: Environment = torchrun, model: Path = FOLDER) -> Iterator[Group]:
    """Two hosts of a group that is ready. The first is closed first: the other waits for the end of the group."""
    with ExitStack() as stack:
        yield Group(stack, environment, model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the built-in model."""
    return shutil.copytree(FOLDER, tmp_path_factory.mktemp("hosts") / "model")


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[Group]:
    """Two hosts that torchrun's variables join, shared by the first tests. Their model is in `folder`."""
    with hosts(model=folder) as made:
        yield made


def rank_of(server: Server) -> int:
    """Return the process of the one rank of a host that is not the first; 0 for none."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return int(children[0]) if children else 0


def test_two_hosts_answer_as_transformers_do(group: Group) -> None:
    assert not ranks_of(group.first.process.pid)
    check(group.first, FOLDER, STORIES, 0)


@pytest.mark.full
def test_killed_rank_of_the_other_host_shows_in_no_stream(group: Group, folder: Path) -> None:
    """By default test_ranks.py kills a rank, and tests/service/ranks/test_host.py has the host that starts it again.

    The next group finds the weights in memory where they are kept: a rank that read the files, which are
    overwritten, would compute other tokens. Further restarts: test_ranks.py.
    """
    first, second = group.first, group.second
    ask = request("Once upon a time", 60, ignore_eos=True)
    alone = streamed(first.stub, ask)[:2]
    if shares_weights():
        erase(folder)
    call = first.stub.StreamGenerate(ask, timeout=100)
    received = [next(call) for _ in range(5)]
    engine, rank = engine_of(first), rank_of(second)
    os.kill(rank, signal.SIGKILL)
    received += list(call)
    assert "".join(message.text for message in received) == alone[0]
    assert engine_of(first) not in (0, engine)
    assert rank_of(second) not in (0, rank)
    until(lambda: answers(first), first)
    assert streamed(first.stub, ask)[:2] == alone
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)


@pytest.mark.full
def test_rank_of_the_other_host_that_dies_is_noticed_while_nothing_runs(group: Group) -> None:
    """Its next process cannot join the old group. The check and its intervals: tests/service/ranks/test_processes.py.
    """
    first, second = group.first, group.second
    engine, rank = engine_of(first), rank_of(second)
    os.kill(rank, signal.SIGKILL)
    until(lambda: engine_of(first) not in (0, engine), first)
    until(lambda: answers(first), first)
    assert rank_of(second) not in (0, rank)
    check(first, FOLDER, STORIES[:3], 0)


@pytest.mark.full
def test_stopped_first_host_leaves_the_other_waiting(group: Group) -> None:
    """It waits for the next group, which a new first host starts. As in tests/service/ranks/test_host.py, with real
    ranks."""
    assert group.first.stop() == 0
    assert group.second.process.poll() is None
    group.start_first()
    check(group.first, FOLDER, STORIES[:3], 0)


def test_drain_of_both_hosts_ends_no_stream(group: Group) -> None:
    """As when Kubernetes deletes the pods of a group together. Last test of the shared group."""
    first, second = group.first, group.second
    restarts = second.log.count("starting them again")
    ask = request("Once upon a time", 80, ignore_eos=True)
    alone = streamed(first.stub, ask)[:2]
    call = first.stub.StreamGenerate(ask, timeout=100)
    received = [next(call)]
    for server in (second, first):
        server.process.terminate()
    received += list(call)
    assert "".join(message.text for message in received) == alone[0]
    assert received[-1].HasField("finish")
    assert first.process.wait(60) == 0
    assert second.process.wait(60) == 0
    assert second.log.count("starting them again") == restarts


@pytest.mark.full
def test_two_hosts_of_a_leader_worker_set_answer() -> None:
    """With the variables of tests/service/ranks/test_world.py; otherwise as with torchrun."""
    with hosts(leader_worker_set) as group:
        check(group.first, FOLDER, STORIES[:3], 0)


@pytest.mark.full
def test_second_signal_ends_a_host_at_once() -> None:
    """As in tests/service/ranks/test_host.py, with a real rank."""
    with hosts() as group:
        second = group.second
        second.process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            second.process.wait(1)
        second.process.terminate()
        assert second.process.wait(60) == 0


@pytest.mark.full
def test_missing_rank_is_named_and_ends_the_server() -> None:
    server = host(*FLAGS, "--load-seconds", "2", **torchrun(0, free_port()))
    assert server.process.wait(60) == 2
    assert "tensor_parallel_size: ranks 1 of 2 did not join within 2 s" in server.log
    assert "Traceback" not in server.log


@pytest.mark.full
def test_hosts_with_different_models_are_refused(tmp_path: Path) -> None:
    port, other = free_port(), saved(tmp_path / "other")
    with ExitStack() as stack:
        servers = [host(*FLAGS, **torchrun(0, port)), host(str(other), *FLAGS, **torchrun(1, port))]
        for server in servers:
            stack.callback(server.close)
        assert [server.process.wait(60) for server in servers] == [2, 2]
        assert "rank 1 differs from rank 0 in version, settings or model" in servers[0].log
        assert "rank 1 and rank 0 differ in model" in servers[1].log
        assert not any("Traceback" in server.log for server in servers)


@pytest.mark.parametrize(("rank", "variables", "wrong"), [
    (0, {"RANK": "2"}, "RANK: '2' must be a whole number in [0, 1]"),
    # The other host has the same message, and the test above the same exit.
    pytest.param(0, {"MASTER_ADDR": "npuserve.invalid"}, "MASTER_ADDR: npuserve.invalid does not resolve: ",
                 marks=pytest.mark.full),
    (1, {"MASTER_ADDR": "npuserve.invalid"}, "MASTER_ADDR: npuserve.invalid does not resolve: "),
])
def test_wrong_environment_is_refused(rank: int, variables: dict[str, str], wrong: str) -> None:
    server = host(*FLAGS, "--load-seconds", "1", **{**torchrun(rank, free_port()), **variables})
    assert server.process.wait(60) == 2
    assert wrong in server.log
    assert "Traceback" not in server.log


@pytest.mark.full
def test_port_in_use_is_named_and_ends_the_server() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = host(*FLAGS, **torchrun(0, port))
        assert server.process.wait(60) == 2
    assert f"MASTER_PORT: cannot listen on port {port}: Address already in use" in server.log
    assert "Traceback" not in server.log
