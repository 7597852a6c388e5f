"""Large and compressed messages to a real server: how they are refused, and the memory of the front end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from npuserve.npu import storyteller
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc, model_pb2, tokenize_pb2
from tests.e2e.brittle import COUNTING
from tests.e2e.fuzz.wire import PREFACE, SETTINGS, frame, header_bomb
from tests.e2e.processes import processes, until
from tests.e2e.server import Server, request, serving
from tests.support.certificates import Authority, needs_openssl

GROWTH_MIB = 64
HEADERS_GROWTH_MIB = 200
"""Without a defence 900 MiB. Usually 50, but more on a busy machine, since gRPC's threads are faster than the loop."""
CALLS = 32
CONTEXT = 8192
LONG_TOKEN = 1015
"""Token of the built-in model whose text has 13 characters."""
MAX_CONNECTIONS = 3 * CALLS
"""Enough for the connections of earlier calls too, whose end the server may not have noticed yet."""
SERVICE = "/npuserve.v1.InferenceService/"
EMPTY_MESSAGES = b"\x2a\x80\x80\x40" + b"\x0a\x00" * (1 << 19)
"""Message of 1 MiB for Generate, whose chat has 2**19 empty messages."""


def peak_mib(pid: int, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(name))


class Growth:
    """Context manager that measures the growth of the front end's peak memory, as `mib`."""

    def __init__(self, server: Server) -> None:
        (self._pid,) = processes(server, "frontend")

    def __enter__(self) -> Growth:
        self._before = peak_mib(self._pid, "VmRSS")
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")  # resets VmHWM
        return self

    def __exit__(self, *error: object) -> None:
        self.mib = peak_mib(self._pid, "VmHWM") - self._before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built-in model with a longer context."""
    made = Path(shutil.copytree(storyteller.FOLDER, tmp_path_factory.mktemp("model") / "m"))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return made


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """File of API keys, and the key of its one tenant."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    command = [sys.executable, "-m", "npuserve.cli", "keys", "add", str(file), "alice"]
    return file, subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def server(folder: Path, keys: tuple[Path, str]) -> Iterator[Server]:
    """Server with API keys and a limit of connections; `server.metadata` has the key."""
    file, key = keys
    with serving(str(folder), "--api-keys", str(file), "--max-connections", str(MAX_CONNECTIONS), **COUNTING) as server:
        server.metadata = (("authorization", f"Bearer {key}"),)
        yield server


def ends(server: Server, method: str, data: bytes, calls: int = CALLS, **options: Any) -> set[tuple[str, str]]:
    """Send the call on `calls` connections at the same time; return the statuses with their messages."""
    channels = [grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(calls)]
    options = {"metadata": server.metadata, **options}
    made = [channel.unary_unary(SERVICE + method).future(data, timeout=120, **options) for channel in channels]
    found = {(call.code().name, call.details() or "") for call in made}
    for channel in channels:
        channel.close()
    return found


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_message_is_refused_without_decompressing_it(
    server: Server, compression: grpc.Compression
) -> None:
    with Growth(server) as growth:
        found = ends(server, "Generate", EMPTY_MESSAGES, compression=compression)
    assert found == {("UNIMPLEMENTED", "the request's message is compressed; send it without grpc-encoding")}
    assert growth.mib < GROWTH_MIB


def test_a_call_without_a_key_is_refused_before_its_message_is_read(server: Server) -> None:
    with Growth(server) as growth:
        found = ends(server, "Generate", b"\x1a\x80\x80\x80\x10" + b"x" * (32 << 20), calls=8, metadata=())
    assert {code for code, _ in found} == {"UNAUTHENTICATED"}
    assert growth.mib < GROWTH_MIB
    assert server.stub.Generate(request("Once", 2), metadata=server.metadata).finish.usage.generated_tokens == 2


def test_many_empty_messages_are_refused_before_they_are_parsed(server: Server) -> None:
    with Growth(server) as growth:
        found = ends(server, "Generate", EMPTY_MESSAGES)
    refusals = {details for code, details in found if code == "INVALID_ARGUMENT"}
    assert refusals == {"chat.messages: must be at most 10000, got more"}
    assert {code for code, _ in found} <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert growth.mib < GROWTH_MIB


def test_a_message_that_the_model_cannot_need_is_refused_by_its_size(server: Server) -> None:
    with Growth(server) as growth:
        large = ends(server, "Generate", pb.GenerateRequest(text="x" * (2 << 20)).SerializeToString())
        huge = ends(server, "Generate", pb.GenerateRequest(text="x" * (60 << 20)).SerializeToString(), calls=4)
    assert {code for code, _ in large | huge} == {"RESOURCE_EXHAUSTED"}
    assert any("max_message_size is" in details for _, details in large)
    assert all("larger than max" in details for _, details in huge)
    assert growth.mib < GROWTH_MIB


@pytest.mark.parametrize(("text", "said"), [
    ("x" * (1 << 20), "1048576 bytes of text cannot fit; max_model_len is 8192"),
    ("a b " * 25_000, "have more tokens than max_model_len, 8192"),
])
def test_a_text_that_cannot_fit_the_context_is_not_tokenized(server: Server, text: str, said: str) -> None:
    with Growth(server) as growth:
        found = ends(server, "Tokenize", tokenize_pb2.TokenizeRequest(text=text).SerializeToString(), calls=8)
    assert {code for code, _ in found} <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert any(said in details for _, details in found), found
    assert growth.mib < GROWTH_MIB


def test_more_ids_than_the_context_are_not_detokenized(server: Server) -> None:
    with Growth(server) as growth:
        many = ends(server, "Detokenize", tokenize_pb2.DetokenizeRequest(token_ids=[1] * (1 << 20)).SerializeToString())
        few = ends(server, "Detokenize", tokenize_pb2.DetokenizeRequest(token_ids=[1] * 8193).SerializeToString(), 1)
    assert {code for code, _ in many} == {"RESOURCE_EXHAUSTED"}
    assert few == {("INVALID_ARGUMENT", "token_ids: 8193 ids are too many; max_model_len is 8192")}
    assert growth.mib < GROWTH_MIB


def test_idle_connections_lock_nobody_out(server: Server) -> None:
    """Some send nothing, some an HTTP/2 preface, and all stay. Those with a call continue."""
    host, _, port = server.target.rpartition(":")
    slow = server.stub.StreamGenerate(request("Once", 2000, ignore_eos=True), metadata=server.metadata)
    assert next(slow)
    with contextlib.ExitStack() as idle:
        for number in range(2 * MAX_CONNECTIONS):
            connection = idle.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):  # refused
                connection.sendall((PREFACE + frame(SETTINGS)) * (number % 2))
        for _ in range(3):
            with grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                newcomer = inference_service_pb2_grpc.InferenceServiceStub(channel)
                answer = newcomer.Generate(
                    request("Once", 2), metadata=server.metadata, timeout=60, wait_for_ready=True)
                assert answer.finish.usage.generated_tokens == 2
    assert list(slow)[-1].finish.usage.generated_tokens == 2000
    assert server.metric("npuserve_closed_connections_total", why="connections") > 0


def test_front_end_short_of_descriptors_serves_newcomers(folder: Path) -> None:
    """gRPC tries again every second to accept connections for which no descriptor was free."""
    with serving(str(folder), **COUNTING) as server, contextlib.ExitStack() as idle:
        assert server.stub.Generate(request("Once", 2)).finish.usage.generated_tokens == 2
        (pid,) = processes(server, "frontend")
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 40, hard))
        host, _, port = server.target.rpartition(":")
        for _ in range(80):
            idle.enter_context(socket.create_connection((host, int(port))))
        with grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            newcomer = inference_service_pb2_grpc.InferenceServiceStub(channel)
            answer = newcomer.Generate(request("Once", 2), timeout=60, wait_for_ready=True)
            assert answer.finish.usage.generated_tokens == 2
        first = server.stub.Generate.future(request("Once", 2), timeout=60)
        # Its idle connection may be closed at this moment.
        assert first.exception() is None or first.code() is grpc.StatusCode.UNAVAILABLE
        assert server.stub.Generate(request("Once", 2), timeout=60).finish.usage.generated_tokens == 2
        assert server.process.poll() is None


@pytest.fixture(scope="module")
def tls_server(folder: Path, keys: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pair = Authority(tmp_path_factory.mktemp("tls")).issue("server")
    files = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    with serving(str(folder), "--api-keys", str(keys[0]), *files, **COUNTING) as server:
        yield server


@pytest.mark.parametrize("with_tls", [False, pytest.param(True, marks=[needs_openssl, pytest.mark.full])])
@pytest.mark.parametrize(("calls", "references"), [(400, 16_000), (8, 480_000)])
def test_headers_of_a_client_that_acknowledges_no_settings_take_little_memory(
    with_tls: bool, calls: int, references: int, request: pytest.FixtureRequest
) -> None:
    """Until the client has acknowledged them, gRPC does not apply the limits of metadata. The calls have no key."""
    server = request.getfixturevalue("tls_server" if with_tls else "server")
    host, _, port = server.target.rpartition(":")
    closed = server.metric("npuserve_closed_connections_total", why="headers")
    with Growth(server) as growth, socket.create_connection(
        (host, int(port)), timeout=10, source_address=(f"127.0.1.{calls % 256}", 0)  # which is blocked for 10 s
    ) as connection:
        if with_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            connection = context.wrap_socket(connection)
        with contextlib.suppress(OSError):  # the server closes the connection, or reads no more
            connection.sendall(PREFACE + frame(SETTINGS))
            for number in range(calls):
                connection.sendall(header_bomb(2 * number + 1, references))
        until(lambda: server.metric("npuserve_closed_connections_total", why="headers") > closed, server)
    assert growth.mib < HEADERS_GROWTH_MIB


def test_unread_replies_of_one_client_are_bounded(server: Server) -> None:
    """gRPC reads the replies only when the caller asks, so that the server sends the beginning of each."""
    data = tokenize_pb2.DetokenizeRequest(token_ids=[LONG_TOKEN] * CONTEXT).SerializeToString()
    ended: queue.Queue[Any] = queue.Queue()
    with Growth(server) as growth, grpc.insecure_channel(server.target, [("grpc.http2.bdp_probe", 0)]) as channel:
        for _ in range(120):
            channel.stream_stream(SERVICE + "Detokenize")(iter([data]), metadata=server.metadata).add_done_callback(
                ended.put)
        refused = ended.get(timeout=60)
        assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "replies to this client are unread" in refused.details()
        assert server.stub.Generate(request("Once", 2), metadata=server.metadata).finish.usage.generated_tokens == 2
    assert growth.mib < GROWTH_MIB
    assert server.stub.Detokenize(
        tokenize_pb2.DetokenizeRequest(token_ids=[LONG_TOKEN] * 2), metadata=server.metadata).text


@pytest.mark.parametrize(("method", "expression", "normalizer"), [
    ("Tokenize", r"a*a*a*(?!\w)\d", None), pytest.param("Generate", "(a+)+$", None, marks=pytest.mark.full),
    pytest.param("Generate", "x", {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"} for _ in range(40)]}, marks=pytest.mark.full)])
def test_a_text_that_explodes_in_the_tokenizer_is_refused_and_others_are_served(
    tmp_path: Path, method: str, expression: str, normalizer: dict[str, Any] | None
) -> None:
    """In processes under limits: the front end lives on, and answers other calls meanwhile."""
    model = shutil.copytree(storyteller.FOLDER, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = expression
    tokenizer["normalizer"] = normalizer
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = "a" * 350 + "b" + "a" * 350 if normalizer is None else "a"
    with serving(str(model), **COUNTING) as server:
        (before,) = processes(server, "frontend")
        message = tokenize_pb2.TokenizeRequest if method == "Tokenize" else pb.GenerateRequest
        with Growth(server) as growth:
            call = getattr(server.stub, method).future(message(text=text))
            served = 0
            while not call.done():
                server.stub.GetLoad(model_pb2.GetLoadRequest(), timeout=30)
                served += 1
                time.sleep(0.1)
            assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert call.details().startswith("text: the model's tokenizer ")
        assert served
        assert growth.mib < GROWTH_MIB
        assert server.stub.Tokenize(tokenize_pb2.TokenizeRequest(text="no such letter: zzz")).token_ids
        (after,) = processes(server, "frontend")
        assert after == before
