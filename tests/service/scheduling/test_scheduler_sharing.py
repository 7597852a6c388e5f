"""Shared prefixes, cancels, and all of it at once against the plain model."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams
from npuserve.service.scheduling.block_manager import IntegrityError
from npuserve.service.scheduling.sequence import Sequence
from tests.service.scheduling.reference import answer_alone
from tests.service.scheduling.stepwise import House, crowded

# Prefixes


def test_a_whole_cached_prompt_computes_its_last_tokens() -> None:
    house = House(block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1]
    first = house.add(prompt)
    house.finish()
    second = house.add(prompt)
    step = house.tick()
    assert [(r.start, r.token_ids) for r in step.rows] == [(4, [5, 6, 0, 1])]
    house.finish()
    assert (first.cached_tokens, second.cached_tokens) == (0, 4)
    assert (house.scheduler.prefix_queries, house.scheduler.prefix_hits) == (16, 4)
    house.check_answer(second)


def test_one_token_left_is_the_least() -> None:
    house = House(block_size=4)
    house.add([1, 2, 3, 4, 5])
    house.finish()
    second = house.add([1, 2, 3, 4, 6])
    step = house.tick()
    assert [(r.start, r.token_ids, r.samples) for r in step.rows] == [(4, [6], True)]
    house.finish()
    assert len(second.timing.prefill_chunks) == 1


def test_the_answer_is_a_prefix_too() -> None:
    house = House(block_size=2)
    first = house.add([1, 2, 3], 6)
    house.finish()
    second = house.add(first.token_ids, 2)
    house.tick()
    assert second.cached_tokens == 8  # 9 tokens, the last of which was never computed
    house.finish()
    house.check_answer(second)


def test_sharing_between_running_requests() -> None:
    house = House(block_size=2, budget=16)
    first = house.add([1, 2, 3, 4, 5], 9)
    house.tick()
    second = house.add([1, 2, 3, 4, 6], 9)
    house.tick()
    assert first.block_ids[:2] == second.block_ids[:2]
    house.cancel(first)
    house.scheduler.check_integrity()
    house.finish()
    house.check_answer(second)


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "other"}, {"bypass_prefix_cache": True}, {"sampling": SamplingParams(prompt_logprobs=2)},
    ],
)
def test_who_shares_nothing(fields: dict[str, object]) -> None:
    house = House(block_size=2)
    house.add([1, 2, 3, 4, 5])
    house.finish()
    sequence = house.add([1, 2, 3, 4, 5], **fields)
    assert house.tick().rows[0].start == 0
    house.finish()
    assert sequence.cached_tokens == 0
    house.check_answer(sequence)


def test_a_bypassing_request_leaves_its_prefix_to_others() -> None:
    house = House(block_size=2)
    house.add([1, 2, 3, 4, 5], bypass_prefix_cache=True)
    house.finish()
    assert house.scheduler.prefix_queries == 0
    sequence = house.add([1, 2, 3, 4, 5])
    house.finish()
    assert sequence.cached_tokens == 4


def test_flush_while_in_use() -> None:
    house = House(block_size=2)
    old = house.add([6, 5, 4, 3, 2], 1)
    house.finish()
    running = house.add([1, 2, 3, 4, 5], 9)
    house.tick()
    assert house.blocks.flush_prefix_cache() == 2
    house.scheduler.check_integrity()
    house.tick()
    again = house.add(old.request.prompt_ids)
    house.finish()
    assert again.cached_tokens == 0
    for sequence in (old, running, again):
        house.check_answer(sequence)


def test_continuing_what_a_dead_engine_began() -> None:
    whole = House()
    request = whole.add([1, 2, 3], 9)
    whole.finish()
    answer = whole.tokens[request.id]
    house = House(budget=4)
    sequence = house.add([1, 2, 3], 9, output_ids=answer[:4])
    assert house.tick().new[0].output_ids == answer[:4]
    house.finish()
    assert house.tokens[sequence.id] == answer[4:]
    house.check_answer(sequence)


# Cancel


def test_cancel_of_one_that_waits_is_not_told_to_the_runner() -> None:
    house = House(max_num_seqs=1)
    house.add([1], 2)
    waiting = house.add([1], 2)
    house.tick()
    house.cancel(waiting)
    assert house.scheduler.num_waiting == 0
    house.finish()
    house.add([1], 1)
    assert house.tick().ended == [0]


def test_cancel_of_one_that_runs_frees_at_once_and_is_told_once() -> None:
    house = House()
    sequence, other = house.add([1] * 9, 9), house.add([2] * 9, 9)
    house.tick()
    used = house.blocks.counts.used
    house.cancel(sequence)
    assert house.blocks.counts.used == used - 3
    house.scheduler.check_integrity()
    assert [house.tick().ended for _ in range(2)] == [[0], []]
    assert house.scheduler.cancel(sequence.id) is None
    house.finish()
    house.check_answer(other)


def test_cancel_of_a_preempted_one_is_told() -> None:
    house = crowded()
    house.add([1, 1, 1], 8)
    second = house.add([2, 2, 2], 8)
    while not second.waits or not second.met:
        house.tick()
    house.cancel(second)
    house.scheduler.check_integrity()
    assert house.tick().ended == [second.id]
    house.finish()


def test_cancel_between_launch_and_apply() -> None:
    house = House()
    gone, other = house.add([1, 2], 9), house.add([3, 4], 9)
    house.plan()
    house.cancel(gone)
    house.collect()
    assert house.tokens[gone.id] == []
    house.finish()
    house.check_answer(other)


def test_ended_is_kept_while_there_is_nothing_to_launch() -> None:
    house = House()
    house.add([1], 1)
    house.finish()
    assert house.scheduler.schedule(house.now).ended == []
    house.add([1], 1)
    assert house.tick().ended == [0]
    house.finish()


def test_cancel_of_the_unknown() -> None:
    assert House().scheduler.cancel(3) is None


def test_arrival_of_the_living() -> None:
    house = House()
    sequence = house.add([1], 1, arrival=99.5)
    assert house.scheduler.arrival_of(sequence.id) == 99.5
    house.finish()
    with pytest.raises(KeyError):
        house.scheduler.arrival_of(sequence.id)


def test_integrity_sees_a_leak() -> None:
    house = House()
    sequence = house.add([1, 2, 3], 9)
    house.tick()
    sequence.waits = True
    with pytest.raises(IntegrityError, match="sequence 0 is among the running, but"):
        house.scheduler.check_integrity()
    sequence.waits = False
    del house.scheduler._sequences[0]
    house.scheduler._running.clear()
    with pytest.raises(IntegrityError, match="1 blocks are used, but no sequence is left"):
        house.scheduler.check_integrity()


# All of it at once

STEMS = ([1, 2, 3, 4, 5, 6, 0, 1, 2, 3], [1, 2, 3, 4, 6, 6, 6], [0] * 12)
MAX_TOKENS = 24
LARGEST = 12 + 2 + MAX_TOKENS - 1  # tokens in the KV cache


Ask = tuple[int, int | None, list[int], dict[str, object]]


@st.composite
def requests(draw: st.DrawFn) -> Ask:
    """(tick of arrival, ticks until it is cancelled, ticks from one pause or its end to the next, arguments of
    House.add)."""
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
    }
    turns = draw(st.sampled_from([[]] * 3 + [[2, 3], [1, 1, 1, 9], [6, 20, 2, 2]]))
    return draw(st.integers(0, 12)), draw(st.sampled_from([None] * 7 + [0, 3, 20])), turns, fields


@given(
    asks=st.lists(requests(), min_size=5, max_size=14), block_size=st.sampled_from([1, 2, 4]),
    pool=st.integers(LARGEST, LARGEST + 12), max_num_seqs=st.sampled_from([8, 6, 4, 1]),
    budget=st.sampled_from([16, 32, 8, 5, 1]), depth=st.sampled_from([1, 2, 2]),
    prefix_cache=st.sampled_from([True, True, False]), flush_at=st.integers(0, 60),
    aging=st.sampled_from([0.001, 0.1, 5]),
)
def test_all_get_what_they_would_have_got_alone(
    asks: list[Ask], block_size: int, pool: int, max_num_seqs: int, budget: int,
    depth: int, prefix_cache: bool, flush_at: int, aging: float,
) -> None:
    house = House(
        num_blocks=-(-pool // block_size), block_size=block_size, max_num_seqs=max_num_seqs, budget=budget, depth=depth,
        prefix_cache=prefix_cache, aging=aging,
    )
    all_sequences: list[Sequence] = []
    cancels: dict[int, list[Sequence]] = defaultdict(list)
    turns: dict[int, list[Sequence]] = defaultdict(list)
    cancelled: set[int] = set()
    for tick in range(60):
        for arrival, cancel_after, gaps, fields in asks:
            if arrival == tick:
                sequence = house.add(**fields)  # type: ignore[arg-type]
                all_sequences.append(sequence)
                if cancel_after is not None:
                    cancels[tick + cancel_after].append(sequence)
                for turn in itertools.accumulate(gaps, initial=tick):
                    turns[turn].append(sequence)
                turns[tick].remove(sequence)
        for sequence in turns[tick]:
            (house.unpause if sequence.paused else house.pause)(sequence)
        for sequence in cancels[tick]:
            if sequence.id in house.live:
                cancelled.add(sequence.id)
            house.cancel(sequence)
        if tick == flush_at:
            house.blocks.flush_prefix_cache()
            house.scheduler.check_integrity()
        house.tick()
    assert not any(sequence.paused for sequence in house.live.values())
    house.finish()
    assert len(all_sequences) == len(asks)
    for sequence in all_sequences:
        if sequence.id in cancelled:
            assert sequence.id not in house.reasons
            answer, _ = answer_alone(sequence.request)
            assert house.tokens[sequence.id] == answer[: len(house.tokens[sequence.id])]
        else:
            house.check_answer(sequence)
    assert 0 <= house.scheduler.prefix_hits <= house.scheduler.prefix_queries
    assert len(house.device.known) <= len(house.scheduler._ended)
    event(f"preemptions: {min(house.scheduler.preemptions, 3)}")
    event(f"hits: {house.scheduler.prefix_hits > 0}")
