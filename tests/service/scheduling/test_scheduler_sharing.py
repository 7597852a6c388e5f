"""Shared prefixes, cancels, and random mixtures compared with the reference."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams
from npuserve.service.scheduling.block_manager import IntegrityError
from npuserve.service.scheduling.checkpoints import Spacing
from npuserve.service.scheduling.sequence import Sequence, State
from npuserve.service.structured_output.constraint import Constraint
from tests.service.scheduling.reference import answer_alone
from tests.service.scheduling.stepwise import SchedulerHarness, crowded
from tests.support.oracle_drafts import KINDS, Kind

# Prefixes


def test_fully_cached_prompt_computes_its_last_tokens() -> None:
    harness = SchedulerHarness(block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1]
    first = harness.add(prompt)
    harness.finish()
    second = harness.add(prompt)
    step = harness.tick()
    assert [(r.start, r.token_ids) for r in step.rows] == [(4, [5, 6, 0, 1])]
    harness.finish()
    assert (first.cached_tokens, second.cached_tokens) == (0, 4)
    assert (harness.scheduler.memory.prefix_queries, harness.scheduler.memory.prefix_hits) == (16, 4)
    harness.check_answer(second)


def test_cached_prompt_computes_at_least_one_token() -> None:
    harness = SchedulerHarness(block_size=4)
    harness.add([1, 2, 3, 4, 5])
    harness.finish()
    second = harness.add([1, 2, 3, 4, 6])
    step = harness.tick()
    assert [(r.start, r.token_ids, r.samples) for r in step.rows] == [(4, [6], True)]
    harness.finish()
    assert len(second.timer.timing.prefill_chunks) == 1


def test_answer_is_shared_as_a_prefix() -> None:
    harness = SchedulerHarness(block_size=2)
    first = harness.add([1, 2, 3], 6)
    harness.finish()
    second = harness.add(first.token_ids, 2)
    harness.tick()
    assert second.cached_tokens == 8  # 9 tokens, the last of which was never computed
    harness.finish()
    harness.check_answer(second)


def test_prefix_is_shared_between_running_requests() -> None:
    harness = SchedulerHarness(block_size=2, budget=16)
    first = harness.add([1, 2, 3, 4, 5], 9)
    harness.tick()
    second = harness.add([1, 2, 3, 4, 6], 9)
    harness.tick()
    assert first.block_ids[:2] == second.block_ids[:2]
    harness.cancel(first)
    harness.scheduler.check_integrity()
    harness.finish()
    harness.check_answer(second)


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "other"}, {"bypass_prefix_cache": True}, {"sampling": SamplingParams(prompt_logprobs=2)},
    ],
)
def test_prefix_is_not_shared_with(fields: dict[str, object]) -> None:
    harness = SchedulerHarness(block_size=2)
    harness.add([1, 2, 3, 4, 5])
    harness.finish()
    sequence = harness.add([1, 2, 3, 4, 5], **fields)
    assert harness.tick().rows[0].start == 0
    harness.finish()
    assert sequence.cached_tokens == 0
    harness.check_answer(sequence)


def test_bypassing_request_leaves_its_prefix_to_others() -> None:
    harness = SchedulerHarness(block_size=2)
    harness.add([1, 2, 3, 4, 5], bypass_prefix_cache=True)
    harness.finish()
    assert harness.scheduler.memory.prefix_queries == 0
    sequence = harness.add([1, 2, 3, 4, 5])
    harness.finish()
    assert sequence.cached_tokens == 4


def test_flush_prefix_cache_while_requests_run() -> None:
    harness = SchedulerHarness(block_size=2)
    old = harness.add([6, 5, 4, 3, 2], 1)
    harness.finish()
    running = harness.add([1, 2, 3, 4, 5], 9)
    harness.tick()
    assert harness.blocks.flush_prefix_cache() == 2
    harness.scheduler.check_integrity()
    harness.tick()
    again = harness.add(old.request.prompt_ids)
    harness.finish()
    assert again.cached_tokens == 0
    for sequence in (old, running, again):
        harness.check_answer(sequence)


def test_request_of_an_earlier_engine_continues() -> None:
    whole = SchedulerHarness()
    request = whole.add([1, 2, 3], 9)
    whole.finish()
    answer = whole.tokens[request.id]
    harness = SchedulerHarness(budget=4)
    sequence = harness.add([1, 2, 3], 9, output_ids=answer[:4])
    assert harness.tick().new[0].output_ids == answer[:4]
    harness.finish()
    assert harness.tokens[sequence.id] == answer[4:]
    harness.check_answer(sequence)


# Cancel


def test_cancel_of_a_waiting_request_is_not_reported_to_the_runner() -> None:
    harness = SchedulerHarness(max_num_seqs=1)
    harness.add([1], 2)
    waiting = harness.add([1], 2)
    harness.tick()
    harness.cancel(waiting)
    assert harness.scheduler.num_waiting == 0
    harness.finish()
    harness.add([1], 1)
    assert harness.tick().ended == [0]


def test_cancel_of_a_running_request_frees_and_is_reported_once() -> None:
    harness = SchedulerHarness()
    sequence, other = harness.add([1] * 9, 9), harness.add([2] * 9, 9)
    harness.tick()
    used = harness.blocks.counts.used
    harness.cancel(sequence)
    assert harness.blocks.counts.used == used - 3
    harness.scheduler.check_integrity()
    assert [harness.tick().ended for _ in range(2)] == [[0], []]
    assert harness.scheduler.cancel(sequence.id) is None
    harness.finish()
    harness.check_answer(other)


def test_cancel_of_a_preempted_request_is_reported() -> None:
    harness = crowded()
    harness.add([1, 1, 1], 8)
    second = harness.add([2, 2, 2], 8)
    while second.holds_blocks or not second.was_admitted:
        harness.tick()
    harness.cancel(second)
    harness.scheduler.check_integrity()
    assert harness.tick().ended == [second.id]
    harness.finish()


def test_cancel_between_launch_and_apply() -> None:
    harness = SchedulerHarness()
    gone, other = harness.add([1, 2], 9), harness.add([3, 4], 9)
    harness.plan()
    harness.cancel(gone)
    harness.collect()
    assert harness.tokens[gone.id] == []
    harness.finish()
    harness.check_answer(other)


def test_ended_requests_are_reported_with_the_next_step() -> None:
    harness = SchedulerHarness()
    harness.add([1], 1)
    harness.finish()
    assert harness.scheduler.schedule(harness.now).step.ended == []
    harness.add([1], 1)
    assert harness.tick().ended == [0]
    harness.finish()


def test_cancel_of_an_unknown_request_is_none() -> None:
    assert SchedulerHarness().scheduler.cancel(3) is None


def test_sequence_of_an_ended_request_is_a_key_error() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1], 1, arrival=99.5)
    assert harness.scheduler.sequence(sequence.id).request.arrival == 99.5
    harness.finish()
    with pytest.raises(KeyError):
        harness.scheduler.sequence(sequence.id)


def test_check_integrity_finds_a_leak() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2, 3], 9)
    harness.tick()
    sequence.state = State.PREEMPTED
    with pytest.raises(IntegrityError, match="sequence 0 is among the running, but"):
        harness.scheduler.check_integrity()
    sequence.state = State.RUNNING
    del harness.scheduler._sequences[0]
    harness.scheduler._running.clear()
    with pytest.raises(IntegrityError, match="1 blocks are used, but no sequence is left"):
        harness.scheduler.check_integrity()


# Random mixtures

STEMS = ([1, 2, 3, 4, 5, 6, 0, 1, 2, 3], [1, 2, 3, 4, 6, 6, 6], [0] * 12)
MAX_TOKENS = 24
CONSTRAINTS = tuple(Constraint("regex", text) for text in ("1 5", "2 30", "forced 3 30", "forced 2 9"))
SPACINGS = Spacing(1, 1), Spacing(2, 4), Spacing(4, 100)
LARGEST = 12 + 2 + MAX_TOKENS - 1  # tokens in the KV cache


Ask = tuple[int, int | None, list[int], list[int], int, dict[str, object]]


@st.composite
def requests(draw: st.DrawFn) -> Ask:
    """Draw (tick of arrival, ticks until its cancel or None, ticks between its pauses and unpauses, samples to which
    these happen, ticks until its grammar is compiled, arguments of SchedulerHarness.add_samples)."""
    stem = draw(st.sampled_from(STEMS))
    prompt = stem[: draw(st.sampled_from([0, 4, 7, 12]))] + draw(st.lists(st.integers(0, 6), min_size=1, max_size=2))
    sampling = SamplingParams(
        min_tokens=draw(st.sampled_from([0, 0, 3])), ending_ids=(0, 4),
        logprobs=draw(st.sampled_from([None, 0])), prompt_logprobs=draw(st.sampled_from([None] * 7 + [0])),
    )
    ends = draw(st.sampled_from([((), ())] * 5 + [((0,), (4,)), ((0, 4), ())]))
    fields: dict[str, object] = {
        "prompt": prompt, "max_tokens": draw(st.sampled_from([MAX_TOKENS, MAX_TOKENS, 9, 3])), "sampling": sampling,
        "eos_token_ids": frozenset(ends[0]), "stop_token_ids": frozenset(ends[1]),
        "priority": draw(st.sampled_from([0, 0, -2, 3])), "cache_salt": draw(st.sampled_from(["", "", "", "s"])),
        "bypass_prefix_cache": draw(st.sampled_from([False] * 7 + [True])),
        "client": draw(st.sampled_from(["", "a", "b"])),
        "samples": draw(st.sampled_from([1, 1, 1, 2, 5])),
        "constraint": draw(st.sampled_from([None, None, *CONSTRAINTS])),
    }
    whom = draw(st.sampled_from([[0, 1, 2, 3, 4], [0], [1, 3]]))
    turns = draw(st.sampled_from([[]] * 3 + [[2, 3], [1, 1, 1, 9], [6, 20, 2, 2]]))
    compiling = draw(st.sampled_from([0, 0, 2, 9])) if fields["constraint"] else 0
    return draw(st.integers(0, 12)), draw(st.sampled_from([None] * 7 + [0, 3, 20])), turns, whom, compiling, fields


@given(
    asks=st.lists(requests(), min_size=5, max_size=14), block_size=st.sampled_from([1, 2, 4]),
    pool=st.integers(LARGEST, LARGEST + 12), max_num_seqs=st.sampled_from([8, 6, 4, 1]),
    budget=st.sampled_from([16, 32, 8, 5, 1]), depth=st.sampled_from([1, 2, 2]),
    prefix_cache=st.sampled_from([True, True, False]), flush_at=st.integers(0, 60),
    aging=st.sampled_from([0.001, 0.1, 5]), min_forced=st.sampled_from([2, 1, 0]),
    num_slots=st.sampled_from([0, 0, 2, 5, 12, 40]), spacing=st.sampled_from(SPACINGS),
    drafts=st.sampled_from(KINDS),
)
def test_every_request_is_answered_as_if_alone(
    asks: list[Ask], block_size: int, pool: int, max_num_seqs: int, budget: int,
    depth: int, prefix_cache: bool, flush_at: int, aging: float, min_forced: int, num_slots: int, spacing: Spacing,
    drafts: Kind,
) -> None:
    """Token 1 ends messages. The device checks that each row continues the state of the tokens before it."""
    harness = SchedulerHarness(
        num_blocks=-(-pool // block_size), block_size=block_size, max_num_seqs=max_num_seqs, budget=budget, depth=depth,
        prefix_cache=prefix_cache, aging=aging, min_forced=min_forced, num_slots=num_slots, spacing=spacing,
        message_end_ids=frozenset([1]), drafts=drafts,
    )
    all_sequences: list[Sequence] = []
    cancels: dict[int, list[Sequence]] = defaultdict(list)
    turns: dict[int, list[Sequence]] = defaultdict(list)
    compiled: dict[int, list[Sequence]] = defaultdict(list)
    cancelled: set[int] = set()
    for tick in range(60):
        for arrival, cancel_after, gaps, whom, compiling, fields in asks:
            if arrival == tick:
                samples = harness.add_samples(**fields, compiling=bool(compiling))  # type: ignore[arg-type]
                all_sequences += samples
                compiled[tick + compiling] += samples
                some = [sequence for sequence in samples if sequence.request.index in whom]
                if cancel_after is not None:
                    cancels[tick + cancel_after] += some
                for turn in itertools.accumulate(gaps, initial=tick):
                    turns[turn] += some if turn > tick else []
        for sequence in turns[tick]:
            (harness.unpause if sequence.is_paused else harness.pause)(sequence)
        for sequence in compiled[tick]:
            harness.constrain(sequence)
        for sequence in cancels[tick]:
            if sequence.id in harness.live:
                cancelled.add(sequence.id)
            harness.cancel(sequence)
        if tick == flush_at:
            harness.scheduler.memory.flush_prefix_cache()
            harness.scheduler.check_integrity()
        harness.tick()
    assert not any(sequence.is_paused for sequence in harness.live.values())
    harness.finish()
    assert len(all_sequences) == sum(fields["samples"] for *_, fields in asks)  # type: ignore[misc]
    for sequence in all_sequences:
        if sequence.id in cancelled:
            assert sequence.id not in harness.reasons
            answer, _ = answer_alone(sequence.request)
            assert harness.tokens[sequence.id] == answer[: len(harness.tokens[sequence.id])]
        else:
            harness.check_answer(sequence)
    assert 0 <= harness.scheduler.memory.prefix_hits <= harness.scheduler.memory.prefix_queries
    assert len(harness.device.known) <= len(harness.scheduler._ended)
    event(f"preemptions: {min(harness.scheduler.preemptions, 3)}")
    event(f"hits: {harness.scheduler.memory.prefix_hits > 0}")
    event(f"forced tokens: {min(harness.scheduler.forced_tokens, 3)}")
    event(f"drafts {drafts}: {harness.scheduler.drafting.accepted > 0}")
    event(f"hits of states: {num_slots > 0 and harness.scheduler.memory.prefix_hits > 0}")
    event(f"samples: {len(all_sequences) > len(asks)}")
