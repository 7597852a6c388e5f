"""Readiness and liveness over a real gRPC server, with the standard stub."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from npuserve.service.rpc.health import LIVENESS, READINESS, HealthServicer

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[HealthServicer, health_pb2_grpc.HealthStub, grpc.aio.Server]]:
    health, server = HealthServicer(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health, health_pb2_grpc.HealthStub(channel), server
    await server.stop(0)


def test_health_services_match_contract() -> None:
    assert {LIVENESS, *READINESS} == {
        "", "npuserve.readiness", "npuserve.liveness", "npuserve.v1.InferenceService", "npuserve.v1.AdminService"}


async def test_health_check_follows_readiness() -> None:
    async with served() as (health, stub, _):
        async def status(service: str) -> int:
            return (await stub.Check(pb.HealthCheckRequest(service=service))).status

        for ready in (False, True, False):
            health.set_ready(ready)
            for service in READINESS:
                assert await status(service) == (SERVING if ready else NOT_SERVING)
            assert await status(LIVENESS) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await status("nobody")
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
        health.drain()
        health.set_ready(True)
        assert (await status(""), await status(LIVENESS)) == (NOT_SERVING, SERVING)


async def test_health_watch_sends_each_change_once_and_ends_at_drain() -> None:
    async with served() as (health, stub, server):
        watches = {s: stub.Watch(pb.HealthCheckRequest(service=s)) for s in ("", LIVENESS, "nobody")}
        first = {service: (await call.read()).status for service, call in watches.items()}
        assert first == {"": NOT_SERVING, LIVENESS: SERVING, "nobody": UNKNOWN}
        for ready in (True, True, False, True):
            health.set_ready(ready)
            await asyncio.sleep(0.01)
        assert [(await watches[""].read()).status for _ in range(3)] == [SERVING, NOT_SERVING, SERVING]
        health.drain()
        stopping = asyncio.ensure_future(server.stop(30))
        assert (await watches[""].read()).status == NOT_SERVING
        for call in watches.values():
            assert await call.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, 30)


async def test_health_watch_drain_during_write_sends_not_serving() -> None:
    health, sent = HealthServicer(), []
    health.set_ready(True)

    class Context:
        async def write(self, response: pb.HealthCheckResponse) -> None:
            sent.append(response.status)
            health.drain()

    await health.Watch(pb.HealthCheckRequest(), Context())  # type: ignore[arg-type]
    assert sent == [SERVING, NOT_SERVING]


async def test_health_watch_blocked_write_delays_no_status_change() -> None:
    """A watcher that reads nothing blocks neither a change of the status nor a drain."""
    health = HealthServicer()

    class Context:
        async def write(self, response: pb.HealthCheckResponse) -> None:
            await asyncio.Event().wait()

    watching = asyncio.ensure_future(health.Watch(pb.HealthCheckRequest(), Context()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for change, status in ((lambda: health.set_ready(True), SERVING), (health.drain, NOT_SERVING)):
        change()
        checked = await health.Check(pb.HealthCheckRequest(), Context())  # type: ignore[arg-type]
        assert checked.status == status
    assert not watching.done()
    watching.cancel()
