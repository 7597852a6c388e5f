"""Deadlines: refused at once, dropped before any prefill, or ended just before with what was made; and slow readers,
whose requests pause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.service.errors import DeadlineExceeded
from npuserve.service.scheduling.deadlines import LEAST_MARGIN, RETRY, Deadlines, Pace
from tests.service.scheduling.reference import answer_alone
from tests.service.scheduling.stepwise import TICK, House, crowded

# What was measured


def test_nothing_measured_refuses_nobody() -> None:
    pace = Pace(64)
    assert (pace.seconds(1000), pace.drained(5, 2), pace.retry(0.0, 2), pace.margin) == (0.0, 0.0, None, LEAST_MARGIN)


def test_steps_of_few_and_of_many_tokens() -> None:
    pace = Pace(64)
    pace.step(4, 0, 0.03)
    assert (pace.seconds(1), pace.seconds(640)) == (0.03, 0.03)
    pace.step(4, 60, 0.64)
    assert pace.seconds(640) == pytest.approx(6.4)
    assert pace.seconds(1) == 0.03
    assert pace.seconds(0) == 0.0
    assert pace.margin == pytest.approx(2 * (0.03 + 0.1 * 0.61))


def test_pace_many_decode_rows_leave_the_prompt_estimate_unchanged() -> None:
    pace = Pace(256)
    pace.step(0, 256, 0.256)
    for _ in range(100):
        pace.step(250, 0, 0.5)
    assert pace.seconds(2560) == pytest.approx(2.56)
    assert pace.step_seconds(250, 0) == pytest.approx(0.5)
    assert pace.step_seconds(6, 250) == pytest.approx(max(0.5, 0.256))


def test_retry_follows_the_seats_that_become_free() -> None:
    pace = Pace(64)
    pace.answered(4.0, 10)
    assert [pace.retry(100.0, 8) for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    assert pace.retry(101.0, 8) == pytest.approx(1.0)
    assert [pace.retry(101.0, 8) for _ in range(99)][-1] == pytest.approx(RETRY[1])
    assert pace.retry(1000.0, 4000) == RETRY[0]


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


def measured(**fields: object) -> House:
    """Prefill takes 1/64 s for each 8 tokens, and an answer of 8 tokens about 8/64 s."""
    house = House(**{"budget": 8, "max_num_seqs": 1, "prefix_cache": False, **fields})  # type: ignore[arg-type]
    house.add([1] * 8, 8)
    house.finish()
    return house


def test_an_unmeetable_deadline_is_refused_at_once() -> None:
    house = measured()
    for prompt, left, refused in ((8, 0.5, False), (200, 0.2, True), (8, 0.01, True)):
        if refused:
            with pytest.raises(DeadlineExceeded, match=r"^deadline: in 0\.\d+ s; .*, and the margin .* is 0\.\d+ s$"):
                house.add([1] * prompt, 2, deadline=house.now + left)
        else:
            house.add([1] * prompt, 2, deadline=house.now + left)
    assert len(house.live) == 1
    house.finish()
    assert house.scheduler.tokens_in_vain == 0


def test_the_queue_ahead_counts() -> None:
    house = measured()
    for _ in range(20):
        house.add([1] * 8, 8)
    with pytest.raises(DeadlineExceeded):
        house.add([1] * 8, 8, deadline=house.now + 1.0)
    house.add([1] * 8, 8, deadline=house.now + 10.0)
    urgent = house.add([1] * 8, 8, deadline=house.now + 1.0, priority=-1)
    other = house.add([1] * 8, 8, deadline=house.now + 1.0, client="other")
    house.finish()
    assert {urgent.id, other.id} <= set(house.reasons)


def test_a_deadline_that_passes_in_the_queue_costs_nothing() -> None:
    house = House(max_num_seqs=1)
    first = house.add([1], 60)
    house.tick()
    late = house.add([2] * 9, 5, deadline=house.now + 5 * TICK)
    house.finish()
    assert isinstance(house.dropped[late.id], DeadlineExceeded)
    assert (late.met, late.num_computed_tokens, house.scheduler.tokens_in_vain) == (False, 0, 0)
    house.check_answer(first)


def test_a_prompt_that_cannot_be_computed_in_time_is_dropped_before_it_is_begun() -> None:
    house = measured(max_num_seqs=2)
    blocker = house.add([1] * 9, 200)
    house.tick()
    for _ in range(3):  # a full house
        house.add([1] * 9, 20)
    hopeless = house.add([2] * 30, 5, deadline=house.now + 1.9)
    while hopeless.id in house.live:
        assert not hopeless.met
        house.tick()
    assert isinstance(house.dropped[hopeless.id], DeadlineExceeded)
    assert house.scheduler.tokens_in_vain == 0
    house.cancel(blocker)
    house.finish()


def test_tokens_in_vain_are_counted() -> None:
    house = House(budget=8, prefix_cache=False)
    house.add([1] * 40, 5, deadline=house.now + 4 * TICK)  # nothing is measured yet
    house.finish()
    assert len(house.dropped) == 1
    assert 8 <= house.scheduler.tokens_in_vain <= 32


def test_what_was_made_before_the_deadline_stands() -> None:
    house = House()
    sequence = house.add([1, 2, 3], 60, deadline=house.now + 1.0)
    house.finish()
    assert house.dropped == {sequence.id: None}
    finish = sequence.finish("deadline")
    assert finish.generated_tokens == len(house.tokens[sequence.id]) > 10
    assert house.tokens[sequence.id] == answer_alone(sequence.request)[0][: finish.generated_tokens]
    assert finish.timing.last_step_end < 101.0


def test_deadline_margin_grows_with_the_gap_measured_after_the_request_was_added() -> None:
    house = House()
    deadline = house.now + 10.0
    sequence = house.add([1, 2, 3], 60, deadline=deadline)
    house.tick()
    assert house.scheduler.next_deadline == pytest.approx(deadline - LEAST_MARGIN)
    for _ in range(8):
        house.plan()
        house.now += 0.5
        house.collect()
    margin = house.scheduler._pace.margin
    assert margin > 0.9
    assert house.scheduler.next_deadline == pytest.approx(deadline - margin)
    house.scheduler.expire(deadline - margin - TICK)
    house.settle()
    assert sequence.id in house.live
    house.scheduler.expire(deadline - margin + TICK)
    house.settle()
    assert house.dropped == {sequence.id: None}


def test_deadline_is_admitted_while_many_rows_decode() -> None:
    """64 decode rows of a budget of 256 take as long as a chunk of 192 tokens does."""
    house = House(budget=256, num_blocks=2000, max_num_seqs=65, prefix_cache=False)
    house.add([2] * 512, 1)
    house.finish()
    for _ in range(64):
        house.add([1], 100)
    for _ in range(50):
        house.tick()
    assert house.scheduler.num_running == 64
    deadline = house.now + 0.45  # 2,000 tokens are 11 steps of 2 ticks
    sequence = house.add([3] * 2000, 2, deadline=deadline)
    while sequence.id in house.live:
        house.tick()
    assert house.reasons[sequence.id] == "length"
    assert house.now < deadline


def test_a_new_reader_has_its_own_deadline() -> None:
    house = House()
    sequence = house.add([1, 2, 3], 40, deadline=house.now + 0.1)
    house.tick()
    house.pause(sequence)
    house.scheduler.adopt(sequence, (b"other", 1), None)
    assert (sequence.origin, sequence.paused) == ((b"other", 1), False)
    house.scheduler.check_integrity()
    house.finish()
    house.check_answer(sequence)


# Slow readers


def test_a_paused_request_gets_no_row_and_goes_on_where_it_was() -> None:
    house = House()
    slow, other = house.add([1, 2, 3], 20), house.add([4, 5, 6], 20)
    for _ in range(3):
        house.tick()
    house.pause(slow)
    made = len(slow.token_ids)
    for _ in range(5):
        assert [row.request_id for row in house.tick().rows] == [other.id]
    assert (len(slow.token_ids), slow.waits, house.scheduler.num_paused) == (made, False, 1)
    assert slow.block_ids
    house.unpause(slow)
    assert [row.start for row in house.tick().rows] == [made - 1, other.num_computed_tokens - 1]
    house.finish()
    house.check_answer(slow)
    house.check_answer(other)
    assert house.scheduler.preemptions == 0


def test_the_paused_have_no_seats() -> None:
    house = House(max_num_seqs=2)
    slow = [house.add([1, 2, 3], 20), house.add([1, 2], 20)]
    house.tick()
    for sequence in slow:
        house.pause(sequence)
    others = [house.add([4, 5], 30) for _ in range(3)]
    assert [row.request_id for row in house.tick().rows] == [others[0].id, others[1].id]
    house.unpause(slow[0])  # there is no seat: it gives up its blocks, and has the next one
    house.tick()
    assert slow[0].waits
    assert others[2].waits
    house.unpause(slow[1])
    house.finish()
    assert house.started[others[2].id] > 0
    for sequence in (*slow, *others):
        house.check_answer(sequence)


def test_the_paused_are_the_first_to_be_preempted_whatever_their_rank() -> None:
    house = crowded(prefix_cache=False)
    first, second = house.add([1, 1, 1], 8), house.add([2, 2, 2], 8)
    house.tick()
    house.pause(first)
    while not first.waits:
        assert house.scheduler.preemptions == 0
        house.tick()
        if second.id not in house.live:
            second = house.add([2, 2, 2], 8)
    assert not house.scheduler.num_waiting
    house.unpause(first)
    assert house.scheduler.num_waiting == 1
    house.finish()
    house.check_answer(first)


def test_an_admission_takes_the_blocks_of_the_paused() -> None:
    house = House(num_blocks=8, block_size=4, prefix_cache=False)
    slow = [house.add([n] * 9, 4) for n in (1, 2)]
    house.tick()
    for sequence in slow:
        house.pause(sequence)
    big = house.add([3] * 20, 4)
    assert [row.request_id for row in house.tick().rows] == [big.id]
    assert [sequence.waits for sequence in slow] == [False, True]  # of the last rank, and no more than it needs
    for sequence in slow:
        house.unpause(sequence)
    house.finish()
    for sequence in (*slow, big):
        house.check_answer(sequence)


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_a_paused_request_ends_by_cancel(when: str) -> None:
    house = crowded(prefix_cache=False)
    other, slow = house.add([1, 1, 1], 8), house.add([2, 2, 2], 8)
    if when != "waiting":
        house.tick()
    house.pause(slow)
    while when == "preempted" and not slow.waits:
        house.tick()
    house.cancel(slow)
    house.scheduler.check_integrity()
    house.unpause(slow)
    house.pause(slow)
    house.finish()
    house.check_answer(other)


def test_a_pause_is_no_time_of_computing() -> None:
    house = House()
    slow = house.add([1, 2, 3], 6)
    for _ in range(3):
        house.tick()
    house.pause(slow)
    house.now += 50
    house.unpause(slow)
    house.finish()
    house.check_answer(slow)
    assert slow.timing.queue >= 50
    assert house.scheduler._pace.seat < 1
    assert house.scheduler._pace.gap < 1


@given(
    asks=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(1, 12), st.integers(1, 200)), max_size=12),
    seats=st.integers(1, 4), depth=st.sampled_from([1, 2]), pool=st.integers(12, 30),
)
def test_all_end_before_their_deadlines(
    asks: list[tuple[int, int, int, int]], seats: int, depth: int, pool: int
) -> None:
    house = House(num_blocks=pool, block_size=4, max_num_seqs=seats, depth=depth, budget=8)
    asked = {}
    for tick in range(300):
        for arrival, prompt, answer, left in asks:
            if arrival == tick:
                deadline = house.now + left * TICK
                try:
                    sequence = house.add([prompt % 7] * prompt, answer, deadline=deadline)
                except DeadlineExceeded:
                    continue
                asked[sequence.id] = sequence, deadline
        house.tick()
        for key in house.live:
            assert asked[key][1] > house.now - 4 * TICK, "it goes on after its deadline"
    house.finish()
    assert len(house.reasons) + len(house.dropped) == len(asked)
    for key, (sequence, _) in asked.items():
        if key in house.reasons:
            house.check_answer(sequence)


def test_a_paused_request_s_deadline_comes_too() -> None:
    house = House()
    slow = house.add([1, 2, 3], 60, deadline=house.now + 0.5)
    for _ in range(3):
        house.tick()
    house.pause(slow)
    assert house.scheduler.next_deadline == pytest.approx(slow.request.deadline - LEAST_MARGIN, abs=TICK)
    house.now += 0.5
    house.tick()
    house.tick()
    assert house.dropped == {slow.id: None}
    house.finish()
