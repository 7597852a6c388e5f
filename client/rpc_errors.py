"""Exceptions of the client: one class for each kind of gRPC status, all of them a ClientError."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

RESUME_TOKEN = "x-resume-token"
DETAILS = "grpc-status-details-bin"
DOMAIN = "npuserve.dev"
"""ErrorInfo.domain of npuserve. Proxies and gateways set another domain."""


class ClientError(Exception):
    """Error of a call.

    code: gRPC status.
    message: details of the status.
    reason: the server's name of the cause, such as MODEL_NOT_FOUND; "" if a connection broke or a proxy answered.
    retry_seconds: seconds to wait before a retry, as requested by the server; None if it requested none.
    resume_token: token for Client.resume; "" if none is known.
    field: path of the invalid field, such as stopping.max_tokens; "" if no field is invalid.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, *, reason: str = "", retry_seconds: float | None = None,
        resume_token: str = "", field: str = "",
    ):
        super().__init__(f"{message} ({code.name})")
        self.code = code
        self.message = message
        self.reason = reason
        self.retry_seconds = retry_seconds
        self.resume_token = resume_token
        self.field = field


class InvalidRequest(ClientError):
    """A field of the request is invalid; `field` is its path."""


class NotFound(ClientError):
    """The model or the stream does not exist, or the stream has expired."""


class Conflict(ClientError):
    """The request_id belongs to a running request."""


class Overloaded(ClientError):
    """The queue is full, this client reached a limit, or a message is too large (then without retry_seconds)."""


class DeadlineExceeded(ClientError):
    """The timeout passed, or the server predicted that it would."""


class Cancelled(ClientError):
    """This client cancelled the call, another call resumed the stream (reason TAKEN_OVER), or this client read nothing
    for too long (SLOW_READER)."""


class Unavailable(ClientError):
    """For longer than patience or the timeout, there was no connection, or the server was starting or draining."""


class Denied(ClientError):
    """The API key or the certificate is missing, unknown or lacks the permission."""


class Unsupported(ClientError):
    """The server lacks the feature, or its model lacks a tokenizer or a chat template."""


class ServerError(ClientError):
    """A bug in the server or in a proxy. The server's message holds an id, which its log repeats."""


class StreamLost(ClientError):
    """A part of the answer was received, but the server no longer has the stream, so the rest is lost."""


KINDS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.ABORTED: Cancelled,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: Denied,
    grpc.StatusCode.PERMISSION_DENIED: Denied,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.FAILED_PRECONDITION: Unsupported,
}
"""Class of each status. Any other status is a ServerError."""


def from_rpc(error: Any) -> ClientError:
    """Return the ClientError for `error`, the grpc.RpcError of a sync or asyncio call. Ignore malformed details."""
    code = error.code() or grpc.StatusCode.UNKNOWN
    trailing: dict[str, Any] = dict(error.trailing_metadata() or ())
    try:
        reason, retry, field = _read_details(trailing.get(DETAILS, b""))
    except DecodeError:
        reason = ""
        retry = None
        field = ""
    return KINDS.get(code, ServerError)(
        code, error.details() or "no details", reason=reason, retry_seconds=retry,
        resume_token=trailing.get(RESUME_TOKEN, ""), field=field)


def _read_details(serialized: bytes) -> tuple[str, float | None, str]:
    """Return reason, retry_seconds and field of a google.rpc.Status. Raise DecodeError for malformed bytes."""
    reason = ""
    retry = None
    field = ""
    for detail in status_pb2.Status.FromString(serialized).details:
        info = error_details_pb2.ErrorInfo()
        wait = error_details_pb2.RetryInfo()
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason = info.reason if info.domain == DOMAIN else reason
        elif detail.Unpack(wait):
            retry = wait.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
    return reason, retry, field
