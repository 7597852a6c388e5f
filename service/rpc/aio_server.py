"""grpc.aio server with a workaround for a crash of grpcio 1.85: one call whose path is not UTF-8 shuts the server down.
Values of metadata that are not UTF-8, which grpcio logs as errors, are not logged: they may be API keys. A connection
that is lost while a message is sent is not logged either: grpcio logs it as an error, with a traceback.

grpc.aio decodes the path of a call to an unregistered method in the loop that accepts calls. An exception in that loop
shuts the server down, before any API key is checked. grpcio's generated code registers all our methods, so a call that
reaches the loop names an unknown method. This module answers such a call with UNIMPLEMENTED, as grpc.aio would, before
the loop decodes its path.

The workaround needs private names of grpcio, which any minor version may change. pyproject.toml therefore excludes
untested minor versions (tests/e2e/test_fuzz.py), and a front end refuses to start without these names. No upstream
issue describes this crash; https://github.com/grpc/grpc/issues/25400 is similar.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import cache
from operator import attrgetter
from typing import Any

import grpc
import grpc.aio

from npuserve.service.config import ConfigError

try:
    from grpc._cython import cygrpc  # type: ignore[attr-defined]
except ImportError:
    cygrpc = None

PRIVATE_NAMES = ("AioServer._request_call", "_ServicerContext.abort", "ExecuteBatchError")
"""Names in `cygrpc` that the workaround needs."""


def check_private_names() -> None:
    """Raise ConfigError if this grpcio lacks one of `PRIVATE_NAMES`."""
    for name in PRIVATE_NAMES:
        try:
            attrgetter(name)(cygrpc)
        except AttributeError:
            raise ConfigError(
                f"grpcio {grpc.__version__} lacks grpc._cython.cygrpc.{name}, without which one malformed call ends "
                "the server: install a version that `pip check` accepts beside npuserve") from None


def is_lost_connection(error: Exception) -> bool:
    """Return whether the error is of a read or write that failed because the client's connection is lost.

    gRPC reports the failed write first, and the cancel of the call later.
    """
    return cygrpc is not None and isinstance(error, cygrpc.ExecuteBatchError)


@cache
def _server_class() -> type[Any]:
    class AioServer(cygrpc.AioServer):  # type: ignore[misc]
        async def _request_call(self) -> Any:
            """Refuse calls to unregistered methods, without end. Raises the exceptions of the base class's method."""
            refusals: set[asyncio.Task[None]] = set()
            while True:
                state = await super()._request_call()
                task = asyncio.ensure_future(_refuse(state))
                refusals.add(task)
                task.add_done_callback(refusals.discard)

    return AioServer


async def _refuse(state: Any) -> None:
    context = cygrpc._ServicerContext(state, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.BaseError, cygrpc.ExecuteBatchError):  # abort() raises; a client may leave
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def _is_loggable(record: logging.LogRecord) -> bool:
    """Return whether a record of grpcio quotes no metadata of a client, and is not of a lost connection."""
    error = record.exc_info[1] if record.exc_info else None
    is_lost = isinstance(error, Exception) and is_lost_connection(error)
    return not is_lost and not str(record.msg).startswith("Invalid encoding on ")


def server(interceptors: list[Any], options: list[tuple[str, int]]) -> grpc.aio.Server:
    """Return a grpc.aio server with the workaround.

    interceptors: instances of grpc.aio.ServerInterceptor.
    options: channel arguments.
    Raises ConfigError if this grpcio lacks the private names of the workaround.
    """
    check_private_names()
    cygrpc.AioServer = _server_class()
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_loggable)
    return grpc.aio.server(interceptors=interceptors, options=options)
