"""Engine client with a fake engine: order of outputs, one end per request, and restarts of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from npuserve.service import metrics
from npuserve.service.errors import InternalError, QueueFull, StreamNotFound, Unavailable
from npuserve.service.ipc.messages import Cancel, Hello, Load, Output, Outputs, Request, Restore, Started, Submit
from npuserve.service.streams import engine_client as module
from npuserve.service.streams.engine_client import EngineClient, Stream
from tests.support import fake_engine
from tests.support.fake_engine import INFO, FakeEngine, until


@contextlib.asynccontextmanager
async def connected(**options: object) -> AsyncIterator[tuple[EngineClient, FakeEngine]]:
    async with fake_engine.engine(**options) as engine:
        client = EngineClient(engine.address)
        client.start()
        await until(lambda: client.state == "ready")
        try:
            yield client, engine
        finally:
            await client.close()


def request(max_tokens: int = 5, name: str = "r", client: str = "") -> Request:
    return Request(name, [0], max_tokens, time.monotonic(), client=client)


async def ids_of(stream: Stream) -> list[int]:
    return [token async for outputs in stream for output in outputs for token in output.token_ids]


async def test_engine_client_states_and_model_info() -> None:
    states: list[str] = []
    async with fake_engine.engine(started=False) as engine:
        client = EngineClient(engine.address, states.append)
        client.start()
        await asyncio.sleep(0.1)
        assert (client.state, client.model_info, states) == ("starting", None, [])
        with pytest.raises(Unavailable, match="loading"):
            client.submit(request())
        engine.start()
        await until(lambda: client.state == "ready")
        assert (client.model_info, client.epoch, len(engine.got(Hello))) == (INFO, 1, 1)
        await engine.die()
        await until(lambda: client.state == "down")
        with pytest.raises(Unavailable, match="restarting"):
            client.submit(request())
        engine.epoch = 2
        engine.start()
        await until(lambda: client.state == "ready")
        assert (client.epoch, states) == (2, ["ready", "down", "ready"])
        assert sum("_detect_stall" in repr(task) for task in asyncio.all_tasks()) == 1
        assert await ids_of(client.submit(request())) == [1, 2, 3, 4, 5]
        await client.close()


@pytest.mark.slow
async def test_engine_client_silent_engine_is_stalled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "npuserve")
    async with connected() as (client, engine):
        client._stall_seconds = 2
        engine.hold.clear()
        stream = client.submit(request())
        await until(lambda: client.state == "stalled")
        assert client._silent_seconds == 2
        with pytest.raises(Unavailable, match="does not answer"):
            client.submit(request())
        engine.hold.set()
        assert await ids_of(stream) == [1, 2, 3, 4, 5]
        assert client.state == "ready"
        await until(lambda: client.state == "stalled")
        await engine.die()
        await until(lambda: client.state == "down")
    levels = [record.levelname for record in caplog.records if record.message.startswith("engine is ")]
    assert levels == ["DEBUG", "WARNING", "INFO", "WARNING", "WARNING"]


async def test_engine_client_concurrent_streams_get_own_outputs() -> None:
    async with connected(delay=0.001, info=msgspec.structs.replace(INFO, max_num_seqs=64)) as (client, engine):
        streams = [client.submit(Request(str(i), [i], 10 + i % 7, time.monotonic())) for i in range(50)]
        answers = await asyncio.gather(*map(ids_of, streams))
        for i, answer in enumerate(answers):
            assert answer == [(i + 1 + k) % 26 for k in range(10 + i % 7)]
        for stream in streams:
            stream.close()
        assert engine.got(Cancel) == []
        assert client._streams == {}


async def test_stream_unread_outputs_are_one_list() -> None:
    async with connected() as (client, _):
        stream = client.submit(request(8))
        await until(lambda: not stream.is_live)
        assert stream.buffered == 8
        batches = [outputs async for outputs in stream]
        assert [[output.token_ids for output in outputs] for outputs in batches] == [[[i] for i in range(1, 9)]]
        assert batches[0][-1].finish.generated_tokens == 8
        assert stream.buffered == 0


async def test_engine_client_engine_death_is_a_pause() -> None:
    async with connected(delay=0.01) as (client, engine):
        stream = client.submit(request(12))
        await until(lambda: stream.buffered >= 3)
        await engine.die()
        await until(lambda: client.state == "down")
        got = [output.token_ids for output in await stream.__anext__()]
        assert got[:3] == [[1], [2], [3]]
        engine.epoch = 2
        engine.start()
        assert await ids_of(stream) == list(range(len(got) + 1, 13))
        (live,) = [record for _, record in engine.got(Restore)[-1].live]
        assert live.token_ids[: len(got)] == [i for ids in got for i in ids]
        stream.close()
        assert client._streams == {}


async def test_engine_client_close_ends_streams() -> None:
    async with connected(delay=0.01) as (client, _):
        stream = client.submit(request(1000))
        await until(lambda: stream.buffered >= 1)
        await client.close()
        await stream.__anext__()
        for _ in range(2):
            with pytest.raises(Unavailable, match="leaving") as ended:
                await stream.__anext__()
        assert ended.value.retry_seconds > 0
        stream.close()
        assert client._streams == {}


async def test_engine_client_engine_death_fails_calls() -> None:
    async with connected() as (client, engine):
        assert engine._task
        engine._task.cancel()  # it reads nothing any more, but keeps the connection
        await asyncio.sleep(0.02)
        call = asyncio.ensure_future(client.flush_prefix_cache())
        await asyncio.sleep(0.02)
        assert not call.done()
        await engine.die()
        with pytest.raises(Unavailable):
            await call


async def test_engine_client_outputs_of_earlier_epoch_and_of_ended_streams_are_dropped() -> None:
    async with connected(epoch=7) as (client, engine):
        engine.hold.clear()
        stream = client.submit(request())
        await until(lambda: engine.live == 1)
        frontend, key = next(iter(engine._live))
        await engine.send(frontend, Outputs(6, Load(running=99), [Output(key, [25])]))
        other = key + 1000  # of a stream that has ended here
        await engine.send(frontend, Outputs(7, Load(running=3), [Output(other, [25])], [Started(other, 0)], [other]))
        await until(lambda: client.load.running == 3)
        assert stream.buffered == 0
        engine.hold.set()
        assert await ids_of(stream) == [1, 2, 3, 4, 5]
        assert len(engine.got(Hello)) == 1


@pytest.mark.slow
async def test_engine_client_load_counts_unanswered_requests_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNANSWERED_SECONDS", 0.0)
    gauge = metrics.requests_waiting._value
    async with connected() as (client, engine):
        assert engine._task
        first = client.submit(request(name="a"))
        assert client.load.waiting == 1
        await ids_of(first)
        (name, _), = engine._requests
        assert client.load.waiting == 0
        engine._task.cancel()  # it reads nothing any more, but keeps the connection
        await asyncio.sleep(0.02)
        streams = [client.submit(request(name=letter)) for letter in "bcde"]
        assert client.load.waiting == 4
        await until(lambda: gauge.get() == 4)
        # The engine has queued two of them and refused one.
        keys = [stream.key for stream in streams]
        refusal = [Output(keys[2], error=("QueueFull", "full", 0.0))]
        await engine.send(name, Outputs(1, Load(running=1, waiting=2), refusal, [], keys[:2]))
        await until(lambda: client.load == Load(running=1, waiting=3))
        streams[3].close()
        assert client.load == Load(running=1, waiting=2)
        await until(lambda: gauge.get() == 0)
        await engine.die()
        await until(lambda: client.state == "down")
        assert client.load == Load()


async def test_engine_client_restored_requests_wait_until_the_next_engine_answers() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        stream = client.submit(request())
        await until(lambda: engine.live == 1)
        await engine.die()
        await until(lambda: client.state == "down")
        loads: list[Load] = []
        accept = engine._accept

        async def accept_late(frontend: bytes, keys: list[int]) -> None:
            await asyncio.sleep(0.05)
            loads.append(client.load)
            await accept(frontend, keys)

        engine._accept = accept_late  # type: ignore[method-assign]
        engine.epoch = 2
        engine.start()
        await until(lambda: engine.live == 1 and client.load.waiting == 0)
        assert loads == [Load(waiting=1)]
        engine.hold.set()
        assert await ids_of(stream) == [1, 2, 3, 4, 5]


async def test_engine_client_submits_requests_again_that_no_engine_has_accepted() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        accepted = client.submit(request(name="accepted"))
        await until(lambda: accepted.is_accepted)
        assert engine._task
        engine._task.cancel()  # it reads nothing any more, but keeps the connection
        await asyncio.sleep(0.02)
        new, left = client.submit(request(name="new")), client.submit(request(name="left"))
        left.close()
        await engine.die()
        await until(lambda: client.state == "down")
        engine.epoch = 2
        engine.hold.set()
        engine.start()
        assert await ids_of(new) == await ids_of(accepted) == [1, 2, 3, 4, 5]
        assert [record.request.request_id for _, record in engine.got(Restore)[-1].live] == ["accepted"]
        assert [message.request.request_id for message in engine.got(Submit)] == ["accepted", "new"]


async def test_stream_close_cancels_once() -> None:
    async with connected(delay=0.005) as (client, engine):
        stream = client.submit(request(1000))
        await stream.__anext__()
        stream.close()
        stream.close()
        await until(lambda: engine.live == 0)
        await client.flush_prefix_cache()
        assert [(c.key, c.keep) for c in engine.got(Cancel)] == [(stream.key, None)]


async def test_stream_stop_waits_for_finish() -> None:
    async with connected(delay=0.005) as (client, engine):
        stream = client.submit(request(1000))
        await stream.__anext__()
        finish = await stream.stop(1)
        assert (finish.reason, finish.generated_tokens) == ("stop_string", 1)
        stream.close()
        assert [c.keep for c in engine.got(Cancel)] == [1]


async def test_stream_stop_returns_finish_sent_before() -> None:
    async with connected() as (client, engine):
        stream = client.submit(request(3))
        await until(lambda: not stream.is_live)
        finish = await stream.stop(1)
        assert (finish.reason, finish.generated_tokens) == ("length", 3)
        await client.flush_prefix_cache()
        assert engine.got(Cancel) == []


async def test_stream_refusal_is_raised() -> None:
    async with connected() as (client, engine):
        engine.refuse = ("QueueFull", "8 requests wait already", 2.5)
        with pytest.raises(QueueFull, match="8 requests"):
            await ids_of(client.submit(request()))
        engine.refuse = ("SomethingNew", "x", 0.0)
        with pytest.raises(InternalError):
            await ids_of(client.submit(request()))


async def test_engine_client_too_many_streams_raises_queue_full() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        share = INFO.max_num_seqs + INFO.max_queue
        streams = [client.submit(request(name=f"{name}{i}", client=name)) for name in "ab" for i in range(share)]
        refused = metrics.queue_rejections_total.labels("front_end")._value.get()
        with pytest.raises(QueueFull, match=r"front end full: it holds 16 requests.* max_queue \(4\)"):
            client.submit(request(client="c"))
        assert metrics.queue_rejections_total.labels("front_end")._value.get() == refused + 1
        streams.pop().close()
        streams.append(client.submit(request(client="c")))
        for stream in streams:
            stream.close()


async def test_engine_client_bytes_that_the_engine_does_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 1 << 20)
    async with connected() as (client, engine):
        assert engine._task
        engine._task.cancel()  # it reads nothing any more, but keeps the connection
        cancelled = (client.submit(Request("r", [1000] * 10_000, 5, time.monotonic())).close() for _ in range(1000))
        with pytest.raises(Unavailable, match="the engine does not answer"):
            list(cancelled)


async def test_engine_client_live_streams_of_one_client_fill_the_queue() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        streams = [client.submit(request(name=f"{i}")) for i in range(INFO.max_num_seqs + INFO.max_queue)]
        counts = [metrics.queue_rejections_total.labels(why)._value for why in ("queue_full", "client_limit")]
        full, limited = (count.get() for count in counts)
        with pytest.raises(QueueFull, match=r"^queue full: the front end holds 8 requests of this client") as caught:
            client.submit(request())
        assert caught.value.why == "queue_full"
        assert [count.get() for count in counts] == [full + 1, limited]
        for stream in streams:
            stream.close()


async def test_engine_client_unread_streams_of_one_client_take_half() -> None:
    async with connected() as (client, _):
        share = INFO.max_num_seqs + INFO.max_queue
        streams = []
        for i in range(share):
            streams.append(client.submit(request(1, f"slow{i}", "slow")))
            await until(lambda: not streams[-1].is_live)  # the engine is idle
        refused = metrics.queue_rejections_total.labels("client_limit")._value.get()
        with pytest.raises(QueueFull, match=r"client limit: the front end holds 8 requests of this client"):
            client.submit(request(client="slow"))
        with pytest.raises(QueueFull, match="client limit"):
            await client.resume("token", 0, "", None, "slow")
        assert metrics.queue_rejections_total.labels("client_limit")._value.get() == refused + 2
        for _ in range(2 * share):  # streams that were read and closed do not count
            stream = client.submit(request(client="other"))
            assert await ids_of(stream) == [1, 2, 3, 4, 5]
            stream.close()
            with pytest.raises(StreamNotFound):
                await client.resume("token", 0, "", None, "other")
        for stream in streams:
            stream.close()
        assert not client._limit._clients
        assert not client._limit._shares


@pytest.mark.slow
async def test_engine_client_malformed_message_reconnects() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        stream = client.submit(request())
        await until(lambda: engine.live == 1)
        frontend, _ = next(iter(engine._live))
        engine.socket._frontends[frontend].socket.send(b"\x08\0\0\0\xc1garbage")
        await until(lambda: len(engine.got(Hello)) == 2)
        engine.hold.set()
        assert await ids_of(stream) == [1, 2, 3, 4, 5]
        assert client.state == "ready"


@pytest.mark.parametrize(("kind", "method", "work"), [
    (EngineClient, "_on_outputs", "engine client"), (EngineClient, "_detect_stall", "engine client"),
    (Stream, "check_reader", "slow readers")])
async def test_engine_client_failed_background_work_is_logged_and_restarted(
    kind: type, method: str, work: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01, raising=False)
    calls: list[int] = []
    works = getattr(kind, method)

    def fails(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("a bug")
        return works(*arguments)

    async def fails_in_its_task(self: EngineClient) -> None:
        await fails(self)  # type: ignore[misc]

    monkeypatch.setattr(kind, method, fails_in_its_task if method == "_detect_stall" else fails)
    async with fake_engine.engine() as engine:
        client = EngineClient(engine.address, slow_reader_seconds=0.04)
        client.start()
        await until(lambda: client.state == "ready")
        engine.hold.clear()
        stream = client.submit(request())
        await until(lambda: len(calls) > 1)
        engine.hold.set()
        assert await ids_of(stream) == [1, 2, 3, 4, 5]
        await client.close()
    (bug,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert bug.getMessage().startswith(work)
    assert bug.fields["exception_type"] == "KeyError"  # type: ignore[attr-defined]
