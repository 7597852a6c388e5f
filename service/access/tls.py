"""TLS of the gRPC port: certificates that are read again when their files change.

A new certificate is that of the next handshake: connections and their streams go on with the one that they began with.
What is wrong with new files is logged, and the last good ones stay. An expired certificate is not refused here, since
streams under way do not suffer from it: clients refuse it at their next handshake. It is logged, from WARN_DAYS before,
and `npuserve_tls_certificate_expiry_timestamp_seconds` says when.
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

from npuserve.service import logs, metrics
from npuserve.service.access.file_watch import Watched
from npuserve.service.config import ConfigError, ServerConfig

log = logging.getLogger(__name__)

WARN_DAYS = 14
REMIND_SECONDS = 3600.0


@dataclass(frozen=True)
class Certificates:
    """configuration: gRPC's. expiry: Unix time of the first end among the server's certificate and its chain, and among
    the authorities of clients, by the label of the metric."""

    configuration: grpc.ServerCertificateConfiguration
    expiry: dict[str, float]


class Tls:
    """What `config` has of TLS. `look` at the files now and then; `credentials` is for the server's port.

    Raises ConfigError if a file cannot be read, or certificate and key are not of one another.
    """

    def __init__(self, config: ServerConfig, wall: Callable[[], float] = time.time):
        self._config = config
        self._wall = wall
        files = [config.tls_cert, config.tls_key, *filter(None, [config.tls_client_ca])]
        self._certificates = Watched("tls_cert", files, self._read)
        self._told = self._certificates.value.configuration
        self._remind = 0.0
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._told, self._fetch,  # type: ignore[arg-type]
            require_client_authentication=bool(config.tls_client_ca))
        self._check()

    def look(self) -> None:
        """Read what has changed; say what expires."""
        if self._certificates.look():
            self._remind = 0.0
        if time.monotonic() >= self._remind:
            self._check()

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC's, in a thread of its own before each handshake; None: as the last time."""
        current = self._certificates.value.configuration
        if current is self._told:
            return None
        self._told = current
        return current

    def _read(self) -> Certificates:
        cert, key = Path(self._config.tls_cert), Path(self._config.tls_key)
        chain, secret = cert.read_bytes(), key.read_bytes()
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"tls_key: {key} is not the key, in PEM and not encrypted, of {cert}: {_reason(error)}") from None
        expiry, authorities = {"server": min(_ends("tls_cert", cert, chain))}, None
        if self._config.tls_client_ca:
            path = Path(self._config.tls_client_ca)
            authorities = path.read_bytes()
            expiry["client_ca"] = min(_ends("tls_client_ca", path, authorities))
        return Certificates(grpc.ssl_server_certificate_configuration([(secret, chain)], authorities), expiry)

    def _check(self) -> None:
        """Each certificate's end on the metrics page, and in the log where it is near."""
        self._remind = time.monotonic() + REMIND_SECONDS
        for label, ends in self._certificates.value.expiry.items():
            metrics.tls_certificate_expiry.labels(label).set(ends)
            left = ends - self._wall()
            if left < WARN_DAYS * 86400:
                level, message = (logging.WARNING, "expires") if left > 0 else (logging.ERROR, "has expired")
                when = datetime.fromtimestamp(ends, timezone.utc).isoformat()
                logs.event(log, f"a certificate {message}", level=level, certificate=label, when=when)


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


def _ends(setting: str, path: Path, pem: bytes) -> list[float]:
    """Unix time of the end of each certificate of a PEM file."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        parts = pem.decode("ascii", "replace").split(begin)[1:]
        found = [not_after(ssl.PEM_cert_to_DER_cert(begin + part.partition(end)[0] + end)) for part in parts]
    except (ValueError, LookupError):
        found = []
    if not found:
        raise ConfigError(f"{setting}: {path} holds no certificate in PEM")
    return found


def not_after(der: bytes) -> float:
    """Unix time of the end of a certificate's validity (RFC 5280, 4.1). ValueError or LookupError if it is none."""
    _, certificate = _children(der)[0]
    _, to_be_signed = _children(certificate)[0]
    fields = [content for tag, content in _children(to_be_signed) if tag != 0xA0]  # without the version
    _, _, _, validity = fields[:4]  # serial number, signature, issuer, validity
    tag, text = _children(validity)[1]
    form = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}[tag]  # UTCTime, GeneralizedTime
    return datetime.strptime(text.decode(), form).replace(tzinfo=timezone.utc).timestamp()


def _children(der: bytes) -> list[tuple[int, bytes]]:
    """The elements that stand one after the other in DER: (tag, content)."""
    found, at = [], 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(der[at:at + count], "big"), at + count
        if at + size > len(der):
            raise ValueError("cut short")
        found.append((tag, der[at:at + size]))
        at += size
    return found
