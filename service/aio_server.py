"""grpc.aio's server without its weak spot: one call whose path is no UTF-8 ends the whole of it (grpcio 1.85), before
any key is asked for.

grpc.aio decodes the path of a call of no registered method in the loop that accepts calls, and an exception there shuts
the server down. All of our methods are registered (grpcio's generated code does it), so a call that reaches that loop
is of none of them: here it is answered before the loop sees it, as UNIMPLEMENTED, which is what it would have been.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    async def _request_call(self) -> Any:
        """The next call of no registered method: never. Raises what ends the server's own."""
        refusals: set[asyncio.Task[None]] = set()
        while True:
            state = await super()._request_call()
            task = asyncio.ensure_future(_refuse(state))
            refusals.add(task)
            task.add_done_callback(refusals.discard)


async def _refuse(state: Any) -> None:
    context = cygrpc._ServicerContext(state, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.BaseError, cygrpc.ExecuteBatchError):  # the abort's own; or the client is gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def server(interceptors: list[Any], options: list[tuple[str, int]]) -> grpc.aio.Server:
    """As grpc.aio.server. interceptors: grpc.aio.ServerInterceptor."""
    cygrpc.AioServer = _AioServer
    return grpc.aio.server(interceptors=interceptors, options=options)
