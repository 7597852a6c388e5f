"""Two steps in flight give the tokens of one: the real scheduler and the real runner, on the CPU's native kernels, bit
by bit, in whatever company requests run, are preempted, cancelled and ended."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from npuserve.kernels import native
from npuserve.npu.launched import Launched
from npuserve.npu.runner import Runner
from npuserve.npu.step import PENDING, SamplingParams, Step, TokenLogprobs
from npuserve.service.block_manager import BlockManager
from npuserve.service.messages import Request
from npuserve.service.scheduler import Scheduler
from npuserve.service.sequence import Sequence
from tests.npu.models import random_model, saved
from tests.npu.test_runner import ids_of, load

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")

BLOCK_SIZE = 16
MOST = 70
PROMPTS = [ids_of(n, n) for n in (1, 5, 17, 33)] + [ids_of(33, 33)[:20] + ids_of(20, 7)]


@dataclass(frozen=True)
class Ask:
    """tick: of its arrival. cancel: ticks after it, or None."""

    tick: int
    cancel: int | None
    fields: dict[str, object]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None


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


def serve(runner: Runner, all_asks: list[Ask], depth: int, pool: int, seats: int, budget: int) -> list[Answer]:
    """The engine's loop without its socket."""
    blocks = BlockManager(pool, BLOCK_SIZE)
    scheduler = Scheduler(
        blocks, max_num_seqs=seats, max_num_batched_tokens=budget, max_queue=100, aging_seconds=1.0)
    answers = [Answer() for _ in all_asks]
    live: dict[int, Sequence] = {}
    flying: deque[tuple[Step, Launched]] = deque()
    pending = 0

    def collect(now: float) -> None:
        step, handle = flying.popleft()
        for progress in scheduler.apply(step, runner.collect(handle), now):
            answer = answers[progress.sequence.id]
            assert answer.reason is None
            answer.tokens += progress.token_ids
            answer.logprobs += progress.logprobs or []
            answer.prompt_logprobs += progress.prompt_logprobs or []
            answer.reason = progress.reason
            if progress.reason:
                del live[progress.sequence.id]

    cancels: defaultdict[int, list[int]] = defaultdict(list)
    order = sorted(range(len(all_asks)), key=lambda i: all_asks[i].tick)
    ids = {}
    for tick in range(2000):
        while order and all_asks[order[0]].tick <= tick:
            index = order.pop(0)
            request = Request(f"r{index}", arrival=float(index), **all_asks[index].fields)  # type: ignore[arg-type]
            sequence = scheduler.add(request, (b"", 0), float(tick))
            ids[sequence.id] = index
            live[sequence.id] = sequence
            if (after := all_asks[index].cancel) is not None:
                cancels[tick + after].append(sequence.id)
        for sequence_id in cancels.pop(tick, []):
            if live.pop(sequence_id, None):
                scheduler.cancel(sequence_id)
                answers[sequence_id].reason = "cancelled"
        step = scheduler.schedule(float(tick))
        scheduler.check_integrity()
        if step.rows:
            pending += sum(row.token_ids == [PENDING] for row in step.rows)
            flying.append((step, runner.launch(step)))
        if flying and (not step.rows or len(flying) == depth):
            collect(float(tick))
        if not (live or order or flying):
            break
    assert not live, "it never ends"
    assert blocks.counts.used == 0, "blocks leaked"
    runner.launch(Step([], ended=scheduler._ended))
    assert not runner._sampler._states
    assert (pending > 0) <= (depth == 2)
    event(f"preemptions at depth {depth}: {min(scheduler.preemptions, 3)}")
    return [answers[key] for key in sorted(ids, key=ids.__getitem__)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(all_asks=st.lists(asks(), min_size=3, max_size=8), pool=st.sampled_from([7, 9, 40]),
       seats=st.sampled_from([8, 3, 1]), budget=st.sampled_from([48, 9]))
def test_two_steps_in_flight_give_the_tokens_of_one(
    runner: Runner, all_asks: list[Ask], pool: int, seats: int, budget: int
) -> None:
    plain, overlapped = (serve(runner, all_asks, depth, pool, seats, budget) for depth in (1, 2))
    for one, other in zip(plain, overlapped, strict=True):
        if "cancelled" in (one.reason, other.reason):  # when it comes is another matter
            both = min(len(one.tokens), len(other.tokens))
            assert one.tokens[:both] == other.tokens[:both]
        else:
            assert one == other
            assert one.reason
