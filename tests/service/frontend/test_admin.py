"""AdminService over a real gRPC server and a fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest

from npuserve.service.config import ServerConfig
from npuserve.v1 import admin_service_pb2
from npuserve.v1 import generate_pb2 as pb
from tests.support.fake_engine import make_folder, until
from tests.support.front_end import ask, running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "counting")


async def test_admin_calls_return_documented_results(folder: Path) -> None:
    async with running(folder, administrator=True) as server:
        server.engine.delay = 0.005
        call = server.inference.Generate(ask("a", 60, request_id="mine"))
        await until(lambda: server.engine.live == 1)
        await server.admin.Abort(admin_service_pb2.AbortRequest(request_id="mine"))
        assert (await call).finish.reason == pb.FINISH_REASON_ABORTED
        for name, code in (("mine", grpc.StatusCode.NOT_FOUND), ("", grpc.StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await server.admin.Abort(admin_service_pb2.AbortRequest(request_id=name))
            assert failed.value.code() == code
            assert failed.value.details().startswith("request_id: ")
        flushed = await server.admin.FlushPrefixCache(admin_service_pb2.FlushPrefixCacheRequest())
        assert flushed.flushed_blocks == 11
        info = await server.admin.GetServerInfo(admin_service_pb2.GetServerInfoRequest())
        assert (info.version, info.engine_epoch) == ("0.1.0", 1)
        assert info.uptime.ToNanoseconds() > 0
        assert json.loads(info.config_json)["model"] == str(folder)
        assert set(json.loads(info.config_json)) == set(ServerConfig.__struct_fields__)


async def test_admin_drain_reports_grace_to_supervisor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report holds the drain's length. A grace out of range is INVALID_ARGUMENT."""
    async with running(folder, administrator=True, drain_seconds=7) as server:
        for seconds in (None, 2.5, 0, 86400):
            request = admin_service_pb2.DrainRequest()
            if seconds is not None:
                request.grace.FromNanoseconds(int(seconds * 1e9))
            await server.admin.Drain(request)
        for seconds in (-1, 86401):
            request = admin_service_pb2.DrainRequest()
            request.grace.FromSeconds(seconds)
            error_text = rf"grace: must be in \[0, 86400\] seconds, got {seconds}"
            with pytest.raises(grpc.aio.AioRpcError, match=error_text) as bad:
                await server.admin.Drain(request)
            assert bad.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        server.frontend._config = msgspec.structs.replace(server.frontend._config, drain_seconds=0.2)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["seconds"] for line in events if line["event"] == "drain"] == [7, 2.5, 0, 86400]


async def test_admin_reserved_calls_are_unimplemented(folder: Path) -> None:
    async with running(folder, administrator=True) as server:
        calls = {
            "StartProfile": server.admin.StartProfile(admin_service_pb2.StartProfileRequest()),
            "StopProfile": server.admin.StopProfile(admin_service_pb2.StopProfileRequest()),
        }
        for name, call in calls.items():
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED
            assert failed.value.details() == f"{name}: reserved, not implemented in this version"
