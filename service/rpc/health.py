"""grpc.health.v1 with a streaming Watch: readiness and liveness apart."""

from __future__ import annotations

import asyncio
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
READINESS = ("", "npuserve.readiness", "npuserve.v1.InferenceService", "npuserve.v1.AdminService")


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Liveness serves from the start; the others once `set_ready` says so, and never again after `drain`.

    Unlike the reference servicer's, a Watch ends after the last word of a drain, so that nobody who watches makes the
    server wait for its whole grace.
    """

    def __init__(self) -> None:
        self._ready = False
        self._draining = False
        self._changed = asyncio.Event()

    def set_ready(self, ready: bool) -> None:
        if ready != self._ready and not self._draining:
            self._ready = ready
            self._tell()

    def drain(self) -> None:
        self._ready, self._draining = False, True
        self._tell()

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        status = self._status(request.service)
        if status == UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        last = None
        while True:
            # All of one moment: a drain that begins during the write has its own last word to be sent.
            changed, status, draining = self._changed, self._status(request.service), self._draining
            if status != last:
                await context.write(pb.HealthCheckResponse(status=status))
                last = status
            if draining:
                return
            await changed.wait()

    def _status(self, service: str) -> Any:
        if service == LIVENESS:
            return SERVING
        if service in READINESS:
            return SERVING if self._ready else NOT_SERVING
        return UNKNOWN

    def _tell(self) -> None:
        """Wake the watchers. Each change has its own event, so that no watcher misses one or sees it twice."""
        metrics.ready.set(self._ready)
        self._changed.set()
        self._changed = asyncio.Event()
