"""Front-end process as the supervisor starts it: drain, health, connections, errors at the start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from npuserve.service.config import ServerConfig
from npuserve.service.errors import Unavailable
from npuserve.service.frontend import process as frontend_process
from npuserve.service.frontend.process import FrontendArgs, end_without_memory
from npuserve.service.text.template_process import TemplateProcess
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc
from tests.support import fake_engine
from tests.support.fake_engine import make_folder, until
from tests.support.front_end import Running, ask, running
from tests.support.raw_connection import RawConnection

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def rest_of(stream: Any) -> str:
    """Return the remaining text of a stream. Raises the error of its status."""
    text = ""
    while part := await stream.read():
        text += part.text
    return text


class Process:
    """Process `python -m npuserve.service.frontend.process` with the given arguments."""

    def __init__(self, args: FrontendArgs):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "npuserve.service.frontend.process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True)
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(msgspec.json.encode(args).decode() + "\n")
        self.process.stdin.flush()

    def port(self) -> int:
        """Wait until the process listens; return its port."""
        assert self.process.stdout
        return int(json.loads(self.process.stdout.readline())["port"])

    def wrong(self) -> tuple[int, str]:
        """Wait for the exit; return exit code and the reason that the process reported to its parent."""
        assert self.process.stdout
        event = json.loads(self.process.stdout.readlines()[-1])
        assert event["event"] == "unusable"
        return self.process.wait(60), event["error"]

    def end(self) -> tuple[int, str]:
        """Wait for the exit with stdin open; return exit code and stderr."""
        code = self.process.wait(60)
        assert self.process.stderr
        return code, self.process.stderr.read()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.process.kill()
        process.process.wait()
        for pipe in (process.process.stdin, process.process.stdout, process.process.stderr):
            assert pipe
            pipe.close()


def args(folder: Path, address: str = "", port: int = 0, **config: object) -> FrontendArgs:
    """Return arguments of a front end. address: of the engine; "": no engine listens there."""
    settings = ServerConfig(model=str(folder), **config)  # type: ignore[arg-type]
    return FrontendArgs(settings, 0, address or str(folder / "nobody"), port, folder=str(folder))


async def test_frontend_callback_without_memory_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    loop = asyncio.get_running_loop()
    for error in (ValueError(), MemoryError()):
        end_without_memory(loop, {"message": "", "exception": error})
    assert codes == [1]


async def test_frontend_load_without_a_process_of_the_chat_template_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: TemplateProcess) -> None:
        starts.append(self)
        if len(starts) < 3:
            raise Unavailable("the process of the chat template cannot start: Too many open files")

    starts: list[TemplateProcess] = []
    monkeypatch.setattr(TemplateProcess, "start", start)
    monkeypatch.setattr(frontend_process, "TEMPLATE_RETRY_SECONDS", 0.01)
    async with running(make_folder(tmp_path / "m", chat=True)) as server:
        assert (len(starts), len(set(starts))) == (3, 1)
        assert (await server.inference.Generate(ask("ab", 1))).text == "c"


@pytest.mark.slow
async def test_frontend_sigterm_ends_streams_and_refuses_requests(tmp_path: Path, processes: list[Process]) -> None:
    """With a health watcher connected. The running stream is complete, and new requests are refused."""
    async with fake_engine.engine(started=False) as engine:
        processes.append(Process(args(make_folder(tmp_path / "m"), engine.address)))
        port = await asyncio.to_thread(processes[0].port)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            live = await health.Check(health_pb2.HealthCheckRequest(service="npuserve.liveness"))
            assert live.status == SERVING
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status != SERVING
            engine.start()
            assert (await watch.read()).status == SERVING
            inference = inference_service_pb2_grpc.InferenceServiceStub(channel)
            engine.delay = 0.01
            stream = inference.StreamGenerate(ask("a", 40))
            text = (await stream.read()).text
            processes[0].process.send_signal(signal.SIGINT)  # as by Ctrl-C: ignored
            processes[0].process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status != SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await inference.Generate(ask())
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            while part := await stream.read():
                text += part.text
            assert text == "".join(chr(97 + (i + 1) % 26) for i in range(40))
        code, stderr = await asyncio.to_thread(processes[0].end)
        assert code == 0
        assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="policies of threads")
def test_frontend_only_poller_thread_is_batch(tmp_path: Path, processes: list[Process]) -> None:
    processes.append(Process(args(make_folder(tmp_path / "m"))))
    processes[0].port()
    pid = processes[0].process.pid
    tasks = {int(task.name): (task / "comm").read_text() for task in Path(f"/proc/{pid}/task").iterdir()}
    policies = {thread: os.sched_getscheduler(thread) for thread in tasks}
    assert policies.pop(pid) == os.SCHED_OTHER
    assert os.SCHED_BATCH in [policy for thread, policy in policies.items() if "event_engine" not in tasks[thread]]
    assert os.SCHED_BATCH not in [policy for thread, policy in policies.items() if "event_engine" in tasks[thread]]


def test_frontend_parent_dead_exits_at_once(tmp_path: Path, processes: list[Process]) -> None:
    processes.append(Process(args(make_folder(tmp_path / "m"))))
    processes[0].port()
    assert processes[0].process.stdin
    processes[0].process.stdin.close()
    assert processes[0].end()[0] == 1


@pytest.mark.slow
async def test_frontend_drain_end_is_unavailable_with_resume_token(tmp_path: Path, processes: list[Process]) -> None:
    """A drain by the supervisor's order ends calls with UNAVAILABLE, RetryInfo and the resume token.

    It ends after its time, or when the engine has failed for good.
    """
    folder = make_folder(tmp_path / "m")
    order = '{"drain": 0.5}\n{"drain": 600}\n'  # the second one changes nothing
    for orders, dies, reason in (
        (order, False, "its output is lost"),
        (order, True, "its output is lost"),
        ('{"drain": 600}\n{"engine_failed": true}\n', True, "is not restarted; the output is lost"),
    ):
        async with fake_engine.engine(delay=0.2) as engine:
            processes.append(Process(args(folder, engine.address, drain_seconds=600)))
            process = processes[-1].process
            port = await asyncio.to_thread(processes[-1].port)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                while (await watch.read()).status != SERVING:
                    pass
                stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
                whole, stream = stub.Generate(ask("a", 60)), stub.StreamGenerate(ask("a", 60))
                await stream.read()
                token = dict(await stream.initial_metadata())["x-resume-token"]
                if dies:
                    await engine.die()
                assert process.stdin
                process.stdin.write(orders)
                process.stdin.flush()
                with pytest.raises(grpc.aio.AioRpcError) as cut:
                    await rest_of(stream)
                with pytest.raises(grpc.aio.AioRpcError) as unary:
                    await whole
                for error in (cut.value, unary.value):
                    assert error.code() == grpc.StatusCode.UNAVAILABLE
                    assert error.details().endswith(reason)
                    kinds = {detail.TypeName() for detail in rpc_status.from_call(error).details}  # type: ignore[attr-defined]
                    assert "google.rpc.RetryInfo" in kinds
                assert dict(cut.value.trailing_metadata())["x-resume-token"] == token
            code, stderr = await asyncio.to_thread(processes[-1].end)
            assert code == 0
            assert "Traceback" not in stderr


@contextlib.asynccontextmanager
async def drain(server: Running) -> AsyncIterator[asyncio.Future[None]]:
    """Drain the server during the block, with a stream that is complete at the end. Yield the task of `stop`."""
    server.engine.delay = 0.1
    stream = server.inference.StreamGenerate(ask("a", 60))
    text = (await stream.read()).text
    stopping = asyncio.ensure_future(server.frontend.stop(60))
    server.frontend.stop = lambda *_: stopping  # type: ignore[method-assign,assignment,return-value]
    yield stopping
    assert not stopping.done()
    server.engine.delay = 0.0
    assert len(text + await rest_of(stream)) == 60
    await stopping


async def test_frontend_new_connection_during_a_drain_is_answered(tmp_path: Path) -> None:
    """The server is live and not ready, and refuses requests."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with (running(make_folder(tmp_path / "m")) as server, drain(server),
                grpc.aio.insecure_channel(server.target, own) as channel):
        health = health_pb2_grpc.HealthStub(channel)
        for service, ready in (("npuserve.liveness", True), ("npuserve.readiness", False), ("", False)):
            status = (await health.Check(health_pb2.HealthCheckRequest(service=service))).status
            assert (status == SERVING) == ready, service
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        for call in (stub.Generate(ask()), stub.ResumeStream(pb.ResumeStreamRequest(resume_token="x")).read()):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert (refused.value.code(), refused.value.details()) == (
                grpc.StatusCode.UNAVAILABLE, "the server is draining; send the request to another server")
            kinds = {detail.TypeName() for detail in rpc_status.from_call(refused.value).details}  # type: ignore[arg-type]
            assert "google.rpc.RetryInfo" in kinds


@pytest.mark.slow
async def test_frontend_first_call_on_an_open_connection_during_a_drain_is_unavailable(tmp_path: Path) -> None:
    """Never CANCELLED, at any time of the drain, also if the client has read nothing since it connected."""
    async with running(make_folder(tmp_path / "m")) as server:
        port = int(server.target.rpartition(":")[2])
        connections = [await RawConnection.open(port) for _ in range(60)]
        ends = []
        async with drain(server):
            for connection in connections:
                try:
                    ended = await connection.generate(ask("a", 2))
                except (asyncio.IncompleteReadError, ConnectionError):  # UNAVAILABLE at a gRPC client
                    ends.append("closed")
                else:
                    assert b"grpc-status\x0214" in ended, ended
                    assert b"google.rpc.RetryInfo" in ended, ended
                    ends.append("refused")
                await asyncio.sleep(0.03)
        assert ends == sorted(ends, reverse=True)  # first refused, later closed
        assert set(ends) == {"refused", "closed"}
        for connection in connections:
            connection.close()


@pytest.mark.slow
async def test_frontend_drain_moves_a_client_with_a_running_stream(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stream continues on the old connection, and the channel makes its next call on a new one."""
    async with running(make_folder(tmp_path / "m")) as server, drain(server):
        await until(lambda: server.channel.get_state() != grpc.ChannelConnectivity.READY)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await server.inference.Generate(ask(), wait_for_ready=True)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert rpc_status.from_call(refused.value)  # type: ignore[arg-type]
    assert "Failed to add port" not in capfd.readouterr().err  # gRPC's log


async def test_frontend_watch_at_any_moment_of_a_drain_ends_with_not_serving(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        health = health_pb2_grpc.HealthStub(server.channel)
        watches: list[Any] = []

        async def watch() -> None:
            for _ in range(60):
                watches.append(health.Watch(health_pb2.HealthCheckRequest()))
                await asyncio.sleep(0.001)

        watching = asyncio.ensure_future(watch())
        await until(lambda: len(watches) > 10)
        async with drain(server):
            await watching
            last = set()
            for call in watches:
                async for update in call:
                    status = update.status
                last.add(status)
    assert last == {NOT_SERVING}


@pytest.mark.slow
def test_frontend_port_in_use_is_one_sentence(tmp_path: Path, processes: list[Process]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        processes.append(Process(args(make_folder(tmp_path / "m"), port=port)))
        assert processes[0].wrong() == (2, f"port: cannot listen on 127.0.0.1:{port}; is it in use?")
    assert "Traceback" not in processes[0].end()[1]


@pytest.mark.slow
def test_frontend_unusable_folder_is_one_sentence(tmp_path: Path, processes: list[Process]) -> None:
    processes.append(Process(args(tmp_path)))
    assert processes[0].wrong() == (
        2, f"model: {tmp_path} has no config.json; a model folder holds config.json and *.safetensors")
    assert processes[0].end() == (2, "")


def test_frontend_imports_nothing_heavy() -> None:
    script = "import sys, npuserve.service.frontend.process; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "tokenizers", "huggingface_hub"} & set(done.stdout.split())


async def test_reflection_lists_services(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = {service.name async for answer in call for service in answer.list_services_response.service}
        assert listed == {"npuserve.v1.InferenceService", "npuserve.v1.AdminService", "grpc.health.v1.Health",
                          "vllm.grpc.engine.VllmEngine", "grpc.reflection.v1.ServerReflection",
                          "grpc.reflection.v1alpha.ServerReflection"}


async def test_frontend_readiness_follows_engine(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        readiness = health_pb2.HealthCheckRequest(service="npuserve.readiness")
        watch = health_pb2_grpc.HealthStub(server.channel).Watch(readiness)
        assert (await watch.read()).status == SERVING
        await server.engine.die()
        assert (await watch.read()).status != SERVING
        server.engine.start()
        assert (await watch.read()).status == SERVING


async def test_frontend_full_queue_stays_serving(tmp_path: Path) -> None:
    """Saturation changes no health status and wakes no watcher."""
    async with running(make_folder(tmp_path / "m")) as server:
        health = health_pb2_grpc.HealthStub(server.channel)
        services = ("", "npuserve.readiness", "npuserve.liveness")
        watches = [health.Watch(health_pb2.HealthCheckRequest(service=service)) for service in services]
        assert [(await watch.read()).status for watch in watches] == [SERVING] * 3
        server.engine.hold.clear()
        server.frontend._engine._stall_seconds = 1e9  # the fake engine sends no heartbeat
        held = [server.inference.Generate(ask("a", 2)) for _ in range(8)]  # max_num_seqs + max_queue
        await until(lambda: server.engine.live == 8)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as full:
                await server.inference.Generate(ask("a", 2))
            assert full.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            for service in services:
                assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
        reads = [asyncio.ensure_future(watch.read()) for watch in watches]
        server.engine.hold.set()
        assert {(await call).text for call in held} == {"bc"}
        assert not any(read.done() for read in reads)
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*reads, return_exceptions=True)


@pytest.mark.slow
async def test_frontend_accepts_frequent_pings_during_long_call(tmp_path: Path) -> None:
    """A client pings at most once a second. By default, the server sends GOAWAY too_many_pings at the fourth ping."""
    async with running(make_folder(tmp_path / "m")) as server:
        server.engine.hold.clear()
        options = [("grpc.keepalive_time_ms", 100), ("grpc.keepalive_permit_without_calls", 1),
                   ("grpc.http2.max_pings_without_data", 0)]
        async with grpc.aio.insecure_channel(server.target, options=options) as channel:
            call = inference_service_pb2_grpc.InferenceServiceStub(channel).Generate(ask("a", 2))
            await until(lambda: server.engine.live == 1)
            await asyncio.sleep(4.5)
            assert not call.done()
            server.engine.hold.set()
            assert (await call).text == "bc"


@pytest.mark.slow
async def test_frontend_max_connection_age_keeps_running_calls(tmp_path: Path) -> None:
    """The next call uses a new connection, so that clients find new servers. The stream stays on the old one."""
    async with running(make_folder(tmp_path / "m"), max_connection_age_seconds=0.2) as server:
        server.engine.delay = 0.02
        stream = server.inference.StreamGenerate(ask("a", 60))
        text = (await stream.read()).text
        await until(lambda: server.channel.get_state() == grpc.ChannelConnectivity.IDLE)
        assert not stream.done()
        assert (await server.inference.Generate(ask("a", 1))).text == "b"
        while part := await stream.read():
            text += part.text
        assert text == "".join(chr(97 + (i + 1) % 26) for i in range(60))


async def test_frontend_connection_age_is_unlimited_by_default(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        assert (await server.inference.Generate(ask("a", 1))).text == "b"
        await asyncio.sleep(0.5)
        assert server.channel.get_state() == grpc.ChannelConnectivity.READY
