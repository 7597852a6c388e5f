"""SubscribeKvEvents of a real server under load: what subscribers know of the cache is what requests find in it."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from npuserve.v1 import generate_pb2 as pb
from tests.e2e.brittle import COUNTING, POISON
from tests.e2e.server import Server, request, serving, streamed

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from npuserve.service.ipc import kv_events
from npuserve.service.ipc.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.npu.backends.small import saved
from tests.service.gateway.test_kv_events import View

BLOCK = 16
STREAMS, ROUNDS = 32, 4
GROUPS, SHARED, OWN, ANSWER = 8, 48, 40, 40
"""Prompts of a group share their first tokens. A round fills more blocks than the cache has."""
VOCABULARY = POISON  # prompts are random ids below
LONG_PROMPT = 440
SMALL_WINDOW = [
    ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
"""Options of a channel whose client takes few messages that it does not read."""
MAX_ROUNDS = 40


class Subscriber:
    """Subscription that a thread follows. sizes: number of a batch -> bytes of its payload in the server."""

    def __init__(self, server: Server):
        self.view = View(BLOCK)
        self.sizes: dict[int, int] = {}
        self.removed = 0
        self.snapshots = 0
        self.error: grpc.RpcError | None = None
        stub = vllm_engine_pb2_grpc.VllmEngineStub(server.channel)
        self.call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for batch in self.call:
                self.view.apply(batch)
                if batch.events:
                    self.sizes[batch.sequence_number] = payload_bytes(batch)
                self.removed += sum(len(event.removed.block_hashes) for event in batch.events)
                self.snapshots += batch.HasField("snapshot")
                load = batch.load
                if load.load_only and not load.running_requests + load.waiting_requests:
                    self._idle.set()  # all events of the requests before are older
        except grpc.RpcError as error:
            self.error = error
            self._idle.set()

    def wait_until_idle(self) -> None:
        """Wait until the server is idle and all its events have arrived."""
        self._idle.clear()
        assert self._idle.wait(60)
        assert self.error is None

    def prefix(self, tokens: list[int]) -> int:
        """Return how many tokens of a prompt are in the cache, by the events."""
        by_parent = {(parent, tuple(ids)): one for one, (parent, ids) in self.view.blocks.items()}
        found, parent = 0, None
        while (one := by_parent.get((parent, tuple(tokens[found : found + BLOCK])))) is not None:
            found, parent = found + BLOCK, one
        return found


def payload_bytes(batch: common_pb2.KvEventBatch) -> int:
    """Return the size of the payload from which the server made a batch."""
    events: list[kv_events.Event] = []
    for event in batch.events:
        match event.WhichOneof("data"):
            case "stored":
                stored = event.stored
                hashes = [unsigned(block.block_hash) for block in stored.blocks]
                tokens = [token for block in stored.blocks for token in block.token_ids]
                parent = unsigned(stored.parent_block_hash) if stored.HasField("parent_block_hash") else None
                events.append(BlockStored(hashes, parent, tokens, stored.blocks[0].block_size))
            case "removed":
                events.append(BlockRemoved([unsigned(one) for one in event.removed.block_hashes]))
            case "cleared":
                events.append(AllBlocksCleared())
    return len(kv_events.encode_batch(kv_events.Batch(batch.timestamp, events)))


def unsigned(block_hash: int) -> int:
    return block_hash % (1 << 64)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--kv-events", "grpc", "--block-size", str(BLOCK), "--max-num-seqs", str(STREAMS),
                 "--kv-cache-memory", "16MiB", **COUNTING) as running:
        yield running


def prompts(dice: random.Random) -> list[list[int]]:
    shared = [[dice.randrange(10, VOCABULARY) for _ in range(SHARED)] for _ in range(GROUPS)]
    return [shared[number % GROUPS] + [dice.randrange(10, VOCABULARY) for _ in range(OWN)] for number in range(STREAMS)]


def answer(server: Server, prompt: list[int], tokens: int) -> pb.Finish:
    finish: Any = streamed(server.stub, request(prompt, tokens, ignore_eos=True))[2]
    return finish


def test_subscriber_during_busy_streams_knows_the_cache(server: Server) -> None:
    """Numbers without a gap are checked by View. A second subscriber ends at the same state."""
    dice = random.Random(3)
    follower = Subscriber(server)
    follower.wait_until_idle()
    last: list[list[int]] = []
    with ThreadPoolExecutor(STREAMS) as pool:
        for _ in range(ROUNDS):
            last = prompts(dice)
            for finish in pool.map(lambda prompt: answer(server, prompt, ANSWER), last):
                assert finish.usage.generated_tokens == ANSWER
    follower.wait_until_idle()
    assert follower.removed > STREAMS, "nothing was evicted"
    for prompt in last[-4:]:
        known = follower.prefix(prompt)
        found = answer(server, prompt, 1).usage.cached_tokens
        assert found == min(known, (len(prompt) - 1) // BLOCK * BLOCK)
        assert found >= SHARED
    follower.wait_until_idle()
    other = Subscriber(server)
    other.wait_until_idle()
    assert other.snapshots
    assert other.view.blocks == follower.view.blocks
    assert other.view.last == follower.view.last
    assert len(follower.view.blocks) > STREAMS
    follower.call.cancel()
    other.call.cancel()


class Stalled:
    """Subscription with a connection of its own that reads one message, and no further one before `end`."""

    def __init__(self, server: Server):
        self.view = View(BLOCK)
        self._channel = grpc.insecure_channel(server.target, SMALL_WINDOW)
        stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        self._call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        self.view.apply(next(self._call))

    def end(self) -> grpc.RpcError:
        """Read what the connection holds, and return the error at its end."""
        with self._channel:
            try:
                for batch in self._call:
                    self.view.apply(batch)
            except grpc.RpcError as error:
                return error
        raise AssertionError("the subscription ended with OK")


@pytest.mark.full
def test_subscriber_that_stops_reading_is_ended_and_holds_up_nobody(tmp_path: Path) -> None:
    """By default without processes in tests/service/streams/test_kv_subscription.py.

    A follower gets all events meanwhile. A drain does not wait for a subscriber that reads nothing."""
    dice = random.Random(5)
    folder = saved(tmp_path, layers=1, vocabulary=VOCABULARY)
    with serving(str(folder), "--kv-events", "grpc", "--kv-events-buffer", "64", "--block-size", str(BLOCK),
                 "--kv-cache-memory", "8MiB", "--drain-seconds", "600", **COUNTING) as server, \
            ThreadPoolExecutor(16) as pool:
        follower = Subscriber(server)
        follower.wait_until_idle()

        def run_until(is_over: Callable[[], bool]) -> list[int]:
            """Run rounds of requests, each of which the follower reads to its end. Return the last prompt."""
            for _ in range(MAX_ROUNDS):
                prompts = [[dice.randrange(300, VOCABULARY) for _ in range(LONG_PROMPT)] for _ in range(64)]
                for finish in pool.map(lambda prompt: answer(server, prompt, 8), prompts):
                    assert finish.usage.generated_tokens == 8
                follower.wait_until_idle()
                if is_over():
                    return prompts[-1]
            raise AssertionError(f"{follower.sizes=}")

        stalled = Stalled(server)
        prompt = run_until(lambda: ended(server) == 1)
        assert follower.removed > 32, "nothing was evicted"
        found = answer(server, prompt, 1).usage.cached_tokens
        assert found == follower.prefix(prompt) == LONG_PROMPT // BLOCK * BLOCK

        error = stalled.end()
        assert error.code() == grpc.StatusCode.DATA_LOSS
        [(first, last)] = re.findall(r"the batches (\d+) to (\d+) are lost", error.details())
        assert int(first) == stalled.view.last + 1
        held = sum(follower.sizes[number] for number in range(int(first), int(last) + 1))
        assert kv_events.WINDOW_BYTES / 2 < held < kv_events.WINDOW_BYTES + 4 * max(follower.sizes.values())

        stalled, before = Stalled(server), len(follower.sizes)
        run_until(lambda: sum(list(follower.sizes.values())[before:]) > kv_events.WINDOW_BYTES / 2)
        assert server.stop() == 0, server.log
        assert stalled.end().code() == grpc.StatusCode.UNAVAILABLE
        assert follower.error
        assert follower.error.code() == grpc.StatusCode.UNAVAILABLE


def ended(server: Server) -> float:
    """Return the number of subscriptions that ended with DATA_LOSS."""
    return server.metric("npuserve_requests_total", rpc="vllm.SubscribeKvEvents", code="DATA_LOSS")
