"""Rules of admission, and of calls with several samples: places in the queue, the client's limit, and deadlines."""

from __future__ import annotations

import pytest

from npuserve.service.errors import DeadlineExceeded, InvalidField, QueueFull
from npuserve.service.ipc.messages import PriorProgress
from npuserve.service.scheduling.admission import Admission, Load
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.latency_estimator import LatencyEstimator
from npuserve.service.scheduling.preemption import Share
from tests.service.scheduling.stepwise import TICK, SchedulerHarness
from tests.service.scheduling.test_sample_groups import PROMPT, states
from tests.service.structured_output.test_answer_matcher import LONG


def admission(estimator: LatencyEstimator | None = None) -> Admission:
    return Admission(
        estimator or LatencyEstimator(64), BlockManager(17, 4), max_num_seqs=2, max_queue=3, max_model_len=16)


def test_admission_is_full_at_the_places_to_run_and_to_wait() -> None:
    assert [admission().is_full(requests) for requests in (4, 5, 6)] == [False, True, True]


def test_admission_without_a_displaced_request_refuses_the_new_one() -> None:
    with pytest.raises(QueueFull, match=r"^queue full: max_queue is 3, and 4 requests wait$") as refused:
        admission().check_place(None, 4, 1.5)
    assert (refused.value.why, refused.value.retry_seconds) == ("queue_full", 1.5)
    harness = SchedulerHarness()
    sequence = harness.add([1])
    dropped = admission().check_place(sequence, 4, 1.5)
    assert dropped.sequence is sequence
    assert isinstance(dropped.error, QueueFull)
    assert (dropped.error.why, dropped.error.retry_seconds) == ("displaced", 1.5)


def test_admission_refuses_a_deadline_within_the_margin() -> None:
    rules = admission()
    rules.check_deadline(1.0, 2.0)
    with pytest.raises(DeadlineExceeded, match=r"^deadline: in 1\.000 s; the first token would take about 1\.000 s"):
        rules.check_deadline(1.0, 1.0)


def test_first_token_seconds_is_less_where_running_requests_yield() -> None:
    estimator = LatencyEstimator(64)
    estimator.record_step(0, 64, 0.64)
    estimator.record_answer(4.0, 5, 10)
    rules = admission(estimator)
    free, busy = (Load(2, 0, 0, free_slots=slots, free_blocks=4, prompt_tokens=0) for slots in (1, 0))
    own = estimator.prefill_seconds(8)
    assert rules.first_token_seconds(free, 0, 0, 8) == pytest.approx(own)
    assert rules.first_token_seconds(busy, 0, 0, 8) > own
    assert rules.first_token_seconds(busy, 0, 0, 8, lambda: Share(1, 0)) == pytest.approx(own)


@pytest.mark.parametrize(("prompt", "max_tokens", "error"), [
    (5, 12, r"stopping.max_tokens: must be in \[1, 11\], as max_model_len is 16 and the prompt has 5 tokens, got 12"),
    (16, 1, r"prompt: must be at most 15 tokens, as max_model_len is 16, got 16"),
])
@pytest.mark.parametrize("is_restored", [False, True])
def test_request_beyond_max_model_len_is_refused(
    prompt: int, max_tokens: int, error: str, is_restored: bool
) -> None:
    """A stream of an earlier server may have been within a larger limit."""
    harness = SchedulerHarness(max_model_len=16)
    with pytest.raises(InvalidField, match=error):
        harness.add([1] * prompt, max_tokens, progress=PriorProgress(accepted=is_restored))
    answer = harness.add([1] * 5, 11)
    harness.finish()
    harness.check_answer(answer)


def test_followers_count_in_the_queue_limit() -> None:
    harness = SchedulerHarness(max_num_seqs=2, max_queue=2)
    harness.add_samples(PROMPT, 4)
    harness.tick()
    with pytest.raises(QueueFull, match="max_queue is 2, and 3 requests wait"):
        harness.add([1])
    harness.finish()


def test_first_sample_beyond_the_client_limit_is_refused() -> None:
    harness = SchedulerHarness()
    harness.add_samples(PROMPT, 2, client="a", client_limit=5)
    with pytest.raises(QueueFull, match="2 requests of this client have not ended; the call needs 4 more") as refused:
        harness.add_samples(PROMPT, 4, client="a", client_limit=5)
    assert refused.value.why == "client_limit"
    assert len(harness.live) == 2
    harness.add_samples(PROMPT, 3, client="a", client_limit=5)
    harness.finish()


def test_follower_is_displaced_by_a_client_with_fewer_requests() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_queue=3)
    samples = harness.add_samples(PROMPT, 4, client="many")
    harness.tick()
    other = harness.add([1], client="few")
    assert isinstance(harness.dropped[samples[3].id], QueueFull)
    assert states(samples[:3]) == ["running", "waiting", "waiting"]
    harness.finish()
    harness.check_answer(other)


def test_restored_follower_with_tokens_is_not_displaced() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_queue=2)
    for index in range(3):
        harness.add(PROMPT, 9, request_id="call", arrival=90.0, samples=3, index=index, output_ids=[5],
                    progress=PriorProgress(accepted=True), client="many")
    with pytest.raises(QueueFull):
        harness.add([1], client="few")
    for sequence in list(harness.live.values()):
        harness.cancel(sequence)
    harness.finish()


def test_deadline_counts_the_prompt_of_a_call_once() -> None:
    """A prompt is expected to take 8 ticks. Within 30 ticks four samples can begin, but not four requests."""
    prompt = [token % 7 for token in range(64)]
    harness = SchedulerHarness(num_blocks=128, budget=8)
    harness.add([1] * 40, 4, cache_salt="to measure a step")
    harness.finish()
    samples = harness.add_samples(prompt, 4, 2, deadline=harness.now + 30 * TICK)
    harness.finish()
    assert [harness.reasons[sequence.id] for sequence in samples] == ["length"] * 4
    assert not harness.dropped
    for salt in "abc":
        harness.add(prompt, 2, cache_salt=salt, deadline=harness.now + 30 * TICK)
    with pytest.raises(DeadlineExceeded):
        harness.add(prompt, 2, cache_salt="d", deadline=harness.now + 30 * TICK)
    for sequence in list(harness.live.values()):
        harness.cancel(sequence)
    harness.finish()


def test_deadline_of_late_samples_does_not_count_the_computed_prompt() -> None:
    """The prompt takes 8 ticks. The first sample has computed it, so the others need a tick each."""
    prompt = [token % 7 for token in range(64)]
    harness = SchedulerHarness(num_blocks=128, budget=8)
    call = {"request_id": "call", "samples": 3, "arrival": harness.now}
    harness.add(prompt, 9, index=0, **call)
    for _ in range(8):
        harness.tick()
    late = [harness.add(prompt, 1, index=index, deadline=harness.now + 4 * TICK, **call) for index in (1, 2)]
    assert states(late) == ["waiting", "waiting"]
    harness.finish()
    assert not harness.dropped


def test_deadline_of_a_sample_counts_the_prompt_while_the_others_compile() -> None:
    prompt = [token % 7 for token in range(64)]
    harness = SchedulerHarness(num_blocks=128, budget=8)
    harness.add([1] * 40, 4, cache_salt="to measure a step")
    harness.finish()
    call = {"request_id": "call", "samples": 2, "arrival": harness.now, "constraint": LONG}
    first = harness.add(prompt, 2, compiling=True, index=0, **call)
    with pytest.raises(DeadlineExceeded):
        harness.add(prompt, 2, compiling=True, index=1, deadline=harness.now + 4 * TICK, **call)
    harness.cancel(first)
