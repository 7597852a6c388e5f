"""Log of the prefix cache's changes: the events, replayed, give the cache."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from npuserve.npu.step import HostSlots
from npuserve.service.engine.kv_event_log import KvEventLog, to_hash
from npuserve.service.ipc.kv_events import Event, encode_batch
from npuserve.service.scheduling.block_manager import BlockManager, BlockTable
from npuserve.service.scheduling.checkpoints import Spacing
from npuserve.service.scheduling.host_tier import HostTier
from tests.service.scheduling.reference import VOCABULARY, FakeDevice
from tests.service.scheduling.stepwise import SchedulerHarness
from tests.service.scheduling.test_block_manager import hold
from tests.support.kv_model import CacheModel


def made(num_blocks: int, size: int) -> tuple[BlockManager, KvEventLog]:
    log = KvEventLog(size)
    return BlockManager(num_blocks, size, events=log), log


def events(log: KvEventLog, max_blocks: int = 1000) -> list[list[object]]:
    """Return the log's changes as a subscriber decodes them."""
    return decoded(log.take(max_blocks))


def decoded(found: list[Event]) -> list[list[object]]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(found))


def test_log_merges_the_blocks_of_a_chain() -> None:
    blocks, log = made(8, 2)
    log.start()
    table = hold(blocks, [1, 2, 3, 4, 5])
    first, second = map(to_hash, table._digests)
    assert events(log) == [["BlockStored", [first, second], None, [1, 2, 3, 4], 2, None, "GPU", None]]
    blocks.allocate(table, 7)
    blocks.register(table, [1, 2, 3, 4, 5, 6, 7], 7)
    third = to_hash(table._digests[2])
    assert events(log) == [["BlockStored", [third], second, [5, 6], 2, None, "GPU", None]]
    assert not log.has_changes


def test_log_of_evicted_blocks_is_one_event() -> None:
    blocks, log = made(3, 2)
    log.start()
    old = hold(blocks, [1, 2, 3, 4])
    hashes = [to_hash(digest) for digest in old._digests]
    blocks.free(old)
    log.take(100)
    hold(blocks, [7, 7, 8, 8, 9, 9])
    removed, stored = events(log)
    assert removed == ["BlockRemoved", hashes[::-1], "GPU"]  # the leaf first
    assert stored[3] == [7, 7, 8, 8, 9, 9]


def test_log_of_a_flush_is_cleared_or_removed() -> None:
    blocks, log = made(8, 2)
    log.start()
    used = hold(blocks, [1, 2])
    blocks.free(hold(blocks, [3, 4]))
    log.take(100)
    blocks.flush_prefix_cache()
    assert [event[0] for event in events(log)] == ["BlockRemoved"]
    assert len(log.blocks) == 1
    blocks.free(used)
    blocks.flush_prefix_cache()
    assert events(log) == [["AllBlocksCleared"]]
    assert log.blocks == {}
    blocks.flush_prefix_cache()
    assert not log.has_changes


def test_log_holds_no_block_of_a_salted_request() -> None:
    blocks, log = made(8, 2)
    log.start()
    private, public = hold(blocks, [1, 2, 3, 4], "tenant"), hold(blocks, [1, 2])
    assert [event[1] for event in events(log)] == [[to_hash(public._digests[0])]]
    for table in (private, public):
        blocks.free(table)
    hold(blocks, list(range(16)))  # evicts all
    assert events(log)[0] == ["BlockRemoved", [to_hash(public._digests[0])], "GPU"]


def test_log_without_a_subscriber_records_nothing() -> None:
    blocks, log = made(4, 2)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 9]):
        blocks.free(hold(blocks, tokens))
    blocks.flush_prefix_cache()
    assert not log.has_changes


def test_log_takes_at_most_the_given_number_of_blocks() -> None:
    blocks, log = made(8, 2)
    log.start()
    hold(blocks, list(range(10)))
    sizes = []
    while found := log.take(2):
        sizes.append(sum(len(event.block_hashes) for event in found))  # type: ignore[union-attr]
    assert sizes == [2, 2, 1]


def test_snapshot_is_as_of_its_call() -> None:
    blocks, log = made(8, 2)
    hold(blocks, [1, 2, 3, 4])
    count, parts = log.snapshot(1)
    hold(blocks, [1, 2, 9, 9])
    found = list(parts)
    assert count == len(found) == 2
    model = CacheModel(*(encode_batch((1e10, part, 0)) for part in found))
    assert model.prefixes() == {(1, 2), (1, 2, 3, 4)}
    assert model.clears == 1


def test_snapshot_of_an_empty_cache_is_one_part() -> None:
    count, parts = KvEventLog(2).snapshot(10)
    assert (count, decoded(next(parts))) == (1, [["AllBlocksCleared"]])


def test_snapshot_lists_the_parents_that_a_second_request_computed() -> None:
    """Two requests compute the same prompt at once. The first ends, and its blocks would be evicted."""
    blocks, log = made(6, 2)
    first, second = BlockTable(), BlockTable()
    assert blocks.allocate(first, 4)
    assert blocks.allocate(second, 6)
    blocks.register(first, [1, 2, 3, 4], 4)
    blocks.register(second, [1, 2, 3, 4, 5, 6], 6)
    blocks.free(first)
    other = hold(blocks, [9, 9, 8, 8, 7, 7])
    model = CacheModel(*(encode_batch((1e10, part, 0)) for part in log.snapshot(1)[1]))
    assert model.prefixes() == {(1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (9, 9), (9, 9, 8, 8), (9, 9, 8, 8, 7, 7)}
    assert blocks.find_prefix(BlockTable(), [1, 2, 3, 4, 5, 6, 7]) == second.block_ids
    blocks.check_integrity([second, other])


def test_log_of_a_model_with_fixed_state_is_the_cache_while_checkpoints_are_evicted() -> None:
    harness = SchedulerHarness(num_blocks=24, num_slots=4, max_num_seqs=2, spacing=Spacing(4, 8))
    log = KvEventLog(harness.block_size)
    log.start()
    harness.blocks._events = log
    model, draw, cached = CacheModel(), random.Random(3), 0
    known = [[1] * 9]
    for _ in range(40):
        before = draw.choice(known[-4:])
        known.append([*before[: draw.randint(1, 30)], *draw.choices(range(VOCABULARY), k=6)])
        sequence = harness.add(known[-1], 9)
        harness.finish()
        harness.check_answer(sequence)
        assert sequence.cached_tokens <= len(longest_prefix(model, known[-1]))
        cached += sequence.cached_tokens
        while changes := log.take(5):
            model.apply(encode_batch((1e10, changes, 0)))
        assert model.blocks.keys() == {to_hash(digest) for digest in harness.blocks._by_digest}
    misses = harness.scheduler.memory.take_misses()
    assert cached > 0
    assert misses["no_state"] > 0
    assert harness.scheduler.slots
    harness.scheduler.memory.flush_prefix_cache()
    assert harness.scheduler.slots.num_checkpoints == 0
    model.apply(encode_batch((1e10, log.take(5), 0)))
    assert not model.blocks


def test_log_says_which_medium_has_a_block() -> None:
    log = KvEventLog(2)
    device = FakeDevice(2, 2, {})
    tier = HostTier(HostSlots(1, 8), device.take_ended_loads, log)
    blocks = BlockManager(2, 2, events=log, evicted=tier)
    log.start()
    for tokens in ([1, 2], [3, 4], [5, 6]):
        blocks.free(hold(blocks, tokens))
    first, second, third = [to_hash(blocks.digests(BlockTable(), tokens, 1)[0]) for tokens in ([1, 2], [3, 4], [5, 6])]
    assert events(log) == [
        ["BlockStored", [first], None, [1, 2], 2, None, "GPU", None],
        ["BlockStored", [second], None, [3, 4], 2, None, "GPU", None],
        ["BlockStored", [first], None, [1, 2], 2, None, "CPU", None],
        ["BlockRemoved", [first], "GPU"],
        ["BlockStored", [third], None, [5, 6], 2, None, "GPU", None]]
    count, parts = log.snapshot(2)
    assert (count, log.num_blocks) == (2, 3)
    assert [decoded(part) for part in parts][1] == [["BlockStored", [first], None, [1, 2], 2, None, "CPU", None]]
    blocks.free(hold(blocks, [7, 8]))  # host memory has one slot
    assert events(log)[:2] == [
        ["BlockRemoved", [first], "CPU"], ["BlockStored", [second], None, [3, 4], 2, None, "CPU", None]]
    blocks.flush_prefix_cache()
    assert events(log) == [["AllBlocksCleared"]]
    assert log.num_blocks == 0


def test_log_holds_no_salted_block_of_host_memory() -> None:
    log = KvEventLog(2)
    blocks = BlockManager(1, 2, events=log, evicted=HostTier(HostSlots(4, 8), list, log))
    log.start()
    blocks.free(hold(blocks, [1, 2], salt="a"))
    blocks.free(hold(blocks, [3, 4], salt="a"))
    assert not log.has_changes
    assert log.num_blocks == 0


def longest_prefix(model: CacheModel, tokens: list[int]) -> tuple[int, ...]:
    """Return the longest prefix of whole blocks of 4 tokens that a router expects in the cache."""
    prefixes, length = model.prefixes(), 0
    while length + 4 <= len(tokens) and tuple(tokens[: length + 4]) in prefixes:
        length += 4
    return tuple(tokens[:length])


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
actions = st.tuples(st.sampled_from("aaaarrrffxts"), prompts, st.sampled_from(["", "", "s"]), st.integers(0, 9))


@given(num_blocks=st.integers(1, 12), size=st.integers(1, 3), limit=st.integers(1, 4),
       steps=st.lists(actions, max_size=40))
def test_log_replayed_equals_the_cache_at_any_time(
    num_blocks: int, size: int, limit: int, steps: list[tuple[str, list[int], str, int]]
) -> None:
    """Allocate, register, free, flush, take and take snapshots in any order. Compare with the manager's own digests."""
    blocks, log = made(num_blocks, size)
    log.start()
    model, held = CacheModel(), list[tuple[BlockTable, list[int]]]()
    public: dict[bytes, tuple[int, ...]] = {}  # digest of each block without a salt -> its prefix

    def update() -> None:
        while found := log.take(limit):
            model.apply(encode_batch((1e10, found, 0)))

    for what, tokens, salt, which in steps:
        if what == "a":
            table = BlockTable(salt)
            if blocks.allocate(table, len(tokens), blocks.find_prefix(table, tokens)):
                held.append((table, tokens))
        elif what == "r" and held:
            table, tokens = held[which % len(held)]
            blocks.register(table, tokens, len(tokens))
            if not table._salt:
                public |= {digest: tuple(tokens[: (i + 1) * size]) for i, digest in enumerate(table._digests)}
        elif what == "f" and held:
            blocks.free(held.pop(which % len(held))[0])
        elif what == "x":
            blocks.flush_prefix_cache()
        elif what == "t":
            update()
        elif what == "s":
            fresh = CacheModel()
            for part in log.snapshot(limit)[1]:
                fresh.apply(encode_batch((1e10, part, 0)))
            update()
            assert fresh.prefixes() == model.prefixes()
        assert len(model.prefixes()) == len(model.blocks)
        blocks.check_integrity(table for table, _ in held)
    update()
    present = blocks._by_digest.keys() & public.keys()
    assert model.blocks.keys() == {to_hash(digest) for digest in present}
    for digest in present:
        assert model.blocks[to_hash(digest)].token_ids == public[digest][-size:]
    assert model.prefixes() == {public[digest] for digest in present}


def test_log_reports_a_block_of_host_memory_once() -> None:
    log = KvEventLog(2)
    log.start()
    log.stored(b"d" * 16, None, [1, 2])
    log.saved(b"d" * 16)
    log.saved(b"d" * 16)
    assert [event[6] for event in events(log)] == ["GPU", "CPU"]
