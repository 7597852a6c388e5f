"""Two steps in flight give the same tokens as one, bit by bit, with the real scheduler and runner on the CPU's native
kernels. Requests run concurrently and are preempted, cancelled and ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from npuserve.kernels import native
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import SamplingParams
from tests.npu.execution.test_runner import ids_of, load
from tests.support.loop import Ask, serve
from tests.support.models import random_model, saved

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")

MOST = 70
PROMPTS = [ids_of(n, n) for n in (1, 5, 17, 33)] + [ids_of(33, 33)[:20] + ids_of(20, 7)]


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    few = st.integers(0, 99)
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.9])), seed=draw(st.integers(0, 3)),
        top_p=draw(st.sampled_from([1.0, 0.8])), repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.0, 0.7])),
        logit_bias=draw(st.sampled_from([{}, {}, {}, {7: 5.0}])), min_tokens=draw(st.sampled_from([0, 0, 6])),
        ending_ids=(7, 11, 50), logprobs=draw(st.sampled_from([None, None, 2])),
        prompt_logprobs=draw(st.sampled_from([None] * 5 + [1])))
    return Ask(draw(st.integers(0, 25)), draw(st.sampled_from([None] * 6 + [2, 9])), {
        "prompt_ids": draw(st.sampled_from(PROMPTS)), "max_tokens": draw(st.sampled_from([MOST, MOST, 40, 9, 2, 1])),
        "sampling": sampling, "priority": draw(st.sampled_from([0, 0, -2, 3])),
        "eos_token_ids": frozenset(draw(st.sampled_from([[], [], [7, 11, 50], draw(st.lists(few, max_size=25))])))})


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    before = native.library().threads
    folder = saved(random_model("qwen3", max_position_embeddings=128), Path(tmp_path_factory.mktemp("model")))
    yield load(folder, dtype="float32", max_num_batched_tokens=48)
    native.library().set_threads(before)


@settings(max_examples=settings.default.max_examples // 2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(all_asks=st.lists(asks(), min_size=3, max_size=8), pool=st.sampled_from([7, 9, 40]),
       seats=st.sampled_from([8, 3, 1]), budget=st.sampled_from([48, 9]))
def test_two_steps_in_flight_equal_one(
    runner: Runner, all_asks: list[Ask], pool: int, seats: int, budget: int
) -> None:
    (plain, _), (overlapped, scheduler) = (serve(runner, all_asks, depth, pool, seats, budget) for depth in (1, 2))
    event(f"preemptions: {min(scheduler.preemptions, 3)}")
    for one, other in zip(plain, overlapped, strict=True):
        if "cancelled" in (one.reason, other.reason):  # the time of the cancellation differs
            both = min(len(one.tokens), len(other.tokens))
            assert one.tokens[:both] == other.tokens[:both]
        else:
            assert one == other
            assert one.reason
