"""Blocks in a store that schedulers share: harnesses with fake devices, which check the contents of what rows read."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npuserve.service.scheduling.block_manager import BlockTable
from npuserve.service.scheduling.checkpoints import Spacing
from npuserve.service.scheduling.sequence import Sequence, State
from npuserve.service.scheduling.store_tier import MAX_SAVE_TRIES
from npuserve.service.store.connector import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS
from npuserve.service.store.setup import max_saves
from tests.service.scheduling.fake_store import FakeStore
from tests.service.scheduling.stepwise import SchedulerHarness
from tests.service.scheduling.test_host_tier import answer, ids


def harness_of(contents: dict[bytes, Any], host_slots: int = 32, **fields: object) -> SchedulerHarness:
    settings = {"num_blocks": 16, "block_size": 2, "max_num_seqs": 2, "depth": 2} | fields
    return SchedulerHarness(host_slots=host_slots, stored=contents, **settings)  # type: ignore[arg-type]


def store_of(harness: SchedulerHarness) -> FakeStore:
    assert harness.store is not None
    return harness.store


def idle(harness: SchedulerHarness) -> None:
    """Let saves end."""
    for _ in range(40):
        harness.tick()


def wait(harness: SchedulerHarness, seconds: float) -> None:
    end = harness.now + seconds
    while harness.now < end:
        harness.tick()


def filled(**fields: object) -> dict[bytes, Any]:
    """Return a store with the 5 or 6 full blocks of a prompt and its answer."""
    contents: dict[bytes, Any] = {}
    first = harness_of(contents, **fields)
    answer(first, ids(1))
    idle(first)
    assert len(contents) == 6
    return contents


def test_prefix_of_another_server_comes_from_the_store() -> None:
    contents = filled()
    second = harness_of(contents)
    assert answer(second, ids(1)).cached_tokens == 10
    tier = second.tier
    assert tier
    assert tier.store
    assert (tier.store.num_loaded, tier.store.queries) == (5, 10)
    assert answer(second, ids(1)).cached_tokens == 10
    assert len(store_of(second).lookups) == 1, "asked for blocks that the device has"


class SavedBlocks:
    """Receiver of the changes of host memory."""

    def __init__(self) -> None:
        self.saved_digests: list[bytes] = []

    def saved(self, digest: bytes) -> None:
        self.saved_digests.append(digest)

    def forgotten(self, digest: bytes) -> None:
        raise NotImplementedError


def test_blocks_from_the_store_are_reported_once_the_device_has_them() -> None:
    contents = filled()
    second = harness_of(contents)
    assert second.tier
    events = second.tier._events = SavedBlocks()
    answer(second, ids(1))
    (lookup,) = store_of(second).lookups
    assert events.saved_digests[:5] == lookup


def test_idle_scheduler_saves_and_rests() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents, host={"max_early_saves": 4})
    answer(harness, ids(1))
    idle(harness)
    assert len(contents) == 6
    assert not harness.scheduler.loads.has_loads


@pytest.mark.parametrize("host_slots", [1, 4, 32])
def test_idle_scheduler_rests_though_copies_end_late(host_slots: int) -> None:
    """No block is offered to the store twice."""
    harness = harness_of({}, host_slots=host_slots)
    store_of(harness)._memory.save_polls = 3
    answer(harness, ids(1))
    for _ in range(5):
        idle(harness)
    assert harness.tier
    assert harness.tier.store
    assert harness.tier.store.num_saved == 6
    idle(harness)
    assert harness.tier.store.num_saved == 6
    assert not harness.scheduler.loads.has_loads


def test_request_waits_for_the_store_while_others_run() -> None:
    second = harness_of(filled())
    other = second.add(ids(2), 9)
    while other.state is not State.RUNNING:
        second.tick()
    store_of(second).polls = 20
    waiting = second.add(ids(1), 2)
    for _ in range(6):
        second.tick()
    assert waiting.state is State.LOADING
    assert other.num_generated_tokens > 2
    second.finish()
    assert waiting.cached_tokens == 10
    second.check_answer(waiting)
    second.check_answer(other)


def test_request_with_the_same_prefix_joins_the_fetch() -> None:
    second = harness_of(filled())
    sequences = [second.add(ids(1), 2) for _ in range(2)]
    second.finish()
    assert [sequence.cached_tokens for sequence in sequences] == [10, 10]
    assert len(store_of(second).lookups) == 1


@pytest.mark.parametrize("kind", ["lookup", "load", "save"])
def test_failed_call_is_computed(kind: str) -> None:
    contents = filled()
    second = harness_of(contents)
    store_of(second).fault = lambda name, count: 0 if name == kind else count
    assert answer(second, ids(1)).cached_tokens == (10 if kind == "save" else 0)
    assert len(store_of(second).lookups) == 1, "asked again"
    idle(second)


def test_store_that_becomes_unavailable_after_a_lookup_delays_no_request() -> None:
    second = harness_of(filled())
    sequence = second.add(ids(1), 2)
    second.tick()
    assert sequence.state is State.LOADING
    store_of(second).is_available = False
    second.finish()
    assert sequence.cached_tokens == 0
    second.check_answer(sequence)


def test_load_that_ends_early_keeps_what_arrived() -> None:
    second = harness_of(filled())
    store_of(second).fault = lambda name, count: 3 if name == "load" else count
    assert answer(second, ids(1)).cached_tokens == 6


def test_unavailable_store_is_not_asked() -> None:
    contents = filled()
    second = harness_of(contents)
    store_of(second).is_available = False
    assert answer(second, ids(1)).cached_tokens == 0
    assert not store_of(second).lookups
    answer(second, ids(2))
    idle(second)
    assert len(contents) == 6


@pytest.mark.parametrize("is_flushed", [False, True])
def test_blocks_are_saved_once_the_store_is_asked(is_flushed: bool) -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents)
    store_of(harness).is_available = False
    answer(harness, ids(1))
    idle(harness)
    assert not harness.scheduler.loads.has_loads
    if is_flushed:
        harness.scheduler.memory.flush_prefix_cache()
    store_of(harness).is_available = True
    idle(harness)
    assert len(contents) == (0 if is_flushed else 6)
    assert is_flushed or list(contents)[:5] == harness.blocks.digests(BlockTable(), ids(1), 5)
    assert harness.tier
    assert harness.tier.store
    assert harness.tier.store.num_retried == 0
    assert not harness.scheduler.loads.has_loads
    harness.scheduler.check_integrity()


def test_many_saves_that_wait_begin_in_linear_time() -> None:
    """Host memory has forgotten nearly all of them, the oldest ones."""
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents)
    assert harness.tier
    assert harness.tier.store
    harness.tier.store._waiting.update(dict.fromkeys((number.to_bytes(16, "big") for number in range(100_000)), 1))
    began = time.thread_time()
    answer(harness, ids(1))
    idle(harness)
    assert len(contents) == 6
    assert not harness.scheduler.loads.has_loads
    assert time.thread_time() - began < 2


def test_failed_save_is_tried_again_while_host_memory_has_the_block() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents)
    store_of(harness).fault = lambda kind, count: 0
    answer(harness, ids(1))
    begin = harness.now
    assert harness.tier
    tier = harness.tier.store
    assert tier
    while not tier.num_retried and harness.now < begin + 2 * MIN_PAUSE_SECONDS:
        harness.tick()
    assert tier.num_retried
    assert harness.now - begin > MIN_PAUSE_SECONDS / 2, "tried again at once"
    store_of(harness).fault = lambda kind, count: count
    wait(harness, 3)
    assert (len(contents), tier.num_saved) == (6, 6)
    assert tier.num_retried >= 6
    assert not harness.scheduler.loads.has_loads
    second = harness_of(contents)
    assert answer(second, ids(1)).cached_tokens == 10


@pytest.mark.slow
def test_save_that_always_fails_is_given_up_after_longer_and_longer_pauses() -> None:
    harness = harness_of({})
    times: list[float] = []

    def fail(kind: str, count: int) -> int:
        if kind == "save":
            times.append(harness.now)
        return 0

    store_of(harness).fault = fail
    answer(harness, ids(1))
    wait(harness, 120)
    assert len(times) == 6 * MAX_SAVE_TRIES
    pauses = [later - earlier for earlier, later in itertools.pairwise(times) if later - earlier > 0.5]
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(1, abs=0.3)
    assert pauses[3] == pytest.approx(8, abs=0.3)
    assert harness.tier
    assert harness.tier.store
    assert harness.tier.store.num_retried == 6 * (MAX_SAVE_TRIES - 1)
    assert not harness.scheduler.loads.has_loads
    harness.scheduler.check_integrity()


def test_pauses_after_failed_saves_begin_anew_after_a_success() -> None:
    harness = harness_of({})
    answer(harness, ids(0))
    for seed in (1, 2):
        failures: list[float] = []

        def fail_twice(kind: str, count: int, failures: list[float] = failures) -> int:
            if kind != "save" or (failures and harness.now - failures[0] > 2):
                return count
            failures.append(harness.now)
            return 0

        store_of(harness).fault = fail_twice
        answer(harness, ids(seed))
        wait(harness, 8)
        pauses = [later - earlier for earlier, later in itertools.pairwise(failures) if later - earlier > 0.5]
        assert pauses == [pytest.approx(1, abs=0.3)]


def test_save_is_not_tried_again_after_a_flush_or_of_a_corrupt_block() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents)
    store_of(harness).polls = 8
    assert harness.tier
    assert harness.tier.store
    answer(harness, ids(1))
    harness.tick()
    corrupt = set(harness.tier.store.held_slots)
    assert corrupt
    harness.device.corrupt.update(corrupt)
    wait(harness, 3)
    assert len(contents) == 6 - len(corrupt)
    assert harness.tier.store.num_retried == 0
    harness.device.corrupt.clear()
    store_of(harness).fault = lambda kind, count: 0
    answer(harness, ids(2))
    for _ in range(3):
        harness.tick()
    assert "save" in [call.kind for call, _ in store_of(harness)._calls]
    harness.scheduler.memory.flush_prefix_cache()
    wait(harness, 3)
    assert harness.tier.store.num_retried == 0
    harness.scheduler.check_integrity()


def test_salt_and_bypass_find_nothing() -> None:
    contents = filled()
    kept = dict(contents)
    second = harness_of(contents)
    assert answer(second, ids(1), bypass_prefix_cache=True).cached_tokens == 0
    assert not store_of(second).lookups
    second = harness_of(contents)
    assert answer(second, ids(1), cache_salt="a").cached_tokens == 0
    assert kept.keys() == filled().keys()  # the digests are the same in all schedulers
    assert kept.keys().isdisjoint(digests for lookup in store_of(second).lookups for digests in lookup)


def test_flush_empties_the_store_and_drops_what_arrives() -> None:
    contents = filled()
    second = harness_of(contents)
    store_of(second).polls = 4
    sequence = second.add(ids(1), 2)
    while store_of(second)._calls == [] or store_of(second)._calls[0][0].kind != "load":
        second.tick()
    kept = dict(contents)
    second.scheduler.memory.flush_prefix_cache()
    assert not contents
    contents.update(kept)  # of another server: the load brings all blocks
    second.finish()
    assert sequence.cached_tokens == 0
    second.check_answer(sequence)


def test_long_prompt_is_saved_as_fast_as_the_store_takes_it() -> None:
    contents: dict[bytes, Any] = {}
    first = harness_of(contents, host_slots=64, num_blocks=40, host={"max_early_saves": 8})
    assert max_saves(64, 8) == 16
    store_of(first).polls = 20
    store_of(first).limit = 16
    answer(first, ids(1, 61))
    for _ in range(3):
        idle(first)
    assert not store_of(first).failures
    assert not first.scheduler.loads.has_loads
    second = harness_of(contents, host_slots=64, num_blocks=40)
    assert answer(second, ids(1, 61)).cached_tokens == 60


def test_blocks_that_are_evicted_before_the_store_takes_them_are_dropped_and_counted() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents, host_slots=8, num_blocks=8)
    assert max_saves(8, 8) == 2
    store_of(harness).polls = 20
    sequences = [harness.add(ids(seed), 2) for seed in range(6)]
    harness.finish()
    assert store_of(harness).failures["dropped"] >= 4
    for sequence in sequences:
        harness.check_answer(sequence)


def test_early_saves_leave_the_space_of_the_store_to_what_the_step_evicts() -> None:
    harness = harness_of({}, host={"max_early_saves": 8})
    tier = harness.tier
    assert tier
    assert tier.store
    tier.store._max_saves = 4
    table = BlockTable()
    tokens = ids(1, 10)
    assert harness.blocks.allocate(table, 10)
    harness.blocks.register(table, tokens, 10)
    for digest, block in zip(harness.blocks.digests(table, tokens, 3), table.block_ids, strict=False):
        tier.save(digest, block)
    saves, _ = tier.take_copies(harness.blocks)
    assert len(saves) == 4
    assert not store_of(harness).failures


def test_queue_for_a_store_that_takes_nothing_has_only_what_the_device_has() -> None:
    harness = harness_of({}, num_slots=6, num_blocks=100, spacing=Spacing(1, 100))
    assert harness.tier
    assert harness.tier.store
    harness.tier.store._max_saves = 0
    first = harness.add(ids(99), 160)  # its blocks stay the first in the queue
    for seed in range(20):
        other = harness.add(ids(seed), 2)
        while other.id in harness.live:
            harness.tick()
    assert first.id in harness.live
    keys = harness.tier._new._digests
    assert keys
    assert {key for key in keys if len(key) == 16} <= harness.blocks._by_digest.keys()
    assert harness.scheduler.slots
    assert {digest for key, digest in keys.items() if len(key) > 16} <= harness.scheduler.slots._checkpoints.keys()


def test_dropped_save_is_made_later_while_host_memory_has_the_block() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents, num_blocks=8)
    assert harness.tier
    assert harness.tier.store
    harness.tier.store._max_saves = 2
    store_of(harness).polls = 20
    for seed in range(4):
        harness.add(ids(seed), 2)
    harness.finish()
    assert store_of(harness).failures["dropped"]
    wait(harness, 10)
    assert len(contents) == 4 * 6
    assert harness.tier.store.num_retried == store_of(harness).failures["dropped"]


def test_fetch_keeps_the_blocks_before_it_in_host_memory() -> None:
    contents: dict[bytes, Any] = {}
    fields = {"host_slots": 24, "num_blocks": 24}
    first = harness_of(contents, host_slots=64, num_blocks=40)
    answer(first, ids(1, 31))
    idle(first)
    second = harness_of({}, **fields)
    for seed, length in ((1, 21), (2, 41)):
        answer(second, ids(seed, length))
        for _ in range(5):
            idle(second)
    store_of(second).contents.update(contents)
    assert answer(second, ids(1, 31)).cached_tokens == 30


def test_fetch_takes_no_slot_to_which_a_copy_is_in_progress() -> None:
    contents = filled()
    kept = dict(contents)
    second = harness_of(contents, host_slots=12)
    answer(second, ids(2))
    assert second.tier
    memory = store_of(second)._memory
    memory.copying.update(range(12))
    memory.copying.difference_update(second.tier._free[:3])
    second.scheduler.memory.flush_prefix_cache()
    contents.update(kept)
    assert answer(second, ids(1)).cached_tokens == 6
    second.scheduler.check_integrity()


def test_end_of_a_request_leaves_its_fetch() -> None:
    second = harness_of(filled())
    sequence = second.add(ids(1), 2)
    second.tick()
    assert sequence.state is State.LOADING
    second.cancel(sequence)
    second.finish()
    assert answer(second, ids(1)).cached_tokens == 10
    assert len(store_of(second).lookups) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=40)
@given(st.data())
def test_answers_are_those_alone_with_a_faulty_store(data: st.DataObject) -> None:
    """Two schedulers share a store that delays, fails, loses values and becomes unavailable; flushes, cancels. Models
    with fixed states and without."""
    contents: dict[bytes, Any] = {}
    has_states = data.draw(st.booleans())
    harnesses = [
        harness_of(contents, host_slots=data.draw(st.integers(1, 24)), num_blocks=data.draw(st.integers(7, 14)),
                   max_num_seqs=data.draw(st.integers(1, 3)), depth=data.draw(st.integers(1, 2)),
                   num_slots=data.draw(st.integers(1, 6)) if has_states else 0, budget=data.draw(st.integers(4, 16)),
                   spacing=data.draw(st.sampled_from([Spacing(1, 100), Spacing(1, 1), Spacing(4, 8)])),
                   host={"max_saves": data.draw(st.integers(1, 8)), "max_early_saves": data.draw(st.integers(1, 3))})
        for _ in range(2)]
    all_sequences: list[tuple[SchedulerHarness, Sequence]] = []
    draw_fault = st.sampled_from([99, 99, 99, 99, 1, 0])
    for harness in harnesses:
        store = store_of(harness)
        store.polls = data.draw(st.integers(1, 6))
        store.limit = data.draw(st.sampled_from([8, 4, 1]))
        store._memory.save_polls = data.draw(st.integers(0, 2))
        store.fault = lambda kind, count: min(count, data.draw(draw_fault))
        harness.device.load_polls = data.draw(st.integers(1, 4))
    for _ in range(data.draw(st.integers(6, 20))):
        harness = data.draw(st.sampled_from(harnesses))
        match data.draw(st.sampled_from([
                "add", "add", "add", "add", "cancel", "pause", "flush", "corrupt", "lose", "switch"])):
            case "add":
                all_sequences.append((harness, harness.add(
                    ids(data.draw(st.integers(0, 1)), data.draw(st.integers(3, 10))), data.draw(st.integers(1, 3)),
                    cache_salt=data.draw(st.sampled_from(["", "", "a"])))))
            case "cancel" if harness.live:
                harness.cancel(data.draw(st.sampled_from(list(harness.live.values()))))
            case "pause" if harness.live:
                sequence = data.draw(st.sampled_from(list(harness.live.values())))
                (harness.unpause if sequence.is_paused else harness.pause)(sequence)
            case "flush":
                harness.scheduler.memory.flush_prefix_cache()
            case "corrupt":
                harness.device.corrupt.add(data.draw(st.integers(0, 24)))
            case "lose" if contents:
                del contents[data.draw(st.sampled_from(sorted(contents)))]
            case "switch":
                store_of(harness).is_available = not store_of(harness).is_available
        for _ in range(data.draw(st.sampled_from([0, 1, 4, 20]))):
            harness.tick()
    for harness in harnesses:
        for sequence in list(harness.live.values()):
            if sequence.is_paused:
                harness.unpause(sequence)
        harness.finish()
        store_of(harness).fault = lambda kind, count: count
        for _ in range(10):  # with one slot of host memory, blocks are saved one after another
            harness.now += MAX_PAUSE_SECONDS
            idle(harness)
        harness.scheduler.check_integrity()
        assert harness.tier
        assert not list(harness.tier.store.held_slots if harness.tier.store else [])
    for harness, sequence in all_sequences:
        if sequence.id in harness.reasons:
            harness.check_answer(sequence)


def disturb(
    draw: random.Random, harness: SchedulerHarness, sequences: list[Sequence], contents: dict[bytes, Any]
) -> None:
    """Cancel, pause, flush, corrupt slots of host memory, lose values of the store, or let it become unavailable."""
    match draw.randrange(40):
        case 0:
            harness.cancel(draw.choice(sequences))
        case 1:
            harness.pause(draw.choice(sequences))
        case 2 if draw.random() < 0.2:
            harness.scheduler.memory.flush_prefix_cache()
        case 3 | 4:
            harness.device.corrupt.update(draw.sample(range(60), 10))
        case 5 | 6 | 7:
            for key in draw.sample(sorted(contents), len(contents) // 4):
                del contents[key]
        case 8:
            store_of(harness).is_available = not store_of(harness).is_available


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_slots", "seed"), [
    (6, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 0), (0, 1), (6, 1)))])
def test_conversations_at_two_servers_are_answered_as_alone(num_slots: int, seed: int) -> None:
    """Conversations that grow by turns and change the server, with a store that delays, fails, loses values and becomes
    unavailable, corrupt slots, samples, cancels, pauses and flushes."""
    draw = random.Random(seed)
    contents: dict[bytes, Any] = {}
    harnesses = [harness_of(contents, host_slots=60, num_blocks=20, max_num_seqs=3, budget=16, num_slots=num_slots,
                            spacing=Spacing(2, 8)) for _ in range(2)]
    for harness in harnesses:
        store_of(harness).limit = 20
        store_of(harness)._memory.save_polls = 1
        store_of(harness).fault = lambda kind, count: count if draw.random() < 0.9 else min(count, draw.randint(0, 1))
        harness.device.load_polls = 3
    turns = [ids(index, 6) for index in range(10)]
    all_sequences: list[tuple[SchedulerHarness, Sequence]] = []
    for _ in range(250):
        harness = draw.choice(harnesses)
        index = draw.randrange(len(turns))
        salt = "s" * (index % 3 == 0)
        if draw.random() < 0.1:
            sequences = harness.add_samples(turns[index], 2, draw.randint(1, 6), cache_salt=salt)
        else:
            sequences = [harness.add(turns[index], draw.randint(1, 6), cache_salt=salt)]
        all_sequences += [(harness, sequence) for sequence in sequences]
        if draw.random() < 0.3:
            turns[index] = [*turns[index], *ids(draw.randrange(1000), 3)] if len(turns[index]) < 24 else ids(
                draw.randrange(1000), 6)
        disturb(draw, harness, sequences, contents)
        for sequence in list(harness.live.values()):
            if sequence.is_paused and draw.random() < 0.2:
                harness.unpause(sequence)
        for _ in range(draw.randint(0, 20)):
            draw.choice(harnesses).tick()
        for store in map(store_of, harnesses):
            store.is_available = store.is_available or draw.random() < 0.1
    for harness in harnesses:
        for sequence in list(harness.live.values()):
            if sequence.is_paused:
                harness.unpause(sequence)
        harness.finish()
    for harness, sequence in all_sequences:
        if sequence.id in harness.reasons:
            harness.check_answer(sequence)
    tiers = [harness.tier for harness in harnesses if harness.tier]
    stores = [tier.store for tier in tiers if tier.store]
    assert sum(store.hits for store in stores) > 150
    assert sum(store.num_retried for store in stores) > 5
    assert sum(tier.num_corrupt for tier in tiers) > 1
    assert sum(store_of(harness).failures["lost"] for harness in harnesses) > 1 or not num_slots
