"""How a channel to the server is set up."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import grpc

MAX_MESSAGE_BYTES = 64 << 20
OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Long prefills send nothing for a while; a dead peer must still show.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The waiting between calls is ours; gRPC's own would make a server that is back look dead for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a client's connection is its own
]


@dataclass(frozen=True)
class Tls:
    """Files in PEM. ca: whom to trust, none: the system's roots. cert and key: this client's own, for mTLS.
    server_name: the name in the server's certificate, where it is not that of the target."""

    ca: str | PathLike[str] | None = None
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls: cert and key go together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises OSError for one that cannot be read, ValueError for one that TLS cannot use."""
        ca, cert, key = (None if file is None else Path(file).read_bytes() for file in (self.ca, self.cert, self.key))
        self._check()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def _check(self) -> None:
        """Raise ValueError for unusable files, which gRPC reports only as a failed connection."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except ssl.SSLError:
            raise ValueError(f"tls: {self.ca} has no certificate in PEM") from None
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password="")  # no prompt for an encrypted key
        except ssl.SSLError as error:
            why = error.reason or "not in PEM, or encrypted"
            raise ValueError(f"tls: {self.cert} and {self.key} are not a certificate and its key ({why})") from None


def settings(tls: Tls | None) -> list[tuple[str, str | int]]:
    """A channel's options."""
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls and tls.server_name else []
    return [*OPTIONS, *named]


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Of every call. ValueError for a key that no header can hold."""
    if api_key is None:
        return ()
    if not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise ValueError("api_key: must be printable ASCII without spaces around it")
    return (("authorization", f"Bearer {api_key}"),)
