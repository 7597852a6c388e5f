from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.service.scheduling.block_manager import BlockCounts, BlockManager, BlockTable


def hold(blocks: BlockManager, tokens: list[int], salt: str = "") -> BlockTable:
    """Return a table of `tokens`, all of them computed and registered."""
    table = BlockTable(salt)
    assert blocks.allocate(table, len(tokens), blocks.find_prefix(table, tokens))
    blocks.register(table, tokens, len(tokens))
    return table


def hold_at_once(blocks: BlockManager, tokens: list[int], count: int) -> list[BlockTable]:
    """Return tables of `tokens` that were allocated before the first one was registered: they share no block."""
    tables = [BlockTable() for _ in range(count)]
    for table in tables:
        assert blocks.allocate(table, len(tokens))
    for table in tables:
        blocks.register(table, tokens, len(tokens))
    return tables


def found(blocks: BlockManager, tokens: list[int], salt: str = "") -> list[int]:
    return blocks.find_prefix(BlockTable(salt), tokens)


def test_allocate_gives_distinct_blocks_for_all_tokens() -> None:
    blocks = BlockManager(8, 4)
    a, b = BlockTable(), BlockTable()
    assert blocks.allocate(a, 5)
    assert blocks.allocate(b, 4)
    assert (len(a.block_ids), len(b.block_ids)) == (2, 1)
    assert len({*a.block_ids, *b.block_ids}) == 3
    assert blocks.allocate(a, 8)
    assert len(a.block_ids) == 2
    assert blocks.counts == BlockCounts(3, 0, 5)
    blocks.check_integrity([a, b])


def test_allocate_without_enough_blocks_changes_nothing() -> None:
    blocks = BlockManager(3, 4)
    a = hold(blocks, [1, 2, 3, 4])
    b = BlockTable()
    prefix = blocks.find_prefix(b, [1, 2, 3, 4, *range(9)])
    assert prefix == a.block_ids
    assert not blocks.allocate(b, 13, prefix)
    assert b.block_ids == []
    assert blocks.counts == BlockCounts(1, 0, 2)
    assert not blocks.allocate(b, 12, prefix, spare=1)
    assert blocks.allocate(b, 12, prefix)
    blocks.check_integrity([a, b])


def test_allocate_never_evicts_the_shared_prefix() -> None:
    blocks = BlockManager(2, 2)
    blocks.free(hold(blocks, [1, 2, 3, 4]))
    table = BlockTable()
    prefix = blocks.find_prefix(table, [1, 2, 9, 9, 9])
    assert len(prefix) == 1
    assert not blocks.allocate(table, 5, prefix)  # one cached block is left, two are needed
    assert blocks.counts == BlockCounts(0, 2, 0)
    assert blocks.allocate(table, 4, prefix)
    assert table.block_ids[0] == prefix[0]
    blocks.check_integrity([table])


def test_find_prefix_returns_whole_blocks_and_leaves_one_token() -> None:
    blocks = BlockManager(8, 4)
    blocks.free(hold(blocks, list(range(10))))
    assert len(found(blocks, list(range(4)))) == 0
    assert len(found(blocks, list(range(5)))) == 1
    assert len(found(blocks, list(range(8)))) == 1
    assert len(found(blocks, list(range(9)))) == 2
    assert len(found(blocks, list(range(13)))) == 2
    assert len(found(blocks, [0, 1, 2, 3, 9, 9, 9, 9, 9])) == 1
    assert found(blocks, [9, 1, 2, 3, 4, 5, 6, 7, 8]) == []


def test_find_prefix_looks_up_again_only_after_the_prefix_cache_has_changed() -> None:
    blocks = BlockManager(4, 2)
    waiting, table = BlockTable(), BlockTable()
    tokens = [1, 2, 3, 4, 5]
    with patch.object(blocks, "_by_digest", wraps=blocks._by_digest) as index:
        def looked_up() -> tuple[list[int], int]:
            index.get.reset_mock()
            return blocks.find_prefix(waiting, tokens), index.get.call_count

        assert looked_up() == ([], 1)
        assert looked_up() == ([], 0)
        assert blocks.allocate(table, 4)
        assert looked_up() == ([], 0)
    blocks.register(table, tokens[:4], 4)
    first = blocks.find_prefix(waiting, tokens)
    assert first == table.block_ids
    assert blocks.find_prefix(waiting, tokens) is first
    blocks.free(table)
    assert blocks.find_prefix(waiting, tokens) is first, "cached blocks are still found"
    assert blocks.allocate(BlockTable(), 6), "evicts the last block"
    assert blocks.find_prefix(waiting, tokens) == first[:1]
    assert blocks.find_prefix(waiting, [*tokens, 6, 7]) == first[:1]


def test_find_prefix_same_tokens_at_another_position_miss() -> None:
    blocks = BlockManager(8, 2)
    blocks.free(hold(blocks, [1, 2, 3, 4]))
    assert found(blocks, [3, 4, 1]) == []
    assert len(found(blocks, [1, 2, 1, 2, 1])) == 1


def test_find_prefix_other_salt_misses() -> None:
    blocks = BlockManager(8, 2)
    blocks.free(hold(blocks, [1, 2, 3, 4], "a"))
    assert found(blocks, [1, 2, 3, 4, 5]) == []
    assert found(blocks, [1, 2, 3, 4, 5], "b") == []
    assert len(found(blocks, [1, 2, 3, 4, 5], "a")) == 2


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_scope_shares_blocks_among_its_tables_only(prefix_cache: bool) -> None:
    blocks, tokens = BlockManager(16, 2, prefix_cache), [1, 2, 3, 4, 5]
    table, other = BlockTable("a", 1), BlockTable("a", 2)
    for one in (table, other):
        assert blocks.find_prefix(one, tokens) == []
        blocks.allocate(one, 5)
        blocks.register(one, tokens, 5)
    assert blocks.scopes == {1, 2}
    assert blocks.find_prefix(BlockTable("a", 1), tokens) == table.block_ids[:2]
    assert blocks.find_prefix(BlockTable("b", 1), tokens) == []
    assert blocks.find_prefix(BlockTable("a", 2), tokens) == other.block_ids[:2]
    assert found(blocks, tokens, "a") == []
    blocks.check_integrity([table, other])


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_forget_frees_the_blocks_of_a_scope(prefix_cache: bool) -> None:
    blocks, tokens = BlockManager(8, 2, prefix_cache), [1, 2, 3, 4, 5]
    public, table = hold(blocks, tokens), BlockTable("", 7)
    blocks.free(public)
    cached = blocks.counts.cached
    blocks.allocate(table, 5)
    blocks.register(table, tokens, 5)
    blocks.free(table)
    assert blocks.counts.cached == cached + 2  # found by the scope until it ends
    assert len(blocks.find_prefix(BlockTable("", 7), tokens)) == 2
    blocks.forget(7)
    assert blocks.counts == BlockCounts(0, cached, 8 - cached)
    assert blocks.find_prefix(BlockTable("", 7), tokens) == []
    assert len(found(blocks, tokens)) == cached
    blocks.forget(7)
    blocks.forget(0)
    assert not blocks.scopes
    blocks.check_integrity([])


def test_forget_after_eviction_frees_the_rest() -> None:
    blocks, tokens = BlockManager(4, 2), [1, 2, 3, 4, 5]
    table = BlockTable("", 7)
    blocks.allocate(table, 5)
    blocks.register(table, tokens, 5)
    blocks.free(table)
    big = BlockTable()
    blocks.allocate(big, 6)  # 2 free blocks and the last cached one
    blocks.forget(7)
    assert blocks.counts == BlockCounts(3, 0, 1)
    blocks.check_integrity([big])


def test_find_prefix_finds_only_registered_blocks() -> None:
    blocks = BlockManager(8, 2)
    table, tokens = BlockTable(), [1, 2, 3, 4, 5]
    blocks.allocate(table, 5)
    assert found(blocks, tokens) == []
    blocks.register(table, tokens, 3)
    assert found(blocks, tokens) == table.block_ids[:1]
    blocks.register(table, tokens, 5)
    assert found(blocks, tokens) == table.block_ids[:2]
    blocks.check_integrity([table])


def test_register_keeps_the_first_block_of_equal_content() -> None:
    blocks = BlockManager(8, 2)
    a, b = hold_at_once(blocks, [1, 2, 3, 4], 2)
    assert found(blocks, [1, 2, 3, 4, 5]) == a.block_ids
    blocks.free(b)
    assert blocks.counts == BlockCounts(2, 0, 6)
    blocks.free(a)
    assert blocks.counts == BlockCounts(0, 2, 6)
    blocks.check_integrity([])


def test_free_shares_a_used_block_of_equal_content_instead() -> None:
    blocks = BlockManager(8, 2)
    a, b, c = hold_at_once(blocks, [1, 2, 3, 4], 3)
    blocks.free(b)
    blocks.free(a)
    assert blocks.counts == BlockCounts(2, 0, 6)
    assert found(blocks, [1, 2, 3, 4, 5]) == c.block_ids
    blocks.check_integrity([c])
    kept = c.block_ids
    blocks.free(c)
    assert found(blocks, [1, 2, 3, 4, 5]) == kept
    assert blocks.counts == BlockCounts(0, 2, 6)
    blocks.check_integrity([])


def test_register_frees_a_cached_block_of_equal_content() -> None:
    blocks = BlockManager(8, 2)
    a, b = BlockTable(), BlockTable()
    for table in (a, b):
        blocks.allocate(table, 4)
    blocks.register(a, [1, 2, 3, 4], 4)
    blocks.free(a)
    assert blocks.counts == BlockCounts(2, 2, 4)
    blocks.register(b, [1, 2, 3, 4], 4)
    assert blocks.counts == BlockCounts(2, 0, 6)
    assert found(blocks, [1, 2, 3, 4, 5]) == b.block_ids
    blocks.check_integrity([b])


def test_eviction_order_is_least_recently_used_leaf_first() -> None:
    blocks = BlockManager(4, 2)
    old, new = [1, 2, 3, 4], [5, 6, 7, 8]
    first, second = hold(blocks, old), hold(blocks, new)
    blocks.free(first)
    blocks.free(second)
    table = BlockTable()
    blocks.allocate(table, 1)
    assert len(found(blocks, [*old, 0])) == 1
    assert len(found(blocks, [*new, 0])) == 2
    blocks.allocate(table, 5)
    assert found(blocks, [*old, 0]) == []
    assert len(found(blocks, [*new, 0])) == 1
    blocks.check_integrity([table])


def test_eviction_order_after_a_prefix_hit() -> None:
    blocks = BlockManager(4, 2)
    old, new = [1, 2, 3, 4], [5, 6, 7, 8]
    for tokens in (old, new, old):
        blocks.free(hold(blocks, tokens))
    table = BlockTable()
    blocks.allocate(table, 1)
    assert len(found(blocks, [*old, 0])) == 2
    assert len(found(blocks, [*new, 0])) == 1


def test_allocate_uses_free_blocks_before_cached_ones() -> None:
    blocks = BlockManager(4, 2)
    blocks.free(hold(blocks, [1, 2, 3, 4]))
    table = BlockTable()
    blocks.allocate(table, 4)
    assert blocks.counts == BlockCounts(2, 2, 0)


def test_flush_prefix_cache_keeps_used_blocks() -> None:
    blocks = BlockManager(8, 2)
    used = hold(blocks, [1, 2, 3, 4])
    blocks.free(hold(blocks, [1, 2, 9, 9, 8, 8]))
    assert blocks.counts == BlockCounts(2, 2, 4)
    assert blocks.flush_prefix_cache() == 2
    assert blocks.counts == BlockCounts(2, 0, 6)
    assert found(blocks, [1, 2, 9, 9, 8, 8, 7]) == used.block_ids[:1]
    blocks.check_integrity([used])
    blocks.free(used)
    assert blocks.flush_prefix_cache() == 2
    assert blocks.flush_prefix_cache() == 0
    assert found(blocks, [1, 2, 3, 4, 5]) == []
    blocks.check_integrity([])


def test_free_without_prefix_cache_caches_nothing() -> None:
    blocks = BlockManager(4, 2, prefix_cache=False)
    blocks.free(hold(blocks, [1, 2, 3, 4]))
    assert blocks.counts == BlockCounts(0, 0, 4)
    assert found(blocks, [1, 2, 3, 4, 5]) == []


def test_register_after_free_registers_again() -> None:
    blocks = BlockManager(4, 2)
    table = hold(blocks, [1, 2, 3, 4])
    blocks.free(table)
    blocks.flush_prefix_cache()
    blocks.allocate(table, 4)
    assert found(blocks, [1, 2, 3, 4, 5]) == []
    blocks.register(table, [1, 2, 3, 4], 4)
    assert found(blocks, [1, 2, 3, 4, 5]) == table.block_ids


def test_free_leaves_a_list_that_was_read_before_unchanged() -> None:
    blocks = BlockManager(4, 2)
    table = hold(blocks, [1, 2, 3])
    ids = table.block_ids
    held = list(ids)
    blocks.free(table)
    assert ids == held
    assert table.block_ids == []


def test_block_table_version_changes_with_each_allocation_after_free() -> None:
    blocks, others = BlockManager(4, 2), BlockManager(4, 2)
    table, other = BlockTable(), BlockTable()
    assert table.version == 0
    seen = {0}
    for _ in range(3):
        assert blocks.allocate(table, 2)
        version = table.version
        assert blocks.allocate(table, 4)
        assert table.version == version  # it has grown
        assert others.allocate(other, 1)
        assert {version, other.version}.isdisjoint(seen)
        assert version != other.version
        seen |= {version, other.version}
        blocks.free(table)
        others.free(other)
        assert table.version == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_block_manager_rejects_bad_sizes(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockManager(num_blocks, block_size)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
actions = st.tuples(st.sampled_from("aaarrffx"), prompts, st.sampled_from(["", "s"]), st.integers(0, 9))


@given(num_blocks=st.integers(1, 12), size=st.integers(1, 3), steps=st.lists(actions, max_size=40))
def test_block_manager_matches_a_plain_cache(
    num_blocks: int, size: int, steps: list[tuple[str, list[int], str, int]]
) -> None:
    """Compare with a plain cache: each block records the (salt, tokens up to its end) of its last writer."""
    blocks = BlockManager(num_blocks, size)
    content: dict[int, tuple[str, list[int]]] = {}
    held: list[tuple[BlockTable, list[int]]] = []
    waiting: list[tuple[BlockTable, list[int], str]] = []  # looked up again and again
    for what, tokens, salt, which in steps:
        waiting.append((BlockTable(salt), tokens, salt))
        if what == "a":
            table = BlockTable(salt)
            prefix = blocks.find_prefix(table, tokens)
            assert len(prefix) * size < len(tokens)
            before = blocks.counts
            fits = blocks.allocate(table, len(tokens), prefix)
            needed = -(-len(tokens) // size) - len(prefix)
            assert fits or (blocks.counts == before and needed > before.free + before.cached - len(prefix))
            if fits:
                held.append((table, tokens))
                assert len(table.block_ids) == len(prefix) + needed
                for index, block in enumerate(table.block_ids):
                    own = (salt, tokens[: (index + 1) * size])
                    if index < len(prefix):
                        assert content[block] == own
                    content[block] = own
        elif what == "r" and held:
            table, tokens = held[which % len(held)]
            blocks.register(table, tokens, len(tokens))
            findable = blocks.find_prefix(table, [*tokens, 0])
            assert len(findable) == len(tokens) // size
            assert all(content[one] == content[own] for one, own in zip(findable, table.block_ids, strict=False))
        elif what == "f" and held:
            blocks.free(held.pop(which % len(held))[0])
        elif what == "x":
            cached = blocks.counts.cached
            assert blocks.flush_prefix_cache() == cached
        blocks.check_integrity(table for table, _ in held)
        for table, tokens, salt in waiting:
            assert blocks.find_prefix(table, tokens) == found(blocks, tokens, salt)
    for table, _ in held:
        blocks.free(table)
    assert blocks.counts.used == 0
