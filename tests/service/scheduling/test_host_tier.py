"""Blocks in host memory: a scheduler with a fake device, which checks the contents of every slot that a row reads."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.npu.step import EndedLoad, HostCopy, HostLoad, HostSlots, Step
from npuserve.service.scheduling.block_manager import BlockManager, BlockTable, IntegrityError
from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.host_tier import HostTier
from npuserve.service.scheduling.sequence import Sequence, State
from tests.service.scheduling.stepwise import SchedulerHarness


def ids(seed: int, length: int = 12) -> list[int]:
    return random.Random(seed).choices(range(7), k=length)


def harness_of(host_slots: int = 32, **fields: object) -> SchedulerHarness:
    """8 blocks of 2 tokens: a prompt of 12 tokens and its answer take 7."""
    settings = {"num_blocks": 8, "block_size": 2, "max_num_seqs": 2, "depth": 2} | fields
    return SchedulerHarness(host_slots=host_slots, **settings)  # type: ignore[arg-type]


def answer(harness: SchedulerHarness, prompt: list[int], **fields: object) -> Sequence:
    """Answer a request alone, and check the answer."""
    sequence = harness.add(prompt, 2, **fields)
    harness.finish()
    harness.check_answer(sequence)
    return sequence


def tier_of(harness: SchedulerHarness) -> HostTier:
    assert harness.tier is not None
    return harness.tier


def test_evicted_prefix_comes_back_from_host_memory() -> None:
    harness = harness_of()
    answer(harness, ids(1))
    answer(harness, ids(2))
    assert answer(harness, ids(1)).cached_tokens == 10
    tier = tier_of(harness)
    assert tier.num_loaded >= 4
    assert (tier.queries, tier.hits) == (12 + 12 + 12 - 10 + 2 * tier.num_loaded, 2 * tier.num_loaded)
    without = harness_of(host_slots=0)
    answer(without, ids(1))
    answer(without, ids(2))
    assert answer(without, ids(1)).cached_tokens < 10


def test_working_set_of_four_times_the_cache_is_found() -> None:
    harness = harness_of(host_slots=64)
    prompts = [ids(seed) for seed in range(6)]
    for prompt in prompts:
        answer(harness, prompt)
    assert [answer(harness, prompt).cached_tokens for prompt in prompts] == [10] * 6


class SwitchedHead(Drafting):
    """No drafts, of a head that can be stopped. starts: `Row.head_start` of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.is_computed = True
        self.starts: list[int] = []

    @property
    def can_stop_head(self) -> bool:
        return True

    def plan_head(self, *, may_draft: bool) -> int | None:
        return 0 if self.is_computed else None

    def planned(self, step: Step) -> None:
        self.starts += [row.head_start for row in step.rows]


def test_head_reads_the_blocks_from_host_memory_that_it_computed() -> None:
    drafting = SwitchedHead()
    harness = harness_of(drafting=drafting)
    drafting.is_computed = False
    answer(harness, ids(1))
    drafting.is_computed = True
    answer(harness, ids(2))
    for seed, start in ((1, 10), (2, 0), (1, 10)):
        drafting.starts.clear()
        loaded = tier_of(harness).num_loaded
        assert answer(harness, ids(seed)).cached_tokens == 10
        assert tier_of(harness).num_loaded > loaded
        assert set(drafting.starts) == {start}


def test_block_that_comes_back_is_saved_once() -> None:
    harness = harness_of()
    for _ in range(3):
        for seed in (1, 2):
            answer(harness, ids(seed))
    tier = tier_of(harness)
    assert tier.num_used == tier.num_saved <= 14


def test_loading_request_waits_while_others_run() -> None:
    harness = harness_of(num_blocks=12)
    for seed in (1, 2):
        answer(harness, ids(seed))
    harness.device.load_polls = 5
    running = harness.add(ids(3, 3), 8)
    harness.tick()
    loading = harness.add(ids(1), 2)
    rows = 0
    while loading.state is not State.RUNNING:
        step = harness.tick()
        assert loading.state in (State.WAITING, State.LOADING, State.RUNNING)
        rows += loading.state is State.LOADING and any(row.request_id == running.id for row in step.rows)
    assert rows >= 3
    harness.finish()
    for sequence in (running, loading):
        harness.check_answer(sequence)


def test_load_begins_without_rows() -> None:
    """The pipeline launches a step of loads alone, which no result belongs to."""
    harness = harness_of()
    for seed in (1, 2):
        answer(harness, ids(seed))
    launched: list[Step] = []
    launch = harness.device.launch
    harness.device.launch = lambda step: launched.append(step) or launch(step)  # type: ignore[func-returns-value,method-assign]
    harness.add(ids(1), 2)
    assert not harness.tick().rows
    assert [bool(step.loads) for step in launched] == [True]
    assert len(harness.pipeline) == 0
    harness.finish()


@pytest.mark.parametrize("end", ["cancel", "pause"])
def test_end_during_load_keeps_its_blocks_until_it_has_ended(end: str) -> None:
    harness = harness_of()
    for seed in (1, 2):
        answer(harness, ids(seed))
    sequence = harness.add(ids(1), 2)
    harness.tick()
    assert sequence.state is State.LOADING
    getattr(harness, end)(sequence)
    used = harness.blocks.counts.used
    assert used >= 4
    while harness.scheduler.loads.has_loads:
        assert harness.blocks.counts.used == used
        harness.scheduler.schedule(harness.now)
    assert harness.blocks.counts.used == 0
    if end == "pause":
        harness.unpause(sequence)
        harness.finish()
        harness.check_answer(sequence)
        assert sequence.cached_tokens == 10


def test_corrupt_block_is_a_miss_and_counted() -> None:
    harness = harness_of()
    for seed in (1, 2):
        answer(harness, ids(seed))
    tier = tier_of(harness)
    third = harness.blocks.digests(BlockTable(), ids(1), 3)[2]
    harness.device.corrupt = {tier._slots[third][0]}
    sequence = answer(harness, ids(1))
    assert sequence.cached_tokens == 4
    assert tier.num_corrupt == 1
    assert tier.num_loaded == 1
    answer(harness, ids(2))
    assert answer(harness, ids(1)).cached_tokens == 10  # computed and saved again
    assert tier.num_corrupt == 1


def test_full_tier_forgets_the_least_recently_used_blocks() -> None:
    harness = harness_of(host_slots=12)
    for seed in (1, 2, 1, 3, 4):
        answer(harness, ids(seed))
    assert tier_of(harness).num_used == 12
    assert answer(harness, ids(2)).cached_tokens < 10
    harness = harness_of(host_slots=12)
    for seed in (2, 3, 4):
        answer(harness, ids(seed))
    assert answer(harness, ids(3)).cached_tokens == 10


def test_save_overwrites_no_slot_that_a_load_reads() -> None:
    ended: list[EndedLoad] = []
    tier = HostTier(HostSlots(1, 8), lambda: ended)
    blocks = BlockManager(1, 2, evicted=tier)
    first = blocks.digests(BlockTable(), [1, 2], 1)
    tier.save(first[0], 0)
    assert tier.begin_load(blocks, BlockTable(), [1, 2], [], first, 0) == 0
    tier.save(b"other", 0)
    assert tier.find([b"other"]) == []
    assert tier.take_copies(blocks) == ([HostCopy(0, 0)], [HostLoad(0, [HostCopy(0, 0)])])
    ended.append(EndedLoad(0, 1))
    assert tier.end_loads(blocks) == {0}
    assert blocks.find_prefix(BlockTable(), [1, 2, 3]) == [0]
    tier.save(b"other", 0)
    assert tier.find([b"other"]) == [b"other"]


def test_block_that_is_forgotten_before_its_save_is_not_saved() -> None:
    """Four blocks are evicted in one plan, for two slots."""
    tier = HostTier(HostSlots(2, 8), list)
    blocks = BlockManager(4, 2, evicted=tier)
    table = BlockTable()
    tokens = ids(1, 8)
    assert blocks.allocate(table, 8)
    blocks.register(table, tokens, 8)
    blocks.free(table)
    assert blocks.allocate(BlockTable(), 8)
    saves, _ = tier.take_copies(blocks)
    assert sorted(copy.slot for copy in saves) == [0, 1]
    assert tier.num_used == 2


def test_load_makes_the_prefix_the_last_block_to_be_forgotten() -> None:
    tier = HostTier(HostSlots(3, 8), list)
    blocks = BlockManager(3, 2, evicted=tier)
    digests = blocks.digests(BlockTable(), ids(1, 6), 3)
    for block, digest in enumerate(digests):
        tier.save(digest, block)
    assert tier.begin_load(blocks, BlockTable(), ids(1, 6), [], digests, 0) == 0
    assert list(tier._slots) == digests[::-1]


def test_load_advances_while_no_step_is_planned() -> None:
    harness = harness_of()
    for seed in (1, 2):
        answer(harness, ids(seed))
    harness.device.load_polls = 4
    sequence = harness.add(ids(1), 2)
    harness.tick()
    for _ in range(4):
        harness.scheduler.loads.poll()
        assert sequence.state is State.LOADING
    assert not harness.device.loads
    harness.tick()
    assert sequence.state is State.RUNNING
    harness.finish()
    harness.check_answer(sequence)


def test_requests_with_one_prefix_wait_for_one_load() -> None:
    harness = harness_of(num_blocks=64, max_num_seqs=8, host_slots=64)
    answer(harness, ids(1))
    answer(harness, ids(2, 126), client="other")
    harness.device.load_polls = 5
    sequences = [harness.add(ids(1), 2) for _ in range(8)]
    step = harness.tick()
    assert {sequence.state for sequence in sequences} == {State.LOADING}
    assert len(step.loads) == 1
    harness.pause(sequences[0])
    harness.unpause(sequences[0])
    assert not harness.tick().loads
    assert sequences[0].state is State.LOADING  # it waits for the load that it began
    harness.finish()
    assert [sequence.cached_tokens for sequence in sequences] == [10] * 8
    assert tier_of(harness).num_loaded == 5
    for sequence in sequences:
        harness.check_answer(sequence)


def test_loads_together_use_half_of_the_blocks() -> None:
    harness = harness_of(num_blocks=32, max_num_seqs=8, host_slots=100)
    for seed in range(6):
        answer(harness, ids(seed))
    answer(harness, ids(9, 60))
    sequences = [harness.add(ids(seed), 2) for seed in range(6)]
    harness.tick()
    assert {sequence.state for sequence in sequences} == {State.LOADING}
    assert tier_of(harness).num_blocks_of_loads == 3 * 5
    harness.finish()
    assert [sequence.cached_tokens for sequence in sequences] == [10] * 6


def test_saves_of_a_step_are_bounded_and_keep_beginnings() -> None:
    tier = HostTier(HostSlots(8, 8, max_saves=2), list)
    blocks = BlockManager(4, 2, evicted=tier)
    table = BlockTable()
    tokens = ids(1, 8)
    assert blocks.allocate(table, 8)
    blocks.register(table, tokens, 8)
    digests = blocks.digests(table, tokens, 4)
    blocks.free(table)
    assert blocks.allocate(BlockTable(), 8)
    assert len(tier.take_copies(blocks)[0]) == 2
    assert tier.find(digests) == digests[:2]
    assert (tier.num_saved, tier.num_dropped, tier.num_used) == (2, 2, 2)


def test_blocks_are_saved_before_a_long_prompt_evicts_them() -> None:
    """A step saves 2 blocks, and one of them early. The last prompt evicts all blocks in one plan."""
    early = harness_of(num_blocks=16, host={"max_saves": 2, "num_early": 16, "max_early_saves": 1})
    late = harness_of(num_blocks=16, host={"max_saves": 2})
    for harness in (early, late):
        for seed in (1, 2):
            answer(harness, ids(seed))
        for _ in range(16):
            answer(harness, [1])
        answer(harness, ids(3, 28))
    assert tier_of(late).num_dropped > 0
    assert sum(answer(late, ids(seed)).cached_tokens for seed in (1, 2)) < 20
    assert tier_of(early).num_dropped == 0
    assert [answer(early, ids(seed)).cached_tokens for seed in (1, 2)] == [10, 10]


def test_early_saves_look_at_each_block_once() -> None:
    """A step looks at the blocks that have become the next ones since the last look, not at all of the next ones."""
    looks = 0

    class Slots(OrderedDict[bytes, list[int]]):
        def __contains__(self, key: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__contains__(key)

    tier = HostTier(HostSlots(1000, 8, num_early=400, max_early_saves=10), list)
    tier._slots = Slots()
    blocks = BlockManager(500, 1, evicted=tier)
    table, owner = BlockTable(), BlockTable()
    tokens = list(range(500))
    assert blocks.allocate(table, 500)
    blocks.register(table, tokens, 500)
    blocks.free(table)
    for _ in range(60):
        tier.take_copies(blocks)
    assert tier.num_saved >= 390
    looks = 0
    for count in range(1, 81):
        assert blocks.allocate(owner, count)
        tier.take_copies(blocks)
    assert tier.num_saved >= 470
    assert tier.num_dropped == 0
    assert looks < 500


def test_nothing_is_saved_early_while_enough_blocks_are_free() -> None:
    harness = harness_of(num_blocks=64, host={"num_early": 8, "max_early_saves": 8})
    for seed in (1, 2, 3):
        answer(harness, ids(seed))
    assert tier_of(harness).num_saved == 0


def test_loading_request_keeps_the_lead_of_its_client() -> None:
    """Its client has got less than others. It is not raised to their level when its request returns to the queue."""
    harness = harness_of(num_blocks=16, max_num_seqs=2)
    answer(harness, ids(1), client="a")
    answer(harness, ids(2, 28), client="b")
    keeper = harness.add([1], 1, client="a", arrival=0.0)
    loading = harness.add(ids(1), 2, client="a")
    harness.pause(keeper)
    harness.tick()
    assert loading.state is State.LOADING
    account = loading.account
    lead = account.virtual_time
    others = [harness.add(ids(seed, 4), 4, client="c") for seed in (3, 4)]
    others[0].account.virtual_time = lead + 1000
    while loading.state is State.LOADING:
        assert account.is_waiting
        harness.tick()
    assert account.virtual_time <= lead + 12
    harness.unpause(keeper)
    harness.finish()


def test_loading_tokens_do_not_count_as_missing() -> None:
    """A deadline that the whole prompt would miss is met with the tokens from host memory."""
    harness = harness_of()
    for seed in (1, 2):
        answer(harness, ids(seed))
    sequence = harness.add(ids(1), 2)
    assert sequence.num_missing_tokens == 12
    harness.tick()
    assert sequence.state is State.LOADING
    assert sequence.num_missing_tokens == 2
    harness.finish()


def test_blocks_with_a_scope_are_not_saved() -> None:
    """Samples that bypass the prefix cache are paused, preempted, and end while one of them waits for blocks."""
    harness = harness_of(num_blocks=10)
    samples = harness.add_samples(ids(1), 2, max_tokens=6, bypass_prefix_cache=True)
    for _ in range(3):
        harness.tick()
    assert all(sample.holds_blocks for sample in samples)
    for sample in samples:
        harness.pause(sample)
    other = harness.add(ids(2, 18), 2)
    for _ in range(6):
        harness.tick()
    assert other.id in harness.reasons
    assert not any(sample.holds_blocks for sample in samples)
    assert tier_of(harness).num_used == 0
    harness.unpause(samples[1])
    harness.tick()
    for sample in samples:
        harness.cancel(sample)
    harness.finish()


def test_salt_and_flush_reach_host_memory() -> None:
    harness = harness_of()
    answer(harness, ids(1), cache_salt="a")
    answer(harness, ids(2))
    assert answer(harness, ids(1), cache_salt="b").cached_tokens == 0
    answer(harness, ids(2))
    assert answer(harness, ids(1), cache_salt="a").cached_tokens == 10
    harness.scheduler.memory.flush_prefix_cache()
    assert tier_of(harness).num_used == 0
    assert answer(harness, ids(1), cache_salt="a").cached_tokens == 0


def test_flush_during_load_returns_nothing_to_the_cache() -> None:
    """The device's own block, which the load uses, stays as that of a running request would."""
    harness = harness_of()
    for seed in (1, 2):
        answer(harness, ids(seed))
    sequence = harness.add(ids(1), 2)
    harness.tick()
    assert sequence.state is State.LOADING
    harness.scheduler.memory.flush_prefix_cache()
    harness.scheduler.check_integrity()
    harness.finish()
    harness.check_answer(sequence)
    assert sequence.cached_tokens == 2


def test_bypassed_request_loads_nothing() -> None:
    harness = harness_of()
    for seed in (1, 2):
        answer(harness, ids(seed))
    assert answer(harness, ids(1), bypass_prefix_cache=True).cached_tokens == 0
    assert tier_of(harness).num_loaded == 0


def test_audit_finds_a_slot_with_two_holders() -> None:
    harness = harness_of()
    for seed in (1, 2):
        answer(harness, ids(seed))
    tier = tier_of(harness)
    tier._free.append(next(iter(tier._slots.values()))[0])
    with pytest.raises(IntegrityError, match="of host memory"):
        harness.scheduler.check_integrity()


@pytest.mark.full
def test_thousand_requests_under_pressure_are_answered_as_alone() -> None:
    """Conversations of many clients that grow by turns, with samples, cancels and preemptions."""
    harness = harness_of(host_slots=100, num_blocks=24, max_num_seqs=5, budget=16)
    draw = random.Random(0)
    turns = [ids(seed, 6) for seed in range(12)]
    all_sequences: list[Sequence] = []
    while len(all_sequences) < 1000:
        index = draw.randrange(len(turns))
        turns[index] = [*turns[index], *ids(draw.randrange(1000), 3)] if len(turns[index]) < 24 else ids(
            draw.randrange(1000), 6)
        fields = {"client": f"client {index % 5}", "cache_salt": "s" * (index % 3 == 0)}
        if draw.random() < 0.2:
            all_sequences += harness.add_samples(turns[index], 2, draw.randint(1, 9), **fields)
        else:
            all_sequences.append(harness.add(turns[index], draw.randint(1, 9), **fields))
        if draw.random() < 0.1:
            harness.cancel(draw.choice(all_sequences[-4:]))
        for _ in range(draw.randint(0, 12)):
            harness.tick()
    harness.finish()
    answered = [sequence for sequence in all_sequences if sequence.id in harness.reasons]
    for sequence in answered:
        harness.check_answer(sequence)
    tier = tier_of(harness)
    assert len(answered) > 900
    assert harness.scheduler.preemptions > 10
    assert tier.num_used == 100  # it was full
    assert tier.hits > 1000


@pytest.mark.slow
@given(st.data())
def test_answers_are_those_alone_under_pressure(data: st.DataObject) -> None:
    """Shared beginnings, salts, samples, cancels, pauses, flushes and corrupt blocks, with few blocks and slots."""
    harness = harness_of(
        host_slots=data.draw(st.integers(1, 40)), num_blocks=data.draw(st.integers(7, 14)),
        max_num_seqs=data.draw(st.integers(1, 4)), budget=data.draw(st.integers(4, 16)),
        depth=data.draw(st.integers(1, 2)))
    harness.device.load_polls = data.draw(st.integers(1, 6))
    all_sequences: list[Sequence] = []
    for _ in range(data.draw(st.integers(5, 30))):
        match data.draw(st.sampled_from(["add", "add", "add", "samples", "cancel", "pause", "flush", "corrupt"])):
            case "add":
                prompt = ids(data.draw(st.integers(0, 3)), data.draw(st.integers(1, 10)))
                all_sequences.append(harness.add(
                    prompt, data.draw(st.integers(1, 3)), cache_salt=data.draw(st.sampled_from(["", "", "a"])),
                    client=data.draw(st.sampled_from(["x", "y"])),
                    bypass_prefix_cache=data.draw(st.sampled_from([False, False, True]))))
            case "samples":
                all_sequences += harness.add_samples(
                    ids(data.draw(st.integers(0, 3)), 9), 2, bypass_prefix_cache=data.draw(st.booleans()))
            case "cancel" if all_sequences:
                harness.cancel(data.draw(st.sampled_from(all_sequences)))
            case "pause" if harness.live:
                sequence = data.draw(st.sampled_from(list(harness.live.values())))
                (harness.unpause if sequence.is_paused else harness.pause)(sequence)
            case "flush":
                harness.scheduler.memory.flush_prefix_cache()
            case "corrupt":
                harness.device.corrupt.add(data.draw(st.integers(0, 40)))
        for _ in range(data.draw(st.integers(0, 4))):
            harness.tick()
    for sequence in list(harness.live.values()):
        if sequence.is_paused:
            harness.unpause(sequence)
    harness.finish()
    for sequence in all_sequences:
        if sequence.id in harness.reasons:
            harness.check_answer(sequence)
