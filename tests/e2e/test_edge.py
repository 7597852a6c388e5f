"""A real server: TLS and keys with other clients, invalid requests, frozen processes, a drain by request."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npuserve.client import Tls
from npuserve.v1 import admin_service_pb2, admin_service_pb2_grpc, model_pb2
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc as rpc
from tests.e2e.brittle import COUNTING
from tests.e2e.processes import processes, until
from tests.e2e.server import Server, request, serving, streamed
from tests.support.certificates import Authority, needs_openssl
from tests.support.connect import connect

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Server with two front ends that kills a frozen process after 5 s, shared by tests that leave it ready."""
    with serving("--frontends", "2", "--hang-seconds", "5", **COUNTING) as running:
        yield running


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@needs_openssl
def test_mutual_tls_and_keys_with_others_clients(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Clients: grpcurl by reflection, `npuserve generate` and grpcio; probes on the plain health port."""
    authority = Authority(tmp_path)
    server_pair, own = authority.issue("server"), authority.issue("client")
    keys, key_file = tmp_path / "keys", tmp_path / "key"
    cli = (sys.executable, "-m", "npuserve.cli")
    key_file.write_text(command(*cli, "keys", "add", str(keys), "alice").stdout)
    port = free_port()
    with serving("--tls-cert", str(server_pair.cert), "--tls-key", str(server_pair.key), "--tls-client-ca",
                 str(authority.cert), "--api-keys", str(keys), "--health-port", str(port),
                 **COUNTING) as server:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as plain:
            answer = health_pb2_grpc.HealthStub(plain).Check(health_pb2.HealthCheckRequest(service=""), timeout=60)
            assert answer.status == SERVING
        key = key_file.read_text().strip()
        tls = Tls(authority.cert, own.cert, own.key)
        with connect(server.target, key, tls) as channel:
            expected = streamed(rpc.InferenceServiceStub(channel), request("Once upon a time", 8))[0]
            with pytest.raises(grpc.RpcError) as denied:
                admin_service_pb2_grpc.AdminServiceStub(channel).GetServerInfo(admin_service_pb2.GetServerInfoRequest())
            assert denied.value.code() == grpc.StatusCode.PERMISSION_DENIED
        for wrong_key, wrong_tls, code in ((None, tls, "UNAUTHENTICATED"), (key, Tls(authority.cert), "UNAVAILABLE"),
                                           (key, None, "UNAVAILABLE")):
            with connect(server.target, wrong_key, wrong_tls) as channel, pytest.raises(grpc.RpcError) as refused:
                rpc.InferenceServiceStub(channel).GetLoad(model_pb2.GetLoadRequest(), timeout=60)
            assert refused.value.code().name == code
        files = ("--tls-ca", str(authority.cert), "--tls-cert", str(own.cert), "--tls-key", str(own.key))
        ask = (*cli, "generate", "Once upon a time", "--max-tokens=8", "--temperature=0", f"--target={server.target}")
        done = command(*ask, *files, "--api-key-file", str(key_file), "--wait", "10")
        assert (done.returncode, done.stdout.rstrip("\n")) == (0, expected), done.stderr
        assert "UNAUTHENTICATED" in command(*ask, *files).stderr
        load = (*cli, "bench", "serve", "--requests=4", "--output-tokens=4", f"--target={server.target}", *files)
        assert "4 ok" in command(*load, "--api-key-file", str(key_file)).stdout
        assert "UNAUTHENTICATED" in command(*load).stderr
        assert re.search(r'"client": ?"alice"', server.log)
        program = shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or shutil.which("grpcurl")
        if program:
            body = {"text": "Once upon a time", "sampling": {"temperature": 0}, "stopping": {"maxTokens": 8}}
            grpcurl = (program, "-cacert", str(authority.cert), "-cert", str(own.cert), "-key", str(own.key))
            method = "npuserve.v1.InferenceService/Generate"
            bearer = ("-H", f"authorization: Bearer {key}")
            done = command(*grpcurl, *bearer, "-d", json.dumps(body), server.target, method)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["text"] == expected
            assert "an API key is needed" in command(*grpcurl, "-d", json.dumps(body), server.target, method).stderr
        assert server.metric("npuserve_tls_certificate_expiry_timestamp_seconds", certificate="server") > time.time()
        assert key not in server.log


def test_bad_requests_of_any_language_are_invalid_argument_by_field(server: Server) -> None:
    """Requests are sent as bytes: protobuf in C++, Ruby and Node can send messages that Python's cannot."""
    generate = "/npuserve.v1.InferenceService/Generate"

    def counts() -> list[float]:
        return [server.metric("npuserve_requests_total", rpc="Generate", code=code)
                for code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")]

    server.stub.Generate(request("Once", 1))  # makes the metric exist
    before = counts()
    raw = server.channel.unary_unary(generate, response_deserializer=pb.GenerateResponse.FromString)
    several = pb.GenerateRequest(text="a")
    several.sampling.temperature, several.scheduling.priority = -1, 1000
    for data, code, said in (
        (b"\x1a\x04caf\xe9", "INVALID_ARGUMENT", "text: must be valid UTF-8"),
        (b"\x0a\x03\xed\xa0\x80", "INVALID_ARGUMENT", "request_id: must be valid UTF-8"),
        (b"\xff\xff\xff", "INVALID_ARGUMENT", "the request is not a valid npuserve.v1.GenerateRequest: malformed"),
        (several.SerializeToString(), "INVALID_ARGUMENT",
         "sampling.temperature: must be in [0, 100], got -1; scheduling.priority: must be in [0, 100], got"),
        (pb.GenerateRequest(text="").SerializeToString(), "INVALID_ARGUMENT", "text: must be at least one token"),
        (b"\x2a\x08\x0a\x06\x0a\x04user", "FAILED_PRECONDITION", "chat: the served model has no chat template"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            raw(data, timeout=60)
        assert (refused.value.code().name, refused.value.details()[: len(said)]) == (code, said)
    assert len(streamed(server.stub, request("Once upon a time", 4))[1]) == 4
    until(lambda: counts() == [before[0] + 5, before[1] + 1], server)
    assert "Traceback" not in server.log
    assert "InvalidField: text" in server.log


@pytest.mark.slow
def test_a_frozen_engine_is_killed_and_its_streams_go_on(server: Server) -> None:
    """SIGSTOP stands for a stuck driver or a debugger. Health's Watch sends both changes."""
    restarts = server.metric("npuserve_engine_restarts_total")
    ask = request("Once upon a time", 400, ignore_eos=True)
    expected = streamed(server.stub, ask)[:2]
    seen: list[int] = []
    watch = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest(service=""))

    def note() -> None:
        try:
            seen.extend(update.status for update in watch)
        except grpc.RpcError:
            return

    threading.Thread(target=note, daemon=True).start()
    answers: list[tuple[str, list[int]]] = []
    asking = threading.Thread(target=lambda: answers.append(streamed(server.stub, ask)[:2]))
    asking.start()
    until(lambda: server.stub.GetLoad(model_pb2.GetLoadRequest()).running, server)
    (engine,) = processes(server, "engine")
    os.kill(engine, signal.SIGSTOP)
    asking.join(90)
    assert answers == [expected]
    until(lambda: len(seen) == 3, server)
    watch.cancel()
    assert seen == [SERVING, NOT_SERVING, SERVING]
    assert "engine hangs, killing it" in server.log
    assert server.metric("npuserve_engine_restarts_total") == restarts + 1


@pytest.mark.slow
def test_a_frozen_front_end_is_replaced(server: Server) -> None:
    restarts, ready = server.metric("npuserve_engine_restarts_total"), server.log.count("ready in")
    before = processes(server, "frontend")
    os.kill(before[0], signal.SIGSTOP)
    until(lambda: len(after := processes(server, "frontend")) == 2 and before[0] not in after, server)
    assert re.search(r"frontend-\d hangs, killing it", server.log)
    assert before[1] in processes(server, "frontend")
    until(lambda: server.log.count("ready in") > ready, server)
    for _ in range(4):
        with grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            assert len(streamed(rpc.InferenceServiceStub(channel), request("Once", 4))[1]) == 4
    assert server.metric("npuserve_engine_restarts_total") == restarts
    assert server.stop() == 0  # this is the last test of the shared server


@pytest.mark.full
def test_a_drain_on_demand(tmp_path: Path) -> None:
    """AdminService.Drain through one of two front ends: both end, running requests complete, exit code 0.

    By default without a model's processes in tests/service/supervisor/test_supervisor.py.
    """
    keys = tmp_path / "keys"
    key = command(sys.executable, "-m", "npuserve.cli", "keys", "add", str(keys), "ops", "--admin").stdout
    with serving("--frontends", "2", "--api-keys", str(keys), **COUNTING) as server:
        server.channel = connect(server.target, key.strip())
        server.stub = rpc.InferenceServiceStub(server.channel)
        answer: list[int] = []
        asking = threading.Thread(target=lambda: answer.extend(
            streamed(server.stub, request("Once upon a time", 200, ignore_eos=True))[1]))
        asking.start()
        until(lambda: server.stub.GetLoad(model_pb2.GetLoadRequest()).running, server)
        drain = admin_service_pb2.DrainRequest()
        drain.grace.FromSeconds(60)
        admin_service_pb2_grpc.AdminServiceStub(server.channel).Drain(drain)
        asking.join(90)
        assert len(answer) == 200
        assert server.process.wait(60) == 0
