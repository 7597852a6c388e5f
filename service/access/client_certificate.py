"""Names in a client's certificate.

gRPC's own peer names are cut at a NUL byte, so that a certificate for `admin\\0.example` would be named `admin`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ssl
from collections.abc import Iterable

from cryptography import x509
from cryptography.x509.oid import NameOID

MAX_CACHED = 256
"""Certificates whose names are cached, since each call needs them."""


@functools.lru_cache(MAX_CACHED)
def names(pem: bytes) -> tuple[str, ...]:
    """Return the alternative names of a certificate, else its common name, else its fingerprint as `sha256:HEX`.

    The fingerprint is also the name of a certificate with a name that is malformed or has unprintable characters.
    """
    try:
        listed = _names(x509.load_pem_x509_certificate(pem))
    except (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        listed = []
    if listed and all(name.isprintable() for name in listed):
        return tuple(listed)
    return ("sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest(),)


def _names(certificate: x509.Certificate) -> list[str]:
    """Return the DNS, e-mail, URI and IP names that are not empty, else the first common name; [] if there is none."""
    kinds = (x509.DNSName, x509.RFC822Name, x509.UniformResourceIdentifier, x509.IPAddress)
    alternatives: Iterable[x509.GeneralName] = ()
    with contextlib.suppress(x509.ExtensionNotFound):
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    subjects = [str(name.value) for name in alternatives if isinstance(name, kinds)]
    common = [str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return list(filter(None, subjects)) or list(filter(None, common))[:1]
