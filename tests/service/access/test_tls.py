"""TLS with certificates that openssl made: handshakes, reload under streams, mutual authentication, expiry."""

from __future__ import annotations

import contextlib
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npuserve.service import metrics
from npuserve.service.access import tls
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.ipc.messages import Submit
from npuserve.v1 import inference_service_pb2_grpc as rpc
from npuserve.v1 import model_pb2
from tests.support.certificates import Authority, Pair, needs_openssl, openssl
from tests.support.fake_engine import make_folder, until
from tests.support.front_end import Running, ask, running

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Pair:
    """The server's, which a test may replace."""
    made = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    authority.issue("server").install(made.cert, made.key)
    return made


def settings(files: Pair, **more: Any) -> dict[str, Any]:
    return {"tls_cert": str(files.cert), "tls_key": str(files.key), **more}


def trust(authority: Pair, client: Pair | None = None) -> grpc.ChannelCredentials:
    own = (client.key.read_bytes(), client.cert.read_bytes()) if client else (None, None)
    return grpc.ssl_channel_credentials(authority.cert.read_bytes(), *own)


@contextlib.asynccontextmanager
async def connected(server: Running, credentials: grpc.ChannelCredentials) -> AsyncIterator[Any]:
    """A stub on a connection of its own."""
    alone = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(server.target, credentials, options=alone) as channel:
        yield rpc.InferenceServiceStub(channel)


async def refused(server: Running, credentials: grpc.ChannelCredentials) -> None:
    """At the handshake."""
    async with connected(server, credentials) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.GetLoad(model_pb2.GetLoadRequest(), timeout=10)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE


async def answered(server: Running, credentials: grpc.ChannelCredentials) -> None:
    async with connected(server, credentials) as stub:
        assert (await stub.Generate(ask("a", 3), timeout=10)).text == "bcd"


async def test_who_trusts_the_authority_is_served(tmp_path: Path, files: Pair, other: Authority,
                                                  authority: Authority) -> None:
    async with running(make_folder(tmp_path / "m"), credentials=trust(authority), **settings(files)) as server:
        assert (await server.inference.Generate(ask("a", 3))).text == "bcd"
        await refused(server, trust(other))
        async with grpc.aio.insecure_channel(server.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as plain:
                await rpc.InferenceServiceStub(channel).GetLoad(model_pb2.GetLoadRequest(), timeout=10)
            assert plain.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_new_files_are_for_new_connections_and_streams_go_on(
    tmp_path: Path, files: Pair, authority: Authority, other: Authority
) -> None:
    async with running(make_folder(tmp_path / "m"), credentials=trust(authority), **settings(files)) as server:
        server.engine.delay = 0.02
        stream = server.inference.StreamGenerate(ask("a", 60))
        text = (await stream.read()).text
        other.issue("server").install(files.cert, files.key)
        tls_ = server.frontend._tls
        assert tls_
        before = tls_._certificates.value
        await until(lambda: tls_._certificates.value is not before)
        await answered(server, trust(other))
        await refused(server, trust(authority))
        while part := await stream.read():
            text += part.text
        assert text == "".join(chr(97 + (i + 1) % 26) for i in range(60))
        assert (await server.inference.Generate(ask("a", 1))).text == "b", "the old connection is as good as before"


async def test_what_is_wrong_with_new_files_is_logged_and_the_old_ones_stay(
    tmp_path: Path, files: Pair, authority: Authority, other: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(make_folder(tmp_path / "m"), credentials=trust(authority), **settings(files)) as server:
        tls_ = server.frontend._tls
        assert tls_
        fresh = other.issue("server")
        fresh.install(files.cert, tmp_path / "elsewhere")  # the certificate alone, as in the middle of a rotation
        for _ in range(3):
            tls_.look()
        (said,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert "not read again" in said.getMessage()
        assert "is not the key" in said.fields["error"]  # type: ignore[attr-defined]
        await answered(server, trust(authority))
        fresh.install(files.cert, files.key)
        tls_.look()
        await answered(server, trust(other))
        caplog.clear()
        files.key.unlink()
        for _ in range(3):
            tls_.look()
        assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
        await answered(server, trust(other))


async def test_an_expired_certificate_ends_new_connections_alone(
    tmp_path: Path, files: Pair, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """The clients refuse it; streams under way go on; log and metric say it."""
    async with running(make_folder(tmp_path / "m"), credentials=trust(authority), **settings(files)) as server:
        server.engine.delay = 0.02
        stream = server.inference.StreamGenerate(ask("a", 40))
        text = (await stream.read()).text
        past = authority.issue("past", days=-1)
        past.install(files.cert, files.key)
        assert server.frontend._tls
        server.frontend._tls.look()
        await refused(server, trust(authority))
        while part := await stream.read():
            text += part.text
        assert len(text) == 40
        (said,) = [r for r in caplog.records if "has expired" in r.getMessage()]
        assert said.levelno == logging.ERROR
        assert metrics.tls_certificate_expiry.labels("server")._value.get() == ends(past)


async def test_clients_are_known_by_their_certificates(
    tmp_path: Path, files: Pair, authority: Authority, other: Authority
) -> None:
    spiffe = authority.issue("workload", names="URI:spiffe://cluster/ns/llm")
    bare = authority.issue("alice", names="")
    config = settings(files, tls_client_ca=str(authority.cert))
    async with running(make_folder(tmp_path / "m"), credentials=trust(authority, bare), **config) as server:
        await server.inference.Generate(ask("a", 1))
        await answered(server, trust(authority, spiffe))
        names = [message.request.client for message in server.engine.got(Submit)]
        assert names == ["cert:alice", "cert:spiffe://cluster/ns/llm"]
        assert [message.request.owner for message in server.engine.got(Submit)] == names
        await refused(server, trust(authority))
        await refused(server, trust(authority, other.issue("mallory")))


async def test_health_has_a_port_of_its_own(
    tmp_path: Path, files: Pair, authority: Authority, free_port: Any
) -> None:
    """Without TLS, and nothing else is there."""
    port = free_port()
    folder = make_folder(tmp_path / "m")
    async with running(folder, credentials=trust(authority), **settings(files, health_port=port)) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("npuserve.readiness", "npuserve.liveness"):
                status = (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
                assert status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await rpc.InferenceServiceStub(channel).Generate(ask("a", 3))
            assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert server.engine.got(Submit) == []


def ends(pair: Pair) -> float:
    """As openssl says."""
    said = openssl("x509", "-in", pair.cert, "-noout", "-enddate").strip().removeprefix("notAfter=")
    return datetime.strptime(said, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=timezone.utc).timestamp()


def test_the_end_of_a_certificate(tmp_path: Path) -> None:
    """Also beyond 2049, where it is written otherwise."""
    for days in (1, 300, 20_000):
        made = Authority(tmp_path, f"of{days}", days=days)
        assert tls.not_after(ssl.PEM_cert_to_DER_cert(made.cert.read_text())) == ends(made)
    der = ssl.PEM_cert_to_DER_cert(made.cert.read_text())
    for cut in (b"", b"x", der[:40], der[:-1], b"\x30\x03\x30\x01\x00"):
        with pytest.raises((ValueError, LookupError)):
            tls.not_after(cut)


def test_the_first_end_counts_and_is_told_before(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the server's chain and of the clients' authorities; once an hour, however often it looks."""
    soon, later = authority.issue("soon", days=5), Authority(tmp_path, "later", days=40)
    chain = tmp_path / "chain.pem"
    chain.write_text(soon.cert.read_text() + authority.cert.read_text())
    both = tmp_path / "both.pem"
    both.write_text(later.cert.read_text() + authority.cert.read_text())
    made = tls.Tls(ServerConfig(tls_cert=str(chain), tls_key=str(soon.key), tls_client_ca=str(both)))
    made.look()
    assert made._certificates.value.expiry == {"server": ends(soon), "client_ca": ends(authority)}
    said = [(r.getMessage(), r.fields["certificate"]) for r in caplog.records]  # type: ignore[attr-defined]
    assert said == [("a certificate expires", "server"), ("a certificate expires", "client_ca")]
    caplog.clear()
    tls.Tls(ServerConfig(tls_cert=str(chain), tls_key=str(soon.key)), wall=lambda: time.time() + 6 * 86400)
    assert [r.getMessage() for r in caplog.records] == ["a certificate has expired"]
    assert json.loads(json.dumps(made._certificates.value.expiry))["server"] > time.time()


@pytest.mark.parametrize(("cert", "key", "said"), [
    ("none.pem", "good.key", "tls_cert: .*none.pem cannot be read: No such file"),
    ("good.pem", "none.key", "tls_cert: .*none.key cannot be read"),
    ("good.pem", "other.key", "tls_key: .*other.key is not the key, .*KEY_VALUES_MISMATCH"),
    ("good.pem", "secret.key", "tls_key: .*secret.key is not the key, in PEM and not encrypted"),
    ("good.pem", "good.pem", "tls_key: .*good.pem is not the key"),
    ("good.key", "good.key", "tls_key: .*good.key"),
])
def test_unusable_files_are_named(tmp_path: Path, authority: Authority, cert: str, key: str, said: str) -> None:
    good, other = authority.issue("good"), authority.issue("another")
    good.install(tmp_path / "good.pem", tmp_path / "good.key")
    other.install(tmp_path / "other.pem", tmp_path / "other.key")
    openssl("pkcs8", "-topk8", "-in", good.key, "-passout", "pass:x", "-out", tmp_path / "secret.key")
    with pytest.raises(ConfigError, match=said):
        tls.Tls(ServerConfig(tls_cert=str(tmp_path / cert), tls_key=str(tmp_path / key)))


def test_an_authority_without_certificates_is_named(tmp_path: Path, files: Pair) -> None:
    empty = tmp_path / "ca.pem"
    for text in ("", "hello", "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n"):
        empty.write_text(text)
        with pytest.raises(ConfigError, match=r"tls_client_ca: .*ca.pem holds no certificate in PEM"):
            tls.Tls(ServerConfig(**settings(files, tls_client_ca=str(empty))))
