"""Proxies of docs/examples before a server that strangers can reach."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from npuserve.v1 import inference_service_pb2_grpc
from tests.e2e.brittle import COUNTING
from tests.e2e.fuzz.wire import PREFACE, SETTINGS, frame, header_bomb
from tests.e2e.processes import processes, until
from tests.e2e.server import Server, request, serving, streamed
from tests.support.certificates import Authority, needs_openssl

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MAX_GROWTH_MIB = 64
needs_nginx = pytest.mark.skipif(not shutil.which("nginx"), reason="no program nginx on PATH")


def peak_mib(pid: int) -> float:
    """Return the peak of a process's resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


@contextlib.contextmanager
def nginx(folder: Path, server: Server, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run nginx with the example's configuration before a server, on `port` of 127.0.0.1, in one process."""
    pair = Authority(folder).issue("server")
    text = (EXAMPLES / "nginx.conf").read_text()
    for old, new in (
        ("worker_processes auto;", f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log {folder}/log;"),
        ("server 127.0.0.1:50051;", f"server {server.target};"), ("listen 443 ", f"listen 127.0.0.1:{port} "),
        ("/etc/nginx/server.pem", str(pair.cert)), ("/etc/nginx/server.key", str(pair.key)),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    process = subprocess.Popen(
        ["nginx", "-e", str(folder / "log"), "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        def is_listening() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                return True
            return False

        until(is_listening, server)
        yield process
    finally:
        process.terminate()
        process.wait(30)


@needs_openssl
@needs_nginx
def test_nginx_example_serves_calls_and_bounds_headers(tmp_path: Path, free_port: Callable[[], int]) -> None:
    with serving(**COUNTING) as server, nginx(tmp_path, server, port := free_port()) as proxy:
        (front_end,) = processes(server, "frontend")
        credentials = grpc.ssl_channel_credentials((tmp_path / "authority.pem").read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            assert len(streamed(stub, request("Once", 300, ignore_eos=True))[1]) == 300
            before = {pid: peak_mib(pid) for pid in (proxy.pid, front_end)}
            attack(port)
            assert stub.Generate(request("Once", 2)).finish.usage.generated_tokens == 2
            for pid, mib in before.items():
                assert peak_mib(pid) - mib < MAX_GROWTH_MIB
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/npuserve.v1.AdminService/Drain")(b"", timeout=30)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def attack(port: int) -> None:
    """Send 400 calls with 16,000 headers each on one connection, until the proxy closes it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
          context.wrap_socket(connection) as hostile):
        hostile.sendall(PREFACE + frame(SETTINGS))
        for number in range(400):
            hostile.sendall(header_bomb(2 * number + 1, 16_000))
        while hostile.recv(1 << 16):
            pass


def test_envoy_example_bounds_headers() -> None:
    """Envoy is in no package registry: the file's structure alone is checked."""
    config = yaml.safe_load((EXAMPLES / "envoy.yaml").read_text())
    (listener,) = config["static_resources"]["listeners"]
    (filters,) = listener["filter_chains"]
    manager = filters["filters"][0]["typed_config"]
    assert manager["max_request_headers_kb"] == 8
    assert manager["common_http_protocol_options"]["max_headers_count"] == 64
    (cluster,) = config["static_resources"]["clusters"]
    assert manager["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]["cluster"] == cluster["name"]
