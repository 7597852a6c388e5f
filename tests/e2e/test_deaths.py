"""Streams survive the death of engines, front ends and connections."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc as rpc
from tests.e2e import brittle
from tests.e2e.brittle import BRITTLE, COUNTING
from tests.e2e.processes import engine_of, processes
from tests.e2e.server import Server, request, serving
from tests.support.benches import bench

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    """Module bench/reliability/kills.py."""
    return bench("reliability.kills")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File whose existence makes each step of `counting` slower."""
    return tmp_path_factory.mktemp("deaths") / "slow"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Server that computes the model."""
    with serving("--dtype", "float32", "--debuggable", **BRITTLE) as running:
        yield running


@pytest.fixture(scope="module")
def counting(slow: Path) -> Iterator[Server]:
    """Server like `server` whose engine counts, for tests of what surrounds the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(brittle.SLOW, str(slow))
        with serving("--frontends", "2", "--debuggable", **COUNTING) as running:
            yield running


@pytest.mark.full
@pytest.mark.parametrize(("number", "streams"), [(1, 8), (2, 16)])
def test_killed_engines_show_in_no_stream(server: Server, kills: ModuleType, number: int, streams: int) -> None:
    """By default test_ranks.py kills a rank, and so the engine, during the same streams."""
    wanted, before = kills.asks(streams, 100), server.metric("npuserve_engine_restarts_total")
    with ThreadPoolExecutor(8) as threads:
        alone = list(threads.map(lambda ask: kills.stream(server.stub, ask), wanted))
    killer = kills.Killer(server.target, server.process.pid, number, (0.2, 0.8), seed=3)
    wrong, answers = kills.disturbed(server.target, killer, wanted, alone)
    assert wrong == []
    assert len(answers) >= streams
    assert len(killer.killed) == number
    assert server.metric("npuserve_engine_restarts_total") == before + number
    assert server.metric("npuserve_streams_continued_total", after="engine") > 0
    assert server.metric("npuserve_requests_running") == 0
    assert server.metric("npuserve_kv_cache_usage_ratio") == 0


def test_unary_call_survives_a_killed_engine(counting: Server) -> None:
    server = counting
    ask = request("Once upon a time", 400, ignore_eos=True, logprobs=1)
    alone = server.stub.Generate(ask, timeout=60)
    call = server.stub.Generate.future(ask, timeout=60)
    wait_until_running(server)
    os.kill(engine_of(server), signal.SIGKILL)
    answer = call.result()
    assert (answer.text, answer.token_ids, answer.logprobs) == (alone.text, alone.token_ids, alone.logprobs)
    timing = answer.finish.timing
    phases = [timing.queue, *timing.prefill_chunks, timing.decode, timing.finish]
    assert abs(sum(p.ToNanoseconds() for p in phases) - timing.total.ToNanoseconds()) < 10_000_000


def wait_until_running(server: Server, requests: int = 1) -> None:
    from npuserve.v1 import model_pb2

    deadline = time.monotonic() + 60
    while server.stub.GetLoad(model_pb2.GetLoadRequest()).running < requests:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_resume_in_flight_survives_a_killed_engine(counting: Server, kills: ModuleType) -> None:
    """The engine is stopped, so that it dies before it answers the calls."""
    ask = request("Once upon a time", 400, ignore_eos=True)
    alone = kills.stream(counting.stub, ask)
    readers = [Reader(kills, counting.target) for _ in range(4)]
    for reader in readers:
        read(reader.answer, reader.begin(ask), 1)
    stopped = engine_of(counting)
    os.kill(stopped, signal.SIGSTOP)
    calls = [reader.resume() for reader in readers]
    late = counting.stub.ResumeStream(pb.ResumeStreamRequest(resume_token=readers[0].token), timeout=0.2)
    gone = counting.stub.ResumeStream(pb.ResumeStreamRequest(resume_token="x" * 32), timeout=60)
    with pytest.raises(grpc.RpcError) as over:
        list(late)
    assert over.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    os.kill(stopped, signal.SIGKILL)
    for reader, call in zip(readers, calls, strict=True):
        read(reader.answer, call)
        assert reader.answer.same(alone)
        reader.close()
    with pytest.raises(grpc.RpcError) as unknown:
        list(gone)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_only_the_request_that_kills_is_failed(counting: Server, kills: ModuleType) -> None:
    server, before = counting, counting.metric("npuserve_engine_restarts_total")
    with ThreadPoolExecutor(8) as threads:
        wanted = [request([20 * number], 200, ignore_eos=True, logprobs=1) for number in range(1, 7)]
        alone = list(threads.map(lambda ask: kills.stream(server.stub, ask), wanted))
        calls = [server.stub.StreamGenerate(ask, timeout=600) for ask in wanted]
        for call in calls:
            call.initial_metadata()  # arrives when the server has accepted the request; a dead engine accepts none
        others = [threads.submit(kills.read, call) for call in calls]
        poison = server.stub.StreamGenerate(request([5, brittle.POISON, 6], 50, ignore_eos=True), timeout=100)
        reader = kills.Answer()
        with pytest.raises(grpc.RpcError) as failed:
            read(reader, poison)
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        info = error_details_pb2.ErrorInfo()
        assert any(detail.Unpack(info) for detail in rpc_status.from_call(failed.value).details)
        assert info.reason == "ENGINE_KILLER"
        assert len(reader.ids) <= brittle.SPARED + 1
        for one, other in zip(others, alone, strict=True):
            assert one.result().same(other)
        assert 3 <= server.metric("npuserve_engine_restarts_total") - before <= 7


def read(answer: Any, call: Iterable[pb.StreamGenerateResponse], tokens: int = 1 << 30) -> None:
    """Read until the answer has `tokens` tokens or its finish."""
    for part in call:
        answer.add(part)
        if len(answer.ids) >= tokens:
            return


class Reader:
    """Client that reads a stream message by message, and resumes it when it is cut off."""

    def __init__(self, kills: ModuleType, target: str):
        self.answer = kills.Answer()
        self.token = ""
        self._channel = grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = rpc.InferenceServiceStub(self._channel)

    def begin(self, ask: pb.GenerateRequest) -> Iterator[pb.StreamGenerateResponse]:
        call = self.stub.StreamGenerate(ask, timeout=60)
        self.token = dict(call.initial_metadata())["x-resume-token"]
        return call

    def resume(self, offset: int | None = None) -> Iterator[pb.StreamGenerateResponse]:
        ask = pb.ResumeStreamRequest(
            resume_token=self.token, token_offset=len(self.answer.ids) if offset is None else offset)
        return self.stub.ResumeStream(ask, timeout=60)

    def go_on(self, call: Iterator[pb.StreamGenerateResponse], tokens: int = 1 << 30) -> Any:
        """Read until the answer has `tokens` tokens or its finish, resuming cut calls; return the last call."""
        until = time.monotonic() + 40
        while True:
            try:
                read(self.answer, call, tokens)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                    raise
                time.sleep(0.1)
                call = self.resume()
            else:
                return call

    def close(self) -> None:
        self._channel.close()


def test_lost_connections(counting: Server, kills: ModuleType) -> None:
    """Streams are cut at any message, cancelled or running, resumed by another client, and read again at the end."""
    server, chance, codes = counting, random.Random(5), set()
    for ask in kills.asks(6, 120, seed=6):
        alone = kills.stream(server.stub, ask)
        reader = Reader(kills, server.target)
        call = reader.begin(ask)
        read(reader.answer, call, 1)
        while reader.answer.finish is None:
            if chance.random() < 0.5:
                call.cancel()  # type: ignore[attr-defined]
                time.sleep(chance.choice([0.0, 0.02]))
            before, call = call, reader.resume()
            read(reader.answer, call, len(reader.answer.ids) + chance.randint(1, 60))
            try:
                rest = list(before)
            except grpc.RpcError as over:
                codes.add(over.code())
            else:
                assert rest[-1].HasField("finish")  # it had already ended
        assert reader.answer.same(alone)
        again = Reader(kills, server.target)
        again.token = reader.token
        read(again.answer, again.resume(0))
        assert again.answer.same(alone)
        with pytest.raises(grpc.RpcError) as beyond:
            list(reader.resume(len(alone.ids) + 1))
        assert beyond.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert beyond.value.details() == (
            f"token_offset: must be in [0, {len(alone.ids)}], got {len(alone.ids) + 1}")
        reader.close()
    assert codes == {grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED}
    with pytest.raises(grpc.RpcError) as unknown:
        list(server.stub.ResumeStream(pb.ResumeStreamRequest(resume_token="x" * 32), timeout=60))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_killed_front_end(counting: Server, slow: Path, kills: ModuleType) -> None:
    """Its clients continue through the other front end, and through its replacement. Then the engine dies."""
    server, asks = counting, kills.asks(8, 300, seed=7)
    for ask in asks:
        ask.stopping.ignore_eos, ask.stopping.max_tokens = True, 330
    with ThreadPoolExecutor(8) as threads:
        alone = list(threads.map(lambda ask: kills.stream(server.stub, ask), asks))
    slow.touch()  # no stream ends before both are killed
    readers, calls, places = [], [], []
    for ask in asks:
        before = connections(server)
        readers.append(Reader(kills, server.target))
        calls.append(readers[-1].begin(ask))
        (place,) = (pid for pid, sockets in connections(server).items() if sockets - before[pid])
        places.append(place)
    for reader, call in zip(readers, calls, strict=True):
        read(reader.answer, call, 5)
    os.kill(places[0], signal.SIGKILL)
    for number, reader in enumerate(readers):
        if places[number] == places[0]:
            with pytest.raises(grpc.RpcError) as cut:
                read(reader.answer, calls[number])
            assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reader.answer.finish is None
            calls[number] = reader.go_on(reader.resume(), len(reader.answer.ids) + 1)
    os.kill(engine_of(server), signal.SIGKILL)
    slow.unlink()
    for reader, call, expected in zip(readers, calls, alone, strict=True):
        reader.go_on(call)
        assert reader.answer.same(expected)
        reader.close()


def connections(server: Server) -> dict[int, set[str]]:
    """Return process id -> sockets of client connections of each front end, from /proc."""
    port, found = int(server.target.rpartition(":")[2]), {}
    for pid in processes(server, "frontend"):
        tables = Path(f"/proc/{pid}/net").glob("tcp*")  # for IPv4 and IPv6
        lines = [line.split() for table in tables for line in table.read_text().splitlines()]
        established = {f"socket:[{line[9]}]" for line in lines if line[3] == "01" and line[1].endswith(f":{port:04X}")}
        found[pid] = set()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found[pid] |= {os.readlink(descriptor)} & established
    return found
