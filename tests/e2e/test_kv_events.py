"""KV events over ZeroMQ of a real server, across the death of its engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import zmq

from tests.e2e.brittle import COUNTING
from tests.e2e.processes import engine_of, until
from tests.e2e.server import request, serving, streamed
from tests.support.kv_model import CacheModel


class Subscriber:
    """SUB socket with a model of the server's cache. numbers: of the batches so far."""

    def __init__(self, context: zmq.Context, port: int):
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv@llm-0@storyteller")
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.model = CacheModel()
        self.numbers: list[int] = []

    def receive(self, seconds: float) -> bool:
        """Apply the next batch. Return False if none arrives."""
        if not self.socket.poll(1000 * seconds):
            return False
        _, number, payload = self.socket.recv_multipart()
        self.numbers.append(int.from_bytes(number, "big"))
        self.model.apply(payload)
        return True


def test_subscriber_of_a_killed_engine_gets_the_next_engines_cache(
    free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_NAME", "llm-0")
    monkeypatch.delenv("POD_IP", raising=False)
    port, replay_port = free_port(), free_port()
    prompts = ["Once upon a time there was a little dog who lived in a big house with his friend. " * 3,
               "The sun was warm, and the children played in the garden until their mother called. " * 3]
    with zmq.Context() as context, serving(
        "--served-name", "storyteller", "--kv-events", "zmq", "--kv-events-endpoint", f"tcp://*:{port}",
        "--kv-events-replay-endpoint", f"tcp://*:{replay_port}", "--block-size", "16",
        **COUNTING,
    ) as server:
        one = Subscriber(context, port)
        try:
            assert one.receive(10)  # the snapshot of an empty cache
            assert (one.numbers, one.model.blocks) == ([0], {})
            _, ids, finish = streamed(server.stub, request(prompts[0], 20))
            blocks = (finish.usage.prompt_tokens + len(ids) - 1) // 16
            until(lambda: one.receive(1) and len(one.model.blocks) == blocks, server)
            tokens = max(one.model.prefixes(), key=len)
            assert tokens[finish.usage.prompt_tokens :] == tuple(ids)[: len(tokens) - finish.usage.prompt_tokens]
            engine, clears, last = engine_of(server), one.model.clears, one.numbers[-1]
            os.kill(engine, signal.SIGKILL)
            until(lambda: one.receive(1) and one.model.clears > clears, server)
            assert one.numbers[-1] == 0 < last
            assert one.model.blocks == {}
            streamed(server.stub, request(prompts[1], 20))
            until(lambda: one.receive(1) and len(one.model.blocks) > 3, server)
            assert engine_of(server) != engine
        finally:
            one.socket.close(0)


@pytest.mark.full
def test_server_whose_kv_events_port_is_taken_names_the_setting(free_port: Callable[[], int]) -> None:
    port = free_port()
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind(f"tcp://*:{port}")
        with serving("--kv-events", "zmq", "--kv-events-endpoint", f"tcp://*:{port}", wait=False) as server:
            assert server.process.wait(60) == 2
            assert f"kv_events_endpoint: cannot open tcp://*:{port}: Address already in use" in server.log
