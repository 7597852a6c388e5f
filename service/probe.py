"""Probe of an address with plain sockets: which protocol a server speaks there, and whether a port is free. Imports no
gRPC.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from typing import Literal

Protocol = Literal["gRPC", "TLS", "metrics", "HTTP", "unknown", "none"]
"""gRPC: HTTP/2 without TLS. metrics: a page of npuserve's metrics. HTTP: any other HTTP/1. none: no reply."""

SECONDS = 2.0
"""Time limit of a connection, and of each reply."""

_MOST_BYTES = 1 << 20
_FRAME_HEADER = 9
_SETTINGS_FRAME = 4


def protocol_at(host: str, port: int) -> Protocol:
    """Return the protocol of the server at this address. Raises OSError if the connection fails."""
    reply = _reply(host, port, b"GET /metrics HTTP/1.0\r\n\r\n")
    if reply.startswith(b"HTTP/1"):
        return "metrics" if b"npuserve_" in reply else "HTTP"
    if len(reply) >= _FRAME_HEADER and reply[3] == _SETTINGS_FRAME and not any(reply[5:9]):
        return "gRPC"
    hello = _reply(host, port, _client_hello())
    if hello[:2] in (b"\x15\x03", b"\x16\x03"):  # an alert or a handshake
        return "TLS"
    return "unknown" if reply or hello else "none"


def cannot_listen(host: str, port: int) -> OSError | None:
    """Return why listening alone on every address of `host` fails; None if one succeeds.

    port: 0 for any port. One that other processes share (SO_REUSEPORT) is taken.
    """
    last_error: OSError | None = None
    try:
        with malformed_name_error():
            addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        return error
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                return None
        except OSError as error:
            last_error = error
    return last_error


def listening_failure(name: str, error: OSError) -> str:
    """Return a sentence that explains why listening on `name`, a host or an address with its port, failed."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        next_step = "; it must be an address of this machine, or 0.0.0.0 for all"
    elif error.errno == errno.EADDRINUSE:
        next_step = "; end the program that has the port, or set another port"
    elif error.errno == errno.EACCES:
        next_step = "; a port below 1024 needs a right (CAP_NET_BIND_SERVICE); set a higher one"
    else:
        next_step = ""
    return f"cannot listen on {name}: {error.strerror}{next_step}"


@contextlib.contextmanager
def malformed_name_error() -> Iterator[None]:
    """Raise socket.gaierror for a host that cannot be a name, such as 127..0.0.1; Python raises UnicodeError for it."""
    try:
        yield
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None


def why_no_connection(error: OSError, host: str) -> str:
    """Return the end of a sentence that explains why a connection failed."""
    if isinstance(error, socket.gaierror):
        return f"the name {host} cannot be resolved ({error.strerror})"
    if isinstance(error, TimeoutError):
        return f"no connection within {SECONDS:g} s; is the address right, and does a firewall let it through?"
    if isinstance(error, ConnectionRefusedError):
        return "no server answers there (Connection refused); start one with: npuserve serve"
    return f"no connection: {error.strerror or error}"


def _reply(host: str, port: int, message: bytes) -> bytes:
    """Send a message and return the reply up to the end of the connection, or up to SECONDS."""
    received = b""
    end = time.monotonic() + SECONDS
    with malformed_name_error():
        connection = socket.create_connection((host, port), SECONDS)
    with connection, contextlib.suppress(OSError):
        connection.sendall(message)
        while len(received) < _MOST_BYTES and b"npuserve_" not in received and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (part := connection.recv(1 << 16)):
                break
            received += part
            if len(received) >= _FRAME_HEADER and not received.startswith(b"HTTP/"):
                break  # the first bytes identify every other protocol
    return received


def _client_hello() -> bytes:
    """Return the first message of a TLS client."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    incoming = ssl.MemoryBIO()
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()
