"""Profiles of a real server on the CPU: traces, bounds, rights, and what ends a profile."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from npuserve.npu.profiling import trace_folder
from npuserve.v1 import admin_service_pb2 as pb
from npuserve.v1 import admin_service_pb2_grpc, generate_pb2
from tests.e2e.brittle import COUNTING
from tests.e2e.processes import engine_of, until
from tests.e2e.server import Server, request, serving, streamed
from tests.support.command import npuserve

PROMPT = "Once upon a time there was a zebra named Quixotry"
KEY = "npuserve-profile-test"
WITH_KEY = (("authorization", f"Bearer {KEY}"),)
LAYERS = 5
"""Layers of the built-in model."""


class Profiled:
    """A server with an administrator's key, and calls with that key."""

    def __init__(self, server: Server):
        self.server = server
        self._admin = admin_service_pb2_grpc.AdminServiceStub(server.channel)

    def start(self, **fields: Any) -> str:
        return self._admin.StartProfile(pb.StartProfileRequest(**fields), metadata=WITH_KEY, timeout=60).name

    def stop(self, wait: bool = False) -> pb.StopProfileResponse:
        return self._admin.StopProfile(pb.StopProfileRequest(wait=wait), metadata=WITH_KEY, timeout=60)

    def StreamGenerate(
        self, ask: generate_pb2.GenerateRequest, timeout: float
    ) -> Iterator[generate_pb2.StreamGenerateResponse]:
        return self.server.stub.StreamGenerate(ask, timeout=timeout, metadata=WITH_KEY)

    def is_ready(self) -> bool:
        """Return whether the engine accepts requests."""
        try:
            self.answer(1)
        except grpc.RpcError:
            return False
        return True

    def answer(self, tokens: int) -> tuple[str, list[int]]:
        """Return text and ids of an answer to PROMPT."""
        text, ids, _ = streamed(self, request(PROMPT, tokens, ignore_eos=True))  # type: ignore[arg-type]
        return text, ids

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Run one request after the other meanwhile."""
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                self.answer(50)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(work)
            try:
                yield
            finally:
                over.set()
            running.result()


def keys(folder: Path) -> str:
    """Write a file of API keys; return its path."""
    file = folder / "keys.toml"
    file.write_text(f'[root]\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\nadmin = true\n')
    return str(file)


def refusal(call: Callable[[], object], code: grpc.StatusCode) -> str:
    """Return the details of the error that the call must end with."""
    with pytest.raises(grpc.RpcError) as failed:
        call()
    assert failed.value.code() is code  # type: ignore[attr-defined]
    return str(failed.value.details())  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Profiled, Path]]:
    """Server shared by the first tests, each of which leaves it idle and without a profile; and its folder."""
    folder = tmp_path_factory.mktemp("profile")
    flags = "--api-keys", keys(folder), "--profile-dir", str(folder / "traces"), "--dtype", "float32"
    with serving(*flags) as server:
        yield Profiled(server), folder
        assert server.stop() == 0


def test_trace_has_the_decoders_kernels_and_no_prompt(shared: tuple[Profiled, Path]) -> None:
    """First test of the shared server."""
    server, folder = shared
    expected = server.answer(120)
    assert server.start(name="mine", steps=25) == "mine"
    assert server.answer(120) == expected
    made = server.stop(wait=True)
    assert (made.steps, made.layers, made.ending) == (25, LAYERS, pb.PROFILE_ENDING_STEPS)
    file = folder / "traces" / "mine.trace.json"
    assert (made.path, made.bytes) == (str(file), file.stat().st_size)
    assert made.bytes < 1 << 20
    trace, counts = json.loads(file.read_text()), {kernel.kernel: kernel.calls for kernel in made.kernels}
    for kernel, per_layer in (("linear", 3), ("paged_attention", 1), ("qk_norm_rope_kv_write", 1),
                              ("linear_swiglu", 1), ("add_rms_norm", 2)):
        assert counts[kernel] == per_layer * LAYERS * 25
        assert counts[kernel] == sum(
            event.get("cat") == "kernel" and event["name"] == kernel for event in trace["traceEvents"])
    assert all(kernel.seconds > 0 for kernel in made.kernels)
    words = {word for word in (*PROMPT.split(), *expected[0].split()) if len(word) > 5}
    assert "Quixotry" in words
    assert not [word for word in words if word in file.read_text()]
    assert not [event for event in trace["traceEvents"] if
                set(event.get("args", {})) - {"name", "sort_index", "step", "rows", "tokens", "sampled", "context"}]
    assert server.stop() == made  # the last result again
    assert list((folder / "traces").iterdir()) == [file]


def test_command_records_a_busy_server(shared: tuple[Profiled, Path], tmp_path: Path) -> None:
    server, folder = shared
    (tmp_path / "key").write_text(KEY)
    connect = "profile", "--target", server.server.target, "--api-key-file", str(tmp_path / "key")
    with server.busy():
        done = npuserve(*connect, "--steps", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"trace: {folder}/traces/profile-1.trace.json on the server" in done.stdout
    assert "5 steps" in done.stdout
    assert "paged_attention" in done.stdout
    idle = npuserve(*connect, "--seconds", "0.1")
    assert (idle.returncode, idle.stdout.partition(" in ")[0]) == (1, "no step ran")


def test_profile_ends_by_itself_after_its_client_has_left(shared: tuple[Profiled, Path]) -> None:
    server, written = shared[0], shared[0].server.log.count("profile written")
    with grpc.insecure_channel(server.server.target) as leaving:
        start = pb.StartProfileRequest(steps=1000, max_duration={"seconds": 1})  # type: ignore[arg-type]
        admin_service_pb2_grpc.AdminServiceStub(leaving).StartProfile(start, metadata=WITH_KEY)
    said = refusal(server.start, grpc.StatusCode.FAILED_PRECONDITION)
    assert said == "a profile is running already: StopProfile ends it"
    server.answer(10)
    until(lambda: server.server.log.count("profile written") > written, server.server)
    made = server.stop()
    assert made.ending == pb.PROFILE_ENDING_DURATION
    assert 0 < made.steps <= 11
    assert server.start(name="next") == "next"
    server.stop()


@pytest.mark.full
def test_kept_traces_are_bounded(shared: tuple[Profiled, Path]) -> None:
    """Without a server: tests/npu/profiling/test_trace_folder.py."""
    server, folder = shared
    with server.busy():
        for number in range(trace_folder.MAX_TRACES + 2):
            server.start(name=f"t{number}", steps=1)
            assert server.stop(wait=True).steps == 1
        kept = {file.name.partition(".")[0] for file in (folder / "traces").iterdir()}
    assert kept == {f"t{number}" for number in range(2, trace_folder.MAX_TRACES + 2)}


@pytest.mark.full
def test_restart_of_the_engine_ends_a_profile_with_a_clear_answer(shared: tuple[Profiled, Path]) -> None:
    """Last test of the shared server."""
    server, folder = shared
    for file in (folder / "traces").iterdir():
        file.unlink()
    with ThreadPoolExecutor(1) as pool:
        server.start(steps=1000)
        waiting = pool.submit(refusal, lambda: server.stop(wait=True), grpc.StatusCode.UNAVAILABLE)
        until(lambda: engine_of(server.server))
        os.kill(engine_of(server.server), signal.SIGKILL)
        said = waiting.result()
    assert "the engine is not connected" in said or "its profile, if one was running, is lost" in said
    until(lambda: server.server.metric("npuserve_engine_restarts_total") == 1, server.server)
    until(server.is_ready, server.server)
    said = refusal(server.stop, grpc.StatusCode.FAILED_PRECONDITION)
    assert "no profile was started since the engine's start" in said
    assert list((folder / "traces").iterdir()) == []
    assert server.start() == "profile-1"


def test_server_without_the_setting_refuses(tmp_path: Path) -> None:
    with serving("--api-keys", keys(tmp_path), **COUNTING) as server:
        assert "profile_dir" in refusal(Profiled(server).start, grpc.StatusCode.FAILED_PRECONDITION)
        bare = admin_service_pb2_grpc.AdminServiceStub(server.channel)
        refusal(lambda: bare.StartProfile(pb.StartProfileRequest()), grpc.StatusCode.UNAUTHENTICATED)


@pytest.mark.full
def test_server_with_an_unusable_folder_does_not_start(tmp_path: Path) -> None:
    """The error alone: tests/service/engine/test_process.py."""
    with serving("--profile-dir", keys(tmp_path), wait=False) as refused:
        assert refused.process.wait(60) == 2
        assert f"profile_dir: {keys(tmp_path)} cannot be used" in refused.log
