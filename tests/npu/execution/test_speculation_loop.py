"""Answers with drafts equal those without, bit by bit, with the real scheduler and runner on the CPU's native kernels.
Requests run concurrently and are preempted, cancelled and ended; an earlier engine computed a part of some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from npuserve.kernels import native
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import SamplingParams, Step
from npuserve.service.scheduling.sequence import Sequence
from tests.npu.execution.test_runner import ids_of, load
from tests.support.hybrids import random_hybrid
from tests.support.loop import Answer, Ask, serve
from tests.support.models import random_model, saved
from tests.support.oracle_drafts import Kind, drafting_of

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")

VOCABULARY = 100
MOST = 70
PROMPTS = [ids_of(n, n) for n in (1, 5, 17, 33)] + [ids_of(33, 33)[:20] + ids_of(20, 7), [3, 1, 4, 1, 5] * 6]


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    few = st.integers(0, VOCABULARY - 1)
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])), seed=draw(st.integers(0, 3)),
        top_p=draw(st.sampled_from([1.0, 0.8])), repetition_penalty=draw(st.sampled_from([1.0] * 5 + [1.3])),
        frequency_penalty=draw(st.sampled_from([0.0] * 5 + [0.7])),
        logit_bias=draw(st.sampled_from([{}, {}, {7: 5.0}, dict.fromkeys((1, 2, 3), 20.0)])),
        allowed_token_ids=draw(st.sampled_from([(), (), (1, 2, 3, 7)])),
        min_tokens=draw(st.sampled_from([0, 0, 6])), ending_ids=(7, 11, 50),
        logprobs=draw(st.sampled_from([None, None, 2])), prompt_logprobs=draw(st.sampled_from([None] * 5 + [1])))
    return Ask(draw(st.integers(0, 25)), draw(st.sampled_from([None] * 6 + [2, 9])), {
        "prompt_ids": draw(st.sampled_from(PROMPTS)), "max_tokens": draw(st.sampled_from([MOST, MOST, 40, 9, 2, 1])),
        "sampling": sampling, "priority": draw(st.sampled_from([0, 0, -2, 3])),
        "speculate": draw(st.sampled_from([True] * 7 + [False])),
        "eos_token_ids": frozenset(draw(st.sampled_from([[], [], [7, 11, 50], draw(st.lists(few, max_size=25))])))})


MODELS = {
    "qwen3": lambda: random_model("qwen3", max_position_embeddings=128),
    "qwen2": lambda: random_model("qwen2", max_position_embeddings=128),
    "llama": lambda: random_model("llama", max_position_embeddings=128),
    "hybrid": lambda: random_hybrid(3),
    "hybrid with more states": lambda: random_hybrid(11),
}


@pytest.fixture(scope="module", params=[
    pytest.param(kind, marks=[] if kind in ("qwen3", "hybrid") else pytest.mark.slow) for kind in MODELS])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    before = native.library().threads
    folder = saved(MODELS[request.param](), Path(tmp_path_factory.mktemp("model")))
    yield load(folder, dtype="float32", max_model_len=128, max_num_batched_tokens=48, max_drafts=24)
    native.library().set_threads(before)


def state_block_size(runner: Runner) -> int:
    return runner.block_size if runner.num_slots else 0


def equal(plain: Answer, drafted: Answer) -> None:
    """Check that two answers are equal; of a cancelled one, the time of the cancel may differ."""
    if "cancelled" in (plain.reason, drafted.reason):
        both = min(len(plain.tokens), len(drafted.tokens))
        assert plain.tokens[:both] == drafted.tokens[:both]
        reported = min(len(plain.logprobs), len(drafted.logprobs))
        assert plain.logprobs[:reported] == drafted.logprobs[:reported]
    else:
        assert plain == drafted
        assert plain.reason


@pytest.mark.parametrize(
    "kind", ["mixed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("right", "suffix", "auto"))])
@settings(max_examples=settings.default.max_examples // 5, deadline=None,
          suppress_health_check=[HealthCheck.too_slow])
@given(all_asks=st.lists(asks(), min_size=3, max_size=8), pool=st.sampled_from([7, 9, 40]),
       seats=st.sampled_from([8, 3, 1]), budget=st.sampled_from([48, 9]), depth=st.sampled_from([1, 2]),
       kept=st.sampled_from([0, 0, 3]), slots=st.sampled_from([2, 9, 16]))
def test_answers_with_drafts_equal_those_without(
    runner: Runner, kind: Kind, all_asks: list[Ask], pool: int, seats: int, budget: int, depth: int, kept: int,
    slots: int,
) -> None:
    """kept: tokens of each answer that an earlier engine computed. slots: of fixed state, for a hybrid."""
    num_slots = min(slots, runner.num_slots)
    plain, _ = serve(runner, all_asks, 1, pool, seats, budget, num_slots=num_slots)
    asked = all_asks
    if kept:
        asked = [Ask(ask.tick, ask.cancel, {**ask.fields, "output_ids": answer.tokens[:kept]})
                 if len(answer.tokens) > kept and ask.fields["sampling"].prompt_logprobs is None else ask
                 for ask, answer in zip(all_asks, plain, strict=True)]
    answers = {id(ask.fields["sampling"]): answer.tokens for ask, answer in zip(asked, plain, strict=True)}

    def whole_answer(sequence: Sequence) -> list[int]:
        return answers[id(sequence.request.sampling)]

    drafting = drafting_of(kind, whole_answer, VOCABULARY, runner.max_drafts, state_block_size(runner))
    drafted, _ = serve(runner, asked, depth, pool, seats, budget, drafting=drafting, num_slots=num_slots)
    for ask, one, other in zip(asked, plain, drafted, strict=True):
        if before := len(ask.fields.get("output_ids", ())):
            other.tokens[:0] = ask.fields["output_ids"]
            one.logprobs = one.logprobs[before:]
        equal(one, other)
    event(f"accepted: {drafting.accepted > 0}")


def test_drafts_are_accepted_and_save_steps(runner: Runner) -> None:
    """A text that repeats itself: the same tokens in fewer steps, at any depth, also with penalties."""
    sampling = SamplingParams(temperature=0.0, logit_bias={5: 1000.0}, logprobs=1, frequency_penalty=0.1)
    ask = Ask(0, None, {"prompt_ids": [5] * 9, "max_tokens": 40, "sampling": sampling})
    ((plain,), _) = serve(runner, [ask], 2, 40, 4, 48)
    for depth in (1, 2):
        drafting = drafting_of("suffix", lambda sequence: [], VOCABULARY, runner.max_drafts, state_block_size(runner))
        ((drafted,), _) = serve(runner, [ask], depth, 40, 4, 48, drafting=drafting)
        assert drafted == plain
        assert drafting.accepted > 30


def test_rows_have_drafts_beside_the_chunks_of_a_prompt(runner: Runner) -> None:
    sampling = SamplingParams(temperature=0.0, logit_bias={5: 1000.0})
    first = Ask(0, None, {"prompt_ids": [5] * 9, "max_tokens": 60, "sampling": sampling})
    others = [Ask(tick, None, {"prompt_ids": ids_of(tick, 90), "max_tokens": 1, "sampling": sampling})
              for tick in range(4, 20)]
    plain, _ = serve(runner, [first, *others], 1, 40, 4, 24)
    drafting = drafting_of("suffix", lambda sequence: [], VOCABULARY, runner.max_drafts, state_block_size(runner))
    mixed: list[Step] = []
    planned = drafting.planned

    def record(step: Step) -> None:
        planned(step)
        if any(row.samples > 1 for row in step.rows) and any(not row.samples for row in step.rows):
            mixed.append(step)

    drafting.planned = record  # type: ignore[method-assign]
    drafted, _ = serve(runner, [first, *others], 2, 40, 4, 24, drafting=drafting)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert mixed
