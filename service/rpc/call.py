"""One RPC from its start to its one reply: errors to gRPC status, the counter, the log line."""

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
from npuserve.service.errors import InternalError, ServeError, SlowReader, to_status

if TYPE_CHECKING:
    from npuserve.service.rpc.refusal_pace import RefusalPace
    from npuserve.service.rpc.tracing import Trace

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Delayed(Exception):
    """A refusal that is to be sent later, by `refuse_later`."""

    def __init__(self, error: ServeError, seconds: float):
        self.error = error
        self.seconds = seconds


CLIENTS_OWN = (
    code_pb2.UNAUTHENTICATED, code_pb2.PERMISSION_DENIED, code_pb2.INVALID_ARGUMENT, code_pb2.UNIMPLEMENTED,
    code_pb2.NOT_FOUND)
"""Errors that a client makes: they are paced. Those of a busy or leaving server are told at once."""

# Of the server whose call's task this is; set by the guard, which sends what is delayed.
refusal_pace: ContextVar[RefusalPace | None] = ContextVar("refusal_pace", default=None)


@contextlib.asynccontextmanager
async def call(
    context: Context, rpc: str, level: int = logging.DEBUG, trace: Trace | None = None
) -> AsyncIterator[dict[str, Any]]:
    """The body of one RPC. What it puts into the dict stands in the log line, written at `level`, and in the trace.

    A ServeError becomes its gRPC status; any other exception is a bug, INTERNAL to the client with an id that stands
    beside the traceback in the log, without the exception's text unless prompts are logged. A cancel passes through:
    the client is gone, or its deadline. Raises Delayed where the client gets too many errors.
    """
    began = time.monotonic()
    allowed = context.time_remaining()
    fields: dict[str, Any] = {"rpc": rpc}
    if trace:
        fields["trace_id"] = trace.id
    code = "OK"
    try:
        yield fields
    except asyncio.CancelledError:
        code = gone(context.time_remaining(), allowed)
        raise
    except ServeError as error:
        code = code_pb2.Code.Name(error.code)
        fields["error"] = error.logged
        pace = refusal_pace.get()
        if pace and error.code in CLIENTS_OWN and (delay := pace.delay(peer_name(context.peer()))):
            raise Delayed(error, delay) from None
        # A slow reader's status waits behind what it has not read: it is sent when that is, and nobody waits for it.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_abort(context, error), 1 if isinstance(error, SlowReader) else None)
    except Exception as error:
        if context.cancelled() or context.done():
            code = gone(context.time_remaining(), allowed)
            raise asyncio.CancelledError from None
        code = "INTERNAL"
        bug = uuid.uuid4().hex
        fields["error_id"] = bug
        logs.bug(log, "internal error", error, **fields)
        await _abort(context, InternalError(f"internal error, id {bug}"))
    finally:
        metrics.requests_total.labels(rpc, code).inc()
        if trace:
            trace.end(code, fields)
        logs.event(log, "request", level=level, code=code, seconds=round(time.monotonic() - began, 6), **fields)


async def refuse_later(context: Context, refusal: Delayed) -> None:
    """Let go of the call's request, wait, and end the call with the error."""
    for one in (refusal, refusal.error):
        while one is not None:
            traceback.clear_frames(one.__traceback__)
            one.__traceback__, one = None, one.__context__  # type: ignore[assignment]
    await asyncio.sleep(refusal.seconds)
    await _abort(context, refusal.error)


async def _abort(context: Any, error: ServeError) -> None:
    """With the error's details, and what the handler has set as trailing metadata."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, (*status.trailing_metadata, *(context.trailing_metadata() or ())))


def peer_name(peer: str) -> str:
    """gRPC's name of a peer without the port: `ipv4:10.0.0.7`, `ipv6:[fe80::1]`, else `local`."""
    match = re.fullmatch(r"(ipv4:[0-9.]+|ipv6:(?:\[|%5B).*(?:\]|%5D)):\d+", peer)
    return match[1].replace("%5B", "[").replace("%5D", "]") if match else "local"


def gone(left: float | None, allowed: float | None) -> str:
    """What a call ended of that was not ours to end. left, allowed: seconds to its deadline, now and at its start.

    A client ends a call at its own deadline, a little before ours: the timeout on the wire is rounded up by up to 1 %.
    """
    late = left is not None and allowed is not None and left <= max(0.02, 0.01 * allowed)
    return "DEADLINE_EXCEEDED" if late else "CANCELLED"
