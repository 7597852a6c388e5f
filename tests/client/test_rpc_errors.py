"""Exceptions of the client, from the status of a call and its details."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from npuserve.client import InvalidRequest, Unavailable
from npuserve.client.attempts import is_transient
from npuserve.client.rpc_errors import DETAILS, DOMAIN, from_rpc


def rpc_error(code: grpc.StatusCode, details: bytes) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, trailing_metadata=grpc.aio.Metadata((DETAILS, details)), details="text")


def packed(*messages: any_pb2.Any) -> bytes:
    return status_pb2.Status(details=messages).SerializeToString()


def test_from_rpc_reads_details() -> None:
    info, wait = any_pb2.Any(), any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(domain=DOMAIN, reason="QUEUE_FULL"))
    delay = error_details_pb2.RetryInfo()
    delay.retry_delay.FromMilliseconds(250)
    wait.Pack(delay)
    error = from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, packed(info, wait)))
    assert (error.reason, error.retry_seconds, error.message) == ("QUEUE_FULL", 0.25, "text")


def test_from_rpc_reads_the_first_field_and_no_reason_of_another_domain() -> None:
    info, bad, empty = any_pb2.Any(), any_pb2.Any(), any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(domain="googleapis.com", reason="RATE_LIMIT_EXCEEDED"))
    bad.Pack(error_details_pb2.BadRequest(field_violations=[
        error_details_pb2.BadRequest.FieldViolation(field=name) for name in ("prompt", "n")]))
    empty.Pack(error_details_pb2.BadRequest())
    error = from_rpc(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, packed(info, bad, empty)))
    assert (error.reason, error.field, error.retry_seconds) == ("", "prompt", None)


@pytest.mark.parametrize("details", [
    b"\xff\xff\xff",
    packed(any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")),
])
def test_from_rpc_malformed_details_are_ignored(details: bytes) -> None:
    error = from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, details))
    assert type(error) is Unavailable
    assert (error.reason, error.retry_seconds, error.field) == ("", None, "")
    assert is_transient(error)
    assert type(from_rpc(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, details))) is InvalidRequest
