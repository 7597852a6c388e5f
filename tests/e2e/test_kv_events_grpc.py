"""SubscribeKvEvents of a real server under load: what subscribers know of the cache is what requests find in it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from npuserve.v1 import generate_pb2 as pb
from tests.e2e.server import Server, request, serving, streamed

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from tests.service.gateway.test_kv_events import View

BLOCK = 16
STREAMS, ROUNDS = 32, 4
GROUPS, SHARED, OWN, ANSWER = 8, 48, 40, 40
"""Prompts of a group share their first tokens. A round fills more blocks than the cache has."""
VOCABULARY = 1000


class Subscriber:
    """Subscription that a thread follows."""

    def __init__(self, server: Server):
        self.view = View(BLOCK)
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
        assert self._idle.wait(30)
        assert self.error is None

    def prefix(self, tokens: list[int]) -> int:
        """Return how many tokens of a prompt are in the cache, by the events."""
        by_parent = {(parent, tuple(ids)): one for one, (parent, ids) in self.view.blocks.items()}
        found, parent = 0, None
        while (one := by_parent.get((parent, tuple(tokens[found : found + BLOCK])))) is not None:
            found, parent = found + BLOCK, one
        return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--kv-events", "grpc", "--block-size", str(BLOCK), "--max-num-seqs", str(STREAMS),
                 "--kv-cache-memory", "16MiB") as running:
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
