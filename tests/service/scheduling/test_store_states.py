"""Fixed states in a store that schedulers share: harnesses with fake devices, which check the state a row continues."""

from __future__ import annotations

from typing import Any

import pytest

from npuserve.service.scheduling.block_manager import BlockTable
from npuserve.service.scheduling.checkpoints import Spacing
from npuserve.service.scheduling.host_tier import HostTier
from npuserve.service.scheduling.sequence import State
from npuserve.service.scheduling.state_slots import state_key
from npuserve.service.scheduling.store_tier import StoreTier, value_keys
from npuserve.service.store.setup import max_saves
from tests.service.scheduling import test_store_tier
from tests.service.scheduling.reference import STATE_PARTS
from tests.service.scheduling.stepwise import SchedulerHarness
from tests.service.scheduling.test_host_tier import answer, ids, tier_of
from tests.service.scheduling.test_store_tier import idle, store_of, wait

NUM_VALUES = 6 + 2 * STATE_PARTS
"""Values of a prompt and its answer: 6 blocks, and the states at the end of the prompt and after the sixth block."""


def harness_of(contents: dict[bytes, Any], **fields: object) -> SchedulerHarness:
    settings = {"num_slots": 8, "spacing": Spacing(1, 100), "host_slots": 64} | fields
    harness = test_store_tier.harness_of(contents, **settings)  # type: ignore[arg-type]
    store_of(harness).limit = max_saves(harness.host_slots, 8) + STATE_PARTS  # as in setup.py
    return harness


def filled(*seeds: int, **fields: object) -> dict[bytes, Any]:
    """Return a store with blocks and states of prompts, of ids(1) if none is named."""
    contents: dict[bytes, Any] = {}
    first = harness_of(contents, num_blocks=64, num_slots=40, host_slots=200, **fields)
    for seed in seeds or (1,):
        answer(first, ids(seed))
    idle(first)
    assert len(contents) == NUM_VALUES or seeds
    return contents


def store_tier(harness: SchedulerHarness) -> StoreTier:
    store = tier_of(harness).store
    assert store is not None
    return store


def digests_of(harness: SchedulerHarness, seed: int = 1, salt: str = "") -> list[bytes]:
    """Return the digests of the blocks that a prompt shares."""
    return harness.blocks.digests(BlockTable(salt), ids(seed), 5)


def parts_of(digest: bytes) -> list[bytes]:
    return value_keys(state_key(digest), STATE_PARTS)


def test_prefix_of_another_server_comes_with_its_state() -> None:
    second = harness_of(filled())
    assert answer(second, ids(1)).cached_tokens == 10
    tier = store_tier(second)
    assert (tier.queries, tier.hits, tier.num_loaded) == (10, 10, 5 + STATE_PARTS)
    (lookup,) = store_of(second).lookups
    digests = digests_of(second)
    assert lookup == [*digests, *(parts_of(digest)[-1] for digest in digests)]
    assert answer(second, ids(1)).cached_tokens == 10
    assert len(store_of(second).lookups) == 1, "asked for what the device has"


def test_prefix_ends_at_the_last_state_of_the_store() -> None:
    """The store has the state after the sixth block, which is of the answer, and the one before."""
    longer = [*ids(1), 0, 0]
    contents = filled()
    second = harness_of(dict(contents))
    assert answer(second, longer).cached_tokens == 12
    for lost in (second.blocks.digests(BlockTable(), longer, 6)[5],
                 parts_of(second.blocks.digests(BlockTable(), longer, 6)[5])[-1]):
        third = harness_of({key: value for key, value in contents.items() if key != lost})
        assert answer(third, longer).cached_tokens == 10
        assert store_tier(third).num_loaded == 5 + STATE_PARTS
        assert store_tier(third).hits == 10


def test_state_alone_comes_where_the_blocks_are_known() -> None:
    contents = filled()
    second = harness_of({}, num_slots=2)
    answer(second, ids(1))
    answer(second, ids(2))
    tier = tier_of(second)
    tier.forget(state_key(digests_of(second)[-1]))
    store_of(second).contents.update(contents)
    assert answer(second, ids(1)).cached_tokens == 10
    assert store_tier(second).num_loaded == STATE_PARTS
    assert store_of(second).lookups[-1] == [parts_of(digest)[-1] for digest in digests_of(second)]


def test_blocks_alone_come_where_the_state_is_known() -> None:
    contents = filled()
    second = harness_of({}, num_slots=2)
    answer(second, ids(1))
    answer(second, ids(2, 24))
    answer(second, ids(3, 12))
    tier = tier_of(second)
    digests = digests_of(second)
    assert tier.has_state(digests[-1])
    for digest in digests[2:]:
        tier.forget(digest)
    assert not any(map(second.blocks.holds, digests))
    store_of(second).contents.update(contents)
    assert answer(second, ids(1)).cached_tokens == 10
    assert store_tier(second).num_loaded == 3
    assert store_of(second).lookups[-1] == [*digests[2:], *(parts_of(digest)[-1] for digest in digests[:4])]


def test_blocks_alone_come_where_the_device_has_the_state() -> None:
    contents = filled()
    second = harness_of({}, num_blocks=8, num_slots=40)
    for seed in (1, 2, 3):
        answer(second, ids(seed))
    tier = tier_of(second)
    digests = digests_of(second)
    for key in [*digests, *map(state_key, digests)]:
        tier.forget(key)
    assert not any(map(second.blocks.holds, digests))
    assert second.scheduler.slots
    assert second.scheduler.slots.has(digests[-1])
    store_of(second).contents.update({key: value for key, value in contents.items() if len(key) == 16})
    assert answer(second, ids(1)).cached_tokens == 10
    assert store_tier(second).num_loaded == 5


def test_fetch_keeps_the_state_that_its_blocks_need_in_host_memory() -> None:
    contents = filled()
    second = harness_of({}, num_slots=2)
    for seed, length in ((1, 12), (2, 24), (3, 12)):
        answer(second, ids(seed, length))
    tier = tier_of(second)
    digests = digests_of(second)
    for digest in digests[2:]:
        tier.forget(digest)
    for slot in tier.reserve(len(tier._free), lambda slot: False):  # other blocks fill host memory
        tier.enter(b"%d" % slot, [slot])
        tier.release(b"%d" % slot, [slot])
    tier._slots.move_to_end(state_key(digests[-1]), last=False)
    store_of(second).contents.update(contents)
    assert answer(second, ids(1)).cached_tokens == 10
    assert store_tier(second).num_loaded == 3


@pytest.mark.parametrize(("num_free", "num_cached"), [(6, 0), (7, 10)])
def test_fetch_leaves_slots_that_are_too_few_for_a_state(num_free: int, num_cached: int) -> None:
    """Copies to the other slots are in progress."""
    contents = filled()
    second = harness_of(contents, host_slots=16)
    second.tick()
    memory = store_of(second)._memory
    memory.copying.update(range(16))
    memory.copying.difference_update(tier_of(second)._free[:num_free])
    assert answer(second, ids(1)).cached_tokens == num_cached
    second.scheduler.check_integrity()


def test_state_that_saves_fewer_tokens_than_checkpoints_are_apart_is_not_asked_for() -> None:
    contents = filled()
    second = harness_of(dict(contents), spacing=Spacing(8, 100))
    answer(second, ids(1))
    (lookup,) = store_of(second).lookups
    assert lookup[5:] == [parts_of(digest)[-1] for digest in digests_of(second)[3:]]
    third = harness_of(dict(contents), spacing=Spacing(11, 100))
    assert answer(third, ids(1)).cached_tokens == 0
    assert not store_of(third).lookups


@pytest.mark.parametrize("part", range(STATE_PARTS))
def test_lost_part_of_a_state_is_a_miss_and_counted(part: int) -> None:
    contents = filled()
    second = harness_of(contents)
    keys = parts_of(digests_of(second)[-1])
    del contents[keys[part]]
    assert answer(second, ids(1)).cached_tokens == 0
    assert store_of(second).failures == ({"lost": 1} if part < STATE_PARTS - 1 else {})
    tier = store_tier(second)
    assert (tier.queries, tier.hits, tier.num_loaded) == (10, 0, 0)
    idle(second)
    assert contents.keys() >= {*keys}, "the state that was computed again is saved"
    assert answer(harness_of(contents), ids(1)).cached_tokens == 10


@pytest.mark.parametrize("count", [0, 3, 5, 6])
def test_load_that_ends_early_is_a_miss_and_what_arrived_is_kept(count: int) -> None:
    contents = filled()
    second = harness_of(contents)
    store_of(second).fault = lambda kind, number: count if kind == "load" else number
    assert answer(second, ids(1)).cached_tokens == 0
    tier = store_tier(second)
    assert (tier.hits, tier.num_loaded) == (0, count)
    second.scheduler.check_integrity()


@pytest.mark.parametrize("kind", ["lookup", "load"])
def test_failed_call_is_computed(kind: str) -> None:
    second = harness_of(filled())
    store_of(second).fault = lambda name, count: 0 if name == kind else count
    assert answer(second, ids(1)).cached_tokens == 0
    assert len(store_of(second).lookups) == 1, "asked again"


def test_requests_with_the_same_state_join_the_fetch() -> None:
    contents = filled()
    second = harness_of({}, num_slots=4, num_blocks=64)
    for seed in range(1, 5):
        answer(second, ids(seed))
    tier_of(second).forget(state_key(digests_of(second)[-1]))
    store_of(second).contents.update(contents)
    num_lookups = len(store_of(second).lookups)
    sequences = [second.add(ids(1), 2) for _ in range(2)]
    second.finish()
    assert [sequence.cached_tokens for sequence in sequences] == [10, 10]
    assert len(store_of(second).lookups) == num_lookups + 1


def test_working_set_over_the_memory_of_device_and_host_is_found() -> None:
    seeds = range(8)
    contents = filled(*seeds)
    second = harness_of(contents, num_blocks=8, num_slots=3, host_slots=32)
    for _ in range(2):
        assert [answer(second, ids(seed)).cached_tokens for seed in seeds] == [10] * 8
    assert store_tier(second).hits > 8 * 10


def test_idle_scheduler_saves_states_and_rests() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents, host={"max_early_saves": 1, "max_saves": 2})
    answer(harness, ids(1))
    idle(harness)
    assert len(contents) == NUM_VALUES
    assert contents.keys() > {*parts_of(digests_of(harness)[-1])}
    assert tier_of(harness).num_saved == store_tier(harness).num_saved == NUM_VALUES
    assert tier_of(harness).num_dropped == 0
    assert not harness.scheduler.loads.has_loads


def test_prefix_that_is_always_in_use_is_saved_with_its_state() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents, num_blocks=64)
    harness.add(ids(1), 60)
    digests = digests_of(harness)
    for _ in range(30):
        harness.tick()
    assert harness.live
    assert contents.keys() > {*digests, *parts_of(digests[-1])}
    assert answer(harness_of(contents), ids(1)).cached_tokens == 10


def test_state_of_an_answer_is_saved_once_the_request_has_ended() -> None:
    """Its request takes one state after another while it runs."""
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents, num_blocks=64)
    sequence = harness.add(ids(1, 11), 14)
    while sequence.num_generated_tokens < 12:
        harness.tick()
    for _ in range(20):
        harness.scheduler.loads.poll()
    assert sum(len(key) > 16 for key in contents) == STATE_PARTS
    harness.finish()
    idle(harness)
    digests = harness.blocks.digests(BlockTable(), sequence.token_ids, 12)
    assert {key[5:21] for key in contents if len(key) > 16} == {digests[4], digests[11]}


def test_state_on_suspicion_is_saved_at_its_first_use() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents, num_blocks=40, budget=8, spacing=Spacing(1, 4), host_slots=200)
    answer(harness, ids(1, 40))
    idle(harness)
    assert harness.scheduler.slots
    digests = harness.blocks.digests(BlockTable(), ids(1, 40), 19)
    suspected = [digest for digest in digests[:-1] if harness.scheduler.slots.has(digest)]
    assert suspected
    assert not {*parts_of(suspected[0])} & contents.keys()
    used = harness.add([*ids(1, 2 * digests.index(suspected[0]) + 2), 5, 5], 2)
    harness.finish()
    assert used.cached_tokens
    idle(harness)
    assert {*parts_of(suspected[0])} <= contents.keys()


def test_early_saves_of_a_step_are_bounded() -> None:
    """A step saves at most one block more than its bound, by those of one state."""
    harness = harness_of({}, num_blocks=64, num_slots=40, host={"max_early_saves": 3, "max_saves": 8})
    steps = []
    launch = harness.device.launch
    harness.device.launch = lambda step: steps.append(step) or launch(step)  # type: ignore[func-returns-value,method-assign]
    for seed in range(4):
        harness.add(ids(seed), 2)
    harness.finish()
    idle(harness)
    counts = [len(step.saves) for step in steps]
    assert sum(counts) == 4 * NUM_VALUES
    assert max(counts) in (3, 3 + STATE_PARTS - 1)


def test_state_that_no_one_expected_is_not_saved() -> None:
    """A long prompt takes states on suspicion at the ends of its chunks."""
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents, num_blocks=40, budget=8, spacing=Spacing(1, 4), host_slots=200)
    answer(harness, ids(1, 40))
    idle(harness)
    states = {key[5:21] for key in contents if len(key) > 16}
    assert len(states) == 2
    assert harness.scheduler.slots
    assert harness.scheduler.slots.num_checkpoints > 2


@pytest.mark.parametrize("host_slots", [1, 3, 4])
def test_state_of_more_than_half_of_host_memory_hinders_no_block(host_slots: int) -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents, host_slots=host_slots)
    answer(harness, ids(1))
    for _ in range(10):
        idle(harness)
    assert sum(len(key) == 16 for key in contents) == 6
    assert any(len(key) > 16 for key in contents) == (host_slots == 4)
    assert not harness.scheduler.loads.has_loads


def test_salts_separate_states() -> None:
    contents = filled()
    kept = dict(contents)
    second = harness_of(contents)
    assert answer(second, ids(1), cache_salt="a").cached_tokens == 0
    assert kept.keys().isdisjoint(key for lookup in store_of(second).lookups for key in lookup)
    idle(second)
    third = harness_of(contents)
    assert answer(third, ids(1), cache_salt="b").cached_tokens == 0
    assert answer(third, ids(1), cache_salt="a").cached_tokens == 10
    assert answer(third, ids(1), bypass_prefix_cache=True).cached_tokens == 0


def test_states_of_a_call_that_bypasses_the_cache_are_not_saved() -> None:
    """Its samples share blocks and states in a scope of their own."""
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents)
    harness.add_samples(ids(1), 2, 2, bypass_prefix_cache=True)
    while not (harness.scheduler.slots and harness.scheduler.slots.num_checkpoints):
        harness.tick()
    harness.finish()
    idle(harness)
    assert not contents
    assert tier_of(harness).num_saved == 0


def test_flush_empties_the_store_and_drops_states_that_arrive() -> None:
    contents = filled()
    second = harness_of(contents)
    store_of(second).polls = 4
    sequence = second.add(ids(1), 2)
    while store_of(second)._calls == [] or store_of(second)._calls[0][0].kind != "load":
        second.tick()
    assert sequence.state is State.LOADING
    kept = dict(contents)
    second.scheduler.memory.flush_prefix_cache()
    assert not contents
    contents.update(kept)  # of another server: the load brings all of it
    second.finish()
    assert sequence.cached_tokens == 0
    second.check_answer(sequence)


@pytest.mark.parametrize("ticks", range(12))
def test_flush_while_states_are_saved_leaves_none(ticks: int) -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents)
    store_of(harness)._memory.save_polls = 3
    answer(harness, ids(1))
    for _ in range(ticks):
        harness.tick()
    harness.scheduler.memory.flush_prefix_cache()
    for call, _ in store_of(harness)._calls:
        assert call.kind == "save"
    store_of(harness)._calls = [(call, 1) for call, _ in store_of(harness)._calls]
    harness.tick()
    contents.clear()  # by the removal, which follows the calls in progress
    wait(harness, 3)
    assert not contents
    harness.scheduler.check_integrity()


def test_corrupt_part_is_forgotten_at_its_save_and_counted_once() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents)
    harness.add(ids(1), 2)
    tier = tier_of(harness)
    digest = digests_of(harness)[-1]
    while (slots := tier.slots_of(state_key(digest))) is None:
        harness.tick()
    harness.device.corrupt = {slots[1]}
    harness.finish()
    idle(harness)
    assert not tier.has_state(digest)
    assert tier.num_corrupt == 1
    assert store_tier(harness).num_retried == 0
    assert parts_of(digest)[1] not in contents
    harness.scheduler.check_integrity()


def test_state_that_was_saved_again_to_other_slots_is_not_forgotten_as_corrupt() -> None:
    harness = harness_of({})
    answer(harness, ids(1))
    idle(harness)
    tier = tier_of(harness)
    key = state_key(digests_of(harness)[-1])
    slots = tier.slots_of(key)
    assert slots
    tier.forget_corrupt(key, slots[::-1])
    assert (tier.slots_of(key), tier.num_corrupt) == (slots, 0)
    tier.forget_corrupt(key, slots)
    assert (tier.slots_of(key), tier.num_corrupt) == (None, 1)


@pytest.mark.parametrize("part", range(STATE_PARTS))
@pytest.mark.parametrize("is_refused", [False, True])
def test_state_of_which_one_part_failed_is_saved_again_as_a_whole(part: int, is_refused: bool) -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents)
    store = store_of(harness)
    key = parts_of(digests_of(harness)[-1])[part]
    saved: list[bytes] = []
    save = store.save
    count = store._count

    def refuse_once(call: int, value: bytes, slot: int) -> bool:
        saved.append(value)
        return (not is_refused or saved.count(key) != 1 or value != key) and save(call, value, slot)

    store.save = refuse_once  # type: ignore[method-assign]
    store._count = lambda call: (  # type: ignore[method-assign]
        0 if not is_refused and call.keys == [key] and saved.count(key) == 1 else count(call))
    answer(harness, ids(1))
    wait(harness, 3)
    assert len(contents) == NUM_VALUES
    assert saved.count(key) == 2
    assert saved.count(parts_of(digests_of(harness)[-1])[0]) == 2
    assert store_tier(harness).num_retried == 1
    assert not harness.scheduler.loads.has_loads
    harness.scheduler.check_integrity()


def test_states_wait_while_the_store_is_not_asked() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents)
    store_of(harness).is_available = False
    answer(harness, ids(1))
    idle(harness)
    assert not harness.scheduler.loads.has_loads
    store_of(harness).is_available = True
    idle(harness)
    assert len(contents) == NUM_VALUES
    assert store_tier(harness).num_retried == 0


def test_store_that_becomes_unavailable_between_the_parts_is_no_failure() -> None:
    contents: dict[bytes, Any] = {}
    harness = harness_of(contents)
    store = store_of(harness)
    save = store.save

    def save_first_part(call: int, key: bytes, slot: int) -> bool:
        store.is_available = len(key) == 16 or key.endswith(b"\0")
        return save(call, key, slot)

    store.save = save_first_part  # type: ignore[method-assign]
    answer(harness, ids(1))
    idle(harness)
    assert not store.is_available
    store.save = save  # type: ignore[method-assign]
    store.is_available = True
    idle(harness)
    assert len(contents) == NUM_VALUES
    assert store_tier(harness).num_retried == 0
    harness.scheduler.check_integrity()


def test_tier_without_a_store_saves_no_state_early() -> None:
    harness = SchedulerHarness(host_slots=64, num_blocks=16, block_size=2, num_slots=8, spacing=Spacing(1, 100),
                               host={"num_early": 16, "max_early_saves": 1})
    answer(harness, ids(1))
    answer(harness, ids(2))
    idle(harness)
    tier: HostTier = tier_of(harness)
    assert tier.num_used
    assert not any(len(key) > 16 for key in tier._slots)
