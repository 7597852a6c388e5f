"""Life of the processes: start, health while loading, death of the engine, several front ends, stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc, model_pb2, prompt_pb2
from tests.e2e import brittle
from tests.e2e.brittle import COUNTING
from tests.e2e.processes import children, processes, until
from tests.e2e.server import Server, request, serving, streamed
from tests.e2e.stalled_hub import StalledHub
from tests.support.processes import is_running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(server: Server, service: str = "npuserve.readiness") -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status


def is_serving(server: Server) -> bool:
    """Return True if the server is ready; False also while a front end restarts."""
    try:
        return health(server) == SERVING
    except grpc.RpcError:
        return False


@pytest.fixture(scope="module")
def slow_load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File that holds up loads of `server` while it exists."""
    file: Path = tmp_path_factory.mktemp("lifecycle") / "load"
    file.write_text("hold")
    return file


@pytest.fixture(scope="module")
def server(slow_load: Path) -> Iterator[Server]:
    """Server shared by the first tests; it may still load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(brittle.LOAD, str(slow_load))
        with serving("--debuggable", wait=False, **COUNTING) as running:
            yield running


@pytest.fixture(scope="module")
def two_front_ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server with two front ends, whose model is a name on the hub that is in the cache."""
    cache, commit = tmp_path_factory.mktemp("hub"), "0" * 40
    repository = cache / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(FOLDER, repository / "snapshots" / commit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(cache))
        patch.setenv("HF_HUB_OFFLINE", "1")
        with serving("org/name", "--frontends", "2", **COUNTING) as running:
            yield running


def test_health_while_loading_and_watch(server: Server, slow_load: Path) -> None:
    """First test of the shared server, which has just started."""
    assert health(server, "npuserve.liveness") == SERVING
    assert health(server) == NOT_SERVING
    with pytest.raises(grpc.RpcError) as early:
        server.stub.Generate(request("Once", 4), timeout=60)
    assert early.value.code() == grpc.StatusCode.UNAVAILABLE
    seen = []
    watch = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest(service=""), timeout=90)
    for update in watch:
        seen.append(update.status)
        slow_load.unlink(missing_ok=True)
        if update.status == SERVING:
            watch.cancel()
            break
    assert seen == [NOT_SERVING, SERVING]
    assert server.stub.Generate(request("Once", 4), timeout=60).finish.usage.generated_tokens == 4


def test_engine_death_is_a_pause(server: Server, slow_load: Path) -> None:
    server.wait_until_ready()
    until(lambda: is_serving(server))
    restarts = server.metric("npuserve_engine_restarts_total")
    ask = request("Once upon a time", 400, ignore_eos=True)
    expected = streamed(server.stub, ask)[:2]
    answers: list[tuple[str, list[int]]] = []
    asking = threading.Thread(target=lambda: answers.append(streamed(server.stub, ask)[:2]))
    asking.start()
    while server.stub.GetLoad(server_pb()).running == 0 and asking.is_alive():
        time.sleep(0.01)
    slow_load.write_text("hold")
    os.kill(children(server)["engine"], signal.SIGKILL)
    while health(server) == SERVING:
        time.sleep(0.005)
    assert health(server, "npuserve.liveness") == SERVING
    with pytest.raises(grpc.RpcError) as refused:
        server.stub.Generate(request("Once", 4), timeout=60)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    slow_load.unlink()
    asking.join(60)
    assert answers == [expected]
    assert health(server) == SERVING
    assert len(streamed(server.stub, request("Once upon a time", 8))[1]) == 8
    assert server.metric("npuserve_engine_restarts_total") == restarts + 1


@pytest.mark.full
def test_engine_killed_in_each_start_is_restarted_with_short_pauses() -> None:
    """Nothing is wrong with a start that is killed from outside. The request that waits is answered.

    The pauses alone: tests/service/supervisor/test_restart_policy.py.
    """
    with serving() as server:
        ask = request("Once upon a time", 200, ignore_eos=True)
        answer = server.stub.Generate.future(ask, timeout=100)
        killed: set[int] = set()
        while len(killed) < 6:
            until(lambda: children(server).get("engine", 0) not in {0, *killed}, server)
            killed.add(children(server)["engine"])
            os.kill(children(server)["engine"], signal.SIGKILL)
        assert answer.result().finish.usage.generated_tokens == 200
        restarts = [json.loads(line) for line in server.log.splitlines() if "starting it again" in line]
        assert len(restarts) == 6
        assert sum(restart["pause"] for restart in restarts) <= 2.2
        assert server.stop() == 0


def test_metrics_after_kills_keep_totals_in_as_many_files(server: Server) -> None:
    """Two deaths of the engine and of the front end, each after a request whose counts are on the page."""
    server.wait_until_ready()
    until(lambda: is_serving(server))
    environment = Path(f"/proc/{children(server)['frontend']}/environ").read_bytes()
    found = re.search(rb"PROMETHEUS_MULTIPROC_DIR=([^\0]+)", environment)
    assert found
    folder = Path(found[1].decode())
    files, rounds = [], 2
    assert len(streamed(server.stub, request("Once upon a time", 8))[1]) == 8
    tokens, finished, first, sums, restarts = settled(server)
    for number in range(1, rounds + 1):
        for name in ("engine", "frontend"):
            until(lambda: is_serving(server))
            assert len(streamed(server.stub, request("Once upon a time", 8))[1]) == 8
            # Three figures of the engine and the front end, which write them some time after the answer.
            more = 2 * number - (name == "engine")
            until(lambda more=more: server.metric("npuserve_generation_tokens_total") == tokens + 8 * more)
            until(lambda more=more: server.metric(
                "npuserve_request_finish_total", reason="length") == finished + more)
            until(lambda more=more: server.metric("npuserve_time_to_first_token_seconds_count") == first + more)
            pid = children(server)[name]
            os.kill(pid, signal.SIGKILL)
            until(lambda name=name, pid=pid: children(server).get(name, pid) != pid)
        until(lambda: is_serving(server))
        files.append(len(list(folder.glob("*.db"))))
    assert files == [files[0]] * rounds
    assert server.metric("npuserve_generation_tokens_total") == tokens + 8 * 2 * rounds
    assert server.metric("npuserve_request_generation_tokens_sum") == sums + 8 * 2 * rounds
    assert server.metric("npuserve_engine_restarts_total") == restarts + rounds


def settled(server: Server) -> list[float]:
    """Return five totals of the metrics page once they have stopped changing."""
    def totals() -> list[float]:
        return [server.metric("npuserve_generation_tokens_total"),
                server.metric("npuserve_request_finish_total", reason="length"),
                server.metric("npuserve_time_to_first_token_seconds_count"),
                server.metric("npuserve_request_generation_tokens_sum"),
                server.metric("npuserve_engine_restarts_total")]

    seen = [totals()]
    while len(seen) < 4 or seen[-4:] != [seen[-1]] * 4:
        time.sleep(0.5)
        seen.append(totals())
    return seen[-1]


def server_pb() -> model_pb2.GetLoadRequest:
    return model_pb2.GetLoadRequest()


@pytest.mark.slow
def test_sigterm_with_a_silent_collector_slow_readers_and_a_slow_template_exits_0(tmp_path: Path) -> None:
    """Each phase of the exit is bounded, and the supervisor waits for all of them.

    Clients do not read their streams. More chats wait for a template than the front end has threads, so that none is
    free at its exit; each of these calls ends with RetryInfo.
    """
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(  # which must serve one word at the start
        "{% if not messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        "{% endif %}")
    chats = 40
    asked = generate_pb2.GenerateRequest(chat=prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user")]))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as collector:  # accepts connections and never replies
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}"
        with serving(str(folder), "--otlp-endpoint", endpoint, "--drain-seconds", "1", "--max-buffered-tokens", "16",
                     **COUNTING) as server:
            small = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
            with grpc.insecure_channel(server.target, small) as channel:
                stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
                streams = [stub.StreamGenerate(request("Once upon a time", 480, ignore_eos=True, logprobs=20))
                           for _ in range(4)]
                until(lambda: server.metric("npuserve_requests_paused") == len(streams))
                calls = [server.stub.Generate.future(asked) for _ in range(chats)]
                until(lambda: server.metric("npuserve_requests_preparing") == chats)
                assert server.stub.GetLoad(server_pb()).preparing == chats
                assert server.stop() == 0, server.log
                for call in calls:
                    assert call.code() is grpc.StatusCode.UNAVAILABLE
                    retry = error_details_pb2.RetryInfo()
                    assert any(detail.Unpack(retry) for detail in rpc_status.from_call(call).details), call.details()


def test_several_front_ends_share_the_port(two_front_ends: Server) -> None:
    texts = set()
    for _ in range(8):
        channel = grpc.insecure_channel(two_front_ends.target, options=[("grpc.use_local_subchannel_pool", 1)])
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        texts.add(streamed(stub, request("Once upon a time", 8))[0])
        channel.close()
    assert len(texts) == 1


def test_serve_hub_name_in_the_cache_is_served(two_front_ends: Server) -> None:
    """All front ends, and one that starts later, load the folder that the supervisor found."""
    server = two_front_ends
    assert server.stub.GetModelInfo(model_pb2.GetModelInfoRequest()).name == "org/name"
    pid, ready = children(server)["frontend"], server.log.count("ready in")
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.log.count("ready in") > ready, server)
    assert server.stub.Generate(request("Once", 4), timeout=60).finish.usage.generated_tokens == 4


def test_sigterm_to_all_processes_lets_streams_end_without_a_restart(two_front_ends: Server) -> None:
    """systemd, by default, and Slurm send it to all of them. To the supervisor alone: test_smoke.py.

    Last test of the shared server.
    """
    server = two_front_ends
    restarts = server.log.count("starting it again")
    call = server.stub.StreamGenerate(request("Once upon a time", 400, ignore_eos=True), timeout=60)
    tokens = len(next(call).token_ids)
    for pid in (*processes(server, "frontend"), *processes(server, "engine"), server.process.pid):
        os.kill(pid, signal.SIGTERM)
    tokens += sum(len(part.token_ids) for part in call)
    assert tokens == 400
    assert server.process.wait(60) == 0
    assert server.log.count("starting it again") == restarts


@pytest.mark.timeout(300)  # of its waits
@pytest.mark.parametrize(("stalls", "number"), [
    ("files", signal.SIGTERM),
    pytest.param("api", signal.SIGINT, marks=pytest.mark.full),
    pytest.param("api", signal.SIGTERM, marks=pytest.mark.full),
    pytest.param("files", signal.SIGINT, marks=pytest.mark.full),
])
def test_serve_signal_during_a_stalled_download_drains_and_exits_0(
    stalls: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health is served meanwhile. Only one process sends requests to the hub, and no process waits for the body."""
    with contextlib.closing(StalledHub(stalls, tmp_path)) as hub:
        for name, value in hub.environment.items():
            monkeypatch.setenv(name, value)
        with serving("org/name", "--frontends", "2", wait=False) as server:
            assert hub.stalled.wait(180)
            assert health(server, "npuserve.liveness") == SERVING
            assert health(server) == NOT_SERVING
            with pytest.raises(grpc.RpcError) as early:
                server.stub.Generate(request("Once", 4), timeout=60)
            assert early.value.code() == grpc.StatusCode.UNAVAILABLE
            started = children(server)
            server.process.send_signal(number)
            assert server.process.wait(60) == 0, server.log
            assert "Traceback" not in server.log
            assert not [pid for pid in started.values() if is_running(pid)]
        if stalls == "files":
            assert len([path for _, path in hub.requests if path.endswith("/revision/main")]) == 1, hub.requests


@pytest.mark.slow
@pytest.mark.parametrize("command", [("check", "--json"), pytest.param(("quantize",), marks=pytest.mark.full)])
def test_command_interrupted_during_a_stalled_download_ends_at_once(command: tuple[str, ...], tmp_path: Path) -> None:
    with contextlib.closing(StalledHub("files", tmp_path)) as hub:
        arguments = [*command, "org/name", *([str(tmp_path / "out")] if command == ("quantize",) else [])]
        # A background job of a shell, and so its tests, ignore SIGINT.
        process = subprocess.Popen(
            ["env", "--default-signal=INT", sys.executable, "-m", "npuserve.cli", *arguments],
            env={**os.environ, **hub.environment}, stderr=subprocess.PIPE, text=True)
        try:
            assert hub.stalled.wait(180)
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=30)[1]  # shorter than the timeouts of the hub's client
        finally:
            process.kill()
        assert process.returncode == 130
        assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "said"), [
    (("--max-num-seqs", "0"), "max_num_seqs"),
    # By default test_start.py has an engine that cannot load.
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        (("--device", "npu"), "npu"), (("--kv-cache-memory", "1"), "kv_cache_memory"),
        (("/nowhere/at/all",), "/nowhere/at/all"), (("--kv-cache-dtype", "int4"), "kv_cache_dtype"))),
])
def test_serve_error_names_the_cause(arguments: tuple[str, ...], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "npuserve.cli", "serve", *arguments, "--port", "0",
                           "--metrics-port", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_unknown_architecture_names_those_supported(tmp_path: Path) -> None:
    """By default without a server in tests/npu/model/test_config.py."""
    (tmp_path / "config.json").write_text('{"architectures": ["BloomForCausalLM"], "model_type": "bloom"}')
    done = subprocess.run([sys.executable, "-m", "npuserve.cli", "serve", str(tmp_path), "--port", "0",
                           "--metrics-port", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "BloomForCausalLM" in done.stderr
    assert "Qwen3ForCausalLM" in done.stderr
