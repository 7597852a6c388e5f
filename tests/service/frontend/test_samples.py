"""Calls with n above 1: one stream of all samples, each with its own seed, stop and finish. A cancel ends all."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest

from npuserve.service.frontend import samples
from npuserve.service.ipc.messages import Cancel, Output, Record, Submit
from npuserve.service.streams.stream import Stream
from npuserve.v1 import admin_service_pb2, inference_service_pb2_grpc
from npuserve.v1 import generate_pb2 as pb
from tests.service.frontend.test_inference import metric, stream
from tests.service.frontend.test_response import joined
from tests.service.frontend.test_slow_reader import SMALL_WINDOW, codes, text
from tests.service.streams.test_engine_client import request
from tests.service.streams.test_stream import FakeClient
from tests.support.fake_engine import EOS, until
from tests.support.front_end import ask, running
from tests.support.whole_server import whole_server


def by_index(parts: list[pb.StreamGenerateResponse]) -> dict[int, list[pb.StreamGenerateResponse]]:
    """Return the messages of each sample."""
    found: defaultdict[int, list[pb.StreamGenerateResponse]] = defaultdict(list)
    for part in parts:
        found[part.index].append(part)
    return dict(sorted(found.items()))


async def test_samples_have_own_seeds_and_answers(folder: Path) -> None:
    message = ask("ab", 20, n=3, seed=2**64 - 1, logprobs=1, prompt_logprobs=0, return_token_ids=True, request_id="r")
    async with running(folder) as server:
        call = server.inference.StreamGenerate(message)
        assert dict(await call.initial_metadata()) == {"x-request-id": "r"}  # no resume token
        found = by_index([part async for part in call])
        requests = [submit.request for submit in server.engine.got(Submit)]
        unary = await server.inference.Generate(message)
    assert list(found) == [0, 1, 2]
    for sample, (index, parts) in zip(unary.samples, found.items(), strict=True):
        assert (sample.index, parts[0].index) == (index, index)
        answer, ids, finish = joined(parts)
        assert (sample.text, list(sample.token_ids), len(sample.logprobs)) == (answer, ids, 20)
        assert answer == "cdefghijklmnopqrstuv"
        assert finish.usage.generated_tokens == sample.finish.usage.generated_tokens == 20
        assert finish.timing.total.ToNanoseconds() > 0
        assert [len(part.prompt_logprobs) for part in parts if part.prompt_logprobs] == ([2] if index == 0 else [])
    assert (unary.text, list(unary.token_ids), len(unary.logprobs), unary.HasField("finish")) == ("", [], 0, False)
    assert len(unary.prompt_logprobs) == 2
    assert [(r.index, r.samples, r.sampling.seed, r.sampling.prompt_logprobs) for r in requests] == [
        (0, 3, 2**64 - 1, 0), (1, 3, 0, None), (2, 3, 1, None)]
    assert {(r.request_id, r.arrival, r.resume_token) for r in requests} == {("r", requests[0].arrival, "")}


async def test_samples_without_a_seed_have_different_seeds(folder: Path) -> None:
    async with running(folder) as server:
        for _ in range(2):
            await server.inference.Generate(ask("a", 2, n=4))
        assert len({submit.request.sampling.seed for submit in server.engine.got(Submit)}) == 8


async def test_samples_end_separately(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.delay = 0.002
        server.engine.scripts = {0: [1, 23, 24, 25], 1: [2, EOS]}
        answer = await server.inference.Generate(ask("a", 30, n=3, stop=["xyz"], return_token_ids=True))
        assert [(s.text, s.finish.reason, s.finish.usage.generated_tokens) for s in answer.samples[:2]] == [
            ("b", pb.FINISH_REASON_STOP_STRING, 4), ("c", pb.FINISH_REASON_EOS, 2)]
        assert answer.samples[0].finish.matched_stop == "xyz"
        assert answer.samples[2].text == "bcdefghijklmnopqrstuvw"
        assert answer.samples[2].finish.reason == pb.FINISH_REASON_STOP_STRING
        assert [cancel.keep for cancel in server.engine.got(Cancel)] == [4, 25]
        assert server.frontend._engine._streams == {}


async def test_sample_messages_follow_no_finish_of_the_sample(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.delay = 0.001
        server.engine.scripts = {1: [2, EOS], 3: [EOS]}
        found = by_index(await stream(server, ask("a", 40, n=4, return_token_ids=True)))
    assert {index: joined(parts)[2].usage.generated_tokens for index, parts in found.items()} == {
        0: 40, 1: 2, 2: 40, 3: 1}


@pytest.mark.parametrize("index", [0, 2, 3])
async def test_refusal_of_one_sample_refuses_the_call(folder: Path, index: int) -> None:
    async with running(folder) as server:
        server.engine.hold.clear()
        server.engine.refuse, server.engine.refuse_index = ("QueueFull", "full", 1.5), index
        call = server.inference.StreamGenerate(ask("a", 30, n=4, request_id="mine"))
        with pytest.raises(grpc.aio.AioRpcError, match="full") as refused:
            await call.read()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert list(await call.initial_metadata()) == []
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
        await until(lambda: server.engine.live == 0)
        assert len(server.engine.got(Cancel)) == 3
        assert server.frontend._engine._streams == {}


async def test_error_of_one_sample_ends_the_others(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.delay = 0.005
        call = server.inference.StreamGenerate(ask("a", 60, n=3))
        await anext(aiter(call))
        frontend, key = next(origin for origin, made in server.engine._requests.items() if made.index == 1)
        server.engine._end(frontend, key)
        await server.engine._output(frontend, Output(key, error=("QueueFull", "displaced", 1.0)))
        with pytest.raises(grpc.aio.AioRpcError, match="displaced"):
            _ = [part async for part in call]
        await until(lambda: server.engine.live == 0)
        assert len(server.engine.got(Cancel)) == 2


@pytest.mark.slow
async def test_error_of_one_sample_ends_the_call_of_a_client_that_reads_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    async with running(folder, start_engine=False) as server:
        server.engine.info = msgspec.structs.replace(server.engine.info, max_model_len=8192)
        server.engine.start()
        await until(lambda: server.frontend._engine.state == "ready")
        async with grpc.aio.insecure_channel(
            server.target, [*SMALL_WINDOW, ("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            server.engine.hold.clear()
            call = inference_service_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(
                ask("a", 8000, n=3, logprobs=20))
            await until(lambda: server.engine.live == 3)
            frontend, key = next(origin for origin, made in server.engine._requests.items() if made.index == 1)
            server.engine._end(frontend, key)  # it generates nothing
            server.engine.hold.set()
            await until(lambda: all(stream.buffered > 100 for stream in server.frontend._engine._streams.values()
                                    if stream.key != key))
            await server.engine._output(frontend, Output(key, error=("QueueFull", "displaced", 1.0)))
            await until(lambda: codes(caplog))
            assert codes(caplog) == ["RESOURCE_EXHAUSTED"]
            with pytest.raises(grpc.aio.AioRpcError, match="displaced"):
                _ = [part async for part in call]


@pytest.mark.parametrize("how", ["cancel", pytest.param("deadline", marks=pytest.mark.slow), "connection"])
async def test_end_of_the_call_cancels_all_samples(folder: Path, how: str) -> None:
    async with running(folder) as server:
        server.engine.delay = 0.005
        if how == "deadline":
            await server.inference.Generate(ask("a", 1))  # connects
            server.engine.hold.clear()
        call = server.inference.StreamGenerate(ask("a", 60, n=4), timeout=2 if how == "deadline" else None)
        if how == "deadline":
            await until(lambda: server.engine.live == 4)
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await call.read()
            assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            await call.read()
            await until(lambda: server.engine.live == 4)
            if how == "cancel":
                call.cancel()
            else:
                await server.channel.close()
        await until(lambda: server.engine.live == 0)
        assert [cancel.keep for cancel in server.engine.got(Cancel)] == [None] * 4
        await until(lambda: server.frontend._engine._streams == {})


async def test_abort_ends_all_samples(folder: Path) -> None:
    async with running(folder, administrator=True) as server:
        server.engine.delay = 0.005
        call = server.inference.Generate(ask("a", 60, n=3, request_id="mine"))
        await until(lambda: server.engine.live == 3)
        await server.admin.Abort(admin_service_pb2.AbortRequest(request_id="mine"))
        assert [s.finish.reason for s in (await call).samples] == [pb.FINISH_REASON_ABORTED] * 3


async def test_samples_continue_after_the_death_of_the_engine(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.delay = 0.005
        call = server.inference.StreamGenerate(ask("a", 60, n=3, return_token_ids=True))
        first = await anext(aiter(call))
        await until(lambda: server.engine.live == 3)
        await server.engine.die()
        server.engine.epoch = 2
        server.engine.start()
        found = by_index([first, *[part async for part in call]])
    assert list(found) == [0, 1, 2]
    for parts in found.values():
        answer, _, finish = joined(parts)
        assert (answer, finish.usage.generated_tokens) == (text(60), 60)


async def test_call_counts_once_and_each_sample_ends_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    names = {"request_finish_total": {"reason": "length"}, "requests_total": {"rpc": "Generate", "code": "OK"},
             "time_to_first_token_seconds_count": {}, "request_generation_tokens_sum": {}}
    before = {name: metric(name, **labels) for name, labels in names.items()}
    async with running(folder) as server:
        server.engine.scripts = {1: [1, EOS]}
        await server.inference.Generate(ask("a", 5, n=3))
    assert [metric(name, **labels) - before[name] for name, labels in names.items()] == [2, 1, 3, 12]
    (line,) = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert (line["samples"], line["reason"], line["generated_tokens"]) == (3, "length,eos,length", 12)
    assert (line["prompt_tokens"], line["cached_tokens"]) == (1, 3)
    assert 0 < line["ttft"] <= line["e2e"] <= line["seconds"]


@pytest.mark.parametrize("n", [1, 2])
async def test_generate_refuses_logprobs_that_cannot_fit(folder: Path, n: int) -> None:
    """Log-probabilities of min_tokens tokens of each sample must fit 4 MiB."""
    async with running(folder, start_engine=False) as server:
        server.engine.info = msgspec.structs.replace(server.engine.info, max_model_len=20_000)
        server.engine.start()
        await until(lambda: server.frontend._engine.state == "ready")
        most = (4 << 20) // (24 * 21 * n)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await server.inference.Generate(ask("a", 10_000, n=n, logprobs=20, min_tokens=most + 1))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert f"at most {most} tokens of each sample" in (refused.value.details() or "")
        assert not server.engine.got(Submit)


async def test_n_above_the_callers_limit_is_invalid(folder: Path) -> None:
    async with running(folder, max_requests_per_client=2) as server:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await server.inference.Generate(ask("a", 5, n=3))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == (
            "n: must be in [1, 2], since a sample is a request, and at most 2 may be live at a time, got 3")
        assert len((await server.inference.Generate(ask("a", 5, n=2))).samples) == 2


# With the real scheduler


async def read(call: grpc.aio.UnaryStreamCall) -> dict[int, tuple[str, pb.Finish]]:
    parts = by_index([part async for part in call])
    return {index: ("".join(part.text for part in some), some[-1].finish) for index, some in parts.items()}


async def test_samples_share_the_prompt(tmp_path: Path) -> None:
    async with whole_server(tmp_path) as server, server.client() as stub:
        answer = await stub.Generate(ask("ab" * 40, 10, n=8))
        assert [sample.finish.usage.cached_tokens for sample in answer.samples] == [0] + [64] * 7
        assert {sample.text for sample in answer.samples} == {"cdefghijkl"}
        assert {sample.finish.usage.prompt_tokens for sample in answer.samples} == {80}


async def test_name_of_a_call_is_free_once_all_samples_have_ended(tmp_path: Path) -> None:
    async with whole_server(tmp_path, delay=0.005) as server, server.client() as stub:
        call = stub.StreamGenerate(ask("a", 2000, n=3, request_id="mine"))
        await call.read()
        for n in (1, 3):
            with pytest.raises(grpc.aio.AioRpcError) as taken:
                await stub.Generate(ask("a", 5, n=n, request_id="mine"))
            assert taken.value.code() == grpc.StatusCode.ALREADY_EXISTS
        assert server.scheduler.num_running == 3
        call.cancel()
        await until(lambda: not server.scheduler._sequences)
        assert len((await stub.Generate(ask("a", 5, n=3, request_id="mine"))).samples) == 3


@pytest.mark.parametrize("limit", ["client", "queue"])
async def test_call_without_places_for_all_samples_leaves_nothing(tmp_path: Path, limit: str) -> None:
    settings = {"max_requests_per_client": 4} if limit == "client" else {"max_num_seqs": 2, "max_queue": 2}
    async with whole_server(tmp_path, delay=0.005, **settings) as server, server.client() as stub:  # type: ignore[arg-type]
        long = stub.StreamGenerate(ask("a", 2000, n=2))
        await long.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(ask("b", 5, n=3))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: len(server.scheduler._sequences) == 2)
        long.cancel()
        await until(lambda: not server.scheduler._sequences)
        assert len((await stub.Generate(ask("b", 5, n=3))).samples) == 3


TOKENS = 4000


@pytest.mark.slow
async def test_slow_reader_of_samples_pauses_all_and_loses_nothing(tmp_path: Path) -> None:
    async with whole_server(tmp_path, max_buffered_tokens=16) as server, server.client(*SMALL_WINDOW) as slow:
        call = slow.StreamGenerate(ask("a", TOKENS, n=3))
        await until(lambda: server.scheduler.num_paused == 3)
        answers = await read(call)
        assert [answer == text(TOKENS) for answer, _ in answers.values()] == [True] * 3
        assert [finish.usage.generated_tokens for _, finish in answers.values()] == [TOKENS] * 3


@pytest.mark.slow
async def test_slow_reader_of_samples_at_the_limit_frees_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    async with whole_server(
        tmp_path, max_buffered_tokens=16, slow_reader_seconds=1.0
    ) as server, server.client(*SMALL_WINDOW) as slow:
        call = slow.StreamGenerate(ask("a", TOKENS, n=3))
        await until(lambda: server.scheduler.num_paused == 3)
        await until(lambda: not server.scheduler._sequences)
        await until(lambda: codes(caplog))
        assert codes(caplog) == ["ABORTED"]
        assert server.frontend._engine._streams == {}
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            _ = [part async for part in call]
        assert ended.value.details() == "the client took nothing for 1 s (slow_reader_seconds)"


# Parts


class Writer:
    """Client of two samples whose writes wait for `release`. written: indices of the messages."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.written: list[int] = []
        self.is_writing = False
        self.order = samples.SendOrder(self._write)
        self.streams = [Stream(FakeClient(1, 512), key, Record(request(5))) for key in range(2)]

    async def _write(self, message: pb.StreamGenerateResponse) -> None:
        assert not self.is_writing, "two writes at a time"
        self.is_writing = True
        await self.release.wait()
        self.is_writing = False
        self.written.append(message.index)

    async def send(self, index: int) -> None:
        stream = self.streams[index]
        stream.__aiter__()
        stream.restart_check()
        await self.order.of(stream)(pb.StreamGenerateResponse(index=index))


async def test_turns_write_one_message_at_a_time() -> None:
    writer = Writer()
    sending = asyncio.gather(*(writer.send(index) for index in (0, 1, 0, 1)))
    await asyncio.sleep(0.01)
    writer.release.set()
    await sending
    assert writer.written == [0, 1, 0, 1]


async def test_turns_wait_for_another_sample_is_not_slow_reading() -> None:
    writer = Writer()
    sending = [asyncio.ensure_future(writer.send(index)) for index in range(2)]
    await asyncio.sleep(0.01)
    for made in reversed(writer.streams):
        made.check_reader(1.0, 1.0)
        made.check_reader(1.0, 1.0)
    assert [made.slow is not None for made in writer.streams] == [True, False]  # one writes, the other waits
    results = await asyncio.gather(*sending, return_exceptions=True)
    # gRPC may still have the message of the cancelled write, so that no other may follow.
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    assert writer.is_writing
    assert writer.written == []


async def test_run_together_first_exception_cancels_the_others() -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(name)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ValueError, match="first"):
        await samples.run_together([wait("a"), give_up(), give_up(), fail(), give_up(), give_up(), wait("b")])
    assert ended == ["a", "b"]
    with pytest.raises(asyncio.CancelledError):
        await samples.run_together([give_up(), asyncio.sleep(0)])
    task = asyncio.ensure_future(samples.run_together([wait("c"), wait("d")]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["a", "b", "c", "d"]
