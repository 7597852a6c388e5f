"""Forced tokens of constrained requests: which they are, and the steps that compute them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import pytest

from npuserve.npu.step import SamplingParams, StepResult
from npuserve.service.errors import QueueFull
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.sequence import State
from npuserve.service.structured_output.answer_matcher import MAX_FORCED_WORDS, AnswerMatcher
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.errors import MatcherError
from npuserve.service.structured_output.mask_threads import Answer
from tests.service.scheduling.reference import END_IDS, VOCABULARY, Mask, answer_alone
from tests.service.scheduling.stepwise import SchedulerHarness
from tests.service.structured_output.test_answer_matcher import LONG, matcher
from tests.support.fake_grammar import FakeMatcher, allowed, answer_matcher

FORCED = Constraint("regex", "forced 3")


def forced(made: AnswerMatcher) -> list[int]:
    """Return the forced tokens that follow."""
    made.prepare(VOCABULARY)
    return made.forced_run or []


@pytest.mark.parametrize("min_forced", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fields", [
    {}, {"budget": 3, "max_num_seqs": 3}, {"num_blocks": 7, "block_size": 2}, {"max_num_seqs": 1}])
def test_answers_with_forced_tokens_are_those_of_a_request_alone(
    depth: int, fields: dict[str, object], min_forced: int
) -> None:
    harness = SchedulerHarness(depth=depth, min_forced=min_forced, **fields)  # type: ignore[arg-type]
    sequences = [
        harness.add([1, 2, number % 7], 3 + number % 9, constraint=(FORCED, LONG, None)[number % 3],
                    sampling=SamplingParams(seed=number)) for number in range(24)]
    harness.finish()
    for sequence in sequences:
        harness.check_answer(sequence)
    assert bool(harness.scheduler.forced_tokens) == bool(min_forced)
    assert bool(harness.scheduler.preemptions) == ("num_blocks" in fields)


def with_run(prompt: list[int], max_tokens: int, length: int) -> Constraint:
    """Return a constraint under which an answer has one run of `length` forced tokens, and no longer one. At least two
    tokens are before it, and one after it."""
    for key in range(1000):
        constraint = Constraint("regex", f"forced {key}")
        request = Request("r", prompt, max_tokens, 0.0, constraint=constraint)
        made, runs = answer_matcher(request, VOCABULARY, END_IDS), []
        for token in answer_alone(request)[0]:
            runs.append(len(forced(made)))
            made.advance(token)
        if max(runs) == length and runs.count(length) == 1 and 1 < runs.index(length) < len(runs) - length:
            return constraint
    raise AssertionError("no key")


@pytest.mark.parametrize(("depth", "saved"), [(1, lambda length: length), (2, lambda length: length - 1)])
def test_run_of_forced_tokens_saves_steps(depth: int, saved: Callable[[int], int]) -> None:
    """With two steps in flight, the step that computes the token before the run was planned already."""
    constraint = with_run([1, 2], 12, 4)
    rows = {}
    for min_forced in (0, 4, 5):
        harness = SchedulerHarness(depth=depth, min_forced=min_forced)
        sequence = harness.add([1, 2], 12, constraint=constraint)
        steps = []
        while harness.live or harness.pipeline:
            steps.append(harness.tick())
        harness.check_answer(sequence)
        rows[min_forced] = [len(row.token_ids) for step in steps for row in step.rows]
        assert harness.scheduler.forced_tokens == (4 if min_forced == 4 else 0)
    assert rows[5] == rows[0]
    assert len(rows[0]) - len(rows[4]) == saved(4)
    assert max(rows[4][1:]) == (5 if depth == 1 else 4)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", [{"logprobs": 0}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}])
def test_forced_tokens_that_need_a_result_are_sampled(depth: int, sampling: dict[str, float]) -> None:
    harness = SchedulerHarness(depth=depth)
    sequences = [harness.add([1, number], 12, constraint=FORCED, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]
                 for number in range(6)]
    harness.finish()
    for sequence in sequences:
        harness.check_answer(sequence)
    assert harness.scheduler.forced_tokens == 0


def test_chunk_of_forced_tokens_comes_before_older_prompts() -> None:
    harness = SchedulerHarness(budget=8, min_forced=4)
    answer = harness.add([1, 2], 12, constraint=with_run([1, 2], 12, 4))
    harness.tick()
    assert not harness.scheduler.forced_tokens
    prompt = harness.add([3] * 90, 2, arrival=harness.now - 1)
    while not harness.scheduler.forced_tokens and harness.live:
        harness.tick()
    length = answer.num_uncomputed_tokens
    assert 1 < length < 8
    step = harness.tick()
    assert [(row.request_id, len(row.token_ids)) for row in step.rows] == [(answer.id, length), (prompt.id, 8 - length)]
    harness.finish()
    harness.check_answer(answer)
    harness.check_answer(prompt)


def test_mask_of_a_forced_token_has_one_bit() -> None:
    for text in ("forced 3", "forced 5", "forced 8"):
        made = matcher(text)
        for _ in range(12):
            run, mask = forced(made), made.mask()
            assert mask is not None
            found = [token for token in range(VOCABULARY) if allowed(token, mask)]
            if run:
                assert found == run[:1]
            made.advance(found[0])
            assert forced(made)[: len(run[1:])] == run[1:]


def test_run_ends_before_tokens_that_the_request_changes() -> None:
    run = next(run for key in range(99) if len(run := forced(matcher(f"forced {key}"))) > 3 and len({*run[:3]}) == 3)
    text = next(f"forced {key}" for key in range(99) if forced(matcher(f"forced {key}")) == run)
    for fields in (
        {"stop_token_ids": frozenset(run[2:3])}, {"sampling": SamplingParams(logit_bias={run[2]: 1.0})}
    ):
        assert forced(matcher(text, **fields)) == run[:2]


def test_run_is_not_known_after_another_token() -> None:
    made = matcher("forced 3")
    first = forced(made)[0]
    made.advance(next(token for token in range(VOCABULARY) if token != first and made._matcher.allows(token)))  # type: ignore[attr-defined]
    assert (made.error, made.forced_run) == (None, None)


@pytest.mark.parametrize("more", [0, 1])
def test_forced_text_is_not_looked_for_where_many_tokens_are_allowed(more: int) -> None:
    made = matcher("forced 3")
    words = MAX_FORCED_WORDS + more
    made._matcher.fill = lambda bits: bits.__setitem__(slice(words), 1)  # type: ignore[method-assign]
    made._matcher.forced = lambda mask: [5, 6]  # type: ignore[method-assign]
    made.prepare(32 * words + 32)
    assert made.forced_run == ([] if more else [5, 6])


@pytest.mark.parametrize("depth", [1, 2])
def test_failure_within_a_run_ends_the_request_after_the_tokens_before(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = with_run([1, 2], 12, 4)
    harness, whole = SchedulerHarness(depth=depth, min_forced=4), SchedulerHarness()
    broken, right = harness.add([1, 2], 12, constraint=constraint), whole.add([1, 2], 12, constraint=constraint)
    whole.finish()
    assert broken.matcher
    library, advance = broken.matcher._matcher, FakeMatcher.advance
    left: list[int] = []  # forced tokens after each token

    def exceed(self: FakeMatcher, token_id: int) -> bool:
        if self is library and broken.matcher:
            left.append(len(broken.matcher.forced_run or ()))
            if left[-3:] == [3, 2, 1]:
                raise MatcherError("too many items")
        return advance(self, token_id)

    monkeypatch.setattr(FakeMatcher, "advance", exceed)
    harness.finish()
    assert isinstance(harness.failed[broken.id], QueueFull)
    assert harness.scheduler.forced_tokens == 2
    made = harness.tokens[broken.id]
    assert made == whole.tokens[right.id][: len(made)]


def test_no_run_is_appended_while_its_grammar_is_in_use() -> None:
    harness = SchedulerHarness(min_forced=4)
    sequence = harness.add([1, 2], 12, constraint=with_run([1, 2], 12, 4))
    assert sequence.matcher
    lexer = sequence.matcher.lexer
    prepare = harness.pipeline._structured_output.prepare
    is_launch = itertools.cycle([True, False])

    def prepare_others_too(answers: Iterable[Answer], seconds: float) -> None:
        prepare(answers, seconds)
        lexer.jobs = 0 if next(is_launch) else 1

    harness.pipeline._structured_output.prepare = prepare_others_too  # type: ignore[method-assign]
    while harness.live:
        lexer.jobs = 0
        harness.tick()
    assert harness.scheduler.forced_tokens == 0
    harness.check_answer(sequence)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_masks_are_those_of_tokens_that_are_taken(is_cancelled: bool) -> None:
    """Not of a request that has ended, nor in place of the first token of an appended run."""
    harness, skipped = SchedulerHarness(depth=2), []
    sequences = {one.id: one for one in (harness.add([1, number], 12, constraint=FORCED) for number in range(8))}
    sample, prepare = harness.device.sample, harness.pipeline._structured_output.prepare

    def checked_sample(handle: StepResult, masks: Mapping[int, Mask]) -> None:
        assert all(sequences[key].state is not State.ENDED and sequences[key].num_pending_tokens for key in masks)
        skipped.extend(harness.device.unsampled[1].keys() - masks.keys())  # type: ignore[index]
        sample(handle, masks)

    def checked_prepare(answers: Iterable[Answer], seconds: float) -> None:
        answers = list(answers)
        assert not any(one.matcher in answers for one in sequences.values() if one.state is State.ENDED)
        prepare(answers, seconds)

    harness.device.sample = checked_sample  # type: ignore[method-assign]
    harness.pipeline._structured_output.prepare = checked_prepare  # type: ignore[method-assign]
    if is_cancelled:
        harness.plan()
        harness.plan()
        harness.cancel(sequences[0])
        harness.collect()
    harness.finish()
    assert skipped
    for sequence in [*sequences.values()][is_cancelled:]:
        harness.check_answer(sequence)


def test_run_at_the_beginning_follows_the_first_token_after_the_prompt() -> None:
    """The reports of the prompt's chunks are progress, too."""
    text = next(text for key in range(99) if len(forced(matcher(text := f"forced {key}"))) > 3)
    harness = SchedulerHarness(budget=4)
    sequence = harness.add(
        [1] * 12, 8, constraint=Constraint("regex", text), sampling=SamplingParams(prompt_logprobs=0))
    for _ in range(2):
        harness.tick()
    assert (len(harness.prompt_logprobs[sequence.id]), harness.tokens[sequence.id]) == (8, [])
    harness.finish()
    assert harness.scheduler.forced_tokens
    harness.check_answer(sequence)


def test_failure_of_forced_ends_the_request_with_its_next_token() -> None:
    harness = SchedulerHarness(depth=2)
    broken, other = harness.add([1, 2], 9, constraint=FORCED), harness.add([1, 2], 9, constraint=LONG)
    harness.plan()

    def exceed(mask: object = None) -> list[int]:
        raise MatcherError("too many items")

    assert broken.matcher
    broken.matcher.forced_run = None
    broken.matcher._matcher.forced = exceed  # type: ignore[method-assign]
    harness.collect()
    assert broken.num_generated_tokens == 1
    harness.finish()
    assert isinstance(harness.failed[broken.id], QueueFull)
    harness.check_answer(other)
