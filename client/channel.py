"""gRPC channels to a server: options, TLS and the API key."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path

import grpc
import grpc.aio

from npuserve.common.certificate_keys import KEY_TYPES, key_type_of

MAX_MESSAGE_BYTES = 64 << 20
OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A long prefill sends nothing, so only pings detect a dead peer.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The client waits between calls itself. gRPC's own back-off can refuse a restarted server for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # no two channels share a connection
]


@dataclass(frozen=True)
class Tls:
    """TLS settings. All files are PEM.

    ca: trusted authorities; None for the system's.
    cert, key: this client's certificate and its key, for mTLS; both or neither.
    server_name: name in the server's certificate; None for the target's host.
    """

    ca: str | PathLike[str] | None = None
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name, file in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if not isinstance(file, str | PathLike | None):
                raise TypeError(f"tls: {name} must be a path, got {type(file).__name__}")
        if not isinstance(self.server_name, str | None):
            raise TypeError(f"tls: server_name must be a text, got {type(self.server_name).__name__}")
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls: cert and key go together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raise OSError for an unreadable file, ValueError for a file that TLS cannot use."""
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
        if self.cert is None:
            return
        try:
            key_type = key_type_of(Path(self.cert).read_bytes())
        except ImportError:  # without the extra `mtls`, an unusable key is a failed connection
            return
        if key_type not in KEY_TYPES:
            raise ValueError(f"tls: gRPC cannot use {self.cert}, since its key is {key_type}; use RSA, P-256 or P-384")


def open_channel(target: str, tls: Tls | None = None) -> grpc.Channel:
    """Return a channel for threads; it connects on the first call. Raise as `Tls.credentials` does."""
    _check_arguments(target, tls)
    if tls is not None:
        return grpc.secure_channel(target, tls.credentials(), _options(tls))
    return grpc.insecure_channel(target, OPTIONS)


def open_aio_channel(target: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """Return a channel for asyncio; it connects on the first call. Raise as `Tls.credentials` does."""
    return aio_channel_opener(target, tls)()


def aio_channel_opener(target: str, tls: Tls | None = None) -> Callable[[], grpc.aio.Channel]:
    """Return a function that opens a channel of the running event loop. Raise as `Tls.credentials` does."""
    _check_arguments(target, tls)
    if tls is not None:
        return partial(grpc.aio.secure_channel, target, tls.credentials(), _options(tls))
    return partial(grpc.aio.insecure_channel, target, OPTIONS)


def _check_arguments(target: str, tls: Tls | None) -> None:
    """Raise TypeError for an argument of another type, ValueError for a URL, which gRPC would resolve as a name."""
    if not isinstance(target, str):
        raise TypeError(f"target: must be a text, got {type(target).__name__}")
    if target.lower().startswith(("http://", "https://", "grpc://", "grpcs://")):
        raise ValueError(f"target: must be HOST:PORT or a gRPC name such as dns:///HOST:PORT, got {target!r}")
    if not isinstance(tls, Tls | None):
        raise TypeError(f"tls: must be a Tls, got {type(tls).__name__}")


def _options(tls: Tls) -> list[tuple[str, str | int]]:
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return [*OPTIONS, *name]


def auth_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries the API key in each call.

    Raise TypeError for a key that is not a text, ValueError for a key that no header can hold.
    """
    if api_key is None:
        return ()
    if not isinstance(api_key, str):
        raise TypeError(f"api_key: must be a text, got {type(api_key).__name__}")
    if not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise ValueError("api_key: must be printable ASCII without spaces around it")
    return (("authorization", f"Bearer {api_key}"),)
