"""Two workers behind smg: what clients see when one drains, when its engine dies, and when it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e import brittle
from tests.e2e.gateway.sdk import openai
from tests.e2e.gateway.smg import HEALTH_SECONDS, Gateway, gateway
from tests.e2e.gateway.worker import LOGGING, Worker
from tests.e2e.processes import engine_of
from tests.e2e.server import Server
from tests.support.processes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORKERS, STREAMS = 2, 8
TOKENS = 120
STEP_SECONDS = "0.02"
POOL_SECONDS = 30
"""Limit of the time from a worker's start until the gateway uses it again."""


@dataclass
class Seen:
    """What one client saw. id: of the request, also in the worker's log. error: text of an error; "" for none."""

    id: str = ""
    text: str = ""
    reason: str | None = None
    error: str = ""


@dataclass
class Pool:
    """Workers on fixed ports. texts: of the undisturbed streams; empty until known."""

    environment: dict[str, str]
    texts: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(WORKERS)])
    workers: list[Worker] = field(default_factory=list)

    def start(self, port: int) -> Worker:
        server = Server(*LOGGING, **brittle.COUNTING, port=port, process={"env": self.environment})
        server.wait_until_listening()
        server.wait_until_ready()
        return Worker(server)

    def close(self) -> None:
        for worker in self.workers:
            worker.server.close()

    def served(self) -> set[str]:
        """Return the ids of the requests that ended in the workers."""
        return {line["id"] for worker in self.workers for line in worker.requests()}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Workers shared by the tests. The first two leave them ready, the last ends one."""
    slow = tmp_path_factory.mktemp("workers") / "slow"
    slow.write_text(STEP_SECONDS)
    made = Pool({**os.environ, brittle.SLOW: str(slow)})
    try:
        made.workers = [made.start(port) for port in made.ports]
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def in_front(pool: Pool, chat_template: str) -> Iterator[Gateway]:
    with gateway([f"127.0.0.1:{port}" for port in pool.ports], "--chat-template", chat_template) as gate:
        yield gate


@pytest.fixture
def gate(in_front: Gateway) -> Gateway:
    """The gateway, once it uses all workers."""
    in_front.wait_until_ready()
    return in_front


async def stream(client: Any, number: int, tokens: int = TOKENS, begun: asyncio.Event | None = None) -> Seen:
    """Read a chat's stream to its end. begun: event that is set with the first text, or at the end."""
    seen = Seen()
    try:
        parts = await client.chat.completions.create(
            model="storyteller", messages=[{"role": "user", "content": f"Once upon a time, {number} dogs"}],
            max_completion_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True})
        async for part in parts:
            seen.id = part.id
            for choice in part.choices:
                seen.text += choice.delta.content or ""
                if seen.text and begun:
                    begun.set()
                seen.reason = choice.finish_reason or seen.reason
    except openai().OpenAIError as error:
        seen.error = f"{type(error).__name__}: {error}"
        if begun:
            begun.set()
    return seen


def client_of(gate: Gateway) -> Any:
    return openai().AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0, timeout=120)


async def under_load(gate: Gateway, fault: Any) -> tuple[list[Seen], list[Seen]]:
    """Run STREAMS streams, cause a fault once all have begun, and start short ones for some seconds. Return both."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    async with client_of(gate) as client:
        streams = [asyncio.ensure_future(stream(client, number, begun=begun[number])) for number in range(STREAMS)]
        for event in begun:
            await event.wait()
        fault()
        later = []
        for number in range(10):
            later.append(asyncio.ensure_future(stream(client, number, 4)))
            await asyncio.sleep(0.25)
        return await asyncio.gather(*streams), await asyncio.gather(*later)


async def expected_texts(pool: Pool, gate: Gateway) -> list[str]:
    if not pool.texts:
        async with client_of(gate) as client:
            pool.texts = [seen.text for seen in await asyncio.gather(*(stream(client, n) for n in range(STREAMS)))]
    return pool.texts


def assert_whole(found: list[Seen], texts: list[str]) -> None:
    assert [seen.error for seen in found] == [""] * len(found)
    assert [seen.reason for seen in found] == ["length"] * len(found)
    assert [seen.text for seen in found] == texts


async def test_killed_worker_ends_its_own_streams_alone_and_is_used_again(pool: Pool, gate: Gateway) -> None:
    """smg does not resume streams: streams of the killed worker end with an error event. New requests are retried.

    The first test, since smg waits longer for a worker that has failed before. Prints what the clients saw (pytest -s).
    """
    texts = await expected_texts(pool, gate)
    before = pool.served()
    streams, later = await under_load(gate, pool.workers[0].server.process.kill)
    await asyncio.sleep(1)  # until the workers' log lines are written
    victim, *others = pool.workers
    kept = {line["id"] for worker in others for line in worker.requests()} - before
    whole = [(seen, texts[n]) for n, seen in enumerate(streams) if seen.id in kept]
    assert_whole([seen for seen, _ in whole], [text for _, text in whole])
    lost = [seen for seen in streams if seen.id not in kept]
    assert 0 < len(lost) <= STREAMS // 2
    assert all(seen.error and texts[n].startswith(seen.text) for n, seen in enumerate(streams) if seen in lost)
    print(f"{len(whole)} streams whole; lost: {Counter(seen.error for seen in lost)}")
    assert not [seen.error for seen in later if seen.error]
    victim.server.close()
    began = time.monotonic()
    fresh = pool.workers[0] = pool.start(pool.ports[0])
    async with client_of(gate) as client:
        while not fresh.requests():
            assert time.monotonic() - began < POOL_SECONDS + HEALTH_SECONDS
            assert not (await stream(client, 0, 4)).error
            await asyncio.sleep(0.2)
    seconds = time.monotonic() - began
    print(f"pool whole {seconds:.1f} s after the start of the new worker")
    assert seconds < POOL_SECONDS


async def test_killed_engine_of_a_worker_shows_in_no_stream(pool: Pool, gate: Gateway) -> None:
    texts = await expected_texts(pool, gate)
    streams, later = await under_load(gate, lambda: os.kill(engine_of(pool.workers[0].server), signal.SIGKILL))
    assert_whole(streams, texts)
    assert not [seen.error for seen in later if seen.error]


async def test_draining_worker_shows_in_no_stream(pool: Pool, gate: Gateway) -> None:
    """Last test of the shared workers."""
    texts = await expected_texts(pool, gate)
    streams, later = await under_load(gate, pool.workers[0].server.process.terminate)
    assert_whole(streams, texts)
    assert not [seen.error for seen in later if seen.error]
    assert pool.workers[0].server.process.wait(60) == 0
