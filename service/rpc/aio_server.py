"""grpc.aio's server, without the defect by which one call whose path is not UTF-8 ends it (grpcio 1.85).

grpc.aio decodes the path of a call of an unregistered method in the loop that accepts calls, and an exception there
shuts the server down, before any key is checked. All of our methods are registered (grpcio's generated code does it).
So a call that reaches that loop is of none of them, and is answered here before the loop sees it: as UNIMPLEMENTED,
which it would have been.

This needs private names of grpcio, which may change with any minor version. Hence pyproject.toml excludes the minor
versions that are not tested (tests/e2e/test_fuzz.py), and a front end does not start without these names. No issue of
this defect is known upstream; https://github.com/grpc/grpc/issues/25400 is one of the same kind.
"""

from __future__ import annotations

import asyncio
import contextlib
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
"""Of `cygrpc`."""


def check_private_names() -> None:
    """Raise ConfigError if this grpcio lacks one of `PRIVATE_NAMES`."""
    for name in PRIVATE_NAMES:
        try:
            attrgetter(name)(cygrpc)
        except AttributeError:
            raise ConfigError(
                f"grpcio {grpc.__version__} lacks grpc._cython.cygrpc.{name}, without which one malformed call ends "
                "the server: install a version that `pip check` accepts beside npuserve") from None


@cache
def _server_class() -> type[Any]:
    class AioServer(cygrpc.AioServer):  # type: ignore[misc]
        async def _request_call(self) -> Any:
            """Refuse calls of unregistered methods; never return one. Raises what ends the base's own."""
            refusals: set[asyncio.Task[None]] = set()
            while True:
                state = await super()._request_call()
                task = asyncio.ensure_future(_refuse(state))
                refusals.add(task)
                task.add_done_callback(refusals.discard)

    return AioServer


async def _refuse(state: Any) -> None:
    context = cygrpc._ServicerContext(state, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.BaseError, cygrpc.ExecuteBatchError):  # the abort's own; or the client is gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def server(interceptors: list[Any], options: list[tuple[str, int]]) -> grpc.aio.Server:
    """Return what grpc.aio.server returns, without the defect. interceptors: grpc.aio.ServerInterceptor.

    Raises ConfigError for a grpcio in which the defect cannot be avoided.
    """
    check_private_names()
    cygrpc.AioServer = _server_class()
    return grpc.aio.server(interceptors=interceptors, options=options)
