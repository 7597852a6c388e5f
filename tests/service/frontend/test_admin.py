"""AdminService over a real gRPC server and a fake engine."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from pathlib import Path
from typing import Any, get_args

import grpc
import grpc.aio
import msgspec
import pytest

import npuserve
from npuserve.cli.explain import MEANINGS
from npuserve.npu.profile import KernelRow, ProfileSummary
from npuserve.service.config import ServerConfig
from npuserve.service.errors import Unavailable
from npuserve.service.frontend.process import FrontendArgs
from npuserve.service.ipc.explanations import Cause, ExplainRequest
from npuserve.service.ipc.kv_events import UnsubscribeKvEvents
from npuserve.service.ipc.profile_messages import StartProfile, StopProfile
from npuserve.v1 import admin_service_pb2
from npuserve.v1 import generate_pb2 as pb
from tests.support import front_end
from tests.support.fake_engine import until
from tests.support.front_end import ask, running


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
        assert (info.version, info.engine_epoch) == (npuserve.__version__, 1)
        assert info.uptime.ToNanoseconds() > 0
        assert json.loads(info.config_json)["model"] == str(folder)
        assert set(json.loads(info.config_json)) == set(ServerConfig.__struct_fields__)


async def test_admin_explain_returns_where_the_time_of_a_request_went(folder: Path) -> None:
    async with running(folder, administrator=True) as server:
        response = await server.admin.ExplainRequest(
            admin_service_pb2.ExplainRequestRequest(request_id="slow", client="alice"))
        assert server.engine.got(ExplainRequest)[0].client == "alice"
        (found,) = response.requests
        assert (found.request_id, found.duration.ToMilliseconds(), found.steps) == ("slow", 1500, 20)
        assert [(admin_service_pb2.DelayCause.Name(delay.cause), delay.duration.ToMilliseconds(), delay.detail)
                for delay in found.delays] == [
            ("DELAY_CAUSE_QUEUE", 1000, "8 requests ran meanwhile"), ("DELAY_CAUSE_DECODE", 500, "")]
        assert found.kernels[0].kernel == "linear"
        for name, code in (("other", grpc.StatusCode.NOT_FOUND), ("", grpc.StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await server.admin.ExplainRequest(admin_service_pb2.ExplainRequestRequest(request_id=name))
            assert failed.value.code() == code


@pytest.mark.parametrize("cause", get_args(Cause))
def test_admin_explain_has_a_name_for_each_cause(cause: str) -> None:
    assert f"DELAY_CAUSE_{cause.upper()}" in list(admin_service_pb2.DelayCause.keys())
    assert cause in MEANINGS


async def test_admin_uptime_is_that_of_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic() - 86400
    monkeypatch.setattr(front_end, "FrontendArgs", functools.partial(FrontendArgs, started=started))
    async with running(folder, administrator=True) as server:
        info = await server.admin.GetServerInfo(admin_service_pb2.GetServerInfoRequest())
        assert 86400 <= info.uptime.seconds < 86400 + 600


async def test_admin_drain_reports_grace_to_supervisor(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The report holds the drain's length. A grace out of range is INVALID_ARGUMENT."""
    caplog.set_level(logging.INFO, "npuserve")
    async with running(folder, administrator=True, drain_seconds=7) as server:
        for seconds in (None, 2.5, 0, 86400):
            request = admin_service_pb2.DrainRequest()
            if seconds is not None:
                request.grace.FromNanoseconds(int(seconds * 1e9))
            await server.admin.Drain(request)
        for seconds in (-1, 86401, 86400.001):
            request = admin_service_pb2.DrainRequest()
            request.grace.FromNanoseconds(round(seconds * 1e9))
            error_text = rf"grace: must be in \[0, 86400\] seconds, got {seconds}"
            with pytest.raises(grpc.aio.AioRpcError, match=error_text) as bad:
                await server.admin.Drain(request)
            assert bad.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        request.grace.FromJsonString("5s")
        request.grace.nanos = -1
        with pytest.raises(grpc.aio.AioRpcError, match=r"grace.nanos: must be in \[0, 999999999\], got -1"):
            await server.admin.Drain(request)
        server.frontend._config = msgspec.structs.replace(server.frontend._config, drain_seconds=0.2)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["seconds"] for line in events if line["event"] == "drain"] == [7, 2.5, 0, 86400]
    lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert [line["drain_seconds"] for line in lines if line["code"] == "OK"] == [7, 2.5, 0, 86400]


async def test_profiles_without_the_setting_are_refused_by_its_name(folder: Path) -> None:
    async with running(folder, administrator=True) as server:
        for call in (server.admin.StartProfile(admin_service_pb2.StartProfileRequest()),
                     server.admin.StopProfile(admin_service_pb2.StopProfileRequest())):
            with pytest.raises(grpc.aio.AioRpcError, match="the server's setting profile_dir") as failed:
                await call
            assert failed.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert server.engine.got(StartProfile) == server.engine.got(StopProfile) == []


async def test_profile_calls_send_their_bounds_and_return_the_table(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    async with running(folder, administrator=True, profile_dir=str(tmp_path)) as server:
        started = await server.admin.StartProfile(admin_service_pb2.StartProfileRequest())
        assert started.name == "profile-1"
        request = admin_service_pb2.StartProfileRequest(name="mine", steps=1000)
        request.max_duration.FromNanoseconds(2_500_000_000)
        assert (await server.admin.StartProfile(request)).name == "mine"
        sent = [(message.name, message.steps, message.seconds) for message in server.engine.got(StartProfile)]
        assert sent == [("", 20, 60.0), ("mine", 1000, 2.5)]
        lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
        assert [(line["profile_steps"], line["profile_seconds"]) for line in lines] == [(20, 60.0), (1000, 2.5)]
        server.engine.profile = ProfileSummary(
            "mine", "a/mine.trace.json", 7, 3, 2, 1.5, 0.5, "duration", True, "cpu",
            [KernelRow("linear", 6, 0.25, 9.0)])
        made = await server.admin.StopProfile(admin_service_pb2.StopProfileRequest(wait=True))
        assert (made.path, made.bytes, made.steps, made.layers, made.has_times) == ("a/mine.trace.json", 7, 3, 2, True)
        assert (made.name, made.recorder) == ("mine", "cpu")
        assert made.ending == admin_service_pb2.PROFILE_ENDING_DURATION
        assert (made.duration.ToNanoseconds(), made.step_time.ToNanoseconds()) == (1_500_000_000, 500_000_000)
        (kernel,) = made.kernels
        assert (kernel.kernel, kernel.calls, kernel.seconds, kernel.floor_bytes) == ("linear", 6, 0.25, 9.0)
        assert [message.wait for message in server.engine.got(StopProfile)] == [True]
        server.engine.profile, server.engine.no_profile = None, ("ProfileRefused", "none was started", 0.0)
        with pytest.raises(grpc.aio.AioRpcError, match="none was started") as failed:
            await server.admin.StopProfile(admin_service_pb2.StopProfileRequest())
        assert failed.value.code() == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(("fields", "text"), [
    ({"name": "../x"}, "name: must be up to 64 letters"), ({"name": ""}, "name: must be up to 64 letters"),
    ({"steps": 0}, r"steps: must be in \[1, 1000\], got 0"), ({"steps": 1001}, r"steps: must be in \[1, 1000\]"),
    ({"max_duration": {"seconds": 601}}, r"max_duration: must be in \(0, 600\] seconds, got 601"),
    ({"max_duration": {"seconds": 600, "nanos": 100}}, r"max_duration: must be in \(0, 600\] seconds, got 600.0000001"),
    ({"max_duration": {}}, r"max_duration: must be in \(0, 600\] seconds, got 0"),
    ({"max_duration": {"seconds": -1}}, "max_duration: must be in"),
    ({"max_duration": {"nanos": 2_000_000_000}}, r"max_duration.nanos: must be in \[0, 999999999\], got 2000000000")])
async def test_profile_fields_out_of_range_are_refused(
    folder: Path, tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    async with running(folder, administrator=True, profile_dir=str(tmp_path)) as server:
        with pytest.raises(grpc.aio.AioRpcError, match=text) as failed:
            await server.admin.StartProfile(admin_service_pb2.StartProfileRequest(**fields))
        assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_waiting_profile_call_fails_when_the_engine_dies(folder: Path, tmp_path: Path) -> None:
    async with running(folder, administrator=True, profile_dir=str(tmp_path)) as server:
        await server.admin.StartProfile(admin_service_pb2.StartProfileRequest())
        waiting = asyncio.ensure_future(server.frontend._engine.profiles._call(UnsubscribeKvEvents(1)))  # no reply
        await until(lambda: bool(server.engine.got(UnsubscribeKvEvents)))
        await server.engine.die()
        with pytest.raises(Unavailable, match="its profile, if one was running, is lost"):
            await waiting


async def test_profile_calls_need_the_admin_right(folder: Path, tmp_path: Path) -> None:
    async with running(folder, profile_dir=str(tmp_path)) as server:
        for call in (server.admin.StartProfile(admin_service_pb2.StartProfileRequest()),
                     server.admin.StopProfile(admin_service_pb2.StopProfileRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            assert failed.value.code() == grpc.StatusCode.PERMISSION_DENIED
