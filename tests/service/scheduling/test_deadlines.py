"""Deadlines: a request is refused at once, dropped before its prefill, or ended with the tokens that it has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.service.errors import DeadlineExceeded
from npuserve.service.ipc.messages import PriorProgress, Request
from npuserve.service.scheduling.deadlines import Deadlines
from npuserve.service.scheduling.latency_estimator import MIN_MARGIN_SECONDS, STALE_SECONDS, LatencyEstimator
from npuserve.service.scheduling.sequence import Account, Sequence
from tests.service.scheduling.reference import answer_alone
from tests.service.scheduling.stepwise import TICK, SchedulerHarness


@given(
    changes=st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 9))), max_size=30),
    now=st.integers(0, 9), margin=st.integers(0, 3))
def test_deadlines_match_a_plain_dict(changes: list[tuple[int, int | None]], now: int, margin: int) -> None:
    estimator = LatencyEstimator(8)
    estimator.token_gap = margin / 2
    margin = max(MIN_MARGIN_SECONDS, margin)  # type: ignore[assignment]
    sequences = [Sequence(key, (b"", key), Request("r", [1], 1, 0.0), 1.0, Account("")) for key in range(6)]
    deadlines, plain = Deadlines(estimator), dict[int, int]()
    for key, moment in changes:
        if moment is None:
            deadlines.forget(key)
            plain.pop(key, None)
        else:
            sequences[key].deadline = moment
            sequences[key].token_ids = [1, 2]  # with tokens it is late when it is due
            deadlines.set(sequences[key])
            plain[key] = moment
    assert deadlines.ids == set(plain)
    assert deadlines.next(now) == min((moment - margin for moment in plain.values()), default=None)
    due = sorted((moment, k) for k, moment in plain.items() if moment <= now + margin)
    assert [sequence.id for sequence in deadlines.late(now)] == [k for _, k in due]


def measured(**fields: object) -> SchedulerHarness:
    """Return a harness that has measured 1/64 s per 8 tokens of prefill, and about 8/64 s per answer of 8 tokens."""
    options: dict[str, object] = {"budget": 8, "max_num_seqs": 1, "prefix_cache": False, **fields}
    harness = SchedulerHarness(**options)  # type: ignore[arg-type]
    harness.add([1] * 8, 8)
    harness.finish()
    return harness


def test_add_with_an_unmeetable_deadline_is_refused() -> None:
    harness = measured()
    for prompt, left, refused in ((8, 0.5, False), (200, 0.2, True), (8, 0.01, True)):
        if refused:
            with pytest.raises(DeadlineExceeded, match=r"^deadline: in 0\.\d+ s; .*, and the margin .* is 0\.\d+ s$"):
                harness.add([1] * prompt, 2, deadline=harness.now + left)
        else:
            harness.add([1] * prompt, 2, deadline=harness.now + left)
    assert len(harness.live) == 1
    harness.finish()
    assert harness.scheduler.deadlines.tokens_in_vain == 0


def test_add_with_a_deadline_counts_the_queue_ahead() -> None:
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


@pytest.mark.parametrize("holder", ["running", "paused", "ended"])
def test_add_with_a_deadline_counts_the_blocks_that_it_can_get(holder: str) -> None:
    """An answer takes a second. Blocks of a running request are free when it ends, the others at once."""
    harness = SchedulerHarness(num_blocks=32, budget=8)
    harness.add([1] * 8, 64)
    harness.finish()
    held = harness.add([2] * 113, 8)
    while held.num_generated_tokens < 2:
        harness.tick()
    if holder == "paused":
        harness.pause(held)
    elif holder == "ended":
        harness.finish()
    if holder == "running":
        with pytest.raises(DeadlineExceeded):
            harness.add([3] * 32, 1, deadline=harness.now + 0.5)
    else:
        late = harness.add([3] * 32, 1, deadline=harness.now + 0.5)
        while late.id in harness.live:
            harness.tick()
        harness.check_answer(late)
    harness.unpause(held)
    harness.finish()


@pytest.mark.parametrize("prompt", [1, 64])
def test_slow_moment_does_not_refuse_deadlines_forever(prompt: int) -> None:
    """Refused requests are not measured. Steps of the other kind, which requests without deadlines have, correct
    nothing."""
    harness = SchedulerHarness(budget=64, prefix_cache=False)
    harness.add([1] * prompt, 3)
    for _ in range(3):
        harness.plan()
        harness.now += 20.0
        harness.collect()
    began = harness.now
    with pytest.raises(DeadlineExceeded):
        harness.add([1] * prompt, 3, deadline=harness.now + 5.0)
    while harness.now < began + STALE_SECONDS:
        harness.add([2] * (65 - prompt), 1)
        harness.finish()
        harness.now += 0.1
    harness.tick()
    sequence = harness.add([1] * prompt, 3, deadline=harness.now + 5.0)
    harness.finish()
    harness.check_answer(sequence)


def test_slow_step_in_flight_is_not_forgotten() -> None:
    harness = SchedulerHarness()
    harness.add([1], 3)
    for _ in range(2):
        harness.plan()
        harness.now += 20.0
        harness.settle(harness.scheduler.expire(harness.now))
        if len(harness.tokens) == 1:
            with pytest.raises(DeadlineExceeded):
                harness.add([1], 3, deadline=harness.now + 5.0)
        harness.collect()
    harness.finish()


def test_deadline_that_passes_in_the_queue_computes_nothing() -> None:
    harness = SchedulerHarness(max_num_seqs=1)
    first = harness.add([1], 60)
    harness.tick()
    late = harness.add([2] * 9, 5, deadline=harness.now + 5 * TICK)
    harness.finish()
    assert isinstance(harness.dropped[late.id], DeadlineExceeded)
    assert (late.was_admitted, late.num_computed_tokens, harness.scheduler.deadlines.tokens_in_vain) == (False, 0, 0)
    harness.check_answer(first)


def test_prompt_that_would_be_late_is_dropped_before_admission() -> None:
    harness = measured(max_num_seqs=2)
    blocker = harness.add([1] * 9, 200)
    harness.tick()
    for _ in range(3):  # no sequence slot is left
        harness.add([1] * 9, 20)
    hopeless = harness.add([2] * 30, 5, deadline=harness.now + 1.9)
    while hopeless.id in harness.live:
        assert not hopeless.was_admitted
        harness.tick()
    assert isinstance(harness.dropped[hopeless.id], DeadlineExceeded)
    assert harness.scheduler.deadlines.tokens_in_vain == 0
    harness.cancel(blocker)
    harness.finish()


@pytest.mark.parametrize("is_running", [False, True])
def test_prompt_that_cannot_be_computed_in_time_ends_before_its_deadline(is_running: bool) -> None:
    """The prompt takes 8 ticks, and the margin before a deadline less than 2."""
    harness = measured(max_num_seqs=2)
    deadline = harness.now + 10 * TICK
    if not is_running:
        for _ in range(2):
            harness.add([1], 60)
        harness.tick()
    late = harness.add([2] * 64, 5, deadline=deadline, progress=PriorProgress(accepted=True))
    if is_running:
        harness.tick()
        harness.now += 3 * TICK
    while late.id in harness.live:
        harness.tick()
    assert isinstance(harness.dropped[late.id], DeadlineExceeded)
    assert late.was_admitted == is_running
    assert harness.now <= deadline - 4 * TICK
    harness.finish()


def test_tokens_in_vain_are_counted() -> None:
    harness = SchedulerHarness(budget=8, prefix_cache=False)
    harness.add([1] * 40, 5, deadline=harness.now + 4 * TICK)  # nothing was measured yet
    harness.finish()
    assert len(harness.dropped) == 1
    assert 8 <= harness.scheduler.deadlines.tokens_in_vain <= 32


def test_tokens_in_vain_include_no_cached_ones() -> None:
    harness = SchedulerHarness(budget=8)
    harness.add([1] * 17, 1)
    harness.finish()
    late = harness.add([1] * 16 + [2] * 40, 5, deadline=harness.now + 2.0)
    harness.tick()
    assert (late.cached_tokens, late.num_computed_tokens) == (16, 24)
    harness.now += 2.0
    harness.finish()
    assert isinstance(harness.dropped[late.id], DeadlineExceeded)
    assert harness.scheduler.deadlines.tokens_in_vain == 8


def test_deadline_keeps_the_tokens_generated_before() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2, 3], 60, deadline=harness.now + 1.0)
    harness.finish()
    assert harness.dropped == {sequence.id: None}
    finish = sequence.finish("deadline")
    assert finish.generated_tokens == len(harness.tokens[sequence.id]) > 10
    assert harness.tokens[sequence.id] == answer_alone(sequence.request)[0][: finish.generated_tokens]
    assert finish.timing.last_step_end < 101.0


def test_next_deadline_of_a_request_without_tokens_is_its_last_moment() -> None:
    """The margin of 0.8 s is for tokens: the engine would check for so long in vain, without a pause."""
    estimator = LatencyEstimator(8)
    estimator.token_gap = 0.4
    waiting, answering = (Sequence(key, (b"", key), Request("r", [1], 3, 0.0), 1.0, Account("")) for key in range(2))
    waiting.deadline, answering.deadline = 10.0, 10.5
    answering.token_ids = [1, 2]
    deadlines = Deadlines(estimator)
    for sequence in (waiting, answering):
        deadlines.set(sequence)
    assert deadlines.next(9.0) == pytest.approx(9.2)
    assert deadlines.late(9.3) == []
    assert deadlines.next(9.3) == pytest.approx(9.7)
    assert deadlines.late(9.7) == [answering]
    deadlines.forget(answering.id)
    assert deadlines.next(9.7) == pytest.approx(10.0 - MIN_MARGIN_SECONDS)
    assert deadlines.late(9.99) == [waiting]


def test_deadline_margin_grows_with_the_gap_measured_after_the_request_was_added() -> None:
    harness = SchedulerHarness()
    deadline = harness.now + 10.0
    sequence = harness.add([1, 2, 3], 60, deadline=deadline)
    harness.tick()
    assert harness.scheduler.deadlines.next(harness.now) == pytest.approx(deadline - MIN_MARGIN_SECONDS)
    for _ in range(8):
        harness.plan()
        harness.now += 0.5
        harness.collect()
    margin = harness.scheduler._estimator.margin
    assert margin > 0.9
    assert harness.scheduler.deadlines.next(harness.now) == pytest.approx(deadline - margin)
    harness.settle(harness.scheduler.expire(deadline - margin - TICK))
    assert sequence.id in harness.live
    harness.settle(harness.scheduler.expire(deadline - margin + TICK))
    assert harness.dropped == {sequence.id: None}


@pytest.mark.slow
def test_deadline_is_admitted_while_many_rows_decode() -> None:
    """A step of 64 decode rows takes as long as one with a chunk of 192 tokens beside them; the budget is 256."""
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


def test_change_reader_replaces_deadline_and_pause() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2, 3], 40, deadline=harness.now + 0.1)
    harness.tick()
    harness.pause(sequence)
    harness.scheduler.change_reader(sequence, (b"other", 1), None)
    assert (sequence.origin, sequence.is_paused) == ((b"other", 1), False)
    harness.scheduler.check_integrity()
    harness.finish()
    harness.check_answer(sequence)


@given(
    asks=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(1, 12), st.integers(1, 200)), max_size=12),
    seats=st.integers(1, 4), depth=st.sampled_from([1, 2]), pool=st.integers(12, 30),
)
def test_no_request_ends_after_its_deadline(
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
            assert asked[key][1] > harness.now - 4 * TICK, "it runs after its deadline"
    harness.finish()
    assert len(harness.reasons) + len(harness.dropped) == len(asked)
    for key, (sequence, _) in asked.items():
        if key in harness.reasons:
            harness.check_answer(sequence)


def test_predicted_ttft_is_that_of_a_request_behind_all_that_wait() -> None:
    harness = SchedulerHarness(max_num_seqs=1, budget=16, prefix_cache=False)
    assert harness.scheduler.predicted_ttft_seconds() == 0.0
    harness.add([1] * 16, 8)
    harness.finish()
    idle = harness.scheduler.predicted_ttft_seconds()
    assert idle == pytest.approx(TICK)
    for client in "abc":
        harness.add([1] * 16, 8, client=client)
        harness.tick()
    busy = harness.scheduler.predicted_ttft_seconds()
    last = harness.add([1] * 16, 8, client="d", priority=100)
    began = harness.now
    harness.finish()
    assert busy == pytest.approx(harness.started[last.id] - began, rel=0.3)
    assert busy > 10 * idle


def test_predicted_ttft_of_a_slow_moment_is_forgotten() -> None:
    harness = SchedulerHarness(budget=16)
    harness.add([1] * 16, 8)
    harness.finish()
    harness.now += STALE_SECONDS + 1
    harness.scheduler.expire(harness.now)
    assert harness.scheduler.predicted_ttft_seconds() == 0.0
