"""What the commands that talk to a server share: the channel, and errors as one sentence."""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npuserve.client.channel import Tls, metadata
from npuserve.service.config import MAX_MESSAGE_BYTES

Metadata = tuple[tuple[str, str], ...]

READINESS = "npuserve.readiness"
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Long prefills send nothing for a while; a dead peer must still show.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


class CallFailed(Exception):
    """A call's error as a sentence for people."""


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("security")
    group.add_argument("--tls", action="store_true", help="encrypt, and trust the system's authorities")
    group.add_argument("--tls-ca", metavar="FILE", help="encrypt, and trust the authorities of this PEM file")
    group.add_argument("--tls-cert", metavar="FILE", help="with --tls-key: this client's own certificate")
    group.add_argument("--tls-key", metavar="FILE", help="its key")
    group.add_argument("--api-key-file", metavar="FILE", help="the file that holds the API key")


@dataclass(frozen=True, slots=True)
class Security:
    """credentials: of the connection, None for plain text. sent: metadata of each call."""

    credentials: grpc.ChannelCredentials | None = None
    sent: Metadata = ()


PLAIN = Security()


def secured(tls: Tls | None = None, api_key: str | None = None) -> Security:
    """OSError or ValueError for unusable files or key."""
    return Security(tls.credentials() if tls else None, metadata(api_key))


def security(args: argparse.Namespace) -> Security:
    """As the options of `add_connection_arguments` say. CallFailed if a file is unusable."""
    try:
        key = Path(args.api_key_file).read_text("utf-8").strip() if args.api_key_file else None
        own = args.tls_ca, args.tls_cert, args.tls_key
        return secured(Tls(*own) if args.tls or any(own) else None, key)
    except OSError as error:
        raise CallFailed(f"{error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise CallFailed(str(error)) from None


def open_channel(args: argparse.Namespace) -> grpc.Channel:
    """To --target, as the options of `add_connection_arguments` say. CallFailed if a file is unusable."""
    return connect(args.target, security(args))


def connect(target: str, how: Security = PLAIN) -> grpc.Channel:
    """A channel to host:port; it connects with the first call."""
    channel = (grpc.secure_channel(target, how.credentials, OPTIONS) if how.credentials
               else grpc.insecure_channel(target, options=OPTIONS))
    return grpc.intercept_channel(channel, _Sends(how.sent)) if how.sent else channel


class _Details(
    collections.namedtuple("_Details", ("method", "timeout", "metadata", "credentials", "wait_for_ready",
                                        "compression")), grpc.ClientCallDetails):
    """Of a call."""


class _Sends(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Adds metadata to each call."""

    def __init__(self, sent: Metadata):
        self._sent = sent

    def _call(self, go_on: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        made = (*(details.metadata or ()), *self._sent)
        return go_on(_Details(details.method, details.timeout, made, details.credentials, details.wait_for_ready,
                              details.compression), request)

    intercept_unary_unary = intercept_unary_stream = _call  # type: ignore[assignment]


def wait_ready(channel: grpc.Channel, target: str, seconds: float) -> None:
    """Returns once the server takes requests. CallFailed if it does not within `seconds`."""
    request = health_pb2.HealthCheckRequest(service=READINESS)
    watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=seconds, wait_for_ready=True)
    try:
        for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return
        raise CallFailed(f"{target}: closed before it was ready")
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise CallFailed(f"{target}: not ready within {seconds:g} s") from None
        raise CallFailed(explain(error, target)) from None


def explain(error: grpc.RpcError, target: str) -> str:
    """One sentence with the status code."""
    code, details = error.code().name, error.details() or "no details"
    if code == "UNAVAILABLE" and "connect" in details.lower():
        return f"{target}: no server answers there (UNAVAILABLE); start one with: npuserve serve"
    return f"{target}: {details} ({code})"
