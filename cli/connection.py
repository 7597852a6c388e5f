"""Connection of a command to a server: options, TLS and API key, readiness, and errors as sentences."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npuserve.client import Client, ClientError, Tls
from npuserve.client.channel import auth_metadata, open_channel
from npuserve.client.rpc_errors import from_rpc
from npuserve.service import arguments, probe

READINESS = "npuserve.readiness"
"""Health service that is SERVING while the server accepts requests."""
NO_CONNECTION = re.compile("failed to connect to all addresses|errors resolving ")
"""Beginning of gRPC's details for a call without a connection."""


ADVICE = {
    grpc.StatusCode.UNAUTHENTICATED: "; give the key's file with --api-key-file",
    grpc.StatusCode.PERMISSION_DENIED: (
        "; give with --api-key-file the file of a key that npuserve keys add FILE NAME --admin made, or with "
        "--tls-cert and --tls-key the certificate"),
}
"""Options that cure an error of our server, by its code."""


class ConnectionFailed(Exception):
    """The server cannot be reached as requested; the message is one sentence."""


def add_target_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", type=arguments.target, default="127.0.0.1:50051", metavar="HOST:PORT",
        help="server (default: %(default)s)")


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("security")
    group.add_argument("--tls", action="store_true", help="use TLS and trust the system's authorities")
    group.add_argument("--tls-ca", metavar="FILE", help="use TLS and trust the authorities in this PEM file")
    group.add_argument("--tls-cert", metavar="FILE", help="PEM file of this client's certificate; needs --tls-key")
    group.add_argument("--tls-key", metavar="FILE", help="PEM file of its private key")
    group.add_argument("--api-key-file", metavar="FILE", help="file that holds the API key")


def uses_tls(args: argparse.Namespace) -> bool:
    """Return whether the options of `add_connection_arguments` require TLS."""
    return bool(args.tls or args.tls_ca or args.tls_cert or args.tls_key)


def read_credentials(args: argparse.Namespace) -> tuple[Tls | None, str | None]:
    """Return TLS settings and API key, each None if absent. Raise ConnectionFailed for unusable files."""
    given, missing = ("--tls-cert", "--tls-key") if args.tls_cert else ("--tls-key", "--tls-cert")
    if bool(args.tls_cert) != bool(args.tls_key):
        raise ConnectionFailed(f"{given} needs {missing}")
    try:
        tls = Tls(args.tls_ca, args.tls_cert, args.tls_key) if uses_tls(args) else None
        if tls:
            tls.credentials()
    except OSError as error:
        flags = {args.tls_ca: "--tls-ca", args.tls_cert: "--tls-cert", args.tls_key: "--tls-key"}
        raise ConnectionFailed(f"{flags.get(error.filename, 'tls')}: {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise ConnectionFailed(str(error)) from None
    return tls, _read_key(args.api_key_file) if args.api_key_file else None


def _read_key(file: str) -> str:
    """Return the API key in a file. Raise ConnectionFailed if it holds none."""
    place = f"--api-key-file: {file}"
    try:
        key = Path(file).read_text("utf-8").strip()
        auth_metadata(key)
    except OSError as error:
        raise ConnectionFailed(f"{place}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConnectionFailed(f"{place}: is not UTF-8") from None
    except ValueError:
        what = "holds more than one key" if key else "is empty"
        raise ConnectionFailed(f"{place}: {what}; it must hold the line that npuserve keys add prints") from None
    return key


def open_client(args: argparse.Namespace) -> Client:
    """Return a client of --target that never retries, after at most --wait seconds until the server is ready.

    Raise ConnectionFailed for unusable files, or if the server is not ready in time.
    """
    tls, key = read_credentials(args)
    if args.wait:
        wait_ready(args.target, args.wait, tls)
    return Client(args.target, api_key=key, tls=tls, patience=0)


def wait_ready(target: str, seconds: float, tls: Tls | None = None) -> None:
    """Wait until the server accepts requests. Raise ConnectionFailed if it does not within `seconds`."""
    with open_channel(target, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=READINESS)
        watch = stub.Watch(request, timeout=seconds, wait_for_ready=True)
        try:
            for health in watch:
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    watch.cancel()
                    return
            raise ConnectionFailed(f"{target}: closed before it was ready")
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ConnectionFailed(explain(from_rpc(error), target, tls=bool(tls))) from None
        late = f"not ready within {seconds:g} s"
        try:
            stub.Check(request, timeout=probe.SECONDS)  # unlike `watch`, it reports why there is no connection
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise ConnectionFailed(f"{explain(from_rpc(error), target, tls=bool(tls))}; {late}") from None
        raise ConnectionFailed(f"{target}: {late}")


def print_error(error: ConnectionFailed | ClientError, args: argparse.Namespace) -> int:
    """Print one sentence on stderr. Return the exit code, 1."""
    sentence = explain(error, args.target, tls=uses_tls(args)) if isinstance(error, ClientError) else str(error)
    print(f"npuserve: {sentence}", file=sys.stderr)
    return 1


def explain(error: ClientError, target: str, *, tls: bool = False) -> str:
    """Return one sentence: why there was no connection, or the server's details with the status code.

    tls: whether the call used TLS.
    """
    if (error.code is grpc.StatusCode.UNAVAILABLE and NO_CONNECTION.match(error.message)
            and (address := arguments.split_host_port(target))
            and (why := _why_no_connection(*address, tls, error.message))):
        return f"{target}: {why}"
    return f"{target}: {error}{ADVICE.get(error.code, '') if error.reason else ''}"


def _why_no_connection(host: str, port: int, tls: bool, details: str) -> str | None:
    """Return why gRPC could not connect; None if only its own details explain it. tls: whether it used TLS."""
    if wrong := re.search(r"CERTIFICATE_VERIFY_FAILED: (.*?)(?:: OK)?$", details):
        untrusted = "issuer" in wrong[1] or "self" in wrong[1]
        advice = "; give its authority's certificate with --tls-ca" if untrusted else ""
        return f"the server's certificate is not valid: {wrong[1]}{advice}"
    if "Hostname Verification Check failed" in details:
        return f"the server's certificate does not name {host}"
    try:
        protocol = probe.protocol_at(host, port)
    except OSError as error:
        return probe.why_no_connection(error, host)
    if protocol == "TLS":
        return ("the server ended the connection after the TLS handshake; does it require a client certificate "
                "(--tls-cert, --tls-key)?" if tls else "the server speaks TLS; add --tls, or --tls-ca FILE")
    return {
        "gRPC": "the server speaks no TLS; leave out --tls, --tls-ca, --tls-cert and --tls-key" if tls else None,
        "metrics": "this is the port of npuserve's metrics; gRPC has another, 50051 by default",
        "HTTP": "this port belongs to a web server without gRPC",
        "unknown": "the server at this port speaks neither gRPC nor TLS",
        "none": "the server accepts the connection and sends nothing",
    }[protocol]
