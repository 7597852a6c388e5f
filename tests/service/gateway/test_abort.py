"""Abort over front ends, engine and scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from npuserve.cli.main import main
from npuserve.service.config import ServerConfig
from npuserve.service.frontend.process import Frontend, FrontendArgs
from npuserve.service.gateway import servicer
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc
from tests.support.fake_engine import make_folder, until
from tests.support.front_end import ask, running
from tests.support.vllm_engine import Answer, engine_stub, join, read_all, vllm_request
from tests.support.whole_server import Whole, whole_server

LONG = 5000


@asynccontextmanager
async def another_front_end(tmp_path: Path, **config: object) -> AsyncIterator[str]:
    """Run a second front end of the engine of `whole_server`; yield its address."""
    folder = tmp_path / "counting"
    settings = ServerConfig(**{"model": str(folder), "drain_seconds": 0.1, **config})  # type: ignore[arg-type]
    frontend = Frontend(FrontendArgs(settings, 1, f"{tmp_path}/e", 0))
    port = await frontend.start()
    await frontend.load(folder)
    await until(lambda: frontend._engine.state == "ready")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await frontend.stop()


async def abort(target: str, *names: str, key: str = "") -> None:
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    async with grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        await engine_stub(channel).Abort(vllm.AbortRequest(request_ids=names), metadata=metadata)


async def begin(channel: grpc.aio.Channel, name: str, **options: object) -> grpc.aio.UnaryStreamCall:
    """Start a long stream, and wait until the engine has accepted it."""
    call = engine_stub(channel).Generate(vllm_request("ab", LONG, stream=True, request_id=name), **options)
    await call.initial_metadata()
    return call


async def whole(call: grpc.aio.UnaryStreamCall) -> Answer:
    (found,) = join(await read_all(call)).values()
    return found


def live(server: Whole) -> int:
    return len(server.scheduler._sequences)


async def test_abort_through_another_front_end_ends_the_stream(tmp_path: Path) -> None:
    async with (
        whole_server(tmp_path, delay=0.002) as server, another_front_end(tmp_path) as other,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        call = await begin(channel, "mine")
        first = await call.read()
        await abort(other, "unknown", "mine", "mine")
        (found,) = join([first, *await read_all(call)]).values()
        assert found.reason == "abort"
        assert 0 < len(found.token_ids) < LONG
        await until(lambda: live(server) == 0)
        await abort(other, "mine")  # it has ended


async def test_abort_ends_all_samples(tmp_path: Path) -> None:
    async with (
        whole_server(tmp_path, delay=0.002) as server, grpc.aio.insecure_channel(server.target) as channel,
    ):
        call = engine_stub(channel).Generate(vllm_request("ab", LONG, stream=True, request_id="all", n=3))
        messages = [await call.read() for _ in range(6)]
        await abort(server.target, "all")
        found = join([*messages, *await read_all(call)])
        assert {index: one.reason for index, one in found.items()} == dict.fromkeys(range(3), "abort")


async def test_abort_of_a_waiting_request_ends_it(tmp_path: Path) -> None:
    async with (
        whole_server(tmp_path, delay=0.002, max_num_seqs=1) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        running_call, waiting = await begin(channel, "running"), await begin(channel, "waiting")
        await abort(server.target, "waiting")
        found = await whole(waiting)
        assert (found.reason, found.token_ids) == ("abort", [])
        await abort(server.target, "running")
        assert (await whole(running_call)).reason == "abort"


@pytest.mark.slow
async def test_abort_reaches_only_requests_of_vllm_engine(tmp_path: Path) -> None:
    async with (
        whole_server(tmp_path, delay=0.002) as server, grpc.aio.insecure_channel(server.target) as channel,
    ):
        ours = inference_service_pb2_grpc.InferenceServiceStub(channel).Generate(ask("ab", 400, request_id="same"))
        await until(lambda: live(server) == 1)
        theirs = await begin(channel, "same")
        await abort(server.target, "same")
        assert (await whole(theirs)).reason == "abort"
        await abort(server.target, "same")
        assert (await ours).finish.reason == pb.FINISH_REASON_LENGTH


async def test_abort_reaches_only_requests_of_its_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, keys = str(tmp_path / "keys"), {}
    for name in ("alice", "bob"):
        assert main(["keys", "add", file, name]) == 0
        keys[name] = capsys.readouterr().out.strip()
    async with (
        whole_server(tmp_path, delay=0.002, api_keys=file) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        bearer = (("authorization", f"Bearer {keys['alice']}"),)
        call = await begin(channel, "hers", metadata=bearer)
        await abort(server.target, "hers", key=keys["bob"])
        await asyncio.sleep(0.1)
        assert live(server) == 1
        await abort(server.target, "hers", key=keys["alice"])
        assert (await whole(call)).reason == "abort"


async def test_abort_of_too_many_ids_is_refused(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        stub = engine_stub(server.channel)
        await stub.Abort(vllm.AbortRequest(request_ids=[""] * 1024))
        with pytest.raises(grpc.aio.AioRpcError, match="request_ids: must be at most 1024 ids, got 1025"):
            await stub.Abort(vllm.AbortRequest(request_ids=["x"] * 1025))


async def test_abort_before_the_first_engine_finds_nothing(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m"), start_engine=False) as server:
        await engine_stub(server.channel).Abort(vllm.AbortRequest(request_ids=["x"]), timeout=5)


async def test_abort_while_no_engine_starts_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "ABORT_SECONDS", 0.1)
    async with running(make_folder(tmp_path / "m")) as server:
        await server.engine.die()
        await until(lambda: server.frontend._engine.state == "down")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await engine_stub(server.channel).Abort(vllm.AbortRequest(request_ids=["x"]), timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_abort_while_the_engine_restarts_ends_the_request_that_continues(tmp_path: Path) -> None:
    """A client that leaves during a restart is the usual case: its stream has paused."""
    async with running(make_folder(tmp_path / "m")) as server:
        stub = engine_stub(server.channel)
        server.engine.delay = 0.01
        call = stub.Generate(vllm_request("ab", 60, stream=True, request_id="mine"))
        first = await call.read()
        await server.engine.die()
        await until(lambda: server.frontend._engine.state == "down")
        aborting = asyncio.ensure_future(stub.Abort(vllm.AbortRequest(request_ids=["mine"])))
        await asyncio.sleep(0.2)
        assert not aborting.done()
        server.engine.epoch += 1
        server.engine.start()
        await aborting
        (found,) = join([first, *await read_all(call)]).values()
        assert found.reason == "abort"
