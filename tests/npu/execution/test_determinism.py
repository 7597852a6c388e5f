"""Determinism of the CPU's native kernels: tokens and logprobs of a request are bit-identical for any other requests in
the batch, any chunks and threads, and after recomputation."""

from __future__ import annotations

import random

import pytest
import torch

from npuserve.kernels import native
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.step import SamplingParams
from tests.npu.execution.test_runner import Driver, ids_of, load
from tests.support.models import random_model, saved, saved_w8a8

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")

PROMPTS = {0: ids_of(40, 0), 1: ids_of(3, 1), 2: ids_of(17, 2), 3: ids_of(33, 3), 4: ids_of(1, 4)}
SAMPLING = {
    request: SamplingParams(temperature=request % 2 * 0.9, seed=request, top_p=0.9, logprobs=3) for request in PROMPTS
}
COUNT = 20
Answer = tuple[list[int], list[list[float]]]


@pytest.fixture(autouse=True)
def threads():
    before = native.library().threads
    yield
    native.library().set_threads(before)


def answer(driver: Driver, request: int) -> Answer:
    reports = driver.logprobs[request][:COUNT]
    return driver.generated(request)[:COUNT], [[report.logprob, *report.top_logprobs] for report in reports]


def alone(runner, request: int, chunk: int) -> Answer:
    driver = Driver(runner, seed=request)
    driver.add(request, PROMPTS[request], SAMPLING[request])
    while len(driver.generated(request)) < COUNT:
        driver.step(chunk)
    result = answer(driver, request)
    driver.end(request)
    driver.step()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "cache"), [
    pytest.param(None, "auto", id="floats"), pytest.param(None, "int8", id="int8 cache"),
    pytest.param(W8A8(), "auto", id="w8a8"), pytest.param(W8A8(False, False, False, False), "int8", id="zeros"),
])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama-bias"])
def test_native_kernels_bit_identical_in_any_batch_chunks_and_threads(tmp_path, kind, scheme, cache, dtype):
    """scheme: of int8 weights; the LM head is int8 too then. cache: dtype of the KV cache."""
    model = random_model(kind, max_position_embeddings=128).to(getattr(torch, dtype))
    folder = saved_w8a8(model, tmp_path, scheme) if scheme else saved(model, tmp_path)
    runner = load(folder, lm_head_dtype="int8" if scheme else "auto", dtype=dtype, kv_cache_dtype=cache)
    assert runner.deterministic
    expected = {request: alone(runner, request, 64) for request in PROMPTS}
    assert len({str(value) for value in expected.values()}) == len(PROMPTS)

    for number in (1, 2, 3):
        native.library().set_threads(number)
        for chunk in (1, 7):
            assert alone(runner, 0, chunk) == expected[0], (number, chunk)

        r = random.Random(number)
        driver = Driver(runner, seed=number)
        waiting, found = list(PROMPTS), {}
        r.shuffle(waiting)
        while waiting or driver.tokens:
            if waiting and (r.random() < 0.4 or not driver.tokens):
                request = waiting.pop()
                driver.add(request, PROMPTS[request], SAMPLING[request])
            running = list(driver.tokens)
            driver.step(only=set(r.sample(running, r.randint(1, len(running)))))
            if r.random() < 0.1 and driver.tokens:
                # Preemption: the request loses its blocks, and its tokens are computed again.
                request = r.choice(list(driver.tokens))
                driver.free.extend(driver.blocks[request])
                driver.blocks[request], driver.done[request] = [], 0
            for request in [q for q in driver.tokens if len(driver.generated(q)) >= COUNT]:
                found[request] = answer(driver, request)
                driver.end(request)
        driver.step()
        assert found == expected, number
