"""Audit of the block manager: each fault is named."""

from __future__ import annotations

import pytest

from npuserve.service.scheduling.block_manager import AUDIT_BLOCKS, BlockManager, BlockTable, IntegrityError
from tests.service.scheduling.test_block_manager import hold, hold_at_once


def test_audit_names_the_fault_of_a_block() -> None:
    blocks = BlockManager(4, 2)
    table = hold(blocks, [1, 2, 3])
    blocks.check_integrity([table])
    with pytest.raises(IntegrityError, match=r"block 0: 1 references, but 0 tables"):
        blocks.check_integrity([])
    with pytest.raises(IntegrityError, match=r"block 0: 1 references, but 2 tables"):
        blocks.check_integrity([table, table])
    stranger = BlockTable()
    stranger.block_ids = [77]
    with pytest.raises(IntegrityError, match=r"do not exist: \[77\]"):
        blocks.check_integrity([table, stranger])
    blocks._free.append(3)
    with pytest.raises(IntegrityError, match=r"block 3: does not exist, or is in the free list twice"):
        blocks.check_integrity([table])
    blocks._free[-1] = 4
    with pytest.raises(IntegrityError, match=r"block 4: does not exist, or is in the free list twice"):
        blocks.check_integrity([table])
    blocks._free[-1] = 0
    with pytest.raises(IntegrityError, match=r"block 0: in 2 of the states"):
        blocks.check_integrity([table])
    blocks._free.pop()
    blocks._cached[4] = None
    with pytest.raises(IntegrityError, match=r"blocks are cached that do not exist: 4"):
        blocks.check_integrity([table])
    del blocks._cached[4]
    blocks._free.pop()
    with pytest.raises(IntegrityError, match=r"block 2: in 0 of the states"):
        blocks.check_integrity([table])


def test_audit_names_the_fault_of_a_digest() -> None:
    blocks = BlockManager(4, 2)
    blocks.free(hold(blocks, [1, 2, 3]))
    (digest,) = blocks._by_digest
    blocks._by_digest[digest] = 2
    with pytest.raises(IntegrityError, match=f"block 0: its digest {digest.hex()} does not find it"):
        blocks.check_integrity([])
    blocks._by_digest[digest] = 0
    blocks._by_digest[b"other"] = 0
    with pytest.raises(IntegrityError, match="2 digests, but 1 blocks have one"):
        blocks.check_integrity([])
    blocks._digest[3], blocks._by_digest[b"other"] = b"other", 3
    with pytest.raises(IntegrityError, match="block 3: free, but found by a digest"):
        blocks.check_integrity([])
    blocks._by_digest.clear()
    blocks._digest[0] = blocks._digest[3] = None
    with pytest.raises(IntegrityError, match="block 0: cached, but without a digest"):
        blocks.check_integrity([])


def test_audit_names_the_fault_of_a_duplicate() -> None:
    blocks = BlockManager(4, 2)
    a, b = hold_at_once(blocks, [1, 2], 2)
    (digest,) = blocks._by_digest
    blocks.check_integrity([a, b])
    blocks._duplicates[digest][2] = None
    with pytest.raises(IntegrityError, match="2 blocks are listed as duplicates, but 1 are"):
        blocks.check_integrity([a, b])
    blocks._duplicates[digest] = {}
    with pytest.raises(IntegrityError, match=f"block 1: its digest {digest.hex()} does not find it"):
        blocks.check_integrity([a, b])
    blocks._duplicates[digest] = {1: None}
    blocks._refs[0] = 0
    blocks._cached[0] = None
    with pytest.raises(IntegrityError, match="block 0: cached, but a duplicate of it is used"):
        blocks.check_integrity([b])


def test_audit_yields_after_each_part() -> None:
    blocks = BlockManager(3 * AUDIT_BLOCKS, 2)
    assert sum(1 for _ in blocks.audit([])) == 6  # of the free list, and of all blocks
