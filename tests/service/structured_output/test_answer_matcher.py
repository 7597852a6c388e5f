"""Constrained requests in the scheduler: their wait, their masks, their end."""

from __future__ import annotations

import pytest

from npuserve.npu.step import SamplingParams
from npuserve.service.errors import DeadlineExceeded, InternalError, QueueFull
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import IntegrityError
from npuserve.service.scheduling.sequence import State
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.constraint import Constraint
from tests.service.scheduling.reference import END_IDS, VOCABULARY, answer_alone
from tests.service.scheduling.stepwise import TICK, SchedulerHarness, crowded
from tests.support.fake_grammar import FakeCompilation, allowed, answer_matcher, next_mask

LONG = Constraint("regex", "3")
SHORT = Constraint("regex", "5 4")


def under(text: str = "3", **fields: object) -> Request:
    """Return a request with a constraint."""
    return Request("r", [1, 2], 9, 0.0, constraint=Constraint("regex", text), **fields)  # type: ignore[arg-type]


def matcher(text: str = "3", **fields: object) -> AnswerMatcher:
    return answer_matcher(under(text, **fields), VOCABULARY, END_IDS)


def seeded(prompt: list[int], length: int) -> SamplingParams:
    """Return sampling parameters under which a request under LONG has max_tokens == `length` tokens."""
    return next(found for seed in range(1000) if len(answer_alone(Request(
        "r", prompt, length, 0.0, found := SamplingParams(seed=seed), constraint=LONG))[0]) == length)


# The matcher of an answer


def test_matcher_ends_at_an_end_token() -> None:
    made = matcher("3 2")
    while not made.has_ended:
        mask = next_mask(made, VOCABULARY)
        assert mask is not None
        made.advance(next(token for token in range(VOCABULARY) if allowed(token, mask)))
    assert made.error is None
    assert made.is_complete
    assert next_mask(made, VOCABULARY) is None
    assert made.error is None


def test_matcher_refuses_a_token_with_an_internal_error() -> None:
    made = matcher()
    mask = next_mask(made, VOCABULARY)
    assert mask is not None
    made.advance(next(token for token in range(VOCABULARY) if not allowed(token, mask)))
    assert isinstance(made.error, InternalError)
    assert (made.is_prepared, next_mask(made, VOCABULARY), made.lexer.is_worn) == (True, None, False)


def test_matcher_beyond_its_limits_names_the_field_and_can_be_retried() -> None:
    made = matcher("heavy 3")
    for _ in range(2):
        mask = next_mask(made, VOCABULARY)
        assert mask is not None
        made.advance(next(token for token in range(VOCABULARY) if allowed(token, mask)))
    assert next_mask(made, VOCABULARY) is None
    assert isinstance(made.error, QueueFull)
    assert made.error.message == "regex: cannot be followed within limits: too many items"
    assert not made.lexer.is_worn


def test_matcher_without_any_token_fails() -> None:
    compilation = FakeCompilation(LONG, VOCABULARY, END_IDS, done=True)
    made = AnswerMatcher(under(), compilation, END_IDS)
    compilation.made[0].fill = lambda bits: bits.fill(0)  # type: ignore[method-assign]
    assert next_mask(made, VOCABULARY) is None
    assert isinstance(made.error, InternalError)


@pytest.mark.parametrize("error", [RuntimeError("bug"), BaseException("a panic of a library in Rust")])
@pytest.mark.parametrize("method", ["fill", "forced", "advance"])
def test_matcher_failure_of_the_library_is_an_internal_error(method: str, error: BaseException) -> None:
    compilation = FakeCompilation(LONG, VOCABULARY, END_IDS, done=True)
    made = AnswerMatcher(under(), compilation, END_IDS)

    def broken(argument: object) -> None:
        raise error

    setattr(compilation.made[0], method, broken)
    made.prepare(VOCABULARY)
    made.advance(0)
    assert isinstance(made.error, InternalError)
    assert made.error.message == "regex: the matcher failed"
    assert next_mask(made, VOCABULARY) is None


def test_discarded_matcher_computes_nothing() -> None:
    made = matcher()
    made.discard()
    made.prepare(VOCABULARY)
    assert not made.is_prepared


# The wait for the grammar


def test_compiling_request_waits_and_others_run() -> None:
    harness = SchedulerHarness()
    waiting = harness.add([1, 2], 9, constraint=LONG, compiling=True)
    other = harness.add([3, 4], 9)
    assert (waiting.state, harness.scheduler.num_waiting) == (State.COMPILING, 2)
    assert [row.request_id for row in harness.tick().rows] == [other.id]
    assert not waiting.block_ids
    harness.constrain(waiting)
    assert waiting.id in [row.request_id for row in harness.tick().rows]
    harness.finish()
    harness.check_answer(waiting)
    harness.check_answer(other)


def test_compiling_request_enters_the_queue_in_its_old_order() -> None:
    harness = SchedulerHarness(max_num_seqs=1)
    running = harness.add([1], 4)
    harness.tick()
    first = harness.add([1, 2], 2, constraint=LONG, compiling=True)
    harness.now += TICK
    second = harness.add([3, 4], 2)
    harness.constrain(first)
    assert list(harness.scheduler._queue) == [first, second]
    harness.finish()
    harness.check_answer(running)


@pytest.mark.parametrize("is_followed", [False, True])
def test_compiling_request_can_be_cancelled(is_followed: bool) -> None:
    harness = SchedulerHarness()
    samples = harness.add_samples([1] * 9, 2, constraint=LONG, compiling=True)
    harness.cancel(samples[0])
    harness.constrain(samples[1])
    if not is_followed:
        harness.cancel(samples[1])
    harness.finish()
    if is_followed:
        harness.check_answer(samples[1])
    assert harness.tick().ended == []


def test_compiling_request_expires() -> None:
    harness = SchedulerHarness()
    late = harness.add([1, 2], 9, constraint=LONG, compiling=True, deadline=harness.now + 3 * TICK)
    for _ in range(4):
        harness.tick()
        harness.now += TICK
    assert isinstance(harness.dropped[late.id], DeadlineExceeded)
    assert harness.scheduler.num_waiting == 0


def test_compiling_request_counts_in_the_queue_and_is_displaced() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_queue=2)
    mine = [harness.add([1], 4, client="a", constraint=LONG, compiling=True) for _ in range(3)]
    with pytest.raises(QueueFull, match=r"max_queue is 2, and 3 requests wait"):
        harness.add([1], 4, client="a")
    other = harness.add([1], 4, client="b")
    assert list(harness.dropped) == [mine[-1].id]
    for sequence in mine[:2]:
        harness.constrain(sequence)
    harness.finish()
    for sequence in (*mine[:2], other):
        harness.check_answer(sequence)


@pytest.mark.parametrize("compiled", ["before the pause ends", "after the pause", "before"])
def test_pause_while_compiling(compiled: str) -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2], 9, constraint=SHORT, compiling=True)
    if compiled == "before":
        harness.constrain(sequence)
    harness.pause(sequence)
    if compiled == "before the pause ends":
        harness.constrain(sequence)
    assert harness.tick().rows == []
    assert sequence.state is State.PAUSED_WITHOUT_BLOCKS
    harness.unpause(sequence)
    assert sequence.state is (State.COMPILING if compiled == "after the pause" else State.WAITING)
    harness.constrain(sequence)
    harness.finish()
    harness.check_answer(sequence)


def test_cancel_of_a_request_paused_while_compiling() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2], 9, constraint=SHORT, compiling=True)
    harness.pause(sequence)
    harness.cancel(sequence)
    harness.finish()


def test_samples_share_the_prompt_after_the_wait() -> None:
    harness = SchedulerHarness()
    samples = harness.add_samples([1] * 9, 3, 9, constraint=LONG, compiling=True)
    assert {sequence.state for sequence in samples} == {State.COMPILING}
    for sequence in samples:
        harness.constrain(sequence)
    assert [sequence.state for sequence in samples] == [State.WAITING, State.FOLLOWING, State.FOLLOWING]
    harness.finish()
    assert harness.scheduler.memory.prefix_hits == 16
    for sequence in samples:
        harness.check_answer(sequence)


def test_prepare_refuses_before_another_is_displaced() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_queue=1)
    mine = [harness.add([1], 4, client="a") for _ in range(2)]
    refused = Request("r", [1], 4, harness.now, client="b")

    def full() -> None:
        raise QueueFull("full")

    with pytest.raises(QueueFull):
        harness.scheduler.add(refused, (b"", 0), harness.now, full)
    harness.finish()
    for sequence in mine:
        harness.check_answer(sequence)


def test_audit_finds_a_missing_matcher() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2], 9, constraint=LONG)
    sequence.matcher = None
    with pytest.raises(IntegrityError, match="sequence 0 is waiting, and its matcher is missing"):
        harness.scheduler.check_integrity()
    sequence.state = State.COMPILING
    with pytest.raises(IntegrityError, match="among the waiting, but is compiling"):
        harness.scheduler.check_integrity()


# Answers


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fields", [
    {}, {"budget": 2}, {"num_blocks": 6, "block_size": 2}, {"max_num_seqs": 1}, {"prefix_cache": False}])
def test_constrained_answers_are_those_of_a_request_alone(depth: int, fields: dict[str, object]) -> None:
    harness = SchedulerHarness(depth=depth, **fields)  # type: ignore[arg-type]
    sequences = [
        harness.add([1, 2, number % 7], 7, constraint=(LONG, SHORT, None)[number % 3], sampling=SamplingParams(
            seed=number, logprobs=0 if number % 2 else None)) for number in range(12)]
    harness.finish()
    for sequence in sequences:
        harness.check_answer(sequence)
    if "num_blocks" in fields:
        assert harness.scheduler.preemptions


def test_constraint_ends_an_answer_before_min_tokens() -> None:
    harness = SchedulerHarness(depth=2)
    sequence = harness.add([1, 2], 20, constraint=SHORT, sampling=SamplingParams(min_tokens=9, ending_ids=(6,)))
    harness.finish()
    harness.check_answer(sequence)
    assert harness.reasons[sequence.id] == "eos"
    assert len(harness.tokens[sequence.id]) <= 5


def test_end_token_that_is_a_stop_token_is_named() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2], 20, constraint=SHORT, stop_token_ids=END_IDS)
    harness.finish()
    assert harness.reasons[sequence.id] == "stop_token"
    assert sequence.finish("stop_token").grammar_completed


def test_finish_of_cut_answer_is_not_complete() -> None:
    harness = SchedulerHarness()
    sequence = harness.add([1, 2], 8, constraint=LONG, sampling=seeded([1, 2], 8))
    while sequence.num_generated_tokens < 3:
        harness.tick()
    assert not any(sequence.finish("stop_string", keep).grammar_completed for keep in range(4))
    assert sequence.finish("aborted").grammar_completed
    harness.cancel(sequence)


@pytest.mark.parametrize("depth", [1, 2])
def test_failing_matcher_ends_its_request_alone(depth: int) -> None:
    harness = SchedulerHarness(depth=depth)
    heavy = harness.add([1, 2], 9, constraint=Constraint("regex", "heavy 3"))
    other = harness.add([1, 2], 9, constraint=LONG)
    harness.finish()
    assert list(harness.failed) == [heavy.id]
    assert isinstance(harness.failed[heavy.id], QueueFull)
    assert len(harness.tokens[heavy.id]) == 2
    harness.check_answer(other)


def test_violating_token_ends_its_request_alone() -> None:
    harness = SchedulerHarness()
    broken, other = harness.add([1, 2], 9, constraint=LONG), harness.add([1, 2], 9, constraint=LONG)
    harness.plan()
    assert broken.matcher
    broken.matcher._matcher.allows = lambda token: False  # type: ignore[attr-defined]
    harness.collect()
    harness.finish()
    assert isinstance(harness.failed[broken.id], InternalError)
    harness.check_answer(other)


def test_preempted_request_keeps_its_matcher() -> None:
    harness = crowded(depth=2)
    first, second = (
        harness.add(prompt, 8, constraint=LONG, sampling=seeded(prompt, 8)) for prompt in ([1, 1, 1], [2, 2, 2]))
    kept = second.matcher
    harness.finish()
    assert harness.scheduler.preemptions
    assert second.matcher is kept
    harness.check_answer(first)
    harness.check_answer(second)


def test_constrained_request_of_an_earlier_engine_continues() -> None:
    whole = SchedulerHarness()
    answer = whole.tokens[whole.add([1, 2, 3], 9, constraint=LONG).id]
    whole.finish()
    for made in range(1, len(answer)):
        harness = SchedulerHarness(budget=4, depth=2)
        sequence = harness.add([1, 2, 3], 9, constraint=LONG, output_ids=answer[:made])
        harness.finish()
        assert harness.tokens[sequence.id] == answer[made:]
        harness.check_answer(sequence)


def test_quarantine_begins_after_the_wait() -> None:
    harness = SchedulerHarness(depth=2)
    suspect, other = harness.add([1, 2], 9, constraint=LONG, compiling=True), harness.add([3, 4], 12)
    harness.tick()
    harness.constrain(suspect)
    harness.scheduler.isolate(suspect, 1, 4)
    while harness.scheduler.quarantine:
        harness.tick()
    harness.finish()
    harness.check_answer(suspect)
    harness.check_answer(other)
