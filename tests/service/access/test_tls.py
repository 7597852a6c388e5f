"""TLS with certificates made by openssl: handshakes, reload during streams, mutual authentication, expiry."""

from __future__ import annotations

import asyncio
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
    """Return the paths of the server's certificate and key. A test may replace the files."""
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
    """Yield a stub on its own connection."""
    alone = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(server.target, credentials, options=alone) as channel:
        yield rpc.InferenceServiceStub(channel)


async def refused(server: Running, credentials: grpc.ChannelCredentials) -> None:
    """Assert that the handshake fails."""
    async with connected(server, credentials) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.GetLoad(model_pb2.GetLoadRequest(), timeout=60)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE


async def answered(server: Running, credentials: grpc.ChannelCredentials) -> None:
    """Assert that a call on a new connection is answered."""
    async with connected(server, credentials) as stub:
        assert (await stub.Generate(ask("a", 3), timeout=60)).text == "bcd"


async def test_tls_client_trusting_authority_is_served(tmp_path: Path, files: Pair, other: Authority,
                                                  authority: Authority) -> None:
    async with running(make_folder(tmp_path / "m"), credentials=trust(authority), **settings(files)) as server:
        assert (await server.inference.Generate(ask("a", 3))).text == "bcd"
        await refused(server, trust(other))
        async with grpc.aio.insecure_channel(server.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as plain:
                await rpc.InferenceServiceStub(channel).GetLoad(model_pb2.GetLoadRequest(), timeout=60)
            assert plain.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
async def test_tls_new_certificate_applies_to_new_connections(
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
        assert (await server.inference.Generate(ask("a", 1))).text == "b", "the old connection still works"


@pytest.mark.slow
async def test_tls_in_a_drain_answers_clients_that_reconnect(tmp_path: Path, files: Pair, authority: Authority) -> None:
    async with running(make_folder(tmp_path / "m"), credentials=trust(authority), **settings(files)) as server:
        server.engine.hold.clear()
        stream = server.inference.StreamGenerate(ask("a", 2))
        await until(lambda: server.engine.live == 1)
        stopping = asyncio.ensure_future(server.frontend.stop(60))
        server.frontend.stop = lambda *_: stopping  # type: ignore[method-assign,assignment,return-value]
        try:
            await until(lambda: len(server.frontend._servers._servers) == 2)
            async with connected(server, trust(authority)) as stub:
                with pytest.raises(grpc.aio.AioRpcError, match="draining"):
                    await stub.Generate(ask(), wait_for_ready=True, timeout=60)
        finally:
            server.engine.hold.set()
        assert "".join([part.text async for part in stream]) == "bc"
        await stopping


async def test_tls_invalid_new_files_keep_old_ones(
    tmp_path: Path, files: Pair, authority: Authority, other: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(make_folder(tmp_path / "m"), credentials=trust(authority), **settings(files)) as server:
        tls_ = server.frontend._tls
        assert tls_
        fresh = other.issue("server")
        fresh.install(files.cert, tmp_path / "elsewhere")  # only the certificate, as in the middle of a rotation
        for _ in range(3):
            tls_.refresh()
        (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert "not read again" in record.getMessage()
        assert "is not the key" in record.fields["error"]  # type: ignore[attr-defined]
        await answered(server, trust(authority))
        fresh.install(files.cert, files.key)
        tls_.refresh()
        await answered(server, trust(other))
        caplog.clear()
        files.key.unlink()
        for _ in range(3):
            tls_.refresh()
        assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
        await answered(server, trust(other))
        pss = other.issue("pss", new_key=("-newkey", "rsa-pss", "-pkeyopt", "rsa_keygen_bits:2048", "-nodes"))
        pss.install(files.cert, files.key)
        tls_.refresh()
        assert "of a type that gRPC cannot use" in caplog.records[-1].fields["error"]  # type: ignore[attr-defined]
        await answered(server, trust(other))


@pytest.mark.slow
async def test_tls_expired_certificate_keeps_open_streams(
    tmp_path: Path, files: Pair, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """New clients refuse it, open streams continue, and the log and the metric report it."""
    async with running(make_folder(tmp_path / "m"), credentials=trust(authority), **settings(files)) as server:
        server.engine.delay = 0.02
        stream = server.inference.StreamGenerate(ask("a", 40))
        text = (await stream.read()).text
        past = authority.issue("past", days=-1)
        past.install(files.cert, files.key)
        assert server.frontend._tls
        server.frontend._tls.refresh()
        await refused(server, trust(authority))
        while part := await stream.read():
            text += part.text
        assert len(text) == 40
        (record,) = [r for r in caplog.records if "has expired" in r.getMessage()]
        assert record.levelno == logging.ERROR
        assert metrics.tls_certificate_expiry.labels("server")._value.get() == ends(past)


async def test_tls_client_is_named_by_its_certificate(
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


async def test_health_port_serves_health_without_tls(
    tmp_path: Path, files: Pair, authority: Authority, free_port: Any
) -> None:
    """It has no TLS and no other service."""
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
    """Return the Unix time at which a certificate expires, according to openssl."""
    printed = openssl("x509", "-in", pair.cert, "-noout", "-enddate").strip().removeprefix("notAfter=")
    return datetime.strptime(printed, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=timezone.utc).timestamp()


def test_expiry_times_match_openssl(tmp_path: Path) -> None:
    """Also after 2049, when a certificate encodes the time differently."""
    for days in (1, 300, 20_000):
        made = Authority(tmp_path, f"of{days}", days=days)
        assert tls.expiry_times(made.cert.read_bytes()) == [ends(made)]
    der = ssl.PEM_cert_to_DER_cert(made.cert.read_text())
    for cut in (b"", b"x", der[:40], der[:-1], b"\x30\x03\x30\x01\x00"):
        with pytest.raises(ValueError, match=r"PEM|asn1"):
            tls.expiry_times(ssl.DER_cert_to_PEM_cert(cut).encode())


def test_tls_earliest_expiry_is_reported(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """For the server's chain and the clients' authorities. It is logged once an hour, also after more checks."""
    soon, later = authority.issue("soon", days=5), Authority(tmp_path, "later", days=40)
    chain = tmp_path / "chain.pem"
    chain.write_text(soon.cert.read_text() + authority.cert.read_text())
    both = tmp_path / "both.pem"
    both.write_text(later.cert.read_text() + authority.cert.read_text())
    made = tls.Tls(ServerConfig(tls_cert=str(chain), tls_key=str(soon.key), tls_client_ca=str(both)))
    made.refresh()
    assert made._certificates.value.expiry == {"server": ends(soon), "client_ca": ends(authority)}
    records = [(r.getMessage(), r.fields["certificate"]) for r in caplog.records]  # type: ignore[attr-defined]
    assert records == [("certificate expires soon", "server"), ("certificate expires soon", "client_ca")]
    caplog.clear()
    tls.Tls(ServerConfig(tls_cert=str(chain), tls_key=str(soon.key)), wall=lambda: time.time() + 6 * 86400)
    assert [r.getMessage() for r in caplog.records] == ["certificate has expired"]
    assert json.loads(json.dumps(made._certificates.value.expiry))["server"] > time.time()


@pytest.mark.parametrize(("cert", "key", "error_text"), [
    ("none.pem", "good.key", "tls_cert: .*none.pem cannot be read: No such file"),
    ("good.pem", "none.key", "tls_cert: .*none.key cannot be read"),
    ("good.pem", "other.key", "tls_key: .*other.key is not the key, .*KEY_VALUES_MISMATCH"),
    ("good.pem", "secret.key", "tls_key: .*secret.key is not the key, in PEM and not encrypted"),
    ("good.pem", "good.pem", "tls_key: .*good.pem is not the key"),
    ("good.key", "good.key", "tls_key: .*good.key"),
])
def test_tls_unusable_file_is_named(tmp_path: Path, authority: Authority, cert: str, key: str, error_text: str) -> None:
    good, other = authority.issue("good"), authority.issue("another")
    good.install(tmp_path / "good.pem", tmp_path / "good.key")
    other.install(tmp_path / "other.pem", tmp_path / "other.key")
    openssl("pkcs8", "-topk8", "-in", good.key, "-passout", "pass:x", "-out", tmp_path / "secret.key")
    with pytest.raises(ConfigError, match=error_text):
        tls.Tls(ServerConfig(tls_cert=str(tmp_path / cert), tls_key=str(tmp_path / key)))


@pytest.mark.parametrize("kind", [
    "rsa-pss -pkeyopt rsa_keygen_bits:2048", "ec -pkeyopt ec_paramgen_curve:secp224r1",
    "ec -pkeyopt ec_paramgen_curve:secp256k1", "ec -pkeyopt ec_paramgen_curve:brainpoolP256r1", "ed448",
])
async def test_tls_key_type_that_grpc_cannot_use_is_refused(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without the check, listening fails, and the error names the certificate and not the port."""
    pair = authority.issue("odd", new_key=("-newkey", *kind.split(), "-nodes"))
    error_text = r"tls_cert: .*odd.pem has a key of a type that gRPC cannot use; use RSA, not RSA-PSS, or ECDSA on P-"
    with pytest.raises(ConfigError, match=error_text):
        tls.Tls(ServerConfig(**settings(pair)))
    monkeypatch.setattr(tls, "key_type_of", lambda chain: "RSA")
    for frontends in (1, 2):
        with pytest.raises(ConfigError, match="tls_cert: gRPC cannot listen with this certificate and its key"):
            async with running(make_folder(tmp_path / f"m{frontends}"), **settings(pair, frontends=frontends)):
                pass


@pytest.mark.parametrize("kind", [
    "rsa:2048", "ec -pkeyopt ec_paramgen_curve:secp384r1", "ec -pkeyopt ec_paramgen_curve:secp521r1", "ed25519"])
async def test_tls_key_type_that_grpc_can_use_is_served(tmp_path: Path, authority: Authority, kind: str) -> None:
    """Also P-521 and Ed25519, which OpenSSL's clients accept."""
    pair = authority.issue("usable", new_key=("-newkey", *kind.split(), "-nodes"))
    async with running(make_folder(tmp_path / "m"), **settings(pair)) as server:
        context = ssl.create_default_context(cafile=str(authority.cert))
        context.set_alpn_protocols(["h2"])
        host, port = server.target.split(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.close()


def test_tls_client_ca_without_certificate_is_named(tmp_path: Path, files: Pair) -> None:
    empty = tmp_path / "ca.pem"
    for text in ("", "hello", "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n"):
        empty.write_text(text)
        with pytest.raises(ConfigError, match=r"tls_client_ca: .*ca.pem holds no certificate in PEM"):
            tls.Tls(ServerConfig(**settings(files, tls_client_ca=str(empty))))
