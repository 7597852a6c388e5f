"""Fairness between clients by computed tokens, and displacement from a full queue."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npuserve.service.errors import QueueFull
from npuserve.service.ipc.messages import PriorProgress, Request
from npuserve.service.scheduling.block_manager import IntegrityError
from npuserve.service.scheduling.fair_queue import MAX_IDLE_ACCOUNTS, PRIORITY_TOKENS, FairQueue
from npuserve.service.scheduling.sequence import Sequence
from tests.service.scheduling.stepwise import SchedulerHarness


def order(harness: SchedulerHarness) -> list[int]:
    return sorted(harness.started, key=lambda key: (harness.started[key], key))


def one_at_a_time() -> SchedulerHarness:
    return SchedulerHarness(max_num_seqs=1, prefix_cache=False)


def test_single_request_is_served_between_another_clients_requests() -> None:
    harness = one_at_a_time()
    for _ in range(6):
        harness.add([1, 2, 3], 2, client="many")
    harness.tick()
    late = harness.add([1, 2, 3], 2, client="one")
    harness.finish()
    assert order(harness).index(late.id) == 1


def test_clients_are_served_alternately_and_each_in_order() -> None:
    harness = one_at_a_time()
    asked = [harness.add([1, 2, 3], 2, client=client).id for client in "aaabbbccc"]
    harness.finish()
    assert order(harness) == [asked[i] for i in (0, 3, 6, 1, 4, 7, 2, 5, 8)]


def test_clients_get_equal_tokens_not_equal_requests() -> None:
    harness = one_at_a_time()
    for _ in range(4):
        harness.add([1] * 12, 1, client="long")
    for _ in range(20):
        harness.add([1, 1, 1], 1, client="short")
    asked = dict(harness.live)
    turns = 0
    while {s.request.client for s in harness.live.values() if not s.holds_blocks} == {"long", "short"}:
        harness.tick()
        computed = Counter({"long": 0, "short": 0})
        for key in harness.started:
            computed[asked[key].request.client] += len(asked[key].request.prompt_ids)
        assert abs(computed["long"] - computed["short"]) <= 12 + 3
        turns += 1
    assert turns > 10
    harness.finish()


def test_idle_client_earns_no_credit() -> None:
    """A client that sent few requests for long gets no more than its share when it sends many."""
    harness = one_at_a_time()
    harness.add([1, 2, 3], 1, client="rare")
    for _ in range(20):
        harness.add([1, 2, 3], 1, client="busy")
    for _ in range(12):
        harness.tick()
    before = len(harness.started)
    rare = {harness.add([1, 2, 3], 1, client="rare").id for _ in range(8)}
    harness.finish()
    following = order(harness)[before:]
    assert sum(key in rare for key in following[:8]) == 4


def test_idle_client_keeps_its_debt_while_others_wait() -> None:
    harness = one_at_a_time()
    for _ in range(6):
        harness.add([1, 2, 3], 2, client="busy")
    spender = harness.add([1] * 12, 1, client="spender")
    while spender.id in harness.live:
        harness.tick()
    again, fresh = harness.add([1], 1, client="spender"), harness.add([1], 1, client="fresh")
    harness.finish()
    assert order(harness).index(fresh.id) < order(harness).index(again.id)


def test_clients_begin_alike_after_a_time_in_which_nobody_waited() -> None:
    """A client that used a running server more, or less, than others has neither debt nor credit."""
    harness = SchedulerHarness(max_num_seqs=3, prefix_cache=False)
    harness.add([1], 40, client="frugal")
    harness.add([1] * 12, 40, client="spender")
    harness.add([1] * 12, 40, client="spender")
    for _ in range(20):
        harness.tick()
    asked = [harness.add([1, 2], 2, client=client).id for client in ("spender", "frugal", "spender", "frugal")]
    for sequence in [sequence for sequence in harness.live.values() if sequence.holds_blocks][1:]:
        harness.cancel(sequence)
    harness.finish()
    assert order(harness)[-4:] == asked


def test_use_of_an_idle_server_is_no_debt_afterwards() -> None:
    harness = one_at_a_time()
    harness.add([1, 2, 3], 60, client="old")
    harness.finish()
    for _ in range(6):
        harness.add([1, 2, 3], 2, client="many")
    harness.tick()
    late = harness.add([1, 2, 3], 2, client="old")
    harness.finish()
    assert order(harness)[1:].index(late.id) == 1


def test_lower_priority_value_is_served_first_across_clients() -> None:
    harness = SchedulerHarness(max_num_seqs=1, aging=1000.0)
    first = harness.add([1], 1, client="a")
    harness.tick()
    others = [harness.add([1], 1, client="a", priority=priority).id for priority in (3, -2)]
    fresh = harness.add([1], 1, client="b", priority=3).id
    harness.finish()
    assert order(harness) == [first.id, others[1], fresh, others[0]]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(per_tick=st.integers(1, 3), seats=st.integers(1, 3), spent=st.integers(1, 6), blocks=st.integers(8, 20))
def test_stream_of_new_clients_starves_no_old_client(
    per_tick: int, seats: int, spent: int, blocks: int
) -> None:
    """An endless stream of new clients, more than can be served."""
    harness = SchedulerHarness(num_blocks=blocks, block_size=2, max_num_seqs=seats, budget=8, max_queue=30)
    for _ in range(spent):
        harness.add([1, 2, 3, 4], 4, client="old")
    patient = harness.add([1, 2, 3, 4], 4, client="old")
    new = 0
    for _ in range(3000):
        if patient.id not in harness.live:
            break
        for _ in range(per_tick):
            new += 1
            try:
                harness.add([5, 6, 5], 3, client=f"new {new}")
            except QueueFull:
                harness.settle([])
        harness.tick()
    assert patient.id in harness.reasons or isinstance(harness.dropped.get(patient.id), QueueFull)
    for sequence in [*harness.live.values()]:
        harness.cancel(sequence)
    harness.finish()


# Priority among clients


@pytest.mark.slow
@pytest.mark.parametrize("urgency", [
    -100, 0, 7, *(pytest.param(urgency, marks=pytest.mark.full) for urgency in (-7, 100))])
def test_priority_is_worth_a_bounded_number_of_tokens(urgency: int) -> None:
    harness, worth = one_at_a_time(), abs(urgency) * PRIORITY_TOKENS
    request = 12 + 3
    for _ in range(40 + worth // 10):
        harness.add([1] * 12, 4, client="flood", priority=urgency)
        harness.add([2] * 12, 4, client="quiet")
    asked, greatest, seen = dict(harness.live), 0, 0
    computed = Counter({"flood": 0, "quiet": 0})
    while {s.request.client for s in harness.live.values() if not s.holds_blocks} == {"flood", "quiet"}:
        harness.tick()
        for key in itertools.islice(harness.started, seen, None):
            computed[asked[key].request.client] += request
        seen = len(harness.started)
        ahead = computed["flood"] - computed["quiet"]
        greatest = max(greatest, abs(ahead))
        assert -request <= (ahead if urgency < 0 else -ahead if urgency > 0 else abs(ahead))
        assert greatest <= worth + request
    assert greatest >= worth


@pytest.mark.slow
def test_client_that_arrives_while_another_has_borrowed_is_not_behind_it() -> None:
    """Each single request of the quiet client is served soon, however long the flood lasts."""
    harness = one_at_a_time()
    for _ in range(400):
        harness.add([1] * 12, 4, client="flood", priority=-100)
    while harness.scheduler._queue.account("flood").virtual_time < 100 * PRIORITY_TOKENS:
        harness.tick()
    for _ in range(5):
        before = len(harness.started)
        quiet = harness.add([2] * 12, 4, client="quiet")
        while not quiet.holds_blocks:
            harness.tick()
        assert len(harness.started) - before <= 3
        while quiet.id in harness.live:
            harness.tick()


def test_stream_of_urgent_requests_does_not_preempt_a_request_forever() -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=2, max_num_seqs=4, budget=8, aging=1000.0, prefix_cache=False)
    quiet = harness.add([1, 1, 1], 9, client="quiet")
    harness.tick()
    ticks = 0
    while quiet.id in harness.live:
        if harness.scheduler.num_waiting < 3:
            harness.add([2, 2, 2], 9, client="flood", priority=-100)
        harness.tick()
        ticks += 1
        assert ticks < 60, "starved"
    harness.check_answer(quiet)
    assert harness.scheduler.preemptions


# A full queue


def test_full_queue_displaces_the_client_with_most_requests() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_queue=4)
    hogs = [harness.add([1], 2, client="hog") for _ in range(5)]
    harness.tick()
    guest = harness.add([1], 2, client="guest")
    error = harness.dropped[hogs[-1].id]
    assert isinstance(error, QueueFull)
    assert (error.why, hogs[-1].was_admitted) == ("displaced", False)
    assert error.message.startswith("displaced: max_queue is 4")
    second = harness.add([1], 2, client="guest")
    with pytest.raises(QueueFull, match="max_queue is 4"):  # three of the hog's, two of the guest's
        harness.add([1], 2, client="guest")
    with pytest.raises(QueueFull):
        harness.add([1], 2, client="hog")
    harness.finish()
    assert {guest.id, second.id, *(hog.id for hog in hogs[:3])} == set(harness.reasons)


def test_full_queue_displaces_the_least_urgent_and_no_running_request() -> None:
    harness = SchedulerHarness(max_num_seqs=2, max_queue=2)
    for _ in range(2):
        harness.add([1], 9, client="hog")
    harness.tick()
    usual = harness.add([1], 9, client="hog")
    urgent = harness.add([1], 9, client="hog", priority=-100)
    for _ in range(2):
        harness.add([1], 9, client="guest", priority=100)
    assert list(harness.dropped) == [usual.id, urgent.id]
    with pytest.raises(QueueFull):
        harness.add([1], 9, client="guest")
    harness.finish()


def test_full_queue_displaces_no_request_with_tokens() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_queue=2)
    harness.add([1], 9, client="hog")
    harness.tick()
    goes_on = [harness.add([1], 9, client="hog", output_ids=[4]) for _ in range(2)]
    with pytest.raises(QueueFull):
        harness.add([1], 9, client="guest")
    assert not harness.dropped
    harness.finish()
    assert {sequence.id for sequence in goes_on} <= set(harness.reasons)


def test_client_limit_refuses_further_requests() -> None:
    harness = SchedulerHarness()
    first = harness.add([1], 9, client="a", client_limit=2)
    harness.add([1], 9, client="a", client_limit=2)
    with pytest.raises(QueueFull, match=r"^client limit: max_requests_per_client .* is 2, and 2 requests") as caught:
        harness.add([1], 9, client="a", client_limit=2)
    assert caught.value.why == "client_limit"
    harness.add([1], 9, client="b", client_limit=2)
    harness.cancel(first)
    harness.add([1], 9, client="a", client_limit=2)
    harness.finish()


def test_refusals_by_a_client_limit_do_not_delay_the_retries_of_others() -> None:
    harness = SchedulerHarness(max_num_seqs=2, max_queue=0)
    harness.add([1], 10)
    harness.finish()
    for client in ("a", "b"):
        harness.add([1], 40, client=client)
    harness.tick()

    def retry(client: str, limit: int) -> float:
        with pytest.raises(QueueFull) as refused:
            harness.add([1], 40, client=client, client_limit=limit)
        return refused.value.retry_seconds

    waits = [retry("a", 1) for _ in range(50)]
    assert waits == sorted(waits)
    assert retry("b", 1) == waits[0]
    assert retry("c", 0) == waits[0] / 2
    for sequence in list(harness.live.values()):
        harness.cancel(sequence)
    harness.finish()


def test_add_of_a_request_accepted_before_is_never_refused() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_queue=0)
    accepted = {
        "progress": PriorProgress(accepted=True), "client": "a", "client_limit": 1, "deadline": harness.now + 1e-3}
    for _ in range(3):
        harness.add([1], 1, **accepted)
    assert harness.scheduler.num_waiting == 3


def test_queue_full_gives_successive_retry_times() -> None:
    harness = SchedulerHarness(max_num_seqs=2, max_queue=0)
    for _ in range(2):
        harness.add([1], 40)
    harness.finish()
    for _ in range(2):
        harness.add([1], 40)
    harness.tick()
    told = []
    for _ in range(4):
        with pytest.raises(QueueFull) as caught:
            harness.add([1], 40)
        told.append(caught.value.retry_seconds)
    gaps = [b - a for a, b in itertools.pairwise(told)]
    assert gaps == pytest.approx([harness.scheduler._estimator.answer_seconds / 2] * 3)
    harness.finish()


# Accounts


def waiting(queue: FairQueue, number: int, client: str) -> Sequence:
    account = queue.account(client)
    sequence = Sequence(number, (b"", number), Request("r", [1, 2], 3, 0.0), 1.0, account)
    queue.add_live(account)
    queue.push(sequence)
    return sequence


@pytest.mark.parametrize("is_waiting", [False, True])
def test_virtual_time_is_raised_only_for_a_client_without_waiting_requests(is_waiting: bool) -> None:
    """A preempted request counts as waiting, and gives its client no credit for the time in which it ran."""
    queue = FairQueue(8)
    first = waiting(queue, 1, "a")
    if not is_waiting:
        queue.admit(first, 1)
        first.was_admitted = True
    other = waiting(queue, 2, "b")
    other.account.virtual_time = 50.0
    queue.admit(other, 1)
    if not is_waiting:
        queue.push(first)
    waiting(queue, 3, "a")
    assert (first.account.virtual_time > 50) != is_waiting


@pytest.mark.parametrize("is_waiting", [False, True])
def test_new_client_starts_level_with_clients_that_wait_else_with_all(is_waiting: bool) -> None:
    """The virtual time of a running client follows its tokens, so the start of its request is no measure."""
    queue = FairQueue(8)
    ahead, behind = waiting(queue, 1, "ahead"), waiting(queue, 2, "behind")
    patient = waiting(queue, 3, "waiting")
    for sequence in (ahead, behind):
        queue.admit(sequence, 1)
    if not is_waiting:
        queue.admit(patient, 1)
    ahead.account.virtual_time, behind.account.virtual_time, patient.account.virtual_time = 50.0, 20.0, 30.0
    assert waiting(queue, 4, "new").account.virtual_time == (30.0 if is_waiting else 50.0)


def test_idle_accounts_are_bounded() -> None:
    queue = FairQueue(4)
    queue.add_live(queue.account("busy"))  # the accounts of the others stay
    for number in range(3 * MAX_IDLE_ACCOUNTS):
        sequence = waiting(queue, number, f"client {number}")
        assert queue.next() is sequence
        queue.admit(sequence, 1)
        sequence.account.virtual_time += 10**6
        queue.remove_live(sequence.account)
        assert not list(queue.faults())
    assert len(queue._accounts) <= 4 + MAX_IDLE_ACCOUNTS + 1


def test_faults_name_wrong_counts() -> None:
    queue = FairQueue(4)
    sequence = waiting(queue, 1, "a")
    sequence.account.waiting = 2
    assert "1 live and 2 waiting, but 1 are in its queue" in next(queue.faults())
    sequence.account.waiting = 1
    queue._length = 3
    assert next(queue.faults()) == "1 sequences are in queues, 3 were counted"
    harness = SchedulerHarness()
    harness.add([1])
    harness.scheduler._queue._length = 7
    with pytest.raises(IntegrityError, match="1 sequences, but 7 are waiting"):
        harness.scheduler.check_integrity()


@pytest.mark.parametrize(("mine", "priority", "answer_tokens", "expected"), [
    ("a", 0, 0.0, (3, 6)), ("b", 0, 0.0, (2, 4)), ("b", 0, 10.0, (2, 4)), ("new", 0, 0.0, (0, 0)),
    ("new", 1, 0.0, (3, 6))])
def test_ahead_estimates_requests_and_tokens(
    mine: str, priority: int, answer_tokens: float, expected: tuple[int, int]
) -> None:
    queue = FairQueue(8)
    for number, client in enumerate("aab"):
        waiting(queue, number, client)
    requests, tokens = queue.ahead(queue.account(mine), priority, answer_tokens)
    assert (round(requests, 2), tokens) == expected

