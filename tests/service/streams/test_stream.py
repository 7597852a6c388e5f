"""Streams across restarts of the engine: no token is lost or repeated."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams, TokenLogprobs
from npuserve.service import metrics
from npuserve.service.errors import QueueFull, TakenOver, Unavailable
from npuserve.service.ipc.messages import (
    Cancel,
    Finish,
    Output,
    Pause,
    Record,
    Request,
    Restore,
    Started,
    Timing,
    Unpause,
)
from npuserve.service.streams import engine_client as client_module
from npuserve.service.streams import stream as stream_module
from npuserve.service.streams.engine_client import EngineClient
from npuserve.service.streams.stream import Stream
from tests.service.streams.test_engine_client import connected, request
from tests.support.fake_engine import FakeEngine, until


async def restart_engine(engine: FakeEngine, client: object) -> None:
    """Stop the engine, start the next one, and wait until it has received the Restore message."""
    lives = len(engine.got(Restore))
    await engine.die()
    await until(lambda: client.state == "down")  # type: ignore[attr-defined]
    engine.epoch += 1
    engine.start()
    await until(lambda: client.state == "ready")  # type: ignore[attr-defined]
    await until(lambda: len(engine.got(Restore)) > lives)


def build_request(name: str, prompt: int, max_tokens: int, token: str = "", **sampling: object) -> Request:
    return Request(name, [prompt, prompt + 1], max_tokens, time.monotonic(), SamplingParams(**sampling),  # type: ignore[arg-type]
                   resume_token=token, owner="me")


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(deaths=st.lists(st.integers(0, 25), max_size=4), batch=st.integers(1, 3), count=st.integers(1, 6))
def test_stream_engine_deaths_lose_and_repeat_nothing(deaths: list[int], batch: int, count: int) -> None:
    async def run() -> None:
        async with connected(delay=0.001, batch=batch) as (client, engine):
            streams = [client.submit(build_request(str(i), i, 20 + i, logprobs=1, prompt_logprobs=0))
                       for i in range(count)]
            reading = [asyncio.ensure_future(all_outputs(stream)) for stream in streams]
            for pause in deaths:
                await asyncio.sleep(pause / 1000)
                await restart_engine(engine, client)
            for i, task in enumerate(reading):
                outputs = await task
                ids = [token for output in outputs for token in output.token_ids]
                assert ids == [(i + 2 + k) % 26 for k in range(20 + i)]
                assert [r.token_id for output in outputs for r in output.logprobs or []] == ids
                assert [r.token_id for output in outputs for r in output.prompt_logprobs or []] == [i + 1]
                finish = outputs[-1].finish
                assert finish
                assert (finish.reason, finish.generated_tokens) == ("length", 20 + i)
                streams[i].close()
            assert client._streams == {}

    asyncio.run(run())


async def all_outputs(stream: Stream) -> list[Output]:
    return [output async for outputs in stream for output in outputs]


class FakeClient:
    """Engine client without an engine."""

    def __init__(self, stream_interval: int, max_buffered_tokens: int):
        self.stream_interval, self.max_buffered_tokens = stream_interval, max_buffered_tokens

    def send(self, message: object) -> bool:
        return True

    def remove(self, stream: Stream) -> None:
        return


async def read(stream: Stream, taken: list[list[int]]) -> None:
    """Append the tokens of each message of the stream to `taken`."""
    async for outputs in stream:
        taken.append([token for output in outputs for token in output.token_ids])


@pytest.mark.parametrize(("interval", "most", "sizes"), [
    (1, 512, [1] * 11), (4, 512, [1, 4, 4, 2]), (4, 3, [1, 3, 3, 3, 1]), (20, 512, [1, 10])])
async def test_stream_interval_sets_tokens_per_message(
    interval: int, most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token is read at once, then `interval` tokens at a time, and the rest at the end. No more than `most`
    tokens wait.
    """
    monkeypatch.setattr(stream_module, "MAX_INTERVAL_SECONDS", 3600.0)
    stream = Stream(FakeClient(interval, most), 0, Record(request(11)))
    taken: list[list[int]] = []
    reading = asyncio.ensure_future(read(stream, taken))
    for token in range(11):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        finish = Finish("length", 1, 0, 11, Timing(0.0, [], 0.0, 0.0, 0.0, 0.0)) if token == 10 else None
        stream.push(Output(0, [token], finish=finish), time.monotonic())
    await reading
    assert [token for tokens in taken for token in tokens] == list(range(11))
    assert [len(tokens) for tokens in taken] == sizes


async def test_stream_suspended_process_does_not_make_its_reader_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances while the process is stopped, and no check runs."""
    now = 50.0
    monkeypatch.setattr(stream_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now))
    client = EngineClient("", slow_reader_seconds=0.04)
    stream = client._streams[0] = Stream(FakeClient(1, 512), 0, Record(request(11)))

    async def read() -> None:
        async for _ in stream:
            await asyncio.Event().wait()

    reading = asyncio.ensure_future(read())
    stream.push(Output(0, [1]), now)
    await client._check_readers()
    now += 3600.0
    await client._check_readers()
    assert stream.slow is None
    for _ in range(4):
        await client._check_readers()
    assert stream.slow
    await asyncio.wait([reading])
    assert reading.cancelled()


async def test_stream_wakes_reader_after_max_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr(stream_module, "time", SimpleNamespace(monotonic=lambda: now))
    stream = Stream(FakeClient(100, 512), 0, Record(request(11)))
    taken: list[list[int]] = []
    reading = asyncio.ensure_future(read(stream, taken))
    for token in range(8):
        stream.push(Output(0, [token]), now)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        now += 0.125
    assert taken == [[0], [1, 2], [3, 4], [5, 6]]
    reading.cancel()


async def test_stream_interval_first_token_and_disconnect_wake_reader(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "MAX_INTERVAL_SECONDS", 3600.0)
    stream = Stream(FakeClient(4, 512), 0, Record(request(11)))
    taken: list[list[int]] = []

    async def push(*tokens: int) -> None:
        stream.push(Output(0, list(tokens)), time.monotonic())
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    reading = asyncio.ensure_future(read(stream, taken))
    await asyncio.sleep(0)
    for tokens in ((), (), (1,), (2,), (3,)):  # outputs without tokens report log-probabilities of the prompt
        await push(*tokens)
    assert taken == [[], [], [1]]
    stream.on_disconnect()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert taken == [[], [], [1], [2, 3]]
    for token in (4, 5, 6):  # from the next engine
        await push(token)
    assert len(taken) == 4
    await push(7)
    assert taken[4:] == [[4, 5, 6, 7]]
    stream.close()
    with pytest.raises(Unavailable):
        await reading


async def test_stream_lost_connection_keeps_cached_tokens() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        stream = client.submit(request())
        stream.on_started(Started(stream.key, 4), time.monotonic())
        await engine.die()
        await until(lambda: client.state == "down")
        engine.start()  # same epoch
        await until(lambda: client.state == "ready")
        assert stream.record.cached_tokens == 4


async def test_stream_stop_during_engine_death_ends_answer() -> None:
    async with connected(delay=0.002) as (client, engine):
        stream = client.submit(request(1000))
        await until(lambda: len(stream.record.token_ids) >= 5)
        await stream.__anext__()
        assert engine._task
        engine._task.cancel()  # it reads nothing any more
        await asyncio.sleep(0.01)
        stopping = asyncio.ensure_future(stream.stop(4))
        await asyncio.sleep(0.01)
        assert not stopping.done()
        await engine.die()
        finish = await stopping
        assert (finish.reason, finish.generated_tokens, finish.cached_tokens) == ("stop_string", 4, 3)
        assert not stream.is_live
        timing = finish.timing
        assert timing.queue + sum(timing.prefill_chunks) + timing.decode == pytest.approx(
            timing.last_step_end - stream.request.arrival)
        assert stream.record.token_ids == [1, 2, 3, 4]
        other = client._streams.get(stream.key)
        assert other is stream
        stream.close()
        assert engine.got(Cancel) == []


async def test_stream_that_has_ended_is_not_ended_again() -> None:
    """Its reader has not taken the end yet."""
    finish = Finish("length", 1, 0, 1, Timing(0.0, [], 0.0, 0.0, 0.0, 0.0))
    finished, failed = (Stream(FakeClient(1, 512), key, Record(request(11))) for key in range(2))
    finished.push(Output(0, [1], finish), 1.0)
    failed.fail(Unavailable("first"))
    for stream in (finished, failed):
        stream.on_disconnect()
        stream.fail(Unavailable("second"))
    taken: list[list[int]] = []
    await asyncio.wait_for(read(finished, taken), 10)
    assert taken == [[1]]
    with pytest.raises(Unavailable, match="first"):
        await asyncio.wait_for(read(failed, taken), 10)


async def test_stream_stop_without_an_engine_ends_answer() -> None:
    """The next engine would continue after the stop string."""
    async with connected(delay=0.002) as (client, engine):
        stream = client.submit(request(1000))
        await stream.__anext__()
        await engine.die()
        await until(lambda: client.state == "down")
        finish = await asyncio.wait_for(stream.stop(1), 10)
        assert (finish.reason, finish.generated_tokens) == ("stop_string", 1)
        stream.close()


async def test_stream_resumed_within_the_prompt_repeats_its_logprobs() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        record = Record(build_request("r", 0, 10, "t", prompt_logprobs=0))
        reports = [TokenLogprobs(1, -1.0, 1, [], [])]
        record.add(Output(1, [], prompt_logprobs=reports))
        engine.records["t"] = record
        stream = await client.resume("t", 0, "me", None)
        (output,) = await stream.__anext__()
        assert (output.token_ids, output.prompt_logprobs) == ([], reports)
        stream.close()


async def test_stream_resumed_before_its_first_token_waits_for_it() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        engine.records["t"] = Record(build_request("r", 0, 10, "t"))
        stream = await client.resume("t", 0, "me", None)
        reading = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        assert not reading.done()
        engine.hold.set()
        assert (await reading)[0].token_ids == [2]
        stream.close()


async def test_stream_resumed_after_an_answer_without_tokens_returns_its_finish() -> None:
    async with connected() as (client, _):
        record = Record(build_request("r", 0, 10, "t"))
        finish = Finish("aborted", 2, 0, 0, Timing(0.0, [], 0.0, 0.0, 0.0, 0.0))
        record.add(Output(1, finish=finish))
        assert [output.finish for output in await all_outputs(Stream(client, 1, record, resumed=True))] == [finish]


@pytest.mark.parametrize("resumed", [False, True])
def test_stream_times_of_its_tokens(resumed: bool) -> None:
    """Another call has observed the first token of a resumed stream."""
    def observed() -> list[float]:
        return [metrics.time_to_first_token_seconds._sum.get(), metrics.inter_token_latency_seconds._sum.get()]

    client: Any = SimpleNamespace(max_buffered_tokens=9, stream_interval=1, send=lambda message: True)
    stream = Stream(client, 1, Record(Request("r", [1, 2], 9, 100.0)), resumed)
    metrics.flush()
    before = observed()
    stream.on_started(Started(1, 0), 103.0)
    for token, now in enumerate((104.0, 104.5, 106.0)):
        stream.push(Output(1, [token]), now)
    metrics.flush()
    assert [now - then for now, then in zip(observed(), before, strict=True)] == [0.0 if resumed else 4.0, 2.0]
    assert stream.first_token == (None if resumed else 104.0)
    stream.on_reconnect()
    assert stream.record.timing == Timing(3.0, [1.0], 2.0, 0.0, 0.0, 106.0)
    stream.on_started(Started(1, 2), 107.0)  # the next engine has the prompt in its cache
    assert stream.record.cached_tokens == 0
    stream.on_reconnect()
    assert stream.record.timing == Timing(3.0, [1.0], 2.0, 0.0, 0.0, 106.0)
    stream.on_started(Started(1, 2), 108.0)
    for now in (110.0, 111.0):
        stream.push(Output(1, [7]), now)
    stream.on_reconnect()
    assert stream.record.timing == Timing(5.0, [1.0, 2.0], 3.0, 0.0, 0.0, 111.0)


async def test_stream_wait_until_accepted_ends_before_any_output() -> None:
    stream = Stream(FakeClient(1, 512), 0, Record(request(11)))
    waiting = asyncio.ensure_future(stream.wait_until_accepted())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.on_accepted()
    await asyncio.wait_for(waiting, 10)
    refused = Stream(FakeClient(1, 512), 0, Record(request(11)))
    waiting = asyncio.ensure_future(refused.wait_until_accepted())
    await asyncio.sleep(0)
    refused.push(Output(0, error=("QueueFull", "full", 0.0)), time.monotonic())
    with pytest.raises(QueueFull):
        await asyncio.wait_for(waiting, 10)


async def test_stream_reader_catches_up_and_is_paused_again() -> None:
    """Each pause is sent once. A lost engine knows of no pause, and gets no Unpause."""
    sent: list[object] = []
    client: Any = FakeClient(1, 2)
    client.send = lambda message: sent.append(type(message))
    stream = Stream(client, 0, Record(request(99)))
    for _ in range(2):
        stream.push(Output(0, [1, 2]), 0.0)
        assert sent == []
        for _ in range(2):
            stream.push(Output(0, [3]), 0.0)
        assert sent == [Pause]
        await stream.__anext__()
        assert sent == [Pause, Unpause]
        sent.clear()
    stream.push(Output(0, [1, 2, 3]), 0.0)
    stream.on_disconnect()
    await stream.__anext__()
    stream.push(Output(0, [4, 5, 6]), 0.0)
    assert sent == [Pause, Pause]
    stream.close()
    stream.push(Output(0, [7]), 0.0)
    assert stream.buffered == 3
    assert stream.record.token_ids[-1] == 6


async def test_stream_taken_over_is_not_resumable() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        stream = client.submit(build_request("r", 0, 10, "t"))
        assert not stream.is_resumable
        stream.on_accepted()
        assert stream.is_resumable
        stream.push(Output(stream.key, error=("TakenOver", "elsewhere", 0.0)), 0.0)
        with pytest.raises(TakenOver):
            await stream.__anext__()
        assert not stream.is_resumable
