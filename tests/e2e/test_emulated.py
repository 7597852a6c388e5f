"""A server on an emulated NPU, as `npuserve serve --device npu --emulate` starts it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.server import Server, request, serving, streamed
from tests.npu.emulator.child import missing

PROMPTS = ["Once upon a time", "One day, a little girl named Lily went to the park with", "Tim wanted a new toy. He"]


@pytest.fixture(autouse=True)
def emulator() -> None:
    if reason := missing():
        pytest.skip(reason)


def tokens(server: Server) -> Iterator[list[int]]:
    """Yield the tokens of all prompts, sent concurrently; the last request samples."""
    asks = [request(prompt, 24) for prompt in PROMPTS] + [request(PROMPTS[0], 24, temperature=2.0, seed=7)]
    with ThreadPoolExecutor(len(asks)) as pool:
        for _, ids, finish in pool.map(lambda ask: streamed(server.stub, ask), asks):
            assert len(ids) == finish.usage.generated_tokens == 24
            yield ids


def test_it_serves_in_bfloat16_without_any_relaxation() -> None:
    with serving("--device", "npu", "--emulate", "--max-num-seqs", "4", "--decode-buckets", "4") as server:
        assert len(set(map(tuple, tokens(server)))) == len(PROMPTS) + 1
        assert server.stop() == 0


@pytest.mark.full
def test_float32_without_the_relaxation_is_refused_at_the_start() -> None:
    with serving("--device", "npu", "--emulate", "--dtype", "float32", wait=False) as server:
        assert server.process.wait(60) == 2
        assert "npuserve: dtype: 'float32' is not one of auto, bfloat16, float16" in server.log
