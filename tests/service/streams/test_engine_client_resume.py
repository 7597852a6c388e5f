"""Engine client: streams that are restored in the next engine, streams that a later call resumes, and other calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from npuserve.service.errors import StreamNotFound, Unavailable
from npuserve.service.ipc.messages import (
    MAX_RESTORE_BYTES,
    Cancel,
    FlushPrefixCache,
    Hello,
    Load,
    Output,
    Outputs,
    Record,
    Request,
    Restore,
    Resume,
    Submit,
    encode,
)
from npuserve.service.streams.engine_client import EngineClient
from npuserve.service.streams.records import Records
from npuserve.service.streams.stream import Stream
from tests.service.streams.test_engine_client import connected, ids_of, request
from tests.service.streams.test_stream import build_request, restart_engine
from tests.support import fake_engine
from tests.support.fake_engine import until


async def test_engine_client_restore_is_in_order_of_arrival() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        late, early = time.monotonic(), time.monotonic() - 10
        streams = [client.submit(Request(name, [0], 3, at)) for name, at in (("late", late), ("early", early))]
        await until(lambda: all(stream.is_accepted for stream in streams))
        await restart_engine(engine, client)
        assert [r.request.request_id for _, r in engine.got(Restore)[-1].live] == ["early", "late"]


async def test_engine_client_restores_resumable_streams() -> None:
    async with fake_engine.engine(delay=0.001) as engine:
        client = EngineClient(engine.address, resume_seconds=60.0)
        client.start()
        await until(lambda: client.state == "ready")
        done, left = client.submit(build_request("done", 0, 3, "d")), client.submit(build_request("left", 0, 500, "l"))
        plain = client.submit(build_request("plain", 0, 500))
        assert len(await ids_of(done)) == 3
        await until(lambda: len(left.record.token_ids) > 3)
        for stream in (done, left, plain):
            stream.close()
        await restart_engine(engine, client)
        ended = engine.got(Restore)[-1].ended
        assert [(record.token, record.is_finished) for record in ended] == [("d", True), ("l", False)]
        assert msgspec.msgpack.decode(ended[1].data, type=Record).token_ids == left.record.token_ids
        await client.close()


async def test_engine_client_restore_is_split_and_new_requests_follow() -> None:
    async with fake_engine.engine() as engine:
        old: list[Stream] = []
        new: list[Stream] = []

        def changed(state: str) -> None:
            """Submit and close requests when the second engine is ready, before the restore."""
            if state == "ready" and old:
                new.append(client.submit(request(5, "new")))
                old[11].close()

        engine.hold.clear()
        client = EngineClient(engine.address, changed, resume_seconds=60.0)
        client.start()
        await until(lambda: client.state == "ready")
        old += [client.submit(Request(f"old {i}", [0] * 9000, 3, float(i), client=f"{i}")) for i in range(12)]
        for i in range(40):
            client._records.end(Record(build_request(f"ended {i}", 0, 3, f"t{i}"), [1] * 9000), time.monotonic())
        await until(lambda: engine.live == 12)
        await engine.die()
        await until(lambda: client.state == "down")
        engine.received.clear()
        engine.start()
        await until(lambda: engine.got(Submit))
        parts = engine.got(Restore)
        assert [record.request.request_id for part in parts for _, record in part.live] == [
            f"old {i}" for i in range(11)]
        assert all(record.timing for part in parts for _, record in part.live)
        assert [one.token for part in parts for one in part.ended] == [f"t{i}" for i in range(40)]
        assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert len(parts) > 5
        assert max(len(encode(part)) for part in parts) < MAX_RESTORE_BYTES + 50_000
        assert engine.received.index(parts[-1]) < engine.received.index(engine.got(Submit)[0])
        engine.hold.set()
        for stream in [*old[:11], *new]:
            assert len(await ids_of(stream)) == stream.request.max_tokens
            stream.close()
        await client.close()


async def test_engine_client_restore_ends_with_its_connection() -> None:
    """It waits until the engine reads, which a dead engine never does."""
    written: list[object] = []
    connection: Any = SimpleNamespace(write=written.append, drained=asyncio.Event().wait)
    client = EngineClient("")
    client._restoring = asyncio.ensure_future(client._restore(connection, [], []))
    await asyncio.sleep(0)
    assert [type(message) for message in written] == [Restore]
    client._on_disconnect()
    await asyncio.wait([client._restoring], timeout=60)
    assert client._restoring.cancelled()
    assert len(written) == 1


async def test_engine_client_resume_continues_stream() -> None:
    async with connected(delay=0.001) as (client, engine):
        record = Record(build_request("r", 0, 10, "t"))
        record.add(Output(1, [2, 3, 4]))
        engine.records["t"] = record
        client._records = Records(60.0)
        client._records.end(Record(record.request, [2]), time.monotonic())  # of its last reader, here
        stream = await client.resume("t", 1, "me", None)
        assert client._records.ended(time.monotonic()) == []
        assert await ids_of(stream) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
        assert stream.first_token is None
        stream.close()
        with pytest.raises(StreamNotFound):
            await client.resume("u", 0, "me", None)
        assert client._resuming == {}
        assert client._streams == {}


async def test_engine_client_cancelled_resume_cancels_request() -> None:
    async with connected() as (client, engine):
        engine.hold.clear()
        client._records = Records(60.0)
        record = Record(build_request("r", 0, 10, "t"))
        engine.records["t"] = record
        resuming = asyncio.ensure_future(client.resume("t", 0, "me", None))
        await asyncio.sleep(0)
        resuming.cancel()
        await until(lambda: engine.got(Cancel))
        assert engine.live == 0
        assert client._streams == {}
        assert [kept.token for kept in client._records.ended(time.monotonic())] == ["t"]  # for the next engine


@pytest.mark.parametrize("is_found", [True, False])
async def test_engine_client_resume_cancelled_as_the_reply_arrives_leaves_no_stream(is_found: bool) -> None:
    """The reply arrives before the caller's task runs again."""
    async with connected() as (client, engine):
        assert engine._task
        engine._task.cancel()  # it replies to nothing
        resuming = asyncio.ensure_future(client.resume("t", 0, "me", None))
        await asyncio.sleep(0)
        (key,) = client._resuming
        if is_found:
            client._on_resumed(key, Record(build_request("r", 0, 10, "t")))
        else:
            client._on_outputs(Outputs(1, Load(), [Output(key, error=("StreamNotFound", "none", 0.0))]))
        resuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resuming
        assert client._streams == client._resuming == client._limit._clients == {}


@contextlib.asynccontextmanager
async def resumed_at_death(**deadlines: float | None) -> AsyncIterator[
    tuple[EngineClient, fake_engine.FakeEngine, list[asyncio.Future[Stream]]]
]:
    """Run a client whose engine died before it answered calls that resume streams. deadlines: of each, by its token."""
    async with connected(delay=0.001) as (client, engine):
        assert engine._task
        engine._task.cancel()  # it replies to nothing
        await asyncio.sleep(0.01)
        resuming = [asyncio.ensure_future(client.resume(token, 1, "me", deadline, token))
                    for token, deadline in deadlines.items()]
        await asyncio.sleep(0.01)
        await engine.die()
        await until(lambda: client.state == "down")
        yield client, engine, resuming
        await asyncio.gather(*resuming, return_exceptions=True)
        assert client._resuming == client._streams == client._limit._clients == {}


async def test_engine_client_resume_at_engine_death_waits_for_next_engine() -> None:
    deadline = time.monotonic() + 50
    async with resumed_at_death(kept=None, late=deadline, gone=None) as (client, engine, resuming):
        for call in (client.resume("new", 0, "me", None), client.flush_prefix_cache()):
            with pytest.raises(Unavailable, match="restarting"):
                await asyncio.wait_for(call, 10)
        assert client.require_model_info() == fake_engine.INFO
        assert not any(call.done() for call in resuming)
        for token in ("kept", "late"):
            engine.records[token] = Record(build_request(token, 0, 10, token))
            engine.records[token].add(Output(1, [2, 3, 4]))
        engine.received.clear()
        engine.start()
        for call in resuming[:2]:
            stream = await asyncio.wait_for(call, 10)
            assert await ids_of(stream) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
            stream.close()
        with pytest.raises(StreamNotFound):
            await asyncio.wait_for(resuming[2], 10)
        assert [(sent.token, sent.token_offset, sent.deadline) for sent in engine.got(Resume)] == [
            ("kept", 1, None), ("late", 1, deadline), ("gone", 1, None)]
        assert engine.received.index(engine.got(Restore)[-1]) < engine.received.index(engine.got(Resume)[0])


async def test_engine_client_resume_cancelled_after_engine_death_is_not_sent_again() -> None:
    async with resumed_at_death(left=None) as (client, engine, resuming):
        resuming[0].cancel()
        await asyncio.wait(resuming)
        engine.received.clear()
        engine.start()
        await until(lambda: client.state == "ready")
        assert await client.flush_prefix_cache() == 11
        assert engine.got(Resume) == []


async def test_engine_client_resume_at_engine_death_ends_with_the_client() -> None:
    """As at the end of a drain in which no engine starts."""
    async with resumed_at_death(one=None, other=None) as (client, _, resuming):
        client.fail_all(Unavailable("the server shut down"))
        for call in resuming:
            with pytest.raises(Unavailable, match="shut down"):
                await asyncio.wait_for(call, 10)


async def test_engine_client_abort_and_flush() -> None:
    async with connected(delay=0.005) as (client, _):
        stream = client.submit(request(1000, "mine"))
        await stream.__anext__()
        assert await client.abort("mine")
        assert not await client.abort("mine")
        finishes = [outputs[-1].finish async for outputs in stream]
        assert finishes[-1].reason == "aborted"
        assert await client.flush_prefix_cache() == 11


async def test_engine_client_reply_to_a_cancelled_call_is_ignored() -> None:
    async with connected() as (client, engine):
        call = asyncio.ensure_future(client.flush_prefix_cache())
        await asyncio.sleep(0)
        call.cancel()
        assert await client.flush_prefix_cache() == 11
        assert len(engine.got(FlushPrefixCache)) == 2
        assert len(engine.got(Hello)) == 1
