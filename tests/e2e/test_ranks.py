"""Tensor parallelism on one machine: the same tokens with any number of ranks, and the life of the ranks."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from bench.serving.server import ranks_of
from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2 as pb
from tests.e2e.processes import engine_of, until
from tests.e2e.server import KV_CACHE_MEMORY, Server, request, serving, streamed
from tests.e2e.test_exactness import MODELS, STORIES, among_others, check, check_seeded
from tests.support.benches import bench
from tests.support.real_models import model_folder

pytestmark = pytest.mark.slow
REGEX = r"[A-Z][a-z ,]{8,60}\."


def parallel(size: int) -> tuple[str, ...]:
    return "--tensor-parallel-size", str(size), "--threads", "1"


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    """Module bench/reliability/kills.py."""
    return bench("reliability.kills")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the built-in model."""
    return shutil.copytree(FOLDER, tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Server with two ranks, shared by the tests; each leaves it ready and idle."""
    flags = "--dtype", "float32", "--max-num-batched-tokens", "48", "--hang-seconds", "5"
    with serving(str(folder), *flags, *parallel(2), "--kv-cache-memory", KV_CACHE_MEMORY) as running:
        yield running


def test_tokens_equal_those_of_transformers(server: Server) -> None:
    """The other stories: test_tokens_among_others_equal_those_of_transformers. A constraint holds in all ranks."""
    check(server, FOLDER, STORIES, 0)
    check_seeded(server)
    constrained = server.stub.Generate(request("Once upon a time", 48, regex=REGEX), timeout=100)
    assert re.fullmatch(REGEX, constrained.text)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("name", "prompts"), MODELS)
def test_tokens_among_others_equal_those_of_transformers(name: str, prompts: list[str], size: int) -> None:
    """With chunks, preemption and prefix hits. A drain ends all ranks.

    By default without a server in tests/npu/test_parallel.py.
    """
    with among_others(model_folder(name), prompts, *parallel(size), share=2) as server:
        ranks = ranks_of(server.process.pid)
        assert len(ranks) == size - 1
        assert server.stop() == 0
        assert not any(map(is_alive, ranks))


def test_ranks_have_one_process_each(server: Server) -> None:
    assert len(ranks_of(server.process.pid)) == 1


@pytest.mark.full
def test_constrained_answers_equal_those_of_one_process(server: Server) -> None:
    asks = [request("Once upon a time", 48, temperature=temperature, seed=4, regex=REGEX) for temperature in (0.0, 1.0)]
    with serving("--dtype", "float32") as alone:
        wanted = [streamed(alone.stub, ask)[:2] for ask in asks]
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(streamed, server.stub, request(text, 48)) for text in STORIES[:2]]
        assert [streamed(server.stub, ask)[:2] for ask in asks] == wanted
        for other in others:
            other.result()
    assert all(re.fullmatch(REGEX, text) for text, _ in wanted)


def answers(server: Server) -> bool:
    """Return False while the engine restarts."""
    try:
        return bool(streamed(server.stub, request("Once upon a time", 4))[1])
    except grpc.RpcError:
        return False


def is_alive(pid: int) -> bool:
    """Return False for a process that has ended, also if its parent has not waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shares_weights() -> bool:
    """Return True if a server keeps its weights in memory for the next engine."""
    from npuserve.npu.backends.cpu import CpuBackend

    with (open(os.memfd_create("test"), "rb") as file,
          CpuBackend().memory.sharing(file.fileno(), filled=False) as possible):
        return bool(possible)


def erase(folder: Path) -> None:
    """Overwrite the weights' files with zeros, so that nothing but their content shows it."""
    for file in folder.glob("*.safetensors"):
        before = file.stat()
        file.write_bytes(bytes(before.st_size))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture(scope="module")
def erased(server: Server, folder: Path, kills: ModuleType) -> tuple[list[pb.GenerateRequest], list[Any]]:
    """Requests and their answers. The model's files are then overwritten where the weights are kept in memory, so that
    a rank that reads them again computes other tokens.
    """
    wanted = kills.asks(8, 60)
    with ThreadPoolExecutor(8) as threads:
        alone = list(threads.map(lambda ask: kills.stream(server.stub, ask), wanted))
    if shares_weights():
        erase(folder)
    return wanted, alone


@pytest.mark.parametrize("victim", [
    pytest.param("engine", marks=pytest.mark.full),
    "rank"])
def test_death_of_a_rank_ends_the_group_within_a_second(
    server: Server, erased: tuple[list[pb.GenerateRequest], list[Any]], kills: ModuleType, victim: str
) -> None:
    """It shows in no stream, since the next group continues all streams, with the weights in memory."""
    wanted, alone = erased
    before, continued = (server.metric(f"npuserve_{name}_total") for name in ("engine_restarts", "streams_continued"))
    engine, (rank,) = engine_of(server), ranks_of(server.process.pid)
    calls = [server.stub.StreamGenerate(ask, timeout=100) for ask in wanted]
    for call in calls:
        call.initial_metadata()  # arrives when the server has accepted the request
    os.kill(engine if victim == "engine" else rank, signal.SIGKILL)
    until(lambda: not is_alive(engine) and not is_alive(rank), server, 10)
    with ThreadPoolExecutor(8) as threads:
        for answer, expected in zip(threads.map(kills.read, calls), alone, strict=True):
            assert answer.same(expected)
    assert engine_of(server) not in (0, engine)
    assert server.metric("npuserve_engine_restarts_total") == before + 1
    assert server.metric("npuserve_streams_continued_total") > continued
    assert server.metric("npuserve_kv_cache_usage_ratio") == 0


@pytest.mark.full
def test_killed_ranks_show_in_no_stream(
    server: Server, erased: tuple[list[pb.GenerateRequest], list[Any]], kills: ModuleType
) -> None:
    """The engine and the other rank are killed in turn, twice each, at random moments."""
    before = server.metric("npuserve_engine_restarts_total")
    killer = kills.Killer(server.target, server.process.pid, 4, (0.2, 0.7), seed=3, ranks=True)
    wrong, _ = kills.disturbed(server.target, killer, *erased)
    assert wrong == []
    assert len(killer.killed) == 4
    assert server.metric("npuserve_engine_restarts_total") == before + 4
    assert server.metric("npuserve_kv_cache_usage_ratio") == 0


@pytest.mark.full
@pytest.mark.usefixtures("erased")
def test_stopped_rank_is_a_hang_that_the_watchdog_ends(server: Server) -> None:
    """By default test_edge.py freezes an engine."""
    alone, before = streamed(server.stub, request("Once upon a time", 64))[:2], server.metric(
        "npuserve_engine_restarts_total")
    os.kill(ranks_of(server.process.pid)[0], signal.SIGSTOP)
    assert streamed(server.stub, request("Once upon a time", 64))[:2] == alone
    assert server.metric("npuserve_engine_restarts_total") == before + 1


@pytest.mark.full
@pytest.mark.usefixtures("erased")
def test_ranks_read_the_files_of_a_model_that_has_changed(server: Server, folder: Path) -> None:
    """Last test of the server."""
    if not shares_weights():
        pytest.skip("no native kernels, or no large pages of a file in memory")
    for file in folder.glob("*.safetensors"):
        os.utime(file)
    os.kill(engine_of(server), signal.SIGKILL)
    until(lambda: "engine cannot be used" in server.log, server)
    assert "model.safetensors" in server.log


@pytest.mark.full
def test_model_that_the_ranks_cannot_divide_is_refused() -> None:
    """The message: tests/npu/test_parallel.py. A refusal by ranks: test_hosts_with_different_models_are_refused."""
    server = Server(*parallel(3))
    assert server.process.wait(60) == 2
    assert re.search(r"tensor_parallel_size: 3 does not divide the model's \d+ attention heads", server.log)
    assert "Traceback" not in server.log
