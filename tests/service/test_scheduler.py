from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams, Step, StepResult, TokenLogprobs
from npuserve.service.block_manager import BlockManager, IntegrityError
from npuserve.service.errors import InvalidField, QueueFull
from npuserve.service.messages import FinishReason, Request
from npuserve.service.scheduler import Scheduler
from npuserve.service.sequence import Sequence
from tests.service.scheduler_model import VOCABULARY, FakeDevice, answer_alone, report

TICK = 1 / 64  # sums of it are exact


@dataclass
class House:
    """A scheduler with its device and a clock; every step of it is checked.

    depth: steps planned before the oldest of them is applied; 1 is the plain loop.
    """

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    budget: int = 64
    max_queue: int = 1000
    aging: float = 1.0
    prefix_cache: bool = True
    depth: int = 1
    now: float = 100.0
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: defaultdict[int, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: defaultdict[int, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    started: dict[int, float] = field(default_factory=dict)
    live: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = BlockManager(self.num_blocks, self.block_size, self.prefix_cache)
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.budget,
            max_queue=self.max_queue, aging_seconds=self.aging,
        )  # fmt: skip
        self.salts: dict[int, str] = {}
        self.device = FakeDevice(self.num_blocks, self.block_size, self.salts)
        self.flying: deque[tuple[Step, StepResult]] = deque()

    def add(self, prompt: list[int], max_tokens: int = 3, **fields: object) -> Sequence:
        fields = {"arrival": self.now, **fields}
        sequence = self.scheduler.add(Request("r", prompt, max_tokens, **fields), (b"", 0), self.now)  # type: ignore[arg-type]
        self.salts[sequence.id] = sequence.request.cache_salt
        self.live[sequence.id] = sequence
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        assert (self.scheduler.cancel(sequence.id) is sequence) == (self.live.pop(sequence.id, None) is not None)
        assert sequence.block_ids == []

    def plan(self) -> Step:
        """Schedule, check and launch."""
        running = [s for s in self.live.values() if not s.waits]
        decoding = [s for s in running if s.num_uncomputed_tokens == 1]
        preemptions = self.scheduler.preemptions
        step = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        rows = [self.live[row.request_id] for row in step.rows]
        assert step.num_tokens <= self.budget
        assert self.scheduler.num_running <= self.max_num_seqs
        assert [new.request_id for new in step.new] == [s.id for s in rows if s.id not in self.started]
        assert step.rows or not (step.new or step.ended)
        for row, sequence in zip(step.rows, rows, strict=True):
            end = row.start + len(row.token_ids)
            assert row.token_ids == sequence.token_ids[row.start : end]
            assert row.samples == (end == sequence.num_tokens)
            self.started.setdefault(sequence.id, self.now)
        for victim in running:
            if victim.waits:
                assert all(victim.rank > s.rank for s in rows), "preempted by one that ranks after it"
        if self.depth == 1:
            assert step.rows or not self.live, "requests, and no progress"
            assert all(s.waits or s in rows for s in decoding), "a decode row starves"
            first = min((s for s in self.live.values() if not s.waits), key=lambda s: s.rank, default=None)
            assert first in rows or first is None, "the first in rank makes no progress"
            if self.scheduler.preemptions == preemptions:
                assert rows[: len(decoding)] == sorted(decoding, key=lambda s: s.rank), "chunks before decodes"
        if step.rows:
            self.flying.append((step, self.device.run(step, TICK / 2)))
        return step

    def collect(self) -> None:
        """Apply the oldest step in flight."""
        step, result = self.flying.popleft()
        self.now += TICK
        for progress in self.scheduler.apply(step, result, self.now):
            key = progress.sequence.id
            assert self.live[key] is progress.sequence, "progress of one that has ended"
            assert progress.token_ids or progress.prompt_logprobs
            self.tokens[key] += progress.token_ids
            self.logprobs[key] += progress.logprobs or []
            self.prompt_logprobs[key] += progress.prompt_logprobs or []
            if progress.reason:
                self.reasons[key] = progress.reason
                del self.live[key]
                assert progress.sequence.block_ids == []
        self.scheduler.check_integrity()

    def tick(self) -> Step:
        step = self.plan()
        if self.flying and (not step.rows or len(self.flying) >= self.depth):
            self.collect()
        self.now += TICK
        return step

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.live and not self.flying:
                break
            self.tick()
        assert not self.live, "it never ends"
        assert not self.scheduler.has_work
        assert self.blocks.counts.used == 0, "blocks leaked"

    def check_answer(self, sequence: Sequence) -> None:
        """It ended with exactly what it would have got alone."""
        request = sequence.request
        answer, reason = answer_alone(request)
        assert request.output_ids + self.tokens[sequence.id] == answer
        assert self.reasons[sequence.id] == reason
        num_prompt = len(request.prompt_ids)
        finish = sequence.finish(reason)
        assert (finish.prompt_tokens, finish.generated_tokens) == (num_prompt, len(answer))
        assert 0 <= finish.cached_tokens <= num_prompt
        timing = finish.timing
        assert timing.queue + sum(timing.prefill_chunks) + timing.decode == timing.last_step_end - request.arrival
        assert timing.device + timing.host == sum(timing.prefill_chunks) + timing.decode
        if request.sampling.logprobs is not None:
            all_tokens = request.prompt_ids + answer
            begin = num_prompt + len(request.output_ids)
            assert self.logprobs[sequence.id] == [report(all_tokens[p], p) for p in range(begin, len(all_tokens))]
        if request.sampling.prompt_logprobs is not None:
            assert finish.cached_tokens == 0
            expected = [report(request.prompt_ids[p], p) for p in range(1, num_prompt)]
            assert self.prompt_logprobs[sequence.id] == expected


# What is planned


def test_prompt_then_tokens_then_end() -> None:
    house = House()
    sequence = house.add([1, 2, 3], 3)
    first = house.tick()
    assert [(n.request_id, n.prompt_ids, n.output_ids) for n in first.new] == [(sequence.id, [1, 2, 3], [])]
    assert [(r.token_ids, r.start, r.samples) for r in first.rows] == [([1, 2, 3], 0, True)]
    second = house.tick()
    assert not second.new
    assert [(r.token_ids, r.start, r.is_decode) for r in second.rows] == [(house.tokens[0][:1], 3, True)]
    house.finish()
    house.check_answer(sequence)
    assert len(house.tokens[0]) == 3


def test_budget_makes_chunks_and_decodes_go_first() -> None:
    house = House(budget=6)
    house.add([1, 2], 20)
    house.tick()
    long = house.add([3] * 12, 2)
    shapes = [[(r.request_id, r.start, len(r.token_ids), r.samples) for r in house.tick().rows] for _ in range(3)]
    assert shapes == [
        [(0, 2, 1, True), (1, 0, 5, False)],
        [(0, 3, 1, True), (1, 5, 5, False)],
        [(0, 4, 1, True), (1, 10, 2, True)],
    ]
    house.finish()
    house.check_answer(long)
    assert len(long.timing.prefill_chunks) == 3


def test_chunk_rows_name_only_the_blocks_that_they_need() -> None:
    house = House(budget=6)
    house.add([3] * 20, 2)
    assert [len(house.tick().rows[0].block_ids) for _ in range(4)] == [2, 3, 5, 5]


def test_decode_rows_copy_no_block_list() -> None:
    house = House()
    sequence = house.add([3] * 20, 9)
    house.tick()
    assert house.tick().rows[0].block_ids is sequence.block_ids


def test_seats_are_bounded() -> None:
    house = House(max_num_seqs=2)
    for _ in range(5):
        house.add([1, 2])
    assert [r.request_id for r in house.tick().rows] == [0, 1]
    assert (house.scheduler.num_running, house.scheduler.num_waiting) == (2, 3)
    house.finish()


def test_no_more_seats_than_budget_so_that_all_decode() -> None:
    house = House(max_num_seqs=8, budget=3)
    for _ in range(6):
        house.add([1], 6)
    house.tick()
    assert house.scheduler.num_running == 3
    assert len(house.tick().rows) == 3
    house.finish()
    house = House(max_num_seqs=8, budget=3, depth=2)
    for _ in range(6):
        house.add([1], 6)
    assert [len(house.plan().rows) for _ in range(2)] == [3, 0]  # seats stay taken while their tokens are in flight
    house.finish()


def test_nothing_to_do() -> None:
    house = House()
    assert not house.scheduler.has_work
    assert house.scheduler.schedule(house.now) == Step([], [], [])


def test_none_is_passed_by_a_smaller_one_behind_it() -> None:
    house = House(num_blocks=8, block_size=4, prefix_cache=False)
    house.add([1] * 16, 4)  # 4 blocks
    house.tick()
    big, small = house.add([2] * 20, 4), house.add([3], 2)
    house.tick()
    assert big.waits
    assert small.waits
    house.finish()
    assert house.started[big.id] <= house.started[small.id]


def test_admission_leaves_a_block_for_each_running_request() -> None:
    house = House(num_blocks=4, block_size=4, prefix_cache=False)
    house.add([1] * 6, 5)
    house.tick()
    second = house.add([2] * 8, 5)
    house.tick()
    assert house.blocks.counts.free == 2  # enough for the second, until the first grows
    assert second.waits
    house.finish()
    assert house.scheduler.preemptions == 0


# Refusals


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fields", "field_name", "text"),
    [
        ([], 1, {}, "prompt", "at least 1 token"),
        ([1] * 33, 1, {}, "prompt", "at most 32 tokens"),
        ([1] * 30, 4, {}, "stopping.max_tokens", "at most 3 after a prompt of 30 tokens"),
        ([1], 2, {"output_ids": [5, 6]}, "stopping.max_tokens", "more than the 2 tokens"),
    ],
)  # fmt: skip
def test_what_never_fits_is_refused(
    prompt: list[int], max_tokens: int, fields: dict[str, object], field_name: str, text: str
) -> None:
    house = House(num_blocks=8, block_size=4)
    with pytest.raises(InvalidField, match=text) as caught:
        house.add(prompt, max_tokens, **fields)
    assert caught.value.field == field_name
    assert not house.scheduler.has_work


@pytest.mark.parametrize(("prompt", "max_tokens"), [(32, 1), (30, 3), (1, 32)])
def test_what_just_fits_is_served(prompt: int, max_tokens: int) -> None:
    house = House(num_blocks=8, block_size=4)
    sequence = house.add([1] * prompt, max_tokens)
    house.finish()
    house.check_answer(sequence)
    assert house.scheduler.preemptions == 0


def test_queue_full() -> None:
    house = House(max_num_seqs=2, max_queue=1)
    for _ in range(3):
        house.add([1], 2)
    with pytest.raises(QueueFull, match="max_queue is 1") as caught:
        house.add([1], 2)
    assert caught.value.retry_seconds > 0
    house.tick()
    with pytest.raises(QueueFull, match="1 requests wait already"):
        house.add([1], 2)
    house.tick()
    house.add([1], 2)
    house.finish()
    assert len(house.reasons) == 4


def test_no_queue_at_all_still_fills_the_seats() -> None:
    house = House(max_num_seqs=2, max_queue=0)
    house.add([1], 2)
    house.add([1], 2)
    with pytest.raises(QueueFull):
        house.add([1], 2)
    house.finish()


def test_preemption_turns_no_newcomer_away() -> None:
    house = House(num_blocks=4, block_size=2, max_num_seqs=2, max_queue=1)
    house.add([1, 1], 6)
    house.add([2, 2], 6)
    while not house.scheduler.preemptions:
        house.tick()
    house.add([3, 3], 2)
    with pytest.raises(QueueFull):
        house.add([3, 3], 2)
    house.finish()


# Priorities


def test_lower_priority_value_goes_first() -> None:
    house = House(max_num_seqs=1, aging=10.0)
    for priority in (0, 5, -5, 0):
        house.add([1], 1, priority=priority)
    house.finish()
    assert sorted(house.started, key=house.started.__getitem__) == [2, 0, 3, 1]


def test_waiting_is_worth_priority() -> None:
    house = House(max_num_seqs=1, aging=10.0)
    house.add([1], 1, priority=1, arrival=80.0)
    house.add([1], 1, priority=0, arrival=91.0)
    house.add([1], 1, priority=0, arrival=89.0)
    house.finish()
    assert sorted(house.started, key=house.started.__getitem__) == [2, 0, 1]


@settings(max_examples=25, deadline=None)
@given(
    gap=st.integers(1, 6), aging=st.integers(1, 10), per_tick=st.sampled_from([1, 2]), num_blocks=st.integers(6, 16),
    seats=st.integers(1, 3),
)  # fmt: skip
def test_no_stream_of_urgent_requests_starves_another(
    gap: int, aging: int, per_tick: int, num_blocks: int, seats: int
) -> None:
    """More urgent requests than the device can serve, without end: only those that arrive within gap * aging ticks
    overtake, and the wait ends when these are served."""
    house = House(num_blocks=num_blocks, block_size=2, max_num_seqs=seats, budget=8, aging=aging * TICK)
    patient = house.add([1, 2, 3, 4], 4, priority=gap)
    urgent: list[Sequence] = []
    horizon = patient.request.arrival + gap * aging * TICK
    limit = 12 * (1 + per_tick * gap * aging)
    ticks = 0
    while patient.id in house.live:
        urgent += [house.add([5, 6, 5, len(urgent) % VOCABULARY], 4) for _ in range(per_tick)]
        house.tick()
        ticks += 1
        assert ticks <= limit, "starved"
    overtook = [s for s in urgent if house.started.get(s.id, house.now) < house.started[patient.id]]
    assert all(s.request.arrival <= horizon for s in overtook)
    house.check_answer(patient)
    for sequence in [*house.live.values()]:
        house.cancel(sequence)
    house.finish()


# Preemption


def crowded(**fields: object) -> House:
    return House(num_blocks=6, block_size=2, **fields)  # type: ignore[arg-type]


def test_the_last_in_rank_is_preempted_and_ends_as_if_alone() -> None:
    house = crowded()
    first, second = house.add([1, 1, 1], 8), house.add([2, 2, 2], 8)
    while not house.scheduler.preemptions:
        house.tick()
    assert second.waits
    assert not first.waits
    assert second.block_ids == []
    assert second.num_computed_tokens == 0
    assert second.num_generated_tokens > 0
    assert house.scheduler.num_waiting == 1
    house.finish()
    house.check_answer(first)
    house.check_answer(second)


def test_priority_decides_who_is_preempted() -> None:
    house = crowded(aging=10.0)
    late, early = house.add([1, 1, 1], 8, priority=2), house.add([2, 2, 2], 8, priority=1)
    while not house.scheduler.preemptions:
        house.tick()
    assert late.waits
    assert not early.waits
    house.finish()


def test_the_last_in_rank_preempts_itself() -> None:
    house = House(num_blocks=5, block_size=4, budget=3, prefix_cache=False)
    last = house.add([1] * 3, 8, priority=1)
    house.tick()
    first = house.add([2] * 12, 2)
    while not house.scheduler.preemptions:
        step = house.tick()
    assert last.waits
    assert [r.request_id for r in step.rows] == [first.id]
    house.finish()
    house.check_answer(last)
    house.check_answer(first)


def test_a_preempted_request_queues_behind_those_of_earlier_rank() -> None:
    house = crowded(max_num_seqs=2)
    house.add([1, 1, 1], 8)
    second = house.add([2, 2, 2], 8)
    house.tick()
    urgent = house.add([3, 3, 3], 8, priority=-1)
    while not house.scheduler.preemptions:
        house.tick()
    while urgent.id in house.live:
        assert second.waits
        house.tick()
    house.finish()
    house.check_answer(second)


def test_a_preempted_request_samples_only_when_it_has_caught_up() -> None:
    house = crowded(prefix_cache=False, budget=4)
    house.add([1, 1, 1], 8)
    second = house.add([2, 2, 2], 8)
    while not second.waits or not second.met:
        house.tick()
    known = second.num_tokens
    rows = []
    while second.id in house.live:
        rows += [r for r in house.tick().rows if r.request_id == second.id]
    again = rows[: next(i for i, r in enumerate(rows) if r.samples) + 1]
    assert [t for r in again for t in r.token_ids] == second.token_ids[:known]
    assert len(again) > 1
    house.check_answer(second)


def test_a_preempted_request_finds_its_own_prefix_and_is_counted_once() -> None:
    house = crowded()
    house.add([1, 1, 1], 8)
    second = house.add([2, 2, 2], 8)
    while not house.scheduler.preemptions:
        house.tick()
    while second.waits:
        house.tick()
    assert second.num_computed_tokens > 1
    house.finish()
    assert second.finish("length").cached_tokens == 0
    assert (house.scheduler.prefix_queries, house.scheduler.prefix_hits) == (6, 0)


def test_the_runner_meets_a_preempted_request_once() -> None:
    house = crowded()
    house.add([1, 1, 1], 8)
    house.add([2, 2, 2], 8)
    steps = []
    while house.live:
        steps.append(house.tick())
    assert house.scheduler.preemptions
    assert [n.request_id for s in steps for n in s.new] == [0, 1]
    house.add([1], 1)
    steps.append(house.tick())
    assert sorted(i for s in steps for i in s.ended) == [0, 1]


def test_preemption_waits_for_steps_in_flight() -> None:
    house = House(num_blocks=12, block_size=1, budget=2, depth=2)
    first = house.add([1, 1], 8)
    house.plan()
    house.collect()
    second = house.add([2] * 8, 4)

    def plan() -> list[tuple[int, int]]:
        return [(row.request_id, len(row.token_ids)) for row in house.plan().rows]

    assert plan() == [(0, 1), (1, 1)]
    assert plan() == [(1, 2)]  # the first's token is in flight
    house.collect()
    assert plan() == [(0, 1), (1, 1)]  # takes the last free block
    house.collect()
    assert plan() == [(1, 2)]
    house.collect()
    assert house.blocks.counts.free == 0
    assert plan() == [(1, 2)]  # the first asks for a block, but the second's chunk is in flight
    house.collect()
    assert plan() == []
    house.collect()
    assert house.scheduler.preemptions == 0
    assert plan() == [(0, 1)]
    assert house.scheduler.preemptions == 1
    house.finish()
    house.check_answer(first)
    house.check_answer(second)


def test_prompt_logprobs_are_reported_once_each() -> None:
    house = crowded(prefix_cache=True, budget=3)
    house.add([1, 1, 1], 8)
    second = house.add([2, 2, 2, 3], 7, sampling=SamplingParams(prompt_logprobs=0, logprobs=0))
    house.finish()
    assert house.scheduler.preemptions
    assert [r.token_id for r in house.prompt_logprobs[second.id]] == [2, 2, 3]
    house.check_answer(second)


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
)  # fmt: skip
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
    with pytest.raises(IntegrityError, match="block 0: 1 references, but 0 tables hold it"):
        house.scheduler.check_integrity()


# All of it at once

STEMS = ([1, 2, 3, 4, 5, 6, 0, 1, 2, 3], [1, 2, 3, 4, 6, 6, 6], [0] * 12)
MAX_TOKENS = 24
LARGEST = 12 + 2 + MAX_TOKENS - 1  # tokens in the KV cache


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int | None, dict[str, object]]:
    """(tick of arrival, ticks until it is cancelled, arguments of House.add)."""
    stem = draw(st.sampled_from(STEMS))
    prompt = stem[: draw(st.sampled_from([0, 4, 7, 12]))] + draw(st.lists(st.integers(0, 6), min_size=1, max_size=2))
    sampling = SamplingParams(
        min_tokens=draw(st.sampled_from([0, 0, 3])), ending_ids=(0, 4),
        logprobs=draw(st.sampled_from([None, 0])), prompt_logprobs=draw(st.sampled_from([None] * 7 + [0])),
    )  # fmt: skip
    ends = draw(st.sampled_from([((), ())] * 5 + [((0,), (4,)), ((0, 4), ())]))
    fields: dict[str, object] = {
        "prompt": prompt, "max_tokens": draw(st.sampled_from([MAX_TOKENS, MAX_TOKENS, 9, 3])), "sampling": sampling,
        "eos_token_ids": frozenset(ends[0]), "stop_token_ids": frozenset(ends[1]),
        "priority": draw(st.sampled_from([0, 0, -2, 3])), "cache_salt": draw(st.sampled_from(["", "", "", "s"])),
        "bypass_prefix_cache": draw(st.sampled_from([False] * 7 + [True])),
    }  # fmt: skip
    return draw(st.integers(0, 12)), draw(st.sampled_from([None] * 7 + [0, 3, 20])), fields


@settings(max_examples=120, deadline=None)
@given(
    asks=st.lists(requests(), min_size=5, max_size=14), block_size=st.sampled_from([1, 2, 4]),
    pool=st.integers(LARGEST, LARGEST + 12), max_num_seqs=st.sampled_from([8, 6, 4, 1]),
    budget=st.sampled_from([16, 32, 8, 5, 1]), depth=st.sampled_from([1, 1, 2]),
    prefix_cache=st.sampled_from([True, True, False]), flush_at=st.integers(0, 60),
    aging=st.sampled_from([0.001, 0.1, 5]),
)  # fmt: skip
def test_all_get_what_they_would_have_got_alone(
    asks: list[tuple[int, int | None, dict[str, object]]], block_size: int, pool: int, max_num_seqs: int, budget: int,
    depth: int, prefix_cache: bool, flush_at: int, aging: float,
) -> None:  # fmt: skip
    house = House(
        num_blocks=-(-pool // block_size), block_size=block_size, max_num_seqs=max_num_seqs, budget=budget, depth=depth,
        prefix_cache=prefix_cache, aging=aging,
    )  # fmt: skip
    all_sequences: list[Sequence] = []
    cancels: dict[int, list[Sequence]] = defaultdict(list)
    cancelled: set[int] = set()
    for tick in range(45):
        for arrival, cancel_after, fields in asks:
            if arrival == tick:
                sequence = house.add(**fields)  # type: ignore[arg-type]
                all_sequences.append(sequence)
                if cancel_after is not None:
                    cancels[tick + cancel_after].append(sequence)
        for sequence in cancels[tick]:
            if sequence.id in house.live:
                cancelled.add(sequence.id)
            house.cancel(sequence)
        if tick == flush_at:
            house.blocks.flush_prefix_cache()
            house.scheduler.check_integrity()
        house.tick()
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
