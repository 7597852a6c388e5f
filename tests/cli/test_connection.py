"""Connection of the commands to a server: readiness, TLS, and errors as sentences."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest

from npuserve.cli import connection
from npuserve.client import channel
from npuserve.client.rpc_errors import from_rpc
from npuserve.service import arguments
from tests.cli.test_metrics_reader import answering
from tests.support.certificates import Authority, Pair, needs_openssl
from tests.support.command import npuserve
from tests.support.fake_server import serving


def test_wait_ready_returns_once_the_server_is_ready() -> None:
    with serving() as server:
        server.set_ready(False)
        threading.Timer(0.2, server.set_ready, [True]).start()
        connection.wait_ready(server.target, 20)
        server.set_ready(False)
        with pytest.raises(connection.ConnectionFailed, match=r"^127.0.0.1:\d+: not ready within 0.2 s$"):
            connection.wait_ready(server.target, 0.2)


def test_wait_ready_without_a_server_fails_after_the_time(free_port: Callable[[], int]) -> None:
    target = f"127.0.0.1:{free_port()}"
    with pytest.raises(connection.ConnectionFailed, match=r"not ready within 0\.3 s"):
        connection.wait_ready(target, 0.3)


def test_channel_accepts_messages_of_64_mib() -> None:
    assert dict(channel.OPTIONS)["grpc.max_receive_message_length"] == 64 << 20


@pytest.mark.parametrize(("code", "details", "sentence"), [
    (grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: too big", "h:1: sampling.top_p: too big (INVALID_ARGUMENT)"),
    (grpc.StatusCode.UNAVAILABLE, "draining", "h:1: draining (UNAVAILABLE)"),
    (grpc.StatusCode.INTERNAL, None, "h:1: no details (INTERNAL)"),
])
def test_explain_is_a_sentence_with_the_code(code: grpc.StatusCode, details: str | None, sentence: str) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    assert connection.explain(from_rpc(error), "h:1") == sentence


@dataclass
class Ports:
    """Ports of 127.0.0.1 by the protocol of their server. authority signed the certificates, stranger did not."""

    authority: Authority
    stranger: Authority
    by_name: dict[str, int]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    folder = tmp_path_factory.mktemp("certificates")
    authority, stranger = Authority(folder), Authority(folder, "stranger")
    named, elsewhere = authority.issue("named"), authority.issue("elsewhere", names="DNS:elsewhere.example")

    def credentials(pair: Pair, client_ca: Path | None = None) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(pair.key.read_bytes(), pair.cert.read_bytes())], client_ca and client_ca.read_bytes(), bool(client_ca))

    class Junk(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"SSH-2.0-something\r\n")

    grpc_server = grpc.server(futures.ThreadPoolExecutor(1))
    by_name = {
        "plain": grpc_server.add_insecure_port("127.0.0.1:0"),
        "tls": grpc_server.add_secure_port("127.0.0.1:0", credentials(named)),
        "elsewhere": grpc_server.add_secure_port("127.0.0.1:0", credentials(elsewhere)),
        "mutual": grpc_server.add_secure_port("127.0.0.1:0", credentials(named, authority.cert)),
    }
    grpc_server.start()
    with contextlib.ExitStack() as stack:
        for name, body in (("metrics", "npuserve_requests_running 0\n"), ("web", "hello")):
            url = stack.enter_context(answering(200, body))
            by_name[name] = urlsplit(url).port or 0
        junk = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Junk))
        threading.Thread(target=junk.serve_forever, args=(0.01,), daemon=True).start()
        stack.callback(junk.shutdown)
        by_name["junk"] = junk.server_address[1]
        yield Ports(authority, stranger, by_name)
    grpc_server.stop(None).wait()


UNTRUSTED = ("the server's certificate is not valid: unable to get local issuer certificate; give its authority's "
             "certificate with --tls-ca")
METRICS = "this is the port of npuserve's metrics; gRPC has another, 50051 by default"


@pytest.mark.slow
@needs_openssl
@pytest.mark.parametrize(("port", "trusted", "sentence"), [
    ("tls", "stranger", UNTRUSTED),
    ("tls", "system", UNTRUSTED),
    ("tls", "", "the server speaks TLS; add --tls, or --tls-ca FILE"),
    ("mutual", "", "the server speaks TLS; add --tls, or --tls-ca FILE"),
    ("mutual", "authority", "the server ended the connection after the TLS handshake; does it require a client "
     "certificate (--tls-cert, --tls-key)?"),
    ("elsewhere", "authority", "the server's certificate does not name 127.0.0.1"),
    ("plain", "authority", "the server speaks no TLS; leave out --tls, --tls-ca, --tls-cert and --tls-key"),
    ("metrics", "", METRICS),
    ("metrics", "system", METRICS),
    ("web", "", "this port belongs to a web server without gRPC"),
    ("junk", "", "the server at this port speaks neither gRPC nor TLS"),
])
def test_generate_without_a_connection_names_the_protocol(ports: Ports, port: str, trusted: str, sentence: str) -> None:
    target = f"127.0.0.1:{ports.by_name[port]}"
    flags = {"": (), "system": ("--tls",)}.get(trusted) or (
        ("--tls-ca", str(getattr(ports, trusted).cert)) if trusted else ())
    done = npuserve("generate", "x", "--target", target, *flags)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"npuserve: {target}: {sentence}\n")


@pytest.mark.slow
@needs_openssl
def test_generate_unusable_file_is_named(ports: Ports, tmp_path: Path) -> None:
    ca, own, other = ports.authority.cert, ports.authority.issue("own"), ports.authority.issue("other")
    latin = tmp_path / "key"
    latin.write_bytes(b"caf\xe9")
    for flags, sentence in (
        (("--tls-ca", own.key), f"tls: {own.key} has no certificate in PEM"),
        (("--tls-ca", ca, "--tls-cert", own.cert, "--tls-key", other.key),
         f"tls: {own.cert} and {other.key} are not a certificate and its key (KEY_VALUES_MISMATCH)"),
        (("--tls-ca", ca, "--tls-cert", latin, "--tls-key", own.key),
         f"tls: {latin} and {own.key} are not a certificate and its key (not in PEM, or encrypted)"),
        (("--api-key-file", latin), f"--api-key-file: {latin}: is not UTF-8"),
    ):
        done = npuserve("generate", "x", "--target", f"127.0.0.1:{ports.by_name['tls']}", *map(str, flags))
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"npuserve: {sentence}\n")


@pytest.mark.slow
@needs_openssl
def test_generate_wait_without_a_connection_names_the_cause(ports: Ports) -> None:
    target = f"127.0.0.1:{ports.by_name['tls']}"
    done = npuserve("generate", "x", "--target", target, "--wait", "0.5", "--tls-ca", str(ports.stranger.cert))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"npuserve: {target}: {UNTRUSTED}; not ready within 0.5 s\n"


@pytest.mark.slow
@needs_openssl
def test_top_at_a_grpc_port_names_the_protocol(ports: Ports) -> None:
    for port, spoken in (("plain", "gRPC"), ("tls", "TLS, which the metrics page never does")):
        target = f"127.0.0.1:{ports.by_name[port]}"
        done = npuserve("top", "--once", "--target", target)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (f"npuserve top: http://{target}/metrics: this port speaks {spoken}; "
                               "give the metrics port, which is 9090 by default\n")


@pytest.mark.slow
@pytest.mark.parametrize("host", ["no-such-host.invalid", "127..0.0.1"])
def test_generate_at_an_unknown_host_names_it(host: str) -> None:
    done = npuserve("generate", "x", "--target", f"{host}:50051")
    assert done.returncode == 1
    assert done.stderr.startswith(f"npuserve: {host}:50051: the name {host} cannot be resolved (")


def test_top_at_a_malformed_host_names_it() -> None:
    done = npuserve("top", "--once", "--target", "127..0.0.1:9090")
    assert done.returncode == 1
    assert "the name 127..0.0.1 cannot be resolved (" in done.stderr


COMMANDS = [("generate", "x"), ("chat",), ("bench", "serve")]
INVALID = ["http://127.0.0.1:50051", "localhost", "", "::1:50051", "host:0", "host:70000"]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "target"), [
    pytest.param(command, target, marks=[] if command == COMMANDS[0] or target == INVALID[0] else pytest.mark.full)
    for command in COMMANDS for target in INVALID])  # all commands parse it by the same function
def test_target_invalid_is_refused(command: tuple[str, ...], target: str) -> None:
    done = npuserve(*command, "--target", target)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"argument --target: must be HOST:PORT, such as 127.0.0.1:50051, got {target!r}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("target", ["host:1", "[::1]:50051", "10.0.0.1:65535", "dns:///host:1", "unix:/run/socket"])
def test_target_valid_is_accepted(target: str) -> None:
    assert arguments.target(target) == target
