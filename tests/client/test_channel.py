"""gRPC channels: TLS settings and the types of keys that gRPC can use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npuserve.client import Tls
from tests.support.certificates import needs_openssl, openssl


@pytest.mark.parametrize(("settings", "message"), [
    ({"ca": 3}, "tls: ca must be a path, got int"),
    ({"cert": b"c.pem", "key": "c.key"}, "tls: cert must be a path, got bytes"),
    ({"server_name": 3}, "tls: server_name must be a text, got int"),
])
def test_tls_setting_of_another_type_raises(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        Tls(**settings)


def certificate(folder: Path, key_type: str) -> Tls:
    """Return settings with a new self-signed certificate, whose key has a type of `openssl req -newkey`."""
    tls = Tls(cert=folder / "client.pem", key=folder / "client.key")
    openssl("req", "-x509", "-newkey", *key_type.split(), "-nodes", "-subj", "/CN=client", "-keyout", tls.key, "-out",
            tls.cert)
    return tls


@needs_openssl
@pytest.mark.parametrize(("key_type", "name"), [
    ("ed448", "Ed448"), ("rsa-pss -pkeyopt rsa_keygen_bits:2048", "RSA-PSS"),
    ("ec -pkeyopt ec_paramgen_curve:secp224r1", "secp224r1"),
    ("ec -pkeyopt ec_paramgen_curve:secp256k1", "secp256k1"),
])
def test_credentials_key_that_grpc_cannot_load_raises(tmp_path: Path, key_type: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^tls: gRPC cannot use .*client\.pem, since its key is {name}"):
        certificate(tmp_path, key_type).credentials()


@needs_openssl
@pytest.mark.parametrize("key_type", [
    "rsa:2048", "ed25519", "ec -pkeyopt ec_paramgen_curve:prime256v1", "ec -pkeyopt ec_paramgen_curve:secp384r1",
    "ec -pkeyopt ec_paramgen_curve:secp521r1",
])
def test_credentials_key_that_grpc_can_load_is_accepted(tmp_path: Path, key_type: str) -> None:
    assert certificate(tmp_path, key_type).credentials()
