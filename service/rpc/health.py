"""Servicer of grpc.health.v1 with a streaming Watch, and with readiness apart from liveness.

It does not extend grpcio-health-checking's `health.aio.HealthServicer` (1.85), for two reasons. The Watch of that
servicer never ends, so that each watcher would hold up a drain for its whole grace period. It also holds the service's
lock while it writes, and `set` needs that lock: one watcher that reads nothing blocks every change of the status, also
for Check. Everything but Check would have to be overridden.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from npuserve.service import metrics
from npuserve.service.rpc.call import Context

SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN

LIVENESS = "npuserve.liveness"
"""Service name that is SERVING as long as the process answers."""
READINESS = ("", "npuserve.readiness", "npuserve.v1.InferenceService", "npuserve.v1.AdminService")
"""Service names that are SERVING while the server accepts requests."""
MAX_CALLS = 64
"""Open calls of one connection. Health needs no API key, a watcher may stay forever, and the calls of a client that
reads nothing stay open. Each call takes some 24 KiB."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health of one front end: liveness from the start, readiness by `set_ready`, and no readiness after `drain`.

    services: full names of further services whose health is the readiness.
    """

    def __init__(self, services: Collection[str] = ()) -> None:
        self._readiness = {*READINESS, *services}
        self._ready = False
        self._draining = False
        self._changed = asyncio.Event()
        self._calls: Counter[str] = Counter()  # open calls by gRPC's name of the connection's peer

    def set_ready(self, ready: bool) -> None:
        """Set readiness. Ignored during a drain."""
        if not self._draining:
            self._ready = ready
            self._notify()

    def drain(self) -> None:
        """Set readiness to NOT_SERVING for good. Each Watch sends its last status and ends."""
        self._ready = False
        self._draining = True
        self._notify()

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        await self._count(context)
        status = self._status(request.service)
        if status == UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return pb.HealthCheckResponse(status=status)

    async def List(self, request: pb.HealthListRequest, context: Context) -> None:
        """Refuse the call. grpc.aio would log the exception of the generated method as an error, with a traceback."""
        await self._count(context)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "List is not implemented; use Check or Watch")

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        await self._count(context)
        last = None
        while True:
            # Read these three together: a drain that begins during the write below must send its own last status.
            changed = self._changed
            status = self._status(request.service)
            draining = self._draining
            if status != last:
                await context.write(pb.HealthCheckResponse(status=status))
                last = status
            if draining:
                return
            await changed.wait()

    async def _count(self, context: Context) -> None:
        """Count a call of its connection until it ends. Abort it if the connection has MAX_CALLS others."""
        peer = context.peer()
        if self._calls[peer] >= MAX_CALLS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"a connection may have {MAX_CALLS} open calls of grpc.health.v1")
        self._calls[peer] += 1
        context.add_done_callback(lambda _: self._end(peer))  # type: ignore[arg-type]  # the stub names a class

    def _end(self, peer: str) -> None:
        self._calls[peer] -= 1
        if not self._calls[peer]:
            del self._calls[peer]

    def _status(self, service: str) -> Any:
        if service == LIVENESS:
            return SERVING
        if service in self._readiness:
            return SERVING if self._ready else NOT_SERVING
        return UNKNOWN

    def _notify(self) -> None:
        """Wake all watchers. Each change has its own event, so that a watcher handles each change once."""
        metrics.ready.set(self._ready)
        self._changed.set()
        self._changed = asyncio.Event()
