"""Authentication and authorization over a real gRPC server and a fake engine."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from npuserve.cli.main import main
from npuserve.service import metrics
from npuserve.service.access.auth import KV_EVENTS, AuthInterceptor, GatewayInterceptor
from npuserve.service.access.caller import Caller
from npuserve.service.config import ServerConfig
from npuserve.service.frontend.process import _open_keys
from npuserve.service.ipc.messages import Submit
from npuserve.service.rpc.refusal_throttle import RefusalThrottle
from npuserve.v1 import admin_service_pb2, model_pb2, tokenize_pb2
from npuserve.v1 import generate_pb2 as pb
from tests.support.fake_engine import until
from tests.support.front_end import ask, running
from tests.support.whole_server import whole_server


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return API keys by name, and the path of their file as `file`."""
    made = {"file": str(tmp_path / "keys")}
    for name, options in (("alice", ()), ("root", ("--admin",)), ("few", ("--max-requests", "1"))):
        assert main(["keys", "add", made["file"], name, *options]) == 0
        made[name] = capsys.readouterr().out.strip()
    return made


def write(file: str, text: str) -> None:
    Path(file).write_text(text)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def reflect(target: str, metadata: Any) -> None:
    """Call the reflection service. Raises grpc.RpcError.

    By a channel without asyncio: grpc.aio reports INTERNAL if the refusal arrives before it has sent its message.
    """
    with grpc.insecure_channel(target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        next(stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata))


def calls(server: Any, metadata: Any) -> dict[str, Any]:
    """Start one call of each method; return them by name."""
    inference, admin = server.inference, server.admin
    return {
        "Generate": inference.Generate(ask("a", 2), metadata=metadata),
        "StreamGenerate": inference.StreamGenerate(ask("a", 2), metadata=metadata).read(),
        "ResumeStream": inference.ResumeStream(pb.ResumeStreamRequest(resume_token="x"), metadata=metadata).read(),
        "Tokenize": inference.Tokenize(tokenize_pb2.TokenizeRequest(text="a"), metadata=metadata),
        "Detokenize": inference.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=[1]), metadata=metadata),
        "GetModelInfo": inference.GetModelInfo(model_pb2.GetModelInfoRequest(), metadata=metadata),
        "GetLoad": inference.GetLoad(model_pb2.GetLoadRequest(), metadata=metadata),
        "ServerReflectionInfo": asyncio.to_thread(reflect, server.target, metadata),
        "GetServerInfo": admin.GetServerInfo(admin_service_pb2.GetServerInfoRequest(), metadata=metadata),
        "Abort": admin.Abort(admin_service_pb2.AbortRequest(request_id="x"), metadata=metadata),
        "FlushPrefixCache": admin.FlushPrefixCache(admin_service_pb2.FlushPrefixCacheRequest(), metadata=metadata),
        "Drain": admin.Drain(admin_service_pb2.DrainRequest(), metadata=metadata),
    }


ADMINISTRATION = {"GetServerInfo", "Abort", "FlushPrefixCache", "Drain"}


async def codes(server: Any, metadata: Any) -> dict[str, str]:
    found = {}
    for name, made in calls(server, metadata).items():
        try:
            await made
            found[name] = "OK"
        except grpc.RpcError as error:
            found[name] = error.code().name
    return found


async def test_auth_without_key_only_health_is_served(folder: Path, keys: dict[str, str]) -> None:
    async with running(folder, api_keys=keys["file"]) as server:
        wrong = (
            None, bearer(""), bearer("x"), bearer(keys["alice"] + "x"), (("authorization", keys["alice"]),),
            (("authorization", f"Basic {keys['alice']}"),), (("x-api-key", keys["alice"]),),
            bearer(keys["alice"]) * 2,  # ambiguous
        )
        for metadata in wrong:
            assert set((await codes(server, metadata)).values()) == {"UNAUTHENTICATED"}, metadata
        assert server.engine.got(Submit) == []
        health = health_pb2_grpc.HealthStub(server.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert await health.Watch(health_pb2.HealthCheckRequest()).read()
        counted = metrics.requests_total.labels("Generate", "UNAUTHENTICATED")._value.get()
        assert counted >= len(wrong)


@pytest.mark.parametrize(("host", "is_warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_keys_without_tls_are_warned_of_unless_only_this_machine_connects(
    keys: dict[str, str], caplog: pytest.LogCaptureFixture, host: str, is_warned: bool
) -> None:
    _open_keys(ServerConfig(host=host, api_keys=keys["file"]), "")
    assert ("API keys are sent unencrypted: TLS is off" in caplog.messages) == is_warned


async def test_auth_admin_service_needs_admin_right(
    folder: Path, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "npuserve")
    async with running(folder, api_keys=keys["file"]) as server:
        for name, key in (("alice", keys["alice"]), ("root", keys["root"])):
            found = await codes(server, bearer(key))
            denied = {call for call, code in found.items() if code == "PERMISSION_DENIED"}
            assert denied == (ADMINISTRATION if name == "alice" else set())
            assert "UNAUTHENTICATED" not in found.values()
            assert found["Generate"] == found["StreamGenerate"] == found["ServerReflectionInfo"] == "OK"
        names = {message.request.client for message in server.engine.got(Submit)}
        assert names == {"alice", "root"}
        lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
        assert {line["client"] for line in lines if line["code"] == "PERMISSION_DENIED"} == {"alice"}
        # The scheme is case-insensitive, as in HTTP.
        await server.inference.Generate(ask(), metadata=(("authorization", f"bearer {keys['alice']}"),))


def test_namespaces_of_different_owners_and_salts_differ() -> None:
    callers = [Caller(name) for name in ("a", "a:b", "1:a", "")] + [Caller("ipv4:10.0.0.7", is_authenticated=False)]
    salts = ("", "s", "a:", ":s", "0::")
    found = {(caller.owner, salt): caller.namespace(salt, shared=False) for caller in callers for salt in salts}
    assert len(set(found.values())) == len(found)
    assert [key for key, namespace in found.items() if not namespace] == [("", "")]
    assert {caller.namespace("", shared=True) for caller in callers} == {""}


async def subscribe(interceptor: AuthInterceptor, metadata: Any = None) -> str:
    """Return the status of SubscribeKvEvents. It is a service of other people's protos, here without its messages."""

    async def handle(messages: object, context: Any) -> None:
        await context.write(b"events")

    server = grpc.aio.server(interceptors=[interceptor])
    service, _, method = KV_EVENTS[1:].partition("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_registered_method_handlers(service, handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(KV_EVENTS)(b"", metadata=metadata)
            assert [message async for message in call] == [b"events"]
            return "OK"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        await server.stop(None)


async def test_auth_kv_events_need_admin_right_of_callers_with_a_key() -> None:
    """Without keys everyone may subscribe."""
    callers = {"a": Caller("alice"), "r": Caller("root", admin=True)}

    async def outcome(find_key: Any, metadata: Any) -> str:
        return await subscribe(
            AuthInterceptor(find_key, (), RefusalThrottle(0), 16 << 10, lambda context: None), metadata)

    assert await outcome(None, None) == "OK"
    assert await outcome(callers.get, bearer("r")) == "OK"
    assert await outcome(callers.get, bearer("a")) == "PERMISSION_DENIED"
    assert await outcome(callers.get, None) == "UNAUTHENTICATED"


async def test_gateway_port_refuses_others_also_when_refusals_are_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    throttle = RefusalThrottle(1)
    monkeypatch.setattr(throttle, "delay", lambda *_: 0.01)
    caller = Caller("openai:", is_authenticated=False)

    def interceptor(is_gateway: bool) -> GatewayInterceptor:
        return GatewayInterceptor(lambda peer: is_gateway, caller, throttle, 16 << 10, lambda context: None)

    assert await subscribe(interceptor(False)) == "PERMISSION_DENIED"
    assert await subscribe(interceptor(True)) == "OK"


async def test_auth_without_keys_all_but_admin_is_served(folder: Path) -> None:
    async with running(folder) as server:
        found = await codes(server, None)
        assert "UNAUTHENTICATED" not in found.values()
        assert {call for call, code in found.items() if code == "PERMISSION_DENIED"} == ADMINISTRATION
        assert {message.request.client for message in server.engine.got(Submit)} == {"ipv4:127.0.0.1"}
        assert {message.request.owner for message in server.engine.got(Submit)} == {""}


async def test_resume_with_another_key_is_not_found(
    tmp_path: Path, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "npuserve")
    async with whole_server(tmp_path, api_keys=keys["file"]) as server, server.client() as stub:
        call = stub.StreamGenerate(ask("a", 5), metadata=bearer(keys["alice"]))
        resume = pb.ResumeStreamRequest(resume_token=dict(await call.initial_metadata())["x-resume-token"])
        assert "".join([part.text async for part in call]) == "bcdef"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ResumeStream(resume, metadata=bearer(keys["root"])).read()
        info = error_details_pb2.ErrorInfo()
        assert rpc_status.from_call(refused.value).details[0].Unpack(info)
        assert info.reason == "STREAM_NOT_FOUND"
        again = stub.ResumeStream(resume, metadata=bearer(keys["alice"]))
        assert "".join([part.text async for part in again]) == "bcdef"
        lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
        assert [(line["rpc"], line["client"]) for line in lines] == [
            ("StreamGenerate", "alice"), ("ResumeStream", "root"), ("ResumeStream", "alice")]


@pytest.mark.slow
async def test_auth_changed_keys_file_is_reloaded(
    folder: Path, keys: dict[str, str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A running call continues. An invalid file changes nothing."""
    async with running(folder, api_keys=keys["file"]) as server:
        server.engine.delay = 0.02
        reloader = server.frontend._keys
        assert reloader
        stream = server.inference.StreamGenerate(ask("a", 30), metadata=bearer(keys["alice"]))
        text = (await stream.read()).text
        before = reloader.value
        assert main(["keys", "remove", keys["file"], "alice"]) == 0
        assert main(["keys", "add", keys["file"], "bob"]) == 0
        bob = capsys.readouterr().out.splitlines()[-1]
        await until(lambda: reloader.value is not before and reloader.value.find(bob))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await server.inference.Generate(ask(), metadata=bearer(keys["alice"]))
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert (await server.inference.Generate(ask("a", 1), metadata=bearer(bob))).text == "b"
        while part := await stream.read():
            text += part.text
        assert len(text) == 30
        write(keys["file"], "[bob")
        assert not reloader.reload_if_changed()
        os.unlink(keys["file"])
        assert not reloader.reload_if_changed()
        assert len([r for r in caplog.records if "not read again" in r.getMessage()]) == 2
        assert (await server.inference.Generate(ask("a", 1), metadata=bearer(bob))).text == "b"
        write(keys["file"], "")
        assert reloader.reload_if_changed()
        assert set((await codes(server, bearer(bob))).values()) == {"UNAUTHENTICATED"}


@pytest.mark.slow
async def test_auth_reload_with_a_bug_does_not_stop_the_heartbeat(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(folder, administrator=True) as server:
        reloader = server.frontend._keys
        assert reloader
        read, before = reloader._read, reloader.value
        reloader._read = lambda: 1 // 0  # type: ignore[assignment,return-value]
        (folder / "keys").touch()
        await until(lambda: any("not read again" in record.getMessage() for record in caplog.records))
        reloader._read = read
        (folder / "keys").touch()
        await until(lambda: reloader.value is not before)


async def test_auth_key_is_in_no_log_metric_or_message(
    folder: Path, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with running(folder, api_keys=keys["file"]) as server:
        wrong = "npuserve-" + "w" * 43
        for key in (keys["alice"], wrong):
            await codes(server, bearer(key))
        info = await server.admin.GetServerInfo(admin_service_pb2.GetServerInfoRequest(), metadata=bearer(keys["root"]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await server.inference.Generate(ask(), metadata=bearer(wrong))
        sent = [repr(message) for message in server.engine.received]
    records = [json.dumps([r.getMessage(), vars(r)], default=str) for r in caplog.records]
    assert any("Generate" in record for record in records)
    labels = [str(sample.labels) for metric in metrics.requests_total.collect() for sample in metric.samples]
    for text in (*records, *sent, *labels, info.config_json, str(refused.value)):
        for key in (keys["alice"], keys["root"], wrong):
            assert key not in text
    assert not any("alice" in label for label in labels)
