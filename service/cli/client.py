"""What the commands that talk to a server share: the channel, and errors as one sentence."""

from __future__ import annotations

import argparse
import collections
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npuserve.client.channel import Tls, metadata
from npuserve.service import probe
from npuserve.service.arguments import split_target
from npuserve.service.config import MAX_MESSAGE_BYTES

Metadata = tuple[tuple[str, str], ...]

READINESS = "npuserve.readiness"
NO_CONNECTION = re.compile("failed to connect to all addresses|errors resolving ")
"""Beginning of gRPC's details where it has no connection."""
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


def has_tls(args: argparse.Namespace) -> bool:
    """Return whether the options of `add_connection_arguments` ask for TLS."""
    return bool(args.tls or args.tls_ca or args.tls_cert or args.tls_key)


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
    """Return what the options of `add_connection_arguments` ask for. Raises CallFailed for an unusable file."""
    try:
        key = Path(args.api_key_file).read_text("utf-8").strip() if args.api_key_file else None
        tls = Tls(args.tls_ca, args.tls_cert, args.tls_key) if has_tls(args) else None
        return secured(tls, key)
    except OSError as error:
        raise CallFailed(f"{error.filename}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CallFailed(f"{args.api_key_file}: is not UTF-8") from None
    except ValueError as error:
        raise CallFailed(str(error)) from None


def open_channel(args: argparse.Namespace) -> grpc.Channel:
    """Return a channel to --target, with `security`. Raises CallFailed for an unusable file."""
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


def wait_ready(channel: grpc.Channel, target: str, seconds: float, *, tls: bool = False) -> None:
    """Return once the server takes requests. Raises CallFailed if it does not within `seconds`.

    tls: of the channel.
    """
    stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service=READINESS)
    watch = stub.Watch(request, timeout=seconds, wait_for_ready=True)
    try:
        for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return
        raise CallFailed(f"{target}: closed before it was ready")
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise CallFailed(explain(error, target, tls=tls)) from None
    late = f"not ready within {seconds:g} s"
    try:
        stub.Check(request, timeout=probe.SECONDS)  # unlike `watch`, it says why there is no connection
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            raise CallFailed(f"{explain(error, target, tls=tls)}; {late}") from None
    raise CallFailed(f"{target}: {late}")


def explain(error: grpc.RpcError, target: str, *, tls: bool = False) -> str:
    """Return one sentence: why there was no connection, or else the server's details with the status code.

    tls: of the channel that the call was made on.
    """
    code, details = error.code().name, error.details() or "no details"
    if (code == "UNAVAILABLE" and NO_CONNECTION.match(details) and (address := split_target(target))
            and (why := _why_no_connection(*address, tls, details))):
        return f"{target}: {why}"
    return f"{target}: {details} ({code})"


def _why_no_connection(host: str, port: int, tls: bool, details: str) -> str | None:
    """Return why gRPC could not connect; None where only its own details say so. tls: whether it tried TLS."""
    if wrong := re.search(r"CERTIFICATE_VERIFY_FAILED: (.*?)(?:: OK)?$", details):
        untrusted = "issuer" in wrong[1] or "self" in wrong[1]
        advice = "; give its authority's certificate with --tls-ca" if untrusted else ""
        return f"the server's certificate is not valid: {wrong[1]}{advice}"
    if "Hostname Verification Check failed" in details:
        return f"the server's certificate does not name {host}"
    try:
        found = probe.protocol_at(host, port)
    except OSError as error:
        return probe.why_no_connection(error, host)
    if found == "TLS":
        return ("the server ended the connection after the TLS handshake; does it ask for a client's certificate "
                "(--tls-cert, --tls-key)?" if tls else "the server speaks TLS; add --tls, or --tls-ca FILE")
    return {
        "gRPC": "the server speaks no TLS; leave out --tls, --tls-ca, --tls-cert and --tls-key" if tls else None,
        "metrics": "this is the port of npuserve's metrics; gRPC has another, 50051 by default",
        "HTTP": "a web server answers there, which speaks no gRPC",
        "unknown": "what answers there speaks neither gRPC nor TLS",
        "none": "the server accepts the connection and sends nothing",
    }[found]
