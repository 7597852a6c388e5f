"""Names in client certificates, also in malformed ones that openssl does not write."""

from __future__ import annotations

import hashlib
import ipaddress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from npuserve.service.access import client_certificate
from npuserve.service.ipc.messages import Submit
from tests.support.certificates import Authority, Pair, needs_openssl
from tests.support.fake_engine import make_folder
from tests.support.front_end import ask, running

NUL = "root\0.evil.example"
DNS, MAIL, URI = (kind._init_without_validation for kind in (
    x509.DNSName, x509.RFC822Name, x509.UniformResourceIdentifier))
KEY = ec.generate_private_key(ec.SECP256R1())


def certificate(common: list[str], names: list[x509.GeneralName], issuer: Authority | None = None) -> x509.Certificate:
    """Return a certificate of KEY with these common names and alternative names. issuer: None: signed by KEY."""
    now = datetime.now(timezone.utc)
    authority = x509.load_pem_x509_certificate(issuer.cert.read_bytes()).subject if issuer else x509.Name([])
    key = serialization.load_pem_private_key(issuer.key.read_bytes(), None) if issuer else KEY
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common])
    made = x509.CertificateBuilder(
        authority, subject, KEY.public_key(), x509.random_serial_number(), now - timedelta(1), now + timedelta(1))
    if names:
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return made.sign(key, hashes.SHA256())  # type: ignore[arg-type]


def names(made: x509.Certificate) -> list[str]:
    """Return the names of a certificate, with `FINGERPRINT` for its own fingerprint."""
    own = "sha256:" + made.fingerprint(hashes.SHA256()).hex()
    pem = made.public_bytes(serialization.Encoding.PEM)
    return [name.replace(own, "FINGERPRINT") for name in client_certificate.names(pem)]


@pytest.mark.parametrize(("common", "alternative", "expected"), [
    (["alice"], [], ["alice"]),
    (["alice", "root"], [], ["alice"]),
    (["caf\xe9 \u2603"], [], ["caf\xe9 \u2603"]),
    (["root"], [DNS("alice"), MAIL("a@b"), URI("spiffe://td/a")], ["alice", "a@b", "spiffe://td/a"]),
    (["root"], [x509.IPAddress(ipaddress.ip_address("::1"))], ["::1"]),
    (["alice"], [x509.RegisteredID(x509.ObjectIdentifier("1.2.3"))], ["alice"]),
])
def test_names_are_alternative_names_else_common_name(
    common: list[str], alternative: list[x509.GeneralName], expected: list[str]
) -> None:
    assert names(certificate(common, alternative)) == expected


@pytest.mark.parametrize(("common", "alternative"), [
    ([], []),
    ([NUL], []),
    (["root\n"], []),
    (["root\u2028"], []),
    (["root"], [DNS(NUL)]),
    (["root"], [MAIL(NUL)]),
    (["root"], [URI(NUL)]),
    (["root"], [DNS("alice"), DNS(NUL)]),
])
def test_names_unprintable_or_missing_are_the_fingerprint(
    common: list[str], alternative: list[x509.GeneralName]
) -> None:
    assert names(certificate(common, alternative)) == ["FINGERPRINT"]


def test_names_of_malformed_certificate_are_the_fingerprint() -> None:
    """A DNS name that is not ASCII."""
    made = certificate(["root"], [DNS("alice")])
    der = made.public_bytes(serialization.Encoding.DER).replace(b"alice", b"al\xffce")
    pem = x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)
    assert client_certificate.names(pem) == ("sha256:" + hashlib.sha256(der).hexdigest(),)


@needs_openssl
async def test_client_with_nul_in_its_name_is_another_tenant(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("server")
    made = certificate([NUL], [], authority)
    own = Pair(tmp_path / "nul.pem", tmp_path / "nul.key")
    own.cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    own.key.write_bytes(KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    config = {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_client_ca": str(authority.cert)}
    credentials = grpc.ssl_channel_credentials(
        authority.cert.read_bytes(), own.key.read_bytes(), own.cert.read_bytes())
    async with running(make_folder(tmp_path / "m"), credentials=credentials, **config) as server:
        await server.inference.Generate(ask("a", 1))
        clients = [message.request.client for message in server.engine.got(Submit)]
        assert clients == ["cert:sha256:" + made.fingerprint(hashes.SHA256()).hex()]
