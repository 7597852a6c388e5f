"""Samples of one call: the prompt is computed once, its blocks are shared, and no sample waits for ever."""

from __future__ import annotations

import pytest

from npuserve.npu.step import SamplingParams
from npuserve.service.errors import DeadlineExceeded
from npuserve.service.ipc.messages import PriorProgress
from npuserve.service.scheduling.block_manager import IntegrityError
from npuserve.service.scheduling.sequence import Sequence, State
from tests.service.scheduling.reference import answer_alone
from tests.service.scheduling.stepwise import TICK, SchedulerHarness

PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]  # 2 full blocks of 4 tokens, and 2 tokens
PRIVATE = [
    pytest.param(True, False, id="prefix cache"), pytest.param(True, True, id="bypass"),
    pytest.param(False, False, id="no prefix cache"), pytest.param(False, True, id="bypass without prefix cache"),
]


def states(samples: list[Sequence]) -> list[str]:
    return [sequence.state.value for sequence in samples]


def rows(harness: SchedulerHarness) -> list[tuple[int, int, int]]:
    """Run a step. Return (sequence id, start, number of tokens) of its rows."""
    return [(row.request_id, row.start, len(row.token_ids)) for row in harness.tick().rows]


@pytest.mark.parametrize(("prefix_cache", "bypass"), PRIVATE)
def test_samples_compute_the_prompt_once_and_share_its_blocks(prefix_cache: bool, bypass: bool) -> None:
    harness = SchedulerHarness(budget=8, prefix_cache=prefix_cache)
    samples = harness.add_samples(PROMPT, 4, 6, bypass_prefix_cache=bypass)
    assert states(samples) == ["waiting", "following", "following", "following"]
    assert harness.scheduler.num_waiting == 4
    assert rows(harness) == [(0, 0, 8)]
    assert states(samples)[1:] == ["following"] * 3
    assert rows(harness) == [(0, 8, 2)]
    assert states(samples)[1:] == ["waiting"] * 3
    assert rows(harness) == [(0, 10, 1), (1, 8, 2), (2, 8, 2), (3, 8, 2)]
    assert [sequence.block_ids[:2] for sequence in samples] == [samples[0].block_ids[:2]] * 4
    assert harness.blocks.counts.used == 2 + 4
    harness.finish()
    assert [sequence.cached_tokens for sequence in samples] == [0, 8, 8, 8]
    answers = set()
    for sequence in samples:
        harness.check_answer(sequence)
        answers.add(tuple(harness.tokens[sequence.id]))
    assert len(answers) == 4  # each has its own seed


@pytest.mark.parametrize("samples", [1, 8])
def test_blocks_of_samples_against_separate_requests(samples: int) -> None:
    """Eight answers to a prompt of 10 blocks: as samples of one call, and as requests with different salts."""
    prompt = [token % 7 for token in range(41)]
    harness = SchedulerHarness(num_blocks=128, max_num_seqs=8, budget=512)
    if samples == 1:
        for salt in range(8):
            harness.add(prompt, 3, cache_salt=str(salt))
    else:
        harness.add_samples(prompt, samples, 3)
        harness.tick()
    harness.tick()
    assert harness.blocks.counts.used == (8 * 11 if samples == 1 else 10 + 8)
    harness.finish()


@pytest.mark.parametrize(("prefix_cache", "bypass"), PRIVATE[1:])
def test_private_blocks_are_found_by_no_other_request(prefix_cache: bool, bypass: bool) -> None:
    harness = SchedulerHarness(prefix_cache=prefix_cache)
    harness.add(PROMPT)
    harness.finish()
    samples = harness.add_samples(PROMPT, 3, 20, bypass_prefix_cache=bypass)
    assert rows(harness) == [(samples[0].id, 0, 10)]  # it uses no prefix of another request
    other = harness.add(PROMPT, bypass_prefix_cache=bypass)
    further = harness.add_samples(PROMPT, 2, bypass_prefix_cache=bypass)
    harness.tick()
    assert not set(other.block_ids) & set(samples[0].block_ids)
    assert not set(further[0].block_ids) & set(samples[0].block_ids)
    assert len(harness.blocks.scopes) == 2
    cached = harness.blocks.counts.cached
    harness.finish()
    assert [s.cached_tokens for s in (*samples, other, *further)] == [0, 8, 8, 0, 0, 8]
    assert not harness.blocks.scopes
    if not prefix_cache:
        assert harness.blocks.counts.cached == 0
    assert harness.blocks.counts.cached >= cached - 2  # the scopes' blocks are free, the public ones still cached


def test_private_blocks_do_not_count_in_the_hit_rate() -> None:
    harness = SchedulerHarness()
    harness.add_samples(PROMPT, 3, bypass_prefix_cache=True)
    harness.finish()
    assert (harness.scheduler.memory.prefix_queries, harness.scheduler.memory.prefix_hits) == (0, 0)
    harness.add_samples(PROMPT, 3)
    harness.finish()
    assert (harness.scheduler.memory.prefix_queries, harness.scheduler.memory.prefix_hits) == (30, 16)


def test_samples_find_a_cached_prefix() -> None:
    harness = SchedulerHarness()
    harness.add(PROMPT)
    harness.finish()
    samples = harness.add_samples(PROMPT, 3)
    assert rows(harness) == [(1, 8, 2)]
    assert rows(harness) == [(1, 10, 1), (2, 8, 2), (3, 8, 2)]
    harness.finish()
    assert [sequence.cached_tokens for sequence in samples] == [8, 8, 8]


def test_samples_of_a_prompt_below_one_block_do_not_wait() -> None:
    harness = SchedulerHarness()
    samples = harness.add_samples([1, 2, 3, 4], 3)
    assert states(samples) == ["waiting"] * 3
    assert rows(harness) == [(0, 0, 4), (1, 0, 4), (2, 0, 4)]
    harness.finish()


def test_followers_block_no_other_request() -> None:
    harness = SchedulerHarness(budget=4, max_num_seqs=3)
    samples = harness.add_samples(PROMPT, 3, 20)
    harness.tick()
    other = harness.add([6], 2)
    assert [row[0] for row in rows(harness)] == [samples[0].id]  # the chunk takes the whole budget
    assert [row[0] for row in rows(harness)] == [samples[0].id, other.id]
    harness.finish()
    for sequence in (*samples, other):
        harness.check_answer(sequence)


def test_prompt_logprobs_of_the_first_sample_exclude_no_sharing() -> None:
    harness = SchedulerHarness()
    harness.add(PROMPT)
    harness.finish()
    samples = harness.add_samples(PROMPT, 3, sampling=SamplingParams(prompt_logprobs=0, logprobs=0))
    assert rows(harness) == [(1, 0, 10)]
    harness.finish()
    assert [len(harness.prompt_logprobs[sequence.id]) for sequence in samples] == [9, 0, 0]
    assert [sequence.cached_tokens for sequence in samples] == [0, 8, 8]
    for sequence in samples:
        harness.check_answer(sequence)


# Cancel


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("index", [0, 1])
def test_cancel_of_one_sample_leaves_the_others(ticks: int, index: int) -> None:
    """The sample is waiting, computes its prompt, follows, or generates."""
    harness = SchedulerHarness(budget=4)
    samples = harness.add_samples(PROMPT, 3, 20)
    for _ in range(ticks):
        harness.tick()
    harness.cancel(samples[index])
    harness.scheduler.check_integrity()
    left = [sequence for sequence in samples if sequence is not samples[index]]
    if ticks < 3:  # the prompt is not computed yet
        assert [s.state is State.FOLLOWING for s in left] == [False, True]
    harness.finish()
    for sequence in left:
        harness.check_answer(sequence)
    found = min(4 * ticks, 8) if index == 0 else 0  # what the first sample has computed before its cancel
    assert [sequence.cached_tokens for sequence in left] == [found, 8]


@pytest.mark.parametrize("ticks", range(6))
@pytest.mark.parametrize("bypass", [False, True])
def test_cancel_of_all_samples_frees_all_blocks(ticks: int, bypass: bool) -> None:
    harness = SchedulerHarness(budget=4)
    samples = harness.add_samples(PROMPT, 5, 20, bypass_prefix_cache=bypass)
    for _ in range(ticks):
        harness.tick()
    for sequence in samples:
        harness.cancel(sequence)
        harness.scheduler.check_integrity()
    assert harness.blocks.counts.used == 0
    assert not harness.blocks.scopes
    assert (harness.scheduler.num_waiting, harness.scheduler.has_work) == (0, False)
    if bypass:
        assert harness.blocks.counts.cached == 0
    harness.finish()


def test_cancel_between_launch_and_apply_of_the_prompt() -> None:
    harness = SchedulerHarness()
    samples = harness.add_samples(PROMPT, 3)
    harness.plan()
    harness.cancel(samples[0])
    assert states(samples)[1:] == ["waiting", "following"]
    harness.collect()
    harness.finish()
    for sequence in samples[1:]:
        harness.check_answer(sequence)


# Pause, preemption, quarantine


def test_pause_of_the_leader_makes_the_oldest_follower_the_leader() -> None:
    harness = SchedulerHarness(budget=4)
    samples = harness.add_samples(PROMPT, 4, 6)
    harness.tick()
    harness.pause(samples[0])
    assert states(samples) == ["paused", "waiting", "following", "following"]
    while samples[3].state is State.FOLLOWING:
        assert {row[0] for row in rows(harness)} == {samples[1].id}
    harness.unpause(samples[0])
    harness.finish()
    for sequence in samples:
        harness.check_answer(sequence)


def test_pause_of_a_follower_ends_its_wait() -> None:
    harness = SchedulerHarness(budget=4)
    samples = harness.add_samples(PROMPT, 3, 6)
    harness.pause(samples[1])
    assert states(samples) == ["waiting", "paused without blocks", "following"]
    harness.unpause(samples[1])
    assert states(samples) == ["waiting", "waiting", "following"]
    harness.finish()
    for sequence in samples:
        harness.check_answer(sequence)


def test_follower_counts_the_shared_tokens_unless_it_becomes_the_leader() -> None:
    harness = SchedulerHarness(budget=8)
    samples = harness.add_samples(PROMPT, 3, 6)
    assert [sequence.num_missing_tokens for sequence in samples] == [10, 2, 2]
    harness.cancel(samples[0])
    assert [sequence.num_missing_tokens for sequence in samples[1:]] == [10, 2]
    harness.tick()
    harness.tick()
    assert (samples[2].state, samples[2].num_missing_tokens) == (State.WAITING, 2)
    harness.finish()


def test_preempted_leader_stays_the_leader() -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=2, budget=2)
    old = harness.add([6], 12)
    harness.tick()
    samples = harness.add_samples(PROMPT, 3, 3)
    while not harness.scheduler.preemptions:
        harness.tick()
    assert states(samples) == ["preempted", "following", "following"]
    urgent = harness.add([5, 5], 2, priority=-100)
    harness.finish()
    assert harness.started[samples[0].id] < harness.started[urgent.id]
    for sequence in (old, urgent, *samples):
        harness.check_answer(sequence)


def test_quarantined_follower_waits_for_no_other_sample() -> None:
    """Each sample runs alone for its tokens. A follower that waited for a leader outside its group would never run."""
    harness = SchedulerHarness(budget=4)
    samples = harness.add_samples(PROMPT, 3, 6)
    for sequence in reversed(samples):
        harness.scheduler.isolate(sequence, 1, 2)
        harness.scheduler.check_integrity()
    assert states(samples) == ["waiting"] * 3
    harness.finish()
    for sequence in samples:
        harness.check_answer(sequence)


def test_quarantine_of_the_leader_alone_does_not_starve_followers() -> None:
    harness = SchedulerHarness(budget=4)
    samples = harness.add_samples(PROMPT, 3, 6)
    other = harness.add([6], 3)
    harness.scheduler.isolate(samples[0], 1, 4)
    harness.finish()
    for sequence in (*samples, other):
        harness.check_answer(sequence)


# Restart of the engine


@pytest.mark.parametrize("generated", [(0, 0, 0), (2, 0, 1), (2, 3, 1), (0, 2, 2)])
def test_restored_samples_share_the_prompt_again(generated: tuple[int, ...]) -> None:
    """Sample 0 has ended; the others continue with the tokens that they have."""
    harness = SchedulerHarness(num_blocks=32, budget=8)
    samples = []
    for index, count in enumerate(generated, 1):
        fields: dict[str, object] = {
            "request_id": "call", "arrival": 90.0, "samples": 4, "index": index, "sampling": SamplingParams(seed=index)}
        request = SchedulerHarness().add(PROMPT, 9, **fields).request
        answer, _ = answer_alone(request)
        samples.append(harness.add(
            PROMPT, 9, output_ids=answer[:count], progress=PriorProgress(accepted=True), **fields))
    assert states(samples) == ["waiting", "following", "following"]
    harness.finish()
    assert harness.scheduler.memory.prefix_hits == 16
    for sequence in samples:
        harness.check_answer(sequence)


# Expiry


def test_samples_that_never_ran_expire() -> None:
    harness = SchedulerHarness(budget=4, max_num_seqs=1)
    blocking = harness.add([6], 40)
    harness.tick()
    samples = harness.add_samples(PROMPT, 3, 9, deadline=harness.now + 20 * TICK)
    assert states(samples) == ["waiting", "following", "following"]
    for _ in range(12):
        harness.tick()
    assert {id: type(error) for id, error in harness.dropped.items()} == {s.id: DeadlineExceeded for s in samples}
    harness.finish()
    harness.check_answer(blocking)


def test_leader_that_expires_leaves_followers_of_a_later_deadline() -> None:
    harness = SchedulerHarness(budget=4)
    samples = harness.add_samples(PROMPT, 3, 9)
    harness.tick()
    harness.scheduler.change_reader(samples[0], (b"", 0), harness.now)
    harness.tick()
    assert list(harness.dropped) == [samples[0].id]
    harness.finish()
    for sequence in samples[1:]:
        harness.check_answer(sequence)


# Audit


def test_audit_finds_a_follower_without_a_leader() -> None:
    harness = SchedulerHarness()
    samples = harness.add_samples(PROMPT, 2)
    group = harness.scheduler._samples.leaders[samples[0].id]
    group.leader = None
    with pytest.raises(IntegrityError, match="the leaders are"):
        harness.scheduler.check_integrity()
    harness.scheduler._samples.leaders.clear()
    with pytest.raises(IntegrityError, match=r"the sequences \[1\] follow no leader"):
        harness.scheduler.check_integrity()


def test_audit_finds_a_wrong_count_of_live_samples() -> None:
    harness = SchedulerHarness()
    samples = harness.add_samples(PROMPT, 2)
    harness.scheduler._samples.leaders[samples[0].id].live = 3
    with pytest.raises(IntegrityError, match=r"2 samples are live, but the groups count \[3\]"):
        harness.scheduler.check_integrity()


def test_audit_finds_a_follower_in_a_wrong_state() -> None:
    harness = SchedulerHarness()
    samples = harness.add_samples(PROMPT, 2)
    samples[1].state = State.WAITING
    with pytest.raises(IntegrityError, match="sequence 1 is among the followers, but is waiting"):
        harness.scheduler.check_integrity()
    samples[1].state = State.FOLLOWING
    samples[0].state = State.PAUSED
    with pytest.raises(IntegrityError, match="sequence 0 leads other samples, but is paused"):
        harness.scheduler.check_integrity()


def test_audit_finds_a_scope_without_a_group() -> None:
    harness = SchedulerHarness(prefix_cache=False)
    harness.add_samples(PROMPT, 2)
    harness.tick()
    harness.blocks._scopes[77] = {b"digest"}
    with pytest.raises(IntegrityError, match="which no group has"):
        harness.scheduler.check_integrity()
