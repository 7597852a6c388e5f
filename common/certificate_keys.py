"""Types of the keys that certificates may have."""

from __future__ import annotations

KEY_TYPES = ("RSA", "secp256r1", "secp384r1", "secp521r1", "Ed25519")
"""Keys of certificates that gRPC's TLS library, BoringSSL, can load. Each peer accepts some of them."""


def key_type_of(pem: bytes) -> str:
    """Return the type of the first certificate's key, such as RSA, RSA-PSS, Ed448, or the name of an elliptic curve."""
    from cryptography import x509  # only certificates need it
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec

    certificate = x509.load_pem_x509_certificates(pem)[0]
    if certificate.public_key_algorithm_oid == x509.PublicKeyAlgorithmOID.RSASSA_PSS:
        return "RSA-PSS"
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        return "of an unknown type"
    if isinstance(key, ec.EllipticCurvePublicKey):
        return key.curve.name
    return type(key).__name__.removesuffix("PublicKey")
