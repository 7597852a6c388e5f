"""Clients that cancel at any moment: in the queue, in the prompt, between two tokens, preempted, at the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import grpc
import grpc.aio
import pytest

from npuserve.v1 import inference_service_pb2_grpc
from tests.support.fake_engine import until
from tests.support.front_end import ask
from tests.support.whole_server import whole_server

REQUESTS = 300
WHOLE = 12
"""The first requests are not cancelled. Together they are three times as long as the KV cache, so that some are
preempted on a machine of any speed."""


@pytest.mark.slow
async def test_cancels_at_random_moments_leak_nothing(tmp_path: Path) -> None:
    dice = random.Random(7)
    ended: Counter[str] = Counter()

    async def one(stub: inference_service_pb2_grpc.InferenceServiceStub, number: int) -> None:
        await asyncio.sleep(dice.random() * (number >= WHOLE))
        prompt = [number % 3] * dice.choice([1, 20, 90]) + [dice.randrange(26)]
        stream = dice.random() < 0.7
        tokens = dice.choice([1, 30, 150]) if number >= WHOLE else 150
        call = (stub.StreamGenerate if stream else stub.Generate)(ask(prompt, tokens))
        if number >= WHOLE:
            asyncio.get_running_loop().call_later(dice.random() ** 2 * 0.8, call.cancel)
        try:
            if stream:
                async for _ in call:
                    pass
            else:
                await call
            ended["OK"] += 1
        except asyncio.CancelledError:
            ended["CANCELLED"] += 1
        except grpc.aio.AioRpcError as error:
            ended[error.code().name] += 1

    # The KV cache and the queue are small: some requests are preempted, some refused, some displaced.
    async with whole_server(tmp_path, delay=0.001, blocks=40, max_num_seqs=12, max_queue=40) as server:
        async with server.client() as stub, server.client() as other:
            await asyncio.gather(*(one((stub, other)[number % 2], number) for number in range(REQUESTS)))
        await until(lambda: not server.frontend._engine._streams)
        assert sum(ended.values()) == REQUESTS
        assert set(ended) <= {"OK", "CANCELLED", "RESOURCE_EXHAUSTED"}
        assert ended["CANCELLED"] > REQUESTS / 4
        assert ended["OK"]
        assert server.scheduler.preemptions
        # The next step reports them to the runner. The engine's thread may not have launched it yet.
        runner = server.engine._runner
        await until(lambda: len(runner._known) <= len(server.scheduler._ended))  # type: ignore[attr-defined]
