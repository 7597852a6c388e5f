"""Constrained rows whose masks are late: equal answers, no wait of other rows, no starvation."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from npuserve.npu.step import SamplingParams
from npuserve.service import metrics
from npuserve.service.scheduling.sequence import Sequence, State
from npuserve.service.structured_output.constraint import Constraint
from tests.service.scheduling.stepwise import SchedulerHarness
from tests.service.structured_output.test_answer_matcher import LONG, SHORT
from tests.support.fake_grammar import FakeMatcher

FORCED = Constraint("regex", "forced 3")


def deferred() -> float:
    return float(metrics.deferred_rows_total._value.get())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let about a third of the masks take up to a millisecond."""
    fill, rng = FakeMatcher.fill, random.Random(5)

    def fill_slowly(self: FakeMatcher, bits: Any) -> None:
        time.sleep(max(0.0, rng.random() - 0.66) / 300)
        fill(self, bits)

    monkeypatch.setattr(FakeMatcher, "fill", fill_slowly)


@pytest.mark.parametrize("mask_seconds", [0.0, 0.0003])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fields", [
    {}, {"budget": 2}, {"num_blocks": 7, "block_size": 2}, {"max_num_seqs": 1}, {"prefix_cache": False},
    {"block_size": 1}, {"min_forced": 0}])
def test_answers_with_deferred_rows_are_those_of_a_request_alone(
    slow: None, depth: int, fields: dict[str, Any], mask_seconds: float
) -> None:
    before = deferred()
    harness = SchedulerHarness(depth=depth, mask_seconds=mask_seconds, **fields)
    sequences = [
        harness.add([1, 2, number % 7], 3 + number % 9, constraint=(LONG, SHORT, None, FORCED)[number % 4],
                    sampling=SamplingParams(seed=number, logprobs=0 if number % 3 else None)) for number in range(16)]
    sequences += harness.add_samples([1] * 9, 3, 5, constraint=LONG, sampling=SamplingParams(prompt_logprobs=0))
    sequences += harness.add_samples([1] * 8, 3, 5, constraint=FORCED)
    rng = random.Random(7)
    while harness.live or harness.pipeline:
        if live := list(harness.live.values()):
            chosen = rng.choice(live)
            harness.unpause(chosen) if chosen.is_paused or rng.random() < 0.7 else harness.pause(chosen)
        harness.tick()
    for sequence in sequences:
        harness.check_answer(sequence)
    assert mask_seconds or deferred() > before


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_of_an_earlier_engine_with_deferred_rows_are_the_same(slow: None, depth: int) -> None:
    for constraint in (LONG, FORCED):
        whole = SchedulerHarness()
        answer = whole.tokens[whole.add([1, 2, 3], 9, constraint=constraint).id]
        whole.finish()
        for made in range(1, len(answer)):
            harness = SchedulerHarness(budget=4, depth=depth, mask_seconds=0.0)
            sequence = harness.add([1, 2, 3], 9, constraint=constraint, output_ids=answer[:made])
            harness.finish()
            harness.check_answer(sequence)


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_do_not_wait_for_the_mask_of_another_grammar(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fill of one mask lasts until all others have ended. The rows of its grammar wait, and then continue."""
    ended, fill = threading.Event(), FakeMatcher.fill
    harness = SchedulerHarness(depth=depth, mask_seconds=0.01)
    first = harness.add([1, 2], 9, constraint=LONG)
    others = [harness.add([2, number], 9) for number in range(3)]

    def fill_late(self: FakeMatcher, bits: Any) -> None:
        assert ended.wait(60)
        fill(self, bits)

    monkeypatch.setattr(FakeMatcher, "fill", fill_late)
    while any(sequence.id in harness.live for sequence in others):
        step = harness.tick()
        running = [sequence for sequence in others if sequence.id in harness.live]
        if len(harness.started) == 4 and depth == 1:
            assert {row.request_id for row in step.rows} >= {sequence.id for sequence in running}
    assert not harness.tokens[first.id]
    assert first.is_preparing
    ended.set()
    harness.finish()
    for sequence in (first, *others):
        harness.check_answer(sequence)


def test_deferred_row_is_computed_again_once_and_its_block_is_shared_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt fills its blocks. Its last position may be written until it is computed with a mask."""
    planned, fill = threading.Event(), FakeMatcher.fill

    def fill_late(self: FakeMatcher, bits: Any) -> None:
        assert planned.wait(60)
        fill(self, bits)

    monkeypatch.setattr(FakeMatcher, "fill", fill_late)
    harness = SchedulerHarness(mask_seconds=0.0)
    first = harness.add([1] * 8, 4, constraint=LONG)
    step = harness.tick()
    assert [(row.start, len(row.token_ids)) for row in step.rows] == [(0, 8)]
    assert (first.num_computed_tokens, first.num_pending_tokens, len(harness.blocks._cached)) == (7, 0, 0)
    assert harness.blocks.find_prefix(first.blocks, [1] * 9) == first.block_ids[:1]
    planned.set()
    harness.pipeline.wait_for_masks()
    step = harness.tick()
    assert [(row.start, row.token_ids) for row in step.rows] == [(7, [1])]
    assert harness.blocks.find_prefix(first.blocks, [1] * 9) == first.block_ids[:2]
    harness.finish()
    harness.check_answer(first)


@pytest.mark.parametrize("how", ["cancel", "pause"])
@pytest.mark.parametrize("depth", [1, 2])
def test_end_or_pause_of_a_deferred_row(slow: None, how: str, depth: int) -> None:
    harness = SchedulerHarness(depth=depth, mask_seconds=0.0)
    sequence, other = harness.add([1, 2], 9, constraint=LONG), harness.add([1, 3], 9, constraint=LONG)

    def is_deferred(one: Sequence) -> bool:
        return one.state is State.RUNNING and one.is_preparing

    while not is_deferred(sequence):
        harness.tick()
    if how == "cancel":
        harness.cancel(sequence)
    else:
        harness.pause(sequence)
        harness.tick()
        harness.unpause(sequence)
    harness.finish()
    harness.check_answer(other)
    if how == "pause":
        harness.check_answer(sequence)


def test_masks_that_become_ready_after_drafts_were_chosen_leave_steps_in_the_budget(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts of one request fill the budget beside those whose masks are late then."""
    harness = SchedulerHarness(max_num_seqs=4, budget=5, drafts="right")
    sequences = [harness.add([index + 1, 2, 3], 24, cache_salt=str(index)) for index in range(4)]
    choose = harness.scheduler.drafting.choose
    late: set[int] = set()
    monkeypatch.setattr(Sequence, "is_preparing", property(lambda sequence: sequence.id in late))
    most_drafts = 0

    def choose_before_masks(*arguments: Any, **keywords: Any) -> Any:
        nonlocal most_drafts
        late.update(sequence.id for sequence in sequences[1:])
        drafts = choose(*arguments, **keywords)
        late.clear()
        most_drafts = max(most_drafts, sum(map(len, drafts.values())))
        return drafts

    monkeypatch.setattr(harness.scheduler.drafting, "choose", choose_before_masks)
    harness.finish()
    assert most_drafts > 1
    for sequence in sequences:
        harness.check_answer(sequence)
