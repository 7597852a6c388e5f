"""A call's end without an answer, as one tree of exceptions: one class for each kind of gRPC status."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

RESUME_TOKEN = "x-resume-token"
DETAILS = "grpc-status-details-bin"
DOMAIN = "npuserve.dev"
"""ErrorInfo.domain of the server; a proxy or a gateway has another."""


class ClientError(Exception):
    """A call's error.

    code: the gRPC status.
    reason: the server's name of the cause, such as MODEL_NOT_FOUND; "" if a connection broke or a proxy answered.
    retry_seconds: after which the server asks to be tried again, None if it does not.
    resume_token: with which the answer can be resumed, "" if none is known.
    field: the path of the field that is wrong, "" if none is.
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
    """field: the path of the field that is wrong, as in stopping.max_tokens."""


class NotFound(ClientError):
    """No such model, or no such stream (any more)."""


class Conflict(ClientError):
    """The request_id is that of a live request."""


class Overloaded(ClientError):
    """The queue is full, or a limit of this client is reached; or a message is too large (then without a time)."""


class DeadlineExceeded(ClientError):
    """The timeout passed, or the server saw that it could not be met."""


class Cancelled(ClientError):
    """Cancelled here, or another call took the stream over."""


class Unavailable(ClientError):
    """No connection, or the server is starting or leaving, for longer than patience or the timeout allow."""


class Denied(ClientError):
    """The API key or the certificate is missing, unknown or not entitled."""


class Unsupported(ClientError):
    """The server has no such feature, or its model has no tokenizer or no chat template."""


class ServerError(ClientError):
    """A bug of the server, or one of a proxy; the message has an id that is in the server's log."""


class StreamLost(ClientError):
    """A part of the answer came, and the rest cannot be had: the server knows nothing of the stream any more."""


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
"""Every other status is a ServerError."""


def from_rpc(error: Any) -> ClientError:
    """error: a grpc.RpcError of a call, sync or asyncio."""
    code = error.code() or grpc.StatusCode.UNKNOWN
    trailing: dict[str, Any] = dict(error.trailing_metadata() or ())
    reason, retry, field = "", None, ""
    for detail in status_pb2.Status.FromString(trailing.get(DETAILS, b"")).details:
        info, wait, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason = info.reason if info.domain == DOMAIN else reason
        elif detail.Unpack(wait):
            retry = wait.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
    return KINDS.get(code, ServerError)(
        code, error.details() or "no details", reason=reason, retry_seconds=retry,
        resume_token=trailing.get(RESUME_TOKEN, ""), field=field)
