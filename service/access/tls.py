"""TLS of the gRPC port, with certificates that are reloaded when their files change.

A new certificate applies from the next handshake on. Open connections and their streams keep the old one. Errors in new
files are logged, and the last valid certificate stays in use.

The server does not refuse an expired certificate, since that would end running streams: clients refuse it at their next
handshake. A certificate that expires within WARN_DAYS is logged every hour, and the metric
`npuserve_tls_certificate_expiry_timestamp_seconds` holds the time.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import grpc
from cryptography import x509

from npuserve.common.certificate_keys import KEY_TYPES, key_type_of
from npuserve.service import logs, metrics
from npuserve.service.access.file_reloader import FileReloader
from npuserve.service.config import ConfigError, ServerConfig

log = logging.getLogger(__name__)

WARN_DAYS = 14
REMINDER_SECONDS = 3600.0


@dataclass(frozen=True)
class Certificates:
    """Content of the TLS files.

    configuration: key, certificate chain and client authorities for gRPC.
    expiry: Unix time of the earliest expiry among the certificates of a file, by label of the metric: `server` (the
        certificate and its chain) and `client_ca`.
    """

    configuration: grpc.ServerCertificateConfiguration
    expiry: dict[str, float]


class Tls:
    """TLS of the server, from the files of `config`. Call `refresh` regularly.

    wall: returns Unix time in seconds.
    Raises ConfigError if a file cannot be read, if the key does not match the certificate, or if gRPC cannot use it.
    """

    def __init__(self, config: ServerConfig, wall: Callable[[], float] = time.time):
        self._config = config
        self._wall = wall
        files = [config.tls_cert, config.tls_key, *filter(None, [config.tls_client_ca])]
        self._certificates = FileReloader("tls_cert", files, self._read)
        self._next_reminder = 0.0
        self._report_expiry()

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one attempt to listen. gRPC fetches their first configuration only once."""
        fetched = self._certificates.value.configuration

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Return the new configuration, None if gRPC has it. gRPC calls this in a thread before each handshake."""
            nonlocal fetched
            current = self._certificates.value.configuration
            if current is fetched:
                return None
            fetched = current
            return current

        return grpc.dynamic_ssl_server_credentials(
            fetched, fetch,  # type: ignore[arg-type]
            require_client_authentication=bool(self._config.tls_client_ca))

    def refresh(self) -> None:
        """Reload files that have changed, and log certificates that expire soon."""
        if self._certificates.reload_if_changed():
            self._next_reminder = 0.0
        if time.monotonic() >= self._next_reminder:
            self._report_expiry()

    def _read(self) -> Certificates:
        cert = Path(self._config.tls_cert)
        key = Path(self._config.tls_key)
        chain = cert.read_bytes()
        secret = key.read_bytes()
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"tls_key: {key} is not the key, in PEM and not encrypted, of {cert}: {_reason(error)}") from None
        expiry = {"server": _earliest_expiry("tls_cert", cert, chain)}
        authorities = None
        if key_type_of(chain) not in KEY_TYPES:
            raise ConfigError(
                f"tls_cert: {cert} has a key of a type that gRPC cannot use; use RSA, not RSA-PSS, or ECDSA on P-256 "
                "or P-384")
        if self._config.tls_client_ca:
            path = Path(self._config.tls_client_ca)
            authorities = path.read_bytes()
            expiry["client_ca"] = _earliest_expiry("tls_client_ca", path, authorities)
        return Certificates(grpc.ssl_server_certificate_configuration([(secret, chain)], authorities), expiry)

    def _report_expiry(self) -> None:
        """Set the metric of each file's expiry, and log an expiry that is near or past."""
        self._next_reminder = time.monotonic() + REMINDER_SECONDS
        for label, expiry in self._certificates.value.expiry.items():
            metrics.tls_certificate_expiry.labels(label).set(expiry)
            left = expiry - self._wall()
            if left < WARN_DAYS * 86400:
                level, message = (logging.WARNING, "expires soon") if left > 0 else (logging.ERROR, "has expired")
                when = datetime.fromtimestamp(expiry, timezone.utc).isoformat()
                logs.event(log, f"certificate {message}", level=level, certificate=label, when=when)


def _reason(error: Exception) -> str:
    """Return OpenSSL's reason of an ssl.SSLError; else the error's text."""
    return getattr(error, "reason", None) or str(error)


def _earliest_expiry(setting: str, path: Path, pem: bytes) -> float:
    """Return the Unix time of the first expiry among a file's certificates. Raises ConfigError if it has none."""
    try:
        return min(expiry_times(pem))
    except (ValueError, x509.InvalidVersion):
        raise ConfigError(f"{setting}: {path} holds no certificate in PEM") from None


def expiry_times(pem: bytes) -> list[float]:
    """Return the Unix time at which each certificate of a PEM text expires.

    Raises ValueError if there is no certificate or a malformed one, InvalidVersion if one is neither v1 nor v3.
    """
    return [certificate.not_valid_after_utc.timestamp() for certificate in x509.load_pem_x509_certificates(pem)]
