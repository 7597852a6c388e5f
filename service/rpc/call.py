"""One RPC from start to status: errors as gRPC status, the request counter, the log line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import traceback
import uuid
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.rpc import code_pb2
from grpc_status import rpc_status

from npuserve.service import logs, metrics
from npuserve.service.errors import InternalError, MessageTooLarge, ServeError, Unavailable, to_status
from npuserve.service.rpc.aio_server import is_lost_connection
from npuserve.service.rpc.refusal_throttle import RefusalThrottle, work_seconds

if TYPE_CHECKING:
    from npuserve.service.rpc.tracing import Trace

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

CLIENT_ERRORS = (
    code_pb2.UNAUTHENTICATED, code_pb2.PERMISSION_DENIED, code_pb2.INVALID_ARGUMENT, code_pb2.UNIMPLEMENTED,
    code_pb2.NOT_FOUND)
"""Codes of errors that a client causes. They are throttled; errors of a busy or draining server are not."""
UNREAD_SECONDS = 1.0
"""Maximum wait until a status is sent that queues behind messages which the client did not read."""

VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"
"""Full name of the service of service/gateway, some of whose methods have the names of ours."""

refusal_throttle: ContextVar[RefusalThrottle | None] = ContextVar("refusal_throttle", default=None)
"""Throttle of the current task's call. The interceptor of access/auth.py sets it; handlers send delayed refusals."""

_arrival: ContextVar[float | None] = ContextVar("arrival", default=None)


def record_arrival() -> None:
    """Record that the current task's call has arrived now. Call it before the call's message is read."""
    _arrival.set(time.monotonic())


def arrival() -> float:
    """Return when the current task's call arrived, in time.monotonic() seconds; now if that is not recorded."""
    recorded = _arrival.get()
    return time.monotonic() if recorded is None else recorded


def rpc_name(service: str, method: str) -> str:
    """Return the name of a method in metrics and logs: `vllm.Generate` for one of VllmEngine, else `Generate`.

    service: full name of the service, with its package.
    """
    return f"vllm.{method}" if service == VLLM_ENGINE else method


class DelayedRefusal(Exception):
    """Refusal to send after `seconds`, by `refuse_after_delay`."""

    def __init__(self, error: ServeError, seconds: float):
        self.error = error
        self.seconds = seconds


@contextlib.asynccontextmanager
async def call(
    context: Context, rpc: str, level: int = logging.DEBUG, trace: Trace | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Run the body of one RPC; yield a dict whose items become fields of the log line and of the trace.

    A ServeError becomes its gRPC status, and a MemoryError UNAVAILABLE. Any other exception is a bug: the client gets
    INTERNAL with an id, which the log holds beside the traceback. The exception's text is logged only if prompts are. A
    cancel, by the client or its deadline, is raised again. A call that ended before the status of its error could be
    sent counts as cancelled: gRPC may report the end of a call's messages before it cancels the call.

    rpc: name of the method, see `rpc_name`.
    level: level of the log line.
    Raises DelayedRefusal if the client's refusals are throttled.
    """
    began = arrival()
    allowed = context.time_remaining()
    fields: dict[str, Any] = {"rpc": rpc}
    if trace:
        fields["trace_id"] = trace.id
    code = "OK"
    try:
        yield fields
    except asyncio.CancelledError:
        code = cancel_code(context.time_remaining(), allowed)
        raise
    except (ServeError, MemoryError) as caught:
        error = caught if isinstance(caught, ServeError) else Unavailable("the front end has no memory for the request")
        code = code_pb2.Code.Name(error.code)
        fields["error"] = error.logged
        throttle = refusal_throttle.get()
        is_client_error = error.code in CLIENT_ERRORS or isinstance(error, MessageTooLarge)
        if throttle and is_client_error and (
            delay := throttle.delay(peer_name(context.peer()), work_seconds.get())
        ):
            raise DelayedRefusal(error, delay) from None
        seconds = UNREAD_SECONDS if error.is_behind_messages else None
        try:
            await asyncio.wait_for(_abort(context, error), seconds)
        except asyncio.TimeoutError:
            pass
        except Exception as failed:
            if is_lost_connection(failed):
                code = cancel_code(context.time_remaining(), allowed)
            raise
    except Exception as error:
        if is_lost_connection(error):
            code = cancel_code(context.time_remaining(), allowed)
            raise asyncio.CancelledError from None
        code = "INTERNAL"
        error_id = uuid.uuid4().hex
        fields["error_id"] = error_id
        logs.bug(log, "internal error", error, **fields)
        await _abort(context, InternalError(f"internal error, id {error_id}"))
    finally:
        metrics.requests_total.labels(rpc, code).inc()
        if trace:
            trace.end(code, fields)
        logs.event(log, "request", level=level, code=code, seconds=round(time.monotonic() - began, 6), **fields)


async def refuse_after_delay(context: Context, refusal: DelayedRefusal) -> None:
    """Free the call's request, wait, and end the call with the refusal's error."""
    for error in (refusal, refusal.error):
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            error = error.__context__  # type: ignore[assignment]
    await asyncio.sleep(refusal.seconds)
    await _abort(context, refusal.error)


async def _abort(context: Any, error: ServeError) -> None:
    """End the call with the error's status and details. Keep the trailing metadata that the handler has set."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, (*status.trailing_metadata, *(context.trailing_metadata() or ())))


def peer_name(peer: str) -> str:
    """Return gRPC's name of a peer without the port: `ipv4:10.0.0.7` or `ipv6:[fe80::1]`; else `local`."""
    match = re.fullmatch(r"(ipv4:[0-9.]+|ipv6:(?:\[|%5B).*(?:\]|%5D)):\d+", peer)
    return match[1].replace("%5B", "[").replace("%5D", "]") if match else "local"


def cancel_code(left: float | None, allowed: float | None) -> str:
    """Return the code of a cancelled call: DEADLINE_EXCEEDED at its deadline, else CANCELLED.

    A client ends a call at its own deadline, slightly before the server's: the timeout on the wire is rounded up by up
    to 1 %.

    left: seconds to the deadline now; None: no deadline.
    allowed: seconds to the deadline at the start of the call; None: no deadline.
    """
    late = left is not None and allowed is not None and left <= max(0.02, 0.01 * allowed)
    return "DEADLINE_EXCEEDED" if late else "CANCELLED"
