"""Readiness and liveness over a real gRPC server, with the standard stub."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from npuserve.service import metrics
from npuserve.service.rpc.health import LIVENESS, MAX_CALLS, READINESS, HealthServicer

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


class FakeContext:
    """Context of a call that never ends."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        pass


def connect(port: int) -> grpc.aio.Channel:
    """Return a channel with a connection of its own."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[HealthServicer, grpc.aio.Server, int]]:
    health, server = HealthServicer(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield health, server, port
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[HealthServicer, health_pb2_grpc.HealthStub, grpc.aio.Server]]:
    async with listening() as (health, server, port), connect(port) as channel:
        yield health, health_pb2_grpc.HealthStub(channel), server


def test_health_services_match_contract() -> None:
    assert {LIVENESS, *READINESS} == {
        "", "npuserve.readiness", "npuserve.liveness", "npuserve.v1.InferenceService", "npuserve.v1.AdminService"}


async def test_health_check_follows_readiness() -> None:
    async with served() as (health, stub, _):
        async def status(service: str) -> int:
            return (await stub.Check(pb.HealthCheckRequest(service=service))).status

        for ready in (False, True, False):
            health.set_ready(ready)
            assert metrics.ready._value.get() == ready
            for service in READINESS:
                assert await status(service) == (SERVING if ready else NOT_SERVING)
            assert await status(LIVENESS) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await status("nobody")
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
        health.drain()
        health.set_ready(True)
        assert (await status(""), await status(LIVENESS)) == (NOT_SERVING, SERVING)


async def test_health_list_is_unimplemented_and_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as (_, stub, _):
        if not hasattr(stub, "List"):
            pytest.skip("grpcio-health-checking before 1.82 has no List")
        with pytest.raises(grpc.aio.AioRpcError, match="use Check or Watch") as refused:
            await stub.List(pb.HealthListRequest())
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


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

    class Context(FakeContext):
        async def write(self, response: pb.HealthCheckResponse) -> None:
            sent.append(response.status)
            health.drain()

    await health.Watch(pb.HealthCheckRequest(), Context())  # type: ignore[arg-type]
    assert sent == [SERVING, NOT_SERVING]


async def test_health_watch_blocked_write_delays_no_status_change() -> None:
    """A watcher that reads nothing blocks neither a change of the status nor a drain."""
    health = HealthServicer()

    class Context(FakeContext):
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


async def test_health_calls_beyond_the_limit_of_a_connection_are_refused() -> None:
    async with listening() as (_, _, port), connect(port) as channel, connect(port) as other:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(pb.HealthCheckRequest()) for _ in range(MAX_CALLS)]
        for watch in watches:
            assert (await watch.read()).status == NOT_SERVING
        for refused in (stub.Watch(pb.HealthCheckRequest()), stub.Check(pb.HealthCheckRequest())):
            assert await refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await health_pb2_grpc.HealthStub(other).Check(pb.HealthCheckRequest())).status == NOT_SERVING
        watches[0].cancel()

        async def serves_again() -> None:
            while await stub.Check(pb.HealthCheckRequest()).code() != grpc.StatusCode.OK:
                pass

        await asyncio.wait_for(serves_again(), 30)


async def test_health_calls_that_have_ended_leave_no_count() -> None:
    health, ends = HealthServicer(), []

    class Context(FakeContext):
        def add_done_callback(self, callback: Callable[[object], None]) -> None:
            ends.append(callback)

    for _ in range(2):
        await health.Check(pb.HealthCheckRequest(), Context())  # type: ignore[arg-type]
    for left in (1, 0):
        ends.pop()(None)
        assert sum(health._calls.values()) == left
    assert not health._calls
