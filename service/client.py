"""What the commands that talk to a server share: the channel, and errors as one sentence."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npuserve.service.config import MAX_MESSAGE_BYTES

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


def connect(target: str) -> grpc.Channel:
    """A channel to host:port; it connects with the first call."""
    return grpc.insecure_channel(target, options=OPTIONS)


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
