"""SubscribeKvEvents over a real gRPC server and the engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.engine import kv_event_stream
from npuserve.service.errors import Unavailable
from npuserve.service.frontend import process
from npuserve.service.gateway import kv_events
from npuserve.service.ipc.kv_events import AllBlocksCleared, Batch, BlockStored, KvEvents, SnapshotPart, encode_batch
from npuserve.service.ipc.messages import Load, Request
from npuserve.service.streams.engine_client import EngineClient
from tests.service.engine.test_loop_kv_events import FIRST, RunningKv
from tests.support.fake_engine import until


class Servicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    def __init__(self, engine: EngineClient):
        self._engine = engine

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        await kv_events.subscribe(self._engine, request, context)


class Serving:
    """Engine, its client in a front end, and a stub."""

    def __init__(self, engine: RunningKv, client: EngineClient, stub: vllm_engine_pb2_grpc.VllmEngineStub):
        self.engine = engine
        self.client = client
        self.stub = stub
        self._key = 0

    def subscribe(self, start: int = 0, **fields: Any) -> Any:
        return self.stub.SubscribeKvEvents(
            common_pb2.SubscribeKvEventsRequest(start_sequence_number=start, **fields))

    async def generate(self, prompt: list[int], max_tokens: int) -> None:
        self._key += 1
        stream = self.client.submit(Request(f"r{self._key}", prompt, max_tokens, time.monotonic()))
        async for _ in stream:
            pass
        stream.close()


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, blocks: int = 64, has_kv_events: bool = True) -> AsyncIterator[Serving]:
    engine = RunningKv(tmp_path, blocks)
    client = EngineClient(engine.address, has_kv_events=has_kv_events)
    client.start()
    server = grpc.aio.server()
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(Servicer(client), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await until(lambda: client.state == "ready")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Serving(engine, client, vllm_engine_pb2_grpc.VllmEngineStub(channel))
    finally:
        await server.stop(None)
        await client.close()
        engine.stop()


class View:
    """What a gateway knows of one worker. It checks that the numbers of the batches have no gap.

    block_size: tokens of a block.
    """

    def __init__(self, block_size: int = 4) -> None:
        self.block_size = block_size
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.last = 0
        self.event_ids: list[int] = []
        self.samples: list[int] = []

    def apply(self, batch: Any) -> None:
        assert batch.dp_rank == 0
        assert batch.HasField("load")
        assert abs(batch.timestamp - time.time()) < 60
        self.samples.append(batch.load.sample)
        if batch.load.load_only:
            assert batch.sequence_number == self.last
            assert not batch.events
            return
        assert not self.last or batch.sequence_number == self.last + 1
        self.last = batch.sequence_number
        for event in batch.events:
            self.event_ids.append(event.event_id)
            self._apply_event(event)

    def _apply_event(self, event: Any) -> None:
        match event.WhichOneof("data"):
            case "cleared":
                self.blocks.clear()
            case "removed":
                for one in event.removed.block_hashes:
                    self.blocks.pop(one, None)
            case "stored":
                stored = event.stored
                assert (stored.tier, stored.medium) == (common_pb2.KV_CACHE_TIER_DEVICE, "GPU")
                parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
                for block in stored.blocks:
                    assert block.block_size == len(block.token_ids) == self.block_size
                    self.blocks[block.block_hash] = parent, list(block.token_ids)
                    parent = block.block_hash

    async def follow(self, call: Any, number: int) -> None:
        """Apply batches until one has this number."""
        while self.last < number:
            self.apply(await asyncio.wait_for(call.read(), 10))


async def end_of(call: Any, view: View | None = None) -> tuple[grpc.StatusCode, str]:
    """Read a stream to its end; return its status and details. view: to which its batches are applied."""
    try:
        while True:
            batch = await asyncio.wait_for(call.read(), 10)
            if view:
                view.apply(batch)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""


def signed(one: int) -> int:
    return int.from_bytes(one.to_bytes(8, "big"), "big", signed=True)


async def test_subscribe_events_replayed_equal_the_cache(tmp_path: Path) -> None:
    async with serving(tmp_path, blocks=16) as server:
        await server.generate(list(range(10)), 4)
        call, view = server.subscribe(), View()
        first = await call.read()
        assert first.sequence_number == FIRST
        assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 3)
        assert [event.WhichOneof("data") for event in first.events] == ["cleared", "stored"]
        view.apply(first)
        assert view.event_ids == [0, 0]
        assert [tokens for _, tokens in view.blocks.values()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        for key in range(8):
            await server.generate([key * 100 + i for i in range(9)], 12)
        await until(lambda: not server.engine.stream.has_work)
        await view.follow(call, server.engine.stream._latest)
        assert view.blocks.keys() == {signed(one) for one in server.engine.hashes()}
        assert min(view.blocks) < 0 < max(view.blocks)
        assert view.event_ids[2:] == list(range(1, len(view.event_ids) - 1))
        last = view.last
        await server.client.flush_prefix_cache()
        await view.follow(call, last + 1)
        assert view.blocks == {}
        assert view.samples == list(range(1, len(view.samples) + 1))
        call.cancel()
        await until(lambda: not server.engine.stream._subscribers)


def test_batches_have_parents_as_signed_hashes_and_parts_of_a_snapshot() -> None:
    """Events of a snapshot have no id, also in the middle of a stream."""
    batches, stored = kv_events._Batches(), BlockStored([7, 1 << 63], (1 << 64) - 1, [1, 2, 3, 4], 2)
    made = [batches.to_proto(KvEvents(1, 1, 10 + number, encode_batch(Batch(0.0, [event])), part))
            for number, (event, part) in enumerate([
                (stored, None), (AllBlocksCleared(), SnapshotPart(0, 2, 2)), (stored, SnapshotPart(1, 2, 2))])]
    assert [batch.events[0].event_id for batch in made] == [1, 0, 0]
    assert [(batch.snapshot.index, batch.snapshot.count) for batch in made] == [(0, 0), (0, 2), (1, 2)]
    assert made[0].events[0].stored.parent_block_hash == -1
    assert [block.block_hash for block in made[0].events[0].stored.blocks] == [7, -1 << 63]


async def test_subscribe_resumes_and_refuses_as_the_gateway_needs(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        call, view = server.subscribe(), View()
        view.apply(await call.read())  # the engine records from now on
        for key in range(3):
            await server.generate([key * 100 + i for i in range(9)], 5)
        await until(lambda: not server.engine.stream.has_work)
        latest = server.engine.stream._latest
        await view.follow(call, latest)
        call.cancel()
        resumed, again = server.subscribe(latest - 1), View()
        again.last = latest - 2
        await again.follow(resumed, latest)
        for start in (FIRST - 1, latest + 2, 17):
            refused = server.subscribe(start)
            code, details = await end_of(refused)
            assert code == grpc.StatusCode.OUT_OF_RANGE
            assert f"start_sequence_number: {start} is not kept" in details
            assert not await refused.initial_metadata()
        resumed.cancel()


@pytest.mark.slow
async def test_subscribe_without_batches_sends_load_at_changes_and_as_a_heartbeat(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        call, view = server.subscribe(), View()
        view.apply(await call.read())
        began, heartbeats = time.monotonic(), []
        for _ in range(2):
            batch = await asyncio.wait_for(call.read(), 30)
            view.apply(batch)
            heartbeats.append(batch)
        assert time.monotonic() - began > 1.5 * kv_events.HEARTBEAT_SECONDS
        load = heartbeats[0].load
        assert load.load_only
        assert (load.running_requests, load.waiting_requests, load.token_usage) == (0, 0, 0)
        assert load.max_running_requests == 4
        assert (load.max_total_num_tokens, load.num_used_tokens, load.age_ms < 1000) == (512, 0, True)
        call.cancel()


async def test_subscribe_record_of_the_load_has_all_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the load is sent without a heartbeat. Events after the first batch come without the cache's sizes."""
    monkeypatch.setattr(kv_events, "HEARTBEAT_SECONDS", math.inf)
    async with serving(tmp_path) as server:
        call = server.subscribe()
        first = (await call.read()).load
        assert (first.load_only, first.max_total_num_tokens, first.num_used_tokens) == (False, 512, 0)
        monkeypatch.setattr(EngineClient, "load", Load(3, 2, 0.75, 12.5))
        load = (await asyncio.wait_for(call.read(), 30)).load
        assert (load.running_requests, load.waiting_requests, load.token_usage, load.active_token_usage) == (
            3, 2, 0.25, 0.25)
        assert (load.gen_throughput, load.max_running_requests, load.num_used_tokens) == (12.5, 4, 128)
        await server.generate(list(range(9)), 2)
        event = (await asyncio.wait_for(call.read(), 30)).load
        assert not event.load_only
        assert not event.HasField("max_total_num_tokens")
        call.cancel()


@pytest.mark.parametrize("early", [False, True])
async def test_subscribe_resumed_at_the_end_sends_load_first_only_on_request(tmp_path: Path, early: bool) -> None:
    async with serving(tmp_path) as server:
        first = server.subscribe()
        await first.read()
        call = server.subscribe(FIRST + 1, load_records_before_first_batch=early)
        await asyncio.wait_for(call.initial_metadata(), 30)
        reading = asyncio.ensure_future(call.read())
        done, _ = await asyncio.wait([reading], timeout=30 if early else 0.5)
        assert bool(done) == early
        if early:
            assert (reading.result().sequence_number, reading.result().load.load_only) == (0, True)
        else:
            await server.generate(list(range(9)), 2)
            assert (await asyncio.wait_for(reading, 30)).sequence_number == FIRST + 1
        first.cancel()
        call.cancel()


async def test_subscribe_client_that_reads_nothing_ends_with_data_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_stream, "WINDOW_BYTES", 2000)
    async with serving(tmp_path) as server:
        server.engine.stream._max_batches = 8
        call = server.subscribe()
        blocked = asyncio.Event()
        real = server.client.kv_events.receive
        messages: list[Any] = []

        def hold(message: Any) -> None:  # the client's reading is too slow: nothing is reported as read
            (real if blocked.is_set() else messages.append)(message)

        view = View()
        view.apply(await call.read())
        monkeypatch.setattr(server.client.kv_events, "receive", hold)
        for key in range(60):
            await server.generate([key * 10 + i for i in range(9)], 5)
        assert 0 < len(messages) < 60
        blocked.set()
        for message in messages:
            real(message)
        code, details = await end_of(call, view)
        assert code == grpc.StatusCode.DATA_LOSS
        assert f"the batches {view.last + 1} to" in details


async def test_subscribe_ends_with_the_engine_and_with_a_drain(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        calls = [server.subscribe() for _ in range(2)]
        for call in calls:
            await call.read()
        server.client._on_disconnect()
        for call in calls:
            assert (await end_of(call))[0] == grpc.StatusCode.DATA_LOSS
    async with serving(tmp_path) as server:
        call = server.subscribe()
        await call.read()
        server.client.kv_events.close(Unavailable("the server is draining"))
        assert (await end_of(call))[0] == grpc.StatusCode.UNAVAILABLE


async def test_subscribe_to_an_engine_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        server.client._set_state = lambda state: None  # type: ignore[method-assign]  # heartbeats would set it
        server.client.state = "stalled"
        code, details = await end_of(server.subscribe())
        assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the engine does not answer")


async def test_subscribe_on_a_server_without_kv_events_is_unimplemented(tmp_path: Path) -> None:
    async with serving(tmp_path, has_kv_events=False) as server:
        code, details = await end_of(server.subscribe())
        assert code == grpc.StatusCode.UNIMPLEMENTED
        assert "kv_events" in details


def test_kv_events_over_grpc_without_the_stubs_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(kv_events: str) -> object:
        return process._open_vllm_engine(ServerConfig(kv_events=kv_events), None, None, None, None)

    assert opened("grpc")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "npuserve.service.gateway.servicer", None)
        assert opened("zmq") is None
        with pytest.raises(ConfigError, match="kv_events: grpc needs smg-grpc-proto, and the installed one cannot be"):
            opened("grpc")
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    for other in ("off", "zmq"):
        assert opened(other) is None
    with pytest.raises(ConfigError, match=r"kv_events: grpc needs smg-grpc-proto; pip install 'npuserve\[gateway\]'"):
        opened("grpc")
