"""States of hybrids in host memory: a scheduler with a fake device, which checks the state that a row continues."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.npu.step import HostSlots, Step
from npuserve.service.errors import DeadlineExceeded
from npuserve.service.scheduling.block_manager import BlockManager, BlockTable
from npuserve.service.scheduling.checkpoints import Spacing
from npuserve.service.scheduling.host_tier import HostTier
from npuserve.service.scheduling.sequence import Sequence, State
from npuserve.service.scheduling.state_slots import state_key
from tests.service.scheduling.stepwise import TICK, SchedulerHarness
from tests.service.structured_output.test_answer_matcher import LONG, SHORT


def ids(seed: int, length: int = 12) -> list[int]:
    return random.Random(seed).choices(range(7), k=length)


def harness_of(host_slots: int = 64, **fields: object) -> SchedulerHarness:
    """8 blocks of 2 tokens and 4 slots: a prompt of 12 tokens and its answer take 7 blocks and 2 slots."""
    settings = {"num_blocks": 8, "block_size": 2, "max_num_seqs": 2, "depth": 2, "num_slots": 4,
                "spacing": Spacing(1, 100)} | fields
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


def state_of(harness: SchedulerHarness, prompt: list[int], salt: str = "") -> bytes:
    """Return the key of the state after the last full block that a prompt shares."""
    count = (len(prompt) - 1) // harness.block_size
    return state_key(harness.blocks.digests(BlockTable(salt), prompt, count)[-1])


def evicted(**fields: object) -> SchedulerHarness:
    """Return a harness in whose host memory are blocks and state of the prompt ids(1)."""
    harness = harness_of(**fields)  # type: ignore[arg-type]
    for seed in range(1, 6):
        answer(harness, ids(seed))
    assert state_of(harness, ids(1)) in tier_of(harness)._slots
    return harness


def test_evicted_state_comes_back_with_its_blocks() -> None:
    harness = evicted()
    assert answer(harness, ids(1)).cached_tokens == 10
    tier = tier_of(harness)
    assert tier.hits == 10
    without = harness_of(host_slots=0)
    for seed in range(1, 6):
        answer(without, ids(seed))
    assert answer(without, ids(1)).cached_tokens == 0


def test_working_set_of_four_times_the_cache_is_found() -> None:
    harness = harness_of(host_slots=100)
    prompts = [ids(seed) for seed in range(8)]
    for prompt in prompts:
        answer(harness, prompt)
    assert [answer(harness, prompt).cached_tokens for prompt in prompts] == [10] * 8


def test_state_alone_comes_back_where_the_blocks_are_cached() -> None:
    harness = harness_of(num_blocks=64, num_slots=2)
    answer(harness, ids(1))
    answer(harness, ids(2))
    launched: list[Step] = []
    launch = harness.device.launch
    harness.device.launch = lambda step: launched.append(step) or launch(step)  # type: ignore[func-returns-value,method-assign]
    assert answer(harness, ids(1)).cached_tokens == 10
    (load,) = [load for step in launched for load in step.loads]
    assert [copy.part for copy in load.copies] == [0, 1]


def test_blocks_alone_come_back_where_the_state_is_cached() -> None:
    harness = harness_of(num_slots=40)
    for seed in range(1, 6):
        answer(harness, ids(seed))
    assert answer(harness, ids(1)).cached_tokens == 10
    assert not any(tier_of(harness).has_state(digest) for digest in harness.blocks.digests(BlockTable(), ids(1), 5))


def test_prefix_without_a_state_is_not_loaded() -> None:
    harness = evicted()
    tier = tier_of(harness)
    for key in list(tier._slots):
        if len(key) > 16:
            tier.forget(key)
    assert answer(harness, ids(1)).cached_tokens == 0
    assert tier.num_loaded == 0


def test_prefix_ends_at_the_last_state() -> None:
    """Host memory has 6 blocks of the prompt, with states after the sixth, which is of the answer, and the fifth."""
    harness = evicted(host_slots=100)
    longer = [*ids(1), 0, 0]
    assert answer(harness, longer).cached_tokens == 12
    for seed in range(2, 6):
        answer(harness, ids(seed))
    tier_of(harness).forget(state_of(harness, longer))
    assert answer(harness, longer).cached_tokens == 10


def test_state_that_no_one_expected_is_not_saved() -> None:
    """A long prompt takes states on suspicion at the ends of its chunks."""
    harness = harness_of(num_blocks=40, budget=8, num_slots=3, spacing=Spacing(1, 4))
    answer(harness, ids(1, 40))
    for seed in range(2, 5):
        answer(harness, ids(seed, 40))
    tier = tier_of(harness)
    states = [key for key in tier._slots if len(key) > 16]
    assert 1 <= len(states) <= 4


@pytest.mark.parametrize("end", ["cancel", "pause"])
def test_end_during_load_keeps_its_slot_until_it_has_ended(end: str) -> None:
    harness = evicted()
    assert harness.scheduler.slots is not None
    sequence = harness.add(ids(1), 2)
    harness.tick()
    assert sequence.state is State.LOADING
    getattr(harness, end)(sequence)
    while harness.scheduler.loads.has_loads:
        assert harness.scheduler.slots.num_used == 1
        harness.scheduler.schedule(harness.now)
    assert harness.scheduler.slots.num_used == 0
    if end == "pause":
        harness.unpause(sequence)
        harness.finish()
        harness.check_answer(sequence)
        assert sequence.cached_tokens == 10


def test_flush_during_load_returns_no_state() -> None:
    harness = evicted()
    sequence = harness.add(ids(1), 2)
    harness.tick()
    assert sequence.state is State.LOADING
    harness.scheduler.memory.flush_prefix_cache()
    harness.scheduler.check_integrity()
    harness.finish()
    harness.check_answer(sequence)
    assert sequence.cached_tokens == 0
    assert tier_of(harness).num_corrupt == 0


def test_flush_saves_no_states() -> None:
    harness = evicted()
    harness.scheduler.memory.flush_prefix_cache()
    assert tier_of(harness).num_used == 0
    assert answer(harness, ids(1)).cached_tokens == 0


@pytest.mark.parametrize("part", [0, 1])
def test_corrupt_state_is_a_miss_and_counted(part: int) -> None:
    harness = evicted()
    tier = tier_of(harness)
    key = state_of(harness, ids(1))
    harness.device.corrupt = {tier._slots[key][part]}
    assert answer(harness, ids(1)).cached_tokens == 0
    assert tier.num_corrupt == 1
    for seed in range(2, 6):
        answer(harness, ids(seed))
    assert answer(harness, ids(1)).cached_tokens == 10  # computed and saved again
    assert tier.num_corrupt == 1


def test_corrupt_block_brings_no_state() -> None:
    harness = evicted()
    tier = tier_of(harness)
    third = harness.blocks.digests(BlockTable(), ids(1), 3)[2]
    harness.device.corrupt = {tier._slots[third][0]}
    assert answer(harness, ids(1)).cached_tokens == 0
    assert tier.num_corrupt == 1


def test_salt_separates_states() -> None:
    harness = harness_of()
    answer(harness, ids(1), cache_salt="a")
    for seed in range(2, 6):
        answer(harness, ids(seed))
    assert answer(harness, ids(1), cache_salt="b").cached_tokens == 0
    assert answer(harness, ids(1), cache_salt="a").cached_tokens == 10


@pytest.mark.parametrize("scope", [0, 1])
def test_state_with_a_scope_is_not_saved(scope: int) -> None:
    tier = HostTier(HostSlots(8, 8, state_parts=2), list)
    blocks = BlockManager(4, 2, evicted=tier)
    table = BlockTable(scope=scope)
    assert blocks.allocate(table, 4)
    blocks.register(table, [1, 2, 3, 4], 4)
    digest = blocks.digests(table, [1, 2, 3, 4], 2)[1]
    blocks.save_state(digest, 0)
    assert tier.has_state(digest) == (scope == 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 4))])
def test_deadlines_end_requests_that_wait_for_a_load(seed: int) -> None:
    """Loads take longer than some deadlines. Later requests find what a load brings, whatever its request did."""
    harness = harness_of(host_slots=100, num_blocks=16, num_slots=6, max_num_seqs=3)
    draw = random.Random(seed)
    for number in range(8):
        answer(harness, ids(number))
    harness.device.load_polls = 8
    num_late = num_loading = 0
    all_sequences: list[Sequence] = []
    for _ in range(120):
        deadline = harness.now + draw.choice([6, 10, 40]) * TICK
        with contextlib.suppress(DeadlineExceeded):
            all_sequences.append(harness.add(ids(draw.randrange(8)), draw.randint(1, 3), deadline=deadline))
        for _ in range(draw.randint(1, 8)):
            loading = [sequence for sequence in harness.live.values() if sequence.state is State.LOADING]
            harness.tick()
            num_loading += len(loading)
            num_late += sum(sequence.id in harness.dropped for sequence in loading)
    harness.finish()
    assert num_late >= 5
    assert num_loading > 100
    for sequence in all_sequences:
        assert (sequence.id in harness.reasons) != (sequence.id in harness.dropped)
        if sequence.id in harness.reasons:
            harness.check_answer(sequence)
    assert tier_of(harness).hits > 200


def test_requests_with_one_prefix_wait_for_one_load() -> None:
    harness = harness_of(host_slots=100, num_blocks=30, num_slots=10, max_num_seqs=4)
    for seed in range(1, 12):
        answer(harness, ids(seed))
    harness.device.load_polls = 5
    sequences = [harness.add(ids(1), 2) for _ in range(3)]
    step = harness.tick()
    assert {sequence.state for sequence in sequences} == {State.LOADING}
    assert len(step.loads) == 1
    harness.finish()
    assert [sequence.cached_tokens for sequence in sequences] == [10] * 3


def test_state_larger_than_host_memory_is_not_saved() -> None:
    harness = harness_of(host_slots=1)
    for seed in (1, 2, 1):
        answer(harness, ids(seed))
    assert not any(len(key) > 16 for key in tier_of(harness)._slots)


@pytest.mark.slow
def test_thousand_requests_under_pressure_are_answered_as_alone() -> None:
    """Conversations of many clients that grow by turns, with samples, cancels and preemptions."""
    harness = harness_of(host_slots=150, num_blocks=24, num_slots=8, max_num_seqs=5, budget=16)
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
    assert tier.num_used > 140  # it was full
    assert tier.hits > 1000


@pytest.mark.slow
@given(st.data())
def test_answers_are_those_alone_under_pressure(data: st.DataObject) -> None:
    """Shared beginnings, salts, samples, constraints, deadlines, cancels, pauses, flushes and corrupt slots, with few
    blocks and slots."""
    num_slots = data.draw(st.integers(1, 6))
    harness = harness_of(
        host_slots=data.draw(st.integers(1, 40)), num_blocks=data.draw(st.integers(7, 14)), num_slots=num_slots,
        max_num_seqs=data.draw(st.integers(1, 4)), budget=data.draw(st.integers(4, 16)),
        depth=data.draw(st.integers(1, 2)),
        spacing=data.draw(st.sampled_from([Spacing(1, 100), Spacing(1, 1), Spacing(4, 8)])),
        host={"num_early": data.draw(st.integers(0, 8)), "max_saves": data.draw(st.integers(1, 8))},
        drafts=data.draw(st.sampled_from(["off", "right", "wrong"])))
    harness.device.load_polls = data.draw(st.integers(1, 6))
    all_sequences: list[Sequence] = []
    for _ in range(data.draw(st.integers(5, 30))):
        what = data.draw(st.sampled_from(["add", "add", "add", "samples", "cancel", "pause", "flush", "corrupt"]))
        number = data.draw(st.integers(0, 59))  # what is drawn does not depend on what happened
        match what:
            case "add":
                prompt = ids(data.draw(st.integers(0, 3)), data.draw(st.integers(1, 10)))
                ticks = data.draw(st.sampled_from([None, None, 3, 12]))
                # A constrained request needs two slots.
                constraint = data.draw(st.sampled_from([None, None, LONG, SHORT])) if num_slots > 1 else None
                with contextlib.suppress(DeadlineExceeded):
                    all_sequences.append(harness.add(
                        prompt, data.draw(st.integers(4 if constraint else 1, 4)), constraint=constraint,
                        cache_salt=data.draw(st.sampled_from(["", "", "a"])),
                        client=data.draw(st.sampled_from(["x", "y"])),
                        deadline=None if ticks is None else harness.now + ticks * TICK,
                        bypass_prefix_cache=data.draw(st.sampled_from([False, False, True]))))
            case "samples":
                all_sequences += harness.add_samples(
                    ids(data.draw(st.integers(0, 3)), 9), 2, bypass_prefix_cache=data.draw(st.booleans()))
            case "cancel" if all_sequences:
                harness.cancel(all_sequences[number % len(all_sequences)])
            case "pause" if harness.live:
                sequence = list(harness.live.values())[number % len(harness.live)]
                (harness.unpause if sequence.is_paused else harness.pause)(sequence)
            case "flush":
                harness.scheduler.memory.flush_prefix_cache()
            case "corrupt":
                harness.device.corrupt.add(number % 41)
        for _ in range(data.draw(st.integers(0, 4))):
            harness.tick()
    for sequence in list(harness.live.values()):
        if sequence.is_paused:
            harness.unpause(sequence)
    harness.finish()
    for sequence in all_sequences:
        if sequence.id in harness.reasons:
            harness.check_answer(sequence)
