"""Deadlines: refused at once, dropped before any prefill, or ended just before with what was made; and slow readers,
whose requests pause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.service.errors import DeadlineExceeded
from npuserve.service.scheduling.deadlines import Deadlines
from npuserve.service.scheduling.pace import MAX_RETRY_SECONDS, MIN_MARGIN_SECONDS, MIN_RETRY_SECONDS, Pace
from tests.service.scheduling.reference import answer_alone
from tests.service.scheduling.stepwise import TICK, SchedulerHarness, crowded

# What was measured


def test_nothing_measured_refuses_nobody() -> None:
    pace = Pace(64)
    assert (pace.prefill_seconds(1000), pace.drain_seconds(5, 2)) == (0.0, 0.0)
    assert (pace.retry_seconds(0.0, 2), pace.margin) == (None, MIN_MARGIN_SECONDS)


def test_steps_of_few_and_of_many_tokens() -> None:
    pace = Pace(64)
    pace.record_step(4, 0, 0.03)
    assert (pace.prefill_seconds(1), pace.prefill_seconds(640)) == (0.03, 0.03)
    pace.record_step(4, 60, 0.64)
    assert pace.prefill_seconds(640) == pytest.approx(6.4)
    assert pace.prefill_seconds(1) == 0.03
    assert pace.prefill_seconds(0) == 0.0
    assert pace.margin == pytest.approx(2 * (0.03 + 0.1 * 0.61))


def test_pace_many_decode_rows_leave_the_prompt_estimate_unchanged() -> None:
    pace = Pace(256)
    pace.record_step(0, 256, 0.256)
    for _ in range(100):
        pace.record_step(250, 0, 0.5)
    assert pace.prefill_seconds(2560) == pytest.approx(2.56)
    assert pace.step_seconds(250, 0) == pytest.approx(0.5)
    assert pace.step_seconds(6, 250) == pytest.approx(max(0.5, 0.256))


def test_retry_follows_the_seats_that_become_free() -> None:
    pace = Pace(64)
    pace.record_answer(4.0, 10)
    assert [pace.retry_seconds(100.0, 8) for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    assert pace.retry_seconds(101.0, 8) == pytest.approx(1.0)
    assert [pace.retry_seconds(101.0, 8) for _ in range(99)][-1] == pytest.approx(MAX_RETRY_SECONDS)
    assert pace.retry_seconds(1000.0, 4000) == MIN_RETRY_SECONDS


@given(
    changes=st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 9))), max_size=30),
    now=st.integers(0, 9), margin=st.integers(0, 3))
def test_deadlines_are_those_set_last(changes: list[tuple[int, int | None]], now: int, margin: int) -> None:
    deadlines, plain = Deadlines(), dict[int, int]()
    for key, moment in changes:
        if moment is None:
            deadlines.forget(key)
            plain.pop(key, None)
        else:
            deadlines.set(key, moment)
            plain[key] = moment
    assert deadlines.ids == set(plain)
    assert deadlines.next(margin) == min((moment - margin for moment in plain.values()), default=None)
    due = sorted((moment, k) for k, moment in plain.items() if moment <= now + margin)
    assert deadlines.due(now, margin) == [k for _, k in due]


# In the scheduler


def measured(**fields: object) -> SchedulerHarness:
    """Prefill takes 1/64 s for each 8 tokens, and an answer of 8 tokens about 8/64 s."""
    harness = SchedulerHarness(**{"budget": 8, "max_num_seqs": 1, "prefix_cache": False, **fields})  # type: ignore[arg-type]
    harness.add([1] * 8, 8)
    harness.finish()
    return harness


def test_an_unmeetable_deadline_is_refused_at_once() -> None:
    harness = measured()
    for prompt, left, refused in ((8, 0.5, False), (200, 0.2, True), (8, 0.01, True)):
        if refused:
            with pytest.raises(DeadlineExceeded, match=r"^deadline: in 0\.\d+ s; .*, and the margin .* is 0\.\d+ s$"):
                harness.add([1] * prompt, 2, deadline=harness.now + left)
        else:
            harness.add([1] * prompt, 2, deadline=harness.now + left)
    assert len(harness.live) == 1
    harness.finish()
    assert harness.scheduler.tokens_in_vain == 0


def test_the_queue_ahead_counts() -> None:
    harness = measured()
    for _ in range(20):
        harness.add([1] * 8, 8)
    with pytest.raises(DeadlineExceeded):
        harness.add([1] * 8, 8, deadline=harness.now + 1.0)
    harness.add([1] * 8, 8, deadline=harness.now + 10.0)
    urgent = harness.add([1] * 8, 8, deadline=harness.now + 1.0, priority=-1)
    other = harness.add([1] * 8, 8, deadline=harness.now + 1.0, client="other")
    harness.finish()
    assert {urgent.id, other.id} <= set(harness.reasons)


def test_a_deadline_that_passes_in_the_queue_costs_nothing() -> None:
    harness = SchedulerHarness(max_num_seqs=1)
    first = harness.add([1], 60)
    harness.tick()
    late = harness.add([2] * 9, 5, deadline=harness.now + 5 * TICK)
    harness.finish()
    assert isinstance(harness.dropped[late.id], DeadlineExceeded)
    assert (late.was_admitted, late.num_computed_tokens, harness.scheduler.tokens_in_vain) == (False, 0, 0)
    harness.check_answer(first)


def test_a_prompt_that_cannot_be_computed_in_time_is_dropped_before_it_is_begun() -> None:
    harness = measured(max_num_seqs=2)
    blocker = harness.add([1] * 9, 200)
    harness.tick()
    for _ in range(3):  # a full harness
        harness.add([1] * 9, 20)
    hopeless = harness.add([2] * 30, 5, deadline=harness.now + 1.9)
    while hopeless.id in harness.live:
        assert not hopeless.was_admitted
        harness.tick()
    assert isinstance(harness.dropped[hopeless.id], DeadlineExceeded)
    assert harness.scheduler.tokens_in_vain == 0
    harness.cancel(blocker)
    harness.finish()


def test_tokens_in_vain_are_counted() -> None:
    harness = SchedulerHarness(budget=8, prefix_cache=False)
    harness.add([1] * 40, 5, deadline=harness.now + 4 * TICK)  # nothing is measured yet
    harness.finish()
    assert len(harness.dropped) == 1
    assert 8 <= harness.scheduler.tokens_in_vain <= 32


def test_what_was_made_before_the_deadline_stands() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2, 3], 60, deadline=harness.now + 1.0)
    harness.finish()
    assert harness.dropped == {sequence.id: None}
    finish = sequence.finish("deadline")
    assert finish.generated_tokens == len(harness.tokens[sequence.id]) > 10
    assert harness.tokens[sequence.id] == answer_alone(sequence.request)[0][: finish.generated_tokens]
    assert finish.timing.last_step_end < 101.0


def test_deadline_margin_grows_with_the_gap_measured_after_the_request_was_added() -> None:
    harness = SchedulerHarness()
    deadline = harness.now + 10.0
    sequence = harness.add([1, 2, 3], 60, deadline=deadline)
    harness.tick()
    assert harness.scheduler.next_deadline == pytest.approx(deadline - MIN_MARGIN_SECONDS)
    for _ in range(8):
        harness.plan()
        harness.now += 0.5
        harness.collect()
    margin = harness.scheduler._pace.margin
    assert margin > 0.9
    assert harness.scheduler.next_deadline == pytest.approx(deadline - margin)
    harness.settle(harness.scheduler.expire(deadline - margin - TICK))
    assert sequence.id in harness.live
    harness.settle(harness.scheduler.expire(deadline - margin + TICK))
    assert harness.dropped == {sequence.id: None}


def test_deadline_is_admitted_while_many_rows_decode() -> None:
    """64 decode rows of a budget of 256 take as long as a chunk of 192 tokens does."""
    harness = SchedulerHarness(budget=256, num_blocks=2000, max_num_seqs=65, prefix_cache=False)
    harness.add([2] * 512, 1)
    harness.finish()
    for _ in range(64):
        harness.add([1], 100)
    for _ in range(50):
        harness.tick()
    assert harness.scheduler.num_running == 64
    deadline = harness.now + 0.45  # 2,000 tokens are 11 steps of 2 ticks
    sequence = harness.add([3] * 2000, 2, deadline=deadline)
    while sequence.id in harness.live:
        harness.tick()
    assert harness.reasons[sequence.id] == "length"
    assert harness.now < deadline


def test_a_new_reader_has_its_own_deadline() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2, 3], 40, deadline=harness.now + 0.1)
    harness.tick()
    harness.pause(sequence)
    harness.scheduler.change_reader(sequence, (b"other", 1), None)
    assert (sequence.origin, sequence.is_paused) == ((b"other", 1), False)
    harness.scheduler.check_integrity()
    harness.finish()
    harness.check_answer(sequence)


# Slow readers


def test_a_paused_request_gets_no_row_and_goes_on_where_it_was() -> None:
    harness = SchedulerHarness()
    slow, other = harness.add([1, 2, 3], 20), harness.add([4, 5, 6], 20)
    for _ in range(3):
        harness.tick()
    harness.pause(slow)
    made = len(slow.token_ids)
    for _ in range(5):
        assert [row.request_id for row in harness.tick().rows] == [other.id]
    assert (len(slow.token_ids), not slow.holds_blocks, harness.scheduler.num_paused) == (made, False, 1)
    assert slow.block_ids
    harness.unpause(slow)
    assert [row.start for row in harness.tick().rows] == [made - 1, other.num_computed_tokens - 1]
    harness.finish()
    harness.check_answer(slow)
    harness.check_answer(other)
    assert harness.scheduler.preemptions == 0


def test_the_paused_have_no_seats() -> None:
    harness = SchedulerHarness(max_num_seqs=2)
    slow = [harness.add([1, 2, 3], 20), harness.add([1, 2], 20)]
    harness.tick()
    for sequence in slow:
        harness.pause(sequence)
    others = [harness.add([4, 5], 30) for _ in range(3)]
    assert [row.request_id for row in harness.tick().rows] == [others[0].id, others[1].id]
    harness.unpause(slow[0])  # there is no seat: it gives up its blocks, and has the next one
    harness.tick()
    assert not slow[0].holds_blocks
    assert not others[2].holds_blocks
    harness.unpause(slow[1])
    harness.finish()
    assert harness.started[others[2].id] > 0
    for sequence in (*slow, *others):
        harness.check_answer(sequence)


def test_the_paused_are_the_first_to_be_preempted_whatever_their_rank() -> None:
    harness = crowded(prefix_cache=False)
    first, second = harness.add([1, 1, 1], 8), harness.add([2, 2, 2], 8)
    harness.tick()
    harness.pause(first)
    while first.holds_blocks:
        assert harness.scheduler.preemptions == 0
        harness.tick()
        if second.id not in harness.live:
            second = harness.add([2, 2, 2], 8)
    assert not harness.scheduler.num_waiting
    harness.unpause(first)
    assert harness.scheduler.num_waiting == 1
    harness.finish()
    harness.check_answer(first)


def test_an_admission_takes_the_blocks_of_the_paused() -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=4, prefix_cache=False)
    slow = [harness.add([n] * 9, 4) for n in (1, 2)]
    harness.tick()
    for sequence in slow:
        harness.pause(sequence)
    big = harness.add([3] * 20, 4)
    assert [row.request_id for row in harness.tick().rows] == [big.id]
    assert [sequence.holds_blocks for sequence in slow] == [True, False]  # the youngest, and no more than it needs
    for sequence in slow:
        harness.unpause(sequence)
    harness.finish()
    for sequence in (*slow, big):
        harness.check_answer(sequence)


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_a_paused_request_ends_by_cancel(when: str) -> None:
    harness = crowded(prefix_cache=False)
    other, slow = harness.add([1, 1, 1], 8), harness.add([2, 2, 2], 8)
    if when != "waiting":
        harness.tick()
    harness.pause(slow)
    while when == "preempted" and slow.holds_blocks:
        harness.tick()
    harness.cancel(slow)
    harness.scheduler.check_integrity()
    harness.unpause(slow)
    harness.pause(slow)
    harness.finish()
    harness.check_answer(other)


def test_a_pause_is_no_time_of_computing() -> None:
    harness = SchedulerHarness()
    slow = harness.add([1, 2, 3], 6)
    for _ in range(3):
        harness.tick()
    harness.pause(slow)
    harness.now += 50
    harness.unpause(slow)
    harness.finish()
    harness.check_answer(slow)
    assert slow.timing.queue >= 50
    assert harness.scheduler._pace.answer_seconds < 1
    assert harness.scheduler._pace.token_gap < 1


@given(
    asks=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(1, 12), st.integers(1, 200)), max_size=12),
    seats=st.integers(1, 4), depth=st.sampled_from([1, 2]), pool=st.integers(12, 30),
)
def test_all_end_before_their_deadlines(
    asks: list[tuple[int, int, int, int]], seats: int, depth: int, pool: int
) -> None:
    harness = SchedulerHarness(num_blocks=pool, block_size=4, max_num_seqs=seats, depth=depth, budget=8)
    asked = {}
    for tick in range(300):
        for arrival, prompt, answer, left in asks:
            if arrival == tick:
                deadline = harness.now + left * TICK
                try:
                    sequence = harness.add([prompt % 7] * prompt, answer, deadline=deadline)
                except DeadlineExceeded:
                    continue
                asked[sequence.id] = sequence, deadline
        harness.tick()
        for key in harness.live:
            assert asked[key][1] > harness.now - 4 * TICK, "it goes on after its deadline"
    harness.finish()
    assert len(harness.reasons) + len(harness.dropped) == len(asked)
    for key, (sequence, _) in asked.items():
        if key in harness.reasons:
            harness.check_answer(sequence)


def test_a_paused_request_s_deadline_comes_too() -> None:
    harness = SchedulerHarness()
    slow = harness.add([1, 2, 3], 60, deadline=harness.now + 0.5)
    for _ in range(3):
        harness.tick()
    harness.pause(slow)
    assert harness.scheduler.next_deadline == pytest.approx(slow.deadline - MIN_MARGIN_SECONDS, abs=TICK)
    harness.now += 0.5
    harness.tick()
    harness.tick()
    assert harness.dropped == {slow.id: None}
    harness.finish()
