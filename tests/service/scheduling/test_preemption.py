"""Running requests that yield to waiting ones of other clients, and victims of a shortage of blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams, StepResult
from npuserve.service.engine.crash_tracker import CLEAR_TOKENS
from npuserve.service.errors import DeadlineExceeded
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling import preemption
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.fair_queue import SMALL_TOKENS
from npuserve.service.scheduling.preemption import LEAD_PER_RECOMPUTE, MIN_LEAD_TOKENS, MIN_RUN_TOKENS
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Sequence, State
from tests.service.scheduling.stepwise import TICK, SchedulerHarness

LONG = 1000


def filled(seats: int, **fields: object) -> SchedulerHarness:
    """Return a harness in which client `heavy` has run as many long requests as may run, and has more."""
    fields = {"num_blocks": 4000, "block_size": 4, "budget": 64, "max_num_seqs": seats, **fields}
    harness = SchedulerHarness(**fields)  # type: ignore[arg-type]
    for _ in range(seats + 4):
        harness.add([1, 2, 3], LONG, client="heavy")
    for _ in range(2 * MIN_RUN_TOKENS):
        harness.tick()
    return harness


def ticks_to_first_token(harness: SchedulerHarness, sequence: Sequence, limit: int = 2000) -> int:
    for ticks in range(1, limit + 1):
        harness.tick()
        if sequence.num_generated_tokens or sequence.id not in harness.live:
            return ticks
    raise AssertionError("starved")


def running(harness: SchedulerHarness) -> Counter[str]:
    return Counter(s.request.client for s in harness.live.values() if s.holds_blocks)


def cancel_all(harness: SchedulerHarness) -> None:
    for sequence in list(harness.live.values()):
        harness.cancel(sequence)
    harness.finish()


# Slots


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seats", [1, 2, 8])
def test_newcomer_gets_a_slot_within_four_steps(seats: int, depth: int) -> None:
    harness = filled(seats, depth=depth)
    newcomer = harness.add([4] * 5, 3, client="newcomer")
    assert ticks_to_first_token(harness, newcomer) <= 4
    assert harness.scheduler.preemptions == 1
    while newcomer.id in harness.live:
        harness.tick()
    harness.check_answer(newcomer)
    cancel_all(harness)


def test_newcomer_waits_for_the_minimum_run() -> None:
    harness = SchedulerHarness(max_num_seqs=1)
    first = harness.add([1], LONG // 10, client="a")
    harness.tick()
    newcomer = harness.add([4], 3, client="b")
    ticks_to_first_token(harness, newcomer)
    assert MIN_RUN_TOKENS <= first.num_generated_tokens <= MIN_RUN_TOKENS + 2
    cancel_all(harness)


def test_step_looks_the_prefix_of_a_waiting_request_up_at_most_once() -> None:
    """The request lacks blocks, and is examined for yields and for its admission in each step."""
    harness = SchedulerHarness(num_blocks=150, block_size=4)
    first = harness.add([1] * 500, LONG // 25, client="a")
    while not first.num_generated_tokens:
        harness.tick()
    waiting = harness.add([1] * 160 + [2] * 140, 8, client="b")
    steps = 0
    with patch.object(harness.blocks, "_compute_digests", wraps=harness.blocks._compute_digests) as digests:
        for _ in range(30):
            digests.reset_mock()
            harness.tick()
            if waiting.holds_blocks:
                break
            steps += 1
            assert sum(call.args[0] is waiting.blocks for call in digests.call_args_list) <= 1
    assert steps > 4
    cancel_all(harness)


@pytest.mark.slow
def test_requests_of_one_client_do_not_yield_to_each_other() -> None:
    harness = filled(2)
    harness.add([1], 3, client="heavy", priority=-100)
    for _ in range(100):
        harness.tick()
    assert not harness.scheduler.preemptions
    cancel_all(harness)


def test_heavy_clients_answers_are_those_of_requests_alone() -> None:
    harness = SchedulerHarness(num_blocks=400, max_num_seqs=4, depth=2)
    sequences = [harness.add([1, 2, number], 60, client="heavy", sampling=SamplingParams(seed=number, logprobs=0))
                 for number in range(6)]
    sequences.append(harness.add([3] * 9, 60, client="heavy", sampling=SamplingParams(prompt_logprobs=0)))
    for number in range(100):
        if number % 8 == 7:
            sequences.append(harness.add([4, number % 7], 3, client="light"))
        harness.tick()
    harness.finish()
    assert harness.scheduler.preemptions > 3
    for sequence in sequences:
        harness.check_answer(sequence)


def test_yielded_request_returns_before_others_of_its_client() -> None:
    harness = filled(4)
    newcomer = harness.add([4], 3, client="newcomer")
    ticks_to_first_token(harness, newcomer)
    (yielded,) = [s for s in harness.live.values() if s.state is State.PREEMPTED]
    while newcomer.id in harness.live:
        assert not yielded.holds_blocks
        harness.tick()
    harness.tick()
    assert yielded.holds_blocks
    cancel_all(harness)


@pytest.mark.slow
def test_samples_of_one_call_yield_to_another_client() -> None:
    harness = SchedulerHarness(num_blocks=4000, max_num_seqs=8)
    samples = harness.add_samples([1] * 9, 16, 50, client="heavy")
    for _ in range(2 * MIN_RUN_TOKENS):
        harness.tick()
    newcomer = harness.add([4], 3, client="newcomer")
    assert ticks_to_first_token(harness, newcomer) <= 4
    harness.finish()
    for sequence in (*samples, newcomer):
        harness.check_answer(sequence)


def test_priority_makes_no_running_request_yield_but_does_not_protect_it() -> None:
    harness = SchedulerHarness(num_blocks=4000, max_num_seqs=2)
    for _ in range(2):
        harness.add([1, 2, 3], LONG, client="heavy", priority=-100)
    for _ in range(2 * MIN_RUN_TOKENS):
        harness.tick()
    newcomer = harness.add([4], LONG, client="newcomer")
    assert ticks_to_first_token(harness, newcomer) <= 4
    urgent = harness.add([5], 3, client="newcomer", priority=-100)
    for _ in range(20):
        harness.tick()
    assert not urgent.was_admitted
    cancel_all(harness)


def test_nobody_yields_in_a_quarantine() -> None:
    harness = filled(2)
    suspect = harness.add([1, 2], 60, client="suspect")
    harness.scheduler.isolate(suspect, 1, CLEAR_TOKENS)
    harness.tick()
    harness.add([3], 3, client="newcomer")
    for _ in range(4):
        assert [row.request_id for row in harness.tick().rows] == [suspect.id]
    cancel_all(harness)


def test_newcomer_that_leaves_takes_no_place() -> None:
    harness = filled(2, depth=2)
    newcomer = harness.add([4], 3, client="newcomer")
    harness.tick()
    harness.cancel(newcomer)
    for _ in range(5):
        harness.tick()
    assert not harness.scheduler.preemptions
    assert running(harness) == {"heavy": 2}
    cancel_all(harness)


def test_resumed_request_takes_no_slot_of_a_newcomer() -> None:
    harness = filled(2)
    slow = next(s for s in harness.live.values() if s.holds_blocks)
    harness.pause(slow)
    harness.tick()
    newcomer = harness.add([4], 3, client="newcomer")
    harness.unpause(slow)
    assert ticks_to_first_token(harness, newcomer) <= 4
    cancel_all(harness)


# Shares


class Load:
    """Clients that each keep some requests live, on a scheduler with a device that takes `light` seconds a step, or
    `token` seconds a token if that is more.

    tokens: computed tokens by client. useful: without those that were computed again. pauses: number of steps without a
        token, after the first one of a request.
    """

    def __init__(self, max_num_seqs: int, num_blocks: int = 30_000, light: float = 0.002, token: float = 3e-5) -> None:
        self.scheduler = Scheduler(
            BlockManager(num_blocks, 16), max_num_seqs=max_num_seqs, max_num_batched_tokens=512, max_queue=10_000,
            aging_seconds=10.0)
        self.tokens: Counter[str] = Counter()
        self.useful: Counter[str] = Counter()
        self.pauses: list[int] = []
        self.now = 100.0
        self._steps = 0
        self._last: dict[int, int] = {}
        self._light = light
        self._token = token
        self._live: Counter[str] = Counter()
        self._number = 0

    def keep(self, client: str, live: int, prompt: int, length: int) -> None:
        """Add requests until `live` of the client's have not ended. Their prompts differ."""
        while self._live[client] < live:
            self._number += 1
            request = Request("r", [self._number] * prompt, length, self.now, SamplingParams(), client=client)
            self.scheduler.add(request, (b"", self._number), self.now)
            self._live[client] += 1

    def step(self) -> None:
        step = self.scheduler.schedule(self.now).step
        for row in step.rows:
            self.tokens[self.scheduler.sequence(row.request_id).request.client] += len(row.token_ids)
        self.now += max(self._light, self._token * step.num_tokens)
        result = StepResult({row.request_id: [5] for row in step.rows if row.samples}, {}, {}, 0.0)
        for progress in self.scheduler.apply(step, result, self.now):
            sequence = progress.sequence
            if sequence.id in self._last:
                self.pauses.append(self._steps - self._last[sequence.id])
                self.useful[sequence.account.client] += 1
            else:
                self.useful[sequence.account.client] += sequence.num_prompt_tokens
            self._last[sequence.id] = self._steps
            if progress.reason:
                self._live[sequence.account.client] -= 1
        self._steps += 1


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "length"), [
    (2, 4000), (5, 100), *(pytest.param(*of, marks=pytest.mark.slow) for of in ((2, 100), (5, 4000)))])
def test_heavy_clients_get_equal_tokens_without_thrashing(clients: int, length: int) -> None:
    """The first client begins alone. Requests that end give their slots to other clients without a preemption."""
    seats, steps = 20, 3000
    load = Load(seats)
    names = [f"client {number}" for number in range(clients)]
    for step in range(steps):
        if step == 400:
            load.tokens.clear()
        for name in names if step >= 50 else names[:1]:
            load.keep(name, seats + 4, 3, length)
        load.step()
    assert min(load.tokens.values()) > 0.8 * max(load.tokens.values())
    assert load.scheduler.preemptions <= 2 * seats + steps * seats // length // 4
    load.scheduler.check_integrity()


@pytest.mark.parametrize("seats", [1, 8])
def test_short_requests_one_after_the_other_take_no_more_than_their_share(seats: int) -> None:
    load = Load(seats)
    for step in range(1000):
        load.keep("heavy", seats + 4, 3, 4000)
        if step > 50:
            load.keep("short", 1, 4, 4)
        load.step()
    assert load.tokens["short"] > 1000 // (4 * MIN_RUN_TOKENS)
    assert load.tokens["short"] <= 1.2 * load.tokens["heavy"]
    assert load.scheduler.preemptions <= load.tokens["short"] / 7 + 1  # once for each request
    load.scheduler.check_integrity()


def test_more_clients_than_slots_take_turns() -> None:
    load = Load(2)
    for _ in range(8 * MIN_LEAD_TOKENS):
        for number in range(5):
            load.keep(f"client {number}", 1, 1, 4000)
        load.step()
    assert max(load.tokens.values()) - min(load.tokens.values()) <= 2 * MIN_LEAD_TOKENS
    assert load.scheduler.preemptions <= 5 + 2 * 8
    load.scheduler.check_integrity()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_newcomer_waits_for_a_lead_if_many_tokens_would_be_computed_again(prefix_cache: bool) -> None:
    harness = SchedulerHarness(num_blocks=250, block_size=4, max_num_seqs=2, budget=100, prefix_cache=prefix_cache)
    for _ in range(3):
        harness.add([1] * 390, 500, client="heavy")
    for _ in range(40):
        harness.tick()
    ticks = ticks_to_first_token(harness, harness.add([4], 3, client="newcomer"))
    if prefix_cache:
        assert ticks <= 4
    else:
        assert (390 - SMALL_TOKENS) * LEAD_PER_RECOMPUTE / 100 < ticks < 400
    cancel_all(harness)


def test_yielded_request_takes_the_next_free_place_whatever_the_virtual_times() -> None:
    """The patient client has a waiting request, too, and was served less than the heavy one."""
    harness = filled(3)
    for _ in range(3):
        harness.add([2], LONG, client="patient")
    for _ in range(100):
        harness.tick()
    assert running(harness) == {"heavy": 2, "patient": 1}
    newcomer = harness.add([4], 20, client="newcomer")
    ticks_to_first_token(harness, newcomer)
    assert running(harness) == {"heavy": 1, "patient": 1, "newcomer": 1}
    while newcomer.id in harness.live:
        harness.tick()
    for _ in range(3):
        harness.tick()
    assert running(harness) == {"heavy": 2, "patient": 1}
    cancel_all(harness)


def test_long_prompts_of_several_clients_do_not_displace_each_other() -> None:
    """The cache holds three prompts, or two of them with their answers. A newcomer's requests are small."""
    load = Load(16, num_blocks=128, token=2e-4)
    steps = 3000
    newcomers = 0
    for step in range(steps):
        for number in range(4):
            load.keep(f"client {number}", 4, 600, 180)
        if step % 20 == 0:
            newcomers += 1
            load.keep("newcomer", 1, 8, 8)
        load.step()
    assert load.tokens.total() < 1.2 * load.useful.total()
    assert load.useful["newcomer"] > 0.8 * 16 * newcomers
    assert max(load.pauses) < 300
    load.scheduler.check_integrity()


# Blocks


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("heavy", [1, 2])
def test_small_newcomer_does_not_wait_for_a_request_that_fills_the_cache(heavy: int, prefix_cache: bool) -> None:
    harness = SchedulerHarness(num_blocks=64, block_size=4, prefix_cache=prefix_cache)
    long = [harness.add([number] * (200 // heavy), 250 - 200 // heavy, client="heavy") for number in range(heavy + 1)]
    while harness.blocks.counts.free > 2:
        harness.tick()
    newcomer = harness.add([4] * 9, 3, client="newcomer")
    assert ticks_to_first_token(harness, newcomer) <= 4
    harness.finish()
    for sequence in (*long, newcomer):
        harness.check_answer(sequence)


def test_newcomer_does_not_wait_for_a_preempted_request_of_another_client() -> None:
    harness = SchedulerHarness(num_blocks=64, block_size=4, prefix_cache=False)
    long = [harness.add([number] * 100, 100, client="heavy") for number in range(2)]
    while not harness.scheduler.preemptions:
        harness.tick()
    assert long[1].state is State.PREEMPTED
    newcomer = harness.add([4] * 9, 3, client="newcomer")
    assert ticks_to_first_token(harness, newcomer) <= 4
    harness.finish()


def test_victim_of_a_shortage_is_of_the_client_with_most_blocks() -> None:
    harness = SchedulerHarness(num_blocks=40, block_size=2, prefix_cache=False)
    heavy = [harness.add([number] * 20, 30, client="heavy") for number in range(3)]
    harness.tick()
    light = harness.add([4] * 4, 40, client="light")
    while not harness.scheduler.preemptions:
        harness.tick()
    assert light.holds_blocks
    assert [sequence.holds_blocks for sequence in heavy] == [True, True, False]
    harness.finish()
    for sequence in (*heavy, light):
        harness.check_answer(sequence)


def test_victim_of_a_shortage_is_the_youngest_if_each_client_runs_one() -> None:
    harness = SchedulerHarness(num_blocks=12, block_size=2, prefix_cache=False)
    sequences = [harness.add([1] * size, 12, client=client) for client, size in (("a", 8), ("b", 6))]
    while not harness.scheduler.preemptions:
        harness.tick()
    assert [sequence.holds_blocks for sequence in sequences] == [True, False]
    harness.finish()


def test_request_yields_for_blocks_only_if_that_suffices() -> None:
    """The waiting client would hold more blocks than the one that yields to it."""
    harness = SchedulerHarness(num_blocks=30, block_size=4, prefix_cache=False)
    harness.add([1] * 8, 100, client="a")
    small = [harness.add([2] * 8, 100, client="b") for _ in range(2)]
    for _ in range(MIN_RUN_TOKENS + 2):
        harness.tick()
    big = harness.add([3] * 60, 40, client="a")
    for _ in range(20):
        harness.tick()
    assert not harness.scheduler.preemptions
    assert not big.holds_blocks
    assert all(sequence.holds_blocks for sequence in small)
    cancel_all(harness)


def test_long_prompt_yields_once_to_a_newcomer_with_a_short_one() -> None:
    harness = SchedulerHarness(num_blocks=64, block_size=4, budget=8)
    long = harness.add([1] * 240, 4, client="heavy")
    for _ in range(5):
        harness.tick()
    first = harness.add([2] * 20, 2, client="newcomer")
    assert ticks_to_first_token(harness, first) <= 6
    while not long.holds_blocks:
        harness.tick()
    second = harness.add([3] * 20, 2, client="newcomer")
    ticks_to_first_token(harness, second)
    assert long.num_generated_tokens
    assert harness.scheduler.preemptions == 1
    harness.finish()


def test_prompts_of_two_clients_share_the_budget() -> None:
    harness = SchedulerHarness(num_blocks=1000, budget=8)
    long = [harness.add([1] * 400, 2, client="heavy") for _ in range(2)]
    for _ in range(3):
        harness.tick()
    short = harness.add([2] * 16, 2, client="light")
    assert ticks_to_first_token(harness, short) <= 4
    harness.finish()
    for sequence in (*long, short):
        harness.check_answer(sequence)


# Deadlines


def test_deadline_of_a_newcomer_is_accepted_while_long_requests_run() -> None:
    harness = filled(8)
    for number in range(8):
        harness.add([1], 60, client=f"measured {number}")
    while len(harness.reasons) < 4:
        harness.tick()
    assert harness.scheduler._estimator.answer_seconds > 50 * TICK
    newcomer = harness.add([4], 3, client="newcomer", deadline=harness.now + 30 * TICK)
    while newcomer.id in harness.live:
        harness.tick()
    assert harness.reasons[newcomer.id] == "length"
    with pytest.raises(DeadlineExceeded):
        harness.add([4], 3, client="heavy", deadline=harness.now + 30 * TICK)
    cancel_all(harness)


# Everything at once


@pytest.mark.slow
@given(
    asks=st.lists(st.tuples(
        st.integers(0, 40), st.sampled_from("abc"), st.integers(1, 30), st.integers(1, 40),
        st.sampled_from([None] * 5 + [3, 20]), st.sampled_from([None] * 5 + [2, 15]), st.sampled_from([0, 0, -9, 5]),
        st.sampled_from([1, 1, 1, 3])), min_size=3, max_size=12),
    seats=st.integers(1, 4), pool=st.integers(18, 40), budget=st.sampled_from([4, 16]),
    depth=st.sampled_from([1, 2]), prefix_cache=st.booleans(), min_run=st.sampled_from([1, MIN_RUN_TOKENS]),
    min_lead=st.sampled_from([0, 5]),
)
def test_requests_of_several_clients_all_end_as_if_alone(
    asks: list[tuple[int, str, int, int, int | None, int | None, int, int]], seats: int, pool: int, budget: int,
    depth: int, prefix_cache: bool, min_run: int, min_lead: int,
) -> None:
    """Each ask: tick of arrival, client, tokens of prompt and answer, ticks until cancel and pause, priority, samples.
    """
    harness = SchedulerHarness(
        num_blocks=pool, block_size=4, max_num_seqs=seats, budget=budget, depth=depth, prefix_cache=prefix_cache)
    asked: list[Sequence] = []
    cancelled: set[int] = set()
    calls: defaultdict[int, list[tuple[Callable[[Sequence], None], Sequence]]] = defaultdict(list)
    with patch.object(preemption, "MIN_RUN_TOKENS", min_run), patch.object(preemption, "MIN_LEAD_TOKENS", min_lead):
        for tick in range(90):
            for arrival, client, prompt, length, cancel, pause, priority, samples in asks:
                if arrival != tick:
                    continue
                added = harness.add_samples(
                    [len(asked) % 7] * prompt, samples, length, client=client, priority=priority)
                asked += added
                if cancel is not None:
                    calls[tick + cancel].append((harness.cancel, added[0]))
                if pause is not None:
                    calls[tick + pause].append((harness.pause, added[-1]))
                    calls[tick + 2 * pause + 1].append((harness.unpause, added[-1]))
            for call, sequence in calls[tick]:
                if call == harness.cancel and sequence.id in harness.live:
                    cancelled.add(sequence.id)
                call(sequence)
            harness.tick()
        harness.finish()
    for sequence in asked:
        if sequence.id not in cancelled:
            harness.check_answer(sequence)
    event(f"yields: {min(sum(sequence.num_tokens_at_yield > 0 for sequence in asked), 3)}")
