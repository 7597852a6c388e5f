from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams, Step
from npuserve.service.errors import InvalidField, QueueFull
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.scheduling.step_plan import Plan
from tests.service.scheduling.reference import VOCABULARY
from tests.service.scheduling.stepwise import TICK, SchedulerHarness, crowded

# Plan


def test_schedule_plans_prompt_then_decodes_then_end() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2, 3], 3)
    first = harness.tick()
    assert [(n.request_id, n.prompt_ids, n.output_ids) for n in first.new] == [(sequence.id, [1, 2, 3], [])]
    assert [(r.token_ids, r.start, r.samples) for r in first.rows] == [([1, 2, 3], 0, True)]
    second = harness.tick()
    assert not second.new
    assert [(r.token_ids, r.start, r.is_decode) for r in second.rows] == [(harness.tokens[0][:1], 3, True)]
    harness.finish()
    harness.check_answer(sequence)
    assert len(harness.tokens[0]) == 3


def test_schedule_budget_splits_prompts_after_decodes() -> None:
    harness = SchedulerHarness(budget=6)
    harness.add([1, 2], 20)
    harness.tick()
    long = harness.add([3] * 12, 2)
    shapes = [[(r.request_id, r.start, len(r.token_ids), r.samples) for r in harness.tick().rows] for _ in range(3)]
    assert shapes == [
        [(0, 2, 1, True), (1, 0, 5, False)],
        [(0, 3, 1, True), (1, 5, 5, False)],
        [(0, 4, 1, True), (1, 10, 2, True)],
    ]
    harness.finish()
    harness.check_answer(long)
    assert len(long.timer.timing.prefill_chunks) == 3


def test_schedule_chunk_rows_have_only_the_blocks_up_to_their_end() -> None:
    harness = SchedulerHarness(budget=6)
    harness.add([3] * 20, 2)
    assert [len(harness.tick().rows[0].block_ids) for _ in range(4)] == [2, 3, 5, 5]


def test_schedule_decode_rows_share_the_block_list() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([3] * 20, 9)
    harness.tick()
    assert harness.tick().rows[0].block_ids is sequence.block_ids


def test_schedule_runs_at_most_max_num_seqs() -> None:
    harness = SchedulerHarness(max_num_seqs=2)
    for _ in range(5):
        harness.add([1, 2])
    assert [r.request_id for r in harness.tick().rows] == [0, 1]
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 3)
    harness.finish()


def test_schedule_runs_at_most_as_many_requests_as_the_budget() -> None:
    harness = SchedulerHarness(max_num_seqs=8, budget=3)
    for _ in range(6):
        harness.add([1], 6)
    harness.tick()
    assert harness.scheduler.num_running == 3
    assert len(harness.tick().rows) == 3
    harness.finish()
    harness = SchedulerHarness(max_num_seqs=8, budget=3, depth=2)
    for _ in range(6):
        harness.add([1], 6)
    assert [len(harness.plan().rows) for _ in range(3)] == [3, 3, 0]  # no request is two tokens ahead of the host
    harness.finish()


def test_schedule_without_requests_is_empty() -> None:
    harness = SchedulerHarness()
    assert not harness.scheduler.has_work
    assert harness.scheduler.schedule(harness.now) == Plan(Step([], [], []), [], [])


def test_admission_lets_no_smaller_request_pass() -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=4, prefix_cache=False)
    harness.add([1] * 16, 4)  # 4 blocks
    harness.tick()
    big, small = harness.add([2] * 20, 4), harness.add([3], 2)
    harness.tick()
    assert not big.holds_blocks
    assert not small.holds_blocks
    harness.finish()
    assert harness.started[big.id] <= harness.started[small.id]


def test_admission_leaves_a_block_for_each_running_request() -> None:
    harness = SchedulerHarness(num_blocks=4, block_size=4, prefix_cache=False)
    harness.add([1] * 6, 5)
    harness.tick()
    second = harness.add([2] * 8, 5)
    harness.tick()
    assert harness.blocks.counts.free == 2  # enough for the second, until the first grows
    assert not second.holds_blocks
    harness.finish()
    assert harness.scheduler.preemptions == 0


# Refusals


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fields", "field_name", "text"),
    [
        ([], 1, {}, "prompt", "at least 1 token"),
        ([1] * 33, 1, {}, "prompt", "at most 32 tokens"),
        ([1] * 30, 4, {}, "stopping.max_tokens", "at most 3 after a prompt of 30 tokens"),
        ([1], 2, {"output_ids": [5, 6]}, "stopping.max_tokens", "more than the 2 tokens"),
    ],
)
def test_add_refuses_requests_that_never_fit(
    prompt: list[int], max_tokens: int, fields: dict[str, object], field_name: str, text: str
) -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=4)
    with pytest.raises(InvalidField, match=text) as caught:
        harness.add(prompt, max_tokens, **fields)
    assert caught.value.field == field_name
    assert not harness.scheduler.has_work


@pytest.mark.parametrize(("prompt", "max_tokens"), [(32, 1), (30, 3), (1, 32)])
def test_add_accepts_requests_that_just_fit(prompt: int, max_tokens: int) -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=4)
    sequence = harness.add([1] * prompt, max_tokens)
    harness.finish()
    harness.check_answer(sequence)
    assert harness.scheduler.preemptions == 0


def test_add_to_a_full_queue_is_refused() -> None:
    harness = SchedulerHarness(max_num_seqs=2, max_queue=1)
    for _ in range(3):
        harness.add([1], 2)
    with pytest.raises(QueueFull, match="max_queue is 1") as caught:
        harness.add([1], 2)
    assert caught.value.retry_seconds > 0
    harness.tick()
    with pytest.raises(QueueFull, match="max_queue is 1, and 1 requests wait"):
        harness.add([1], 2)
    harness.tick()
    harness.add([1], 2)
    harness.finish()
    assert len(harness.reasons) == 4


def test_add_without_queue_accepts_max_num_seqs() -> None:
    harness = SchedulerHarness(max_num_seqs=2, max_queue=0)
    harness.add([1], 2)
    harness.add([1], 2)
    with pytest.raises(QueueFull):
        harness.add([1], 2)
    harness.finish()


def test_preemption_refuses_no_new_request() -> None:
    harness = SchedulerHarness(num_blocks=4, block_size=2, max_num_seqs=2, max_queue=1)
    harness.add([1, 1], 6)
    harness.add([2, 2], 6)
    while not harness.scheduler.preemptions:
        harness.tick()
    harness.add([3, 3], 2)
    with pytest.raises(QueueFull):
        harness.add([3, 3], 2)
    harness.finish()


# Priorities


def test_lower_priority_value_is_admitted_first() -> None:
    harness = SchedulerHarness(max_num_seqs=1, aging=10.0)
    for priority in (0, 5, -5, 0):
        harness.add([1], 1, priority=priority)
    harness.finish()
    assert sorted(harness.started, key=harness.started.__getitem__) == [2, 0, 3, 1]


def test_waiting_time_counts_as_priority() -> None:
    harness = SchedulerHarness(max_num_seqs=1, aging=10.0)
    harness.add([1], 1, priority=1, arrival=80.0)
    harness.add([1], 1, priority=0, arrival=91.0)
    harness.add([1], 1, priority=0, arrival=89.0)
    harness.finish()
    assert sorted(harness.started, key=harness.started.__getitem__) == [2, 0, 1]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    gap=st.integers(1, 6), aging=st.integers(1, 10), per_tick=st.sampled_from([1, 2]), num_blocks=st.integers(6, 16),
    seats=st.integers(1, 3),
)
def test_stream_of_urgent_requests_starves_no_request(
    gap: int, aging: int, per_tick: int, num_blocks: int, seats: int
) -> None:
    """An endless stream of urgent requests, more than the device can serve. Only the ones that arrive within
    gap * aging ticks overtake, and the wait ends when they are served."""
    harness = SchedulerHarness(num_blocks=num_blocks, block_size=2, max_num_seqs=seats, budget=8, aging=aging * TICK)
    patient = harness.add([1, 2, 3, 4], 4, priority=gap)
    urgent: list[Sequence] = []
    horizon = patient.request.arrival + gap * aging * TICK
    limit = 12 * (1 + per_tick * gap * aging)
    ticks = 0
    while patient.id in harness.live:
        urgent += [harness.add([5, 6, 5, len(urgent) % VOCABULARY], 4) for _ in range(per_tick)]
        harness.tick()
        ticks += 1
        assert ticks <= limit, "starved"
    overtook = [s for s in urgent if harness.started.get(s.id, harness.now) < harness.started[patient.id]]
    assert all(s.request.arrival <= horizon for s in overtook)
    harness.check_answer(patient)
    for sequence in [*harness.live.values()]:
        harness.cancel(sequence)
    harness.finish()


# Preemption


def test_youngest_is_preempted_and_ends_as_if_alone() -> None:
    harness = crowded()
    first, second = harness.add([1, 1, 1], 8), harness.add([2, 2, 2], 8)
    while not harness.scheduler.preemptions:
        harness.tick()
    assert not second.holds_blocks
    assert first.holds_blocks
    assert second.block_ids == []
    assert second.num_computed_tokens == 0
    assert second.num_generated_tokens > 0
    assert harness.scheduler.num_waiting == 1
    harness.finish()
    harness.check_answer(first)
    harness.check_answer(second)


def test_youngest_is_preempted_whatever_the_priority() -> None:
    harness = crowded(aging=10.0)
    early, late = harness.add([1, 1, 1], 8, priority=2), harness.add([2, 2, 2], 8, priority=-1)
    while not harness.scheduler.preemptions:
        harness.tick()
    assert not late.holds_blocks
    assert early.holds_blocks
    harness.finish()


@pytest.mark.parametrize("end", ["cancel", "pause"])
def test_newcomer_that_leaves_before_a_preemption_is_not_admitted(end: str) -> None:
    """It would have got the next free place."""
    harness = crowded(max_num_seqs=2)
    sequences = [harness.add([token] * 3, 8, client="a") for token in (1, 2)]
    for _ in range(3):
        harness.tick()
    newcomer = harness.add([3], 1, client="b")
    harness.tick()
    getattr(harness, end)(newcomer)
    while not harness.scheduler.preemptions:
        harness.tick()
    harness.unpause(newcomer)
    harness.finish()
    for sequence in sequences:
        harness.check_answer(sequence)


def test_youngest_preempts_itself() -> None:
    harness = SchedulerHarness(num_blocks=5, block_size=4, budget=3, prefix_cache=False)
    last = harness.add([1] * 3, 8)
    harness.tick()
    first = harness.add([2] * 12, 2, arrival=harness.now - 50)
    while not harness.scheduler.preemptions:
        step = harness.tick()
    assert not last.holds_blocks
    assert [r.request_id for r in step.rows] == [first.id]
    harness.finish()
    harness.check_answer(last)
    harness.check_answer(first)


def test_preempted_request_is_admitted_next() -> None:
    harness = crowded(max_num_seqs=2)
    harness.add([1, 1, 1], 8)
    second = harness.add([2, 2, 2], 8)
    harness.tick()
    urgent = harness.add([3, 3, 3], 8, priority=-1)
    while not harness.scheduler.preemptions:
        harness.tick()
    while not second.holds_blocks:
        assert not urgent.holds_blocks
        harness.tick()
    harness.finish()
    harness.check_answer(second)


def test_preempted_requests_are_admitted_oldest_first() -> None:
    harness = SchedulerHarness(num_blocks=37, block_size=1, max_num_seqs=8, budget=16, aging=0.001)
    sequences = [harness.add([0], 24, sampling=SamplingParams(ending_ids=(0, 4))) for _ in range(3)]
    harness.tick()
    for prompt, priority in ([0, 0], 0), ([0], 0), ([0], -2):
        sequences.append(harness.add(prompt, 24, sampling=SamplingParams(ending_ids=(0, 4)), priority=priority))
    harness.finish()  # each step checks that no request was preempted for a younger one
    assert harness.scheduler.preemptions
    for sequence in sequences:
        harness.check_answer(sequence)


def test_preempted_request_samples_after_its_last_known_token() -> None:
    harness = crowded(prefix_cache=False, budget=4)
    harness.add([1, 1, 1], 8)
    second = harness.add([2, 2, 2], 8)
    while second.holds_blocks or not second.was_admitted:
        harness.tick()
    known = second.num_tokens
    rows = []
    while second.id in harness.live:
        rows += [r for r in harness.tick().rows if r.request_id == second.id]
    again = rows[: next(i for i, r in enumerate(rows) if r.samples) + 1]
    assert [t for r in again for t in r.token_ids] == second.token_ids[:known]
    assert len(again) > 1
    harness.check_answer(second)


def test_preempted_request_finds_its_prefix_and_is_counted_once() -> None:
    harness = crowded()
    harness.add([1, 1, 1], 8)
    second = harness.add([2, 2, 2], 8)
    while not harness.scheduler.preemptions:
        harness.tick()
    while not second.holds_blocks:
        harness.tick()
    assert second.num_computed_tokens > 1
    harness.finish()
    assert second.finish("length").cached_tokens == 0
    assert (harness.scheduler.memory.prefix_queries, harness.scheduler.memory.prefix_hits) == (6, 0)


def test_preempted_request_is_announced_to_the_runner_once() -> None:
    harness = crowded()
    harness.add([1, 1, 1], 8)
    harness.add([2, 2, 2], 8)
    steps = []
    while harness.live:
        steps.append(harness.tick())
    assert harness.scheduler.preemptions
    assert [n.request_id for s in steps for n in s.new] == [0, 1]
    harness.add([1], 1)
    steps.append(harness.tick())
    assert sorted(i for s in steps for i in s.ended) == [0, 1]


def test_prompt_logprobs_are_reported_once_each() -> None:
    harness = crowded(prefix_cache=True, budget=3)
    harness.add([1, 1, 1], 8)
    second = harness.add([2, 2, 2, 3], 7, sampling=SamplingParams(prompt_logprobs=0, logprobs=0))
    harness.finish()
    assert harness.scheduler.preemptions
    assert [r.token_id for r in harness.prompt_logprobs[second.id]] == [2, 2, 3]
    harness.check_answer(second)
