"""Tenants of one server: a greedy one that fills all slots with long streams, and small ones that measure waits."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

from npuserve.client import AsyncClient, ClientError, Overloaded
from npuserve.service.access.api_keys import PREFIX, hash_key, save_tables
from npuserve.v1 import generate_pb2 as pb

SMALL_TOKENS = 8
SMALL_GAP_SECONDS = 1.0
RECOVERY_SECONDS = 15.0
"""Time after the kill of a process in which the waits of small tenants do not count: the engine loads, and the requests
of its last step run one after the other."""


def write_keys(file: Path, names: Sequence[str]) -> dict[str, str]:
    """Write a file of API keys for `--api-keys`, and return name -> key."""
    keys = {name: f"{PREFIX}{name}-{random.getrandbits(128):032x}" for name in names}
    save_tables(str(file), {name: {"sha256": [hash_key(key).hex()]} for name, key in keys.items()})
    return keys


def story(tokens: int, seed: int) -> pb.GenerateRequest:
    """Return a seeded request of exactly `tokens` tokens."""
    return pb.GenerateRequest(
        text="Once upon a time", sampling=pb.SamplingParams(temperature=0.8, seed=seed),
        stopping=pb.StoppingParams(max_tokens=tokens, ignore_eos=True))


class GreedyTenant:
    """Tenant with `streams` concurrent streams of `tokens` tokens each, without a pause.

    ended: number of complete streams. refused: number of refusals, after which the stream is requested again.
    """

    def __init__(self, client: AsyncClient, streams: int, tokens: int):
        self.ended = 0
        self.refused = 0
        self.wrong: list[str] = []
        self._client = client
        self._streams = streams
        self._request = story(tokens, seed=1)
        self._expected = ""

    async def record(self) -> None:
        """Record the undisturbed answer."""
        self._expected = (await self._client.generate(self._request)).text

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._repeat(until) for _ in range(self._streams)))

    async def _repeat(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                answer = await self._client.generate(self._request)
            except Overloaded as error:
                self.refused += 1
                await asyncio.sleep(error.retry_seconds or 1.0)
            except ClientError as error:
                self.wrong.append(f"greedy tenant: {error} {error.reason}")
                await asyncio.sleep(1.0)
            else:
                self.ended += 1
                if answer.text != self._expected:
                    self.wrong.append(f"greedy tenant: {answer.text!r} is not {self._expected!r}")


class SmallTenant:
    """Tenant that requests a few tokens about once a second. waits: (time.monotonic() at the request, seconds until the
    first token)."""

    def __init__(self, name: str, client: AsyncClient, seed: int):
        self.waits: list[tuple[float, float]] = []
        self.wrong: list[str] = []
        self._name = name
        self._client = client
        self._chance = random.Random(seed)
        self._request = story(SMALL_TOKENS, seed=2)
        self._expected = ""

    async def record(self) -> None:
        """Record the undisturbed answer."""
        self._expected = (await self._client.generate(self._request)).text

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                await self._measure()
            except ClientError as error:
                self.wrong.append(f"tenant {self._name}: {error} {error.reason}")
            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * SMALL_GAP_SECONDS)

    async def _measure(self) -> None:
        sent, text = time.monotonic(), ""
        async with self._client.stream(self._request) as stream:
            async for delta in stream:
                if not text:
                    self.waits.append((sent, time.monotonic() - sent))
                text += delta.text
        if text != self._expected:
            self.wrong.append(f"tenant {self._name}: {text!r} is not {self._expected!r}")


def wait_percentiles(waits: Sequence[tuple[float, float]], kills: Sequence[float]) -> dict[str, float]:
    """Return percentiles of waits in seconds, without those within RECOVERY_SECONDS after a kill.

    kills: time.monotonic() of each kill.
    """
    counted = sorted(seconds for sent, seconds in waits if not any(
        sent - RECOVERY_SECONDS < kill < sent + seconds for kill in kills))
    if not counted:
        return {"requests": 0, "excluded": len(waits)}
    return {"requests": len(counted), "excluded": len(waits) - len(counted), **{
        f"p{share}": round(counted[min(len(counted) - 1, len(counted) * share // 100)], 3) for share in (50, 90, 99)},
        "max": round(counted[-1], 3)}
