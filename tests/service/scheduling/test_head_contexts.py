from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from npuserve.npu.step import HostCopy
from npuserve.service.scheduling.head_contexts import NO_HEAD, HeadContexts

SIZE = 4


def sequence(*block_ids: int) -> Any:
    return SimpleNamespace(block_ids=list(block_ids), head_start=NO_HEAD)


def plan(heads: HeadContexts, request: Any, start: int, end: int) -> int:
    """Plan a step of one row."""
    head_start = heads.plan(request, start, end)
    heads.end_step([], [])
    return head_start


def test_head_reads_all_positions_as_long_as_it_is_computed() -> None:
    heads, request = HeadContexts(SIZE), sequence(3, 1, 2)
    assert [plan(heads, request, start, start + 3) for start in (0, 3, 6)] == [0, 0, 0]
    assert plan(heads, sequence(3, 1, 5), 8, 9) == 0


def test_head_that_returns_reads_from_its_block_on() -> None:
    heads, request = HeadContexts(SIZE), sequence(0, 1, 2, 3)
    plan(heads, request, 0, 5)
    heads.begin_step(is_computed=False)
    assert plan(heads, request, 5, 6) == NO_HEAD
    heads.begin_step(is_computed=True)
    assert plan(heads, request, 6, 7) == SIZE
    assert plan(heads, request, 7, 9) == SIZE
    assert plan(heads, request, 9, 13) == SIZE
    assert plan(heads, sequence(0, 1, 2, 3), 12, 13) == 2 * SIZE


def test_prefix_that_was_computed_without_the_head_is_not_read() -> None:
    heads = HeadContexts(SIZE)
    heads.begin_step(is_computed=False)
    plan(heads, sequence(5, 6), 0, 8)
    heads.begin_step(is_computed=True)
    assert plan(heads, sequence(5, 6, 7), 8, 10) == 2 * SIZE
    assert plan(heads, sequence(5, 6, 7, 8), 12, 13) == 2 * SIZE
    plan(heads, sequence(6, 5), 0, 8)  # written again by another request
    assert plan(heads, sequence(5, 6, 9), 8, 10) == 0


def test_blocks_keep_their_marks_in_host_memory() -> None:
    heads = HeadContexts(SIZE)
    plan(heads, sequence(1), 0, 4)
    heads.begin_step(is_computed=False)
    plan(heads, sequence(2), 0, 4)
    heads.begin_step(is_computed=True)
    saves = [HostCopy(1, 10), HostCopy(2, 11), HostCopy(2, 10, 0)]  # the last one is part of a state
    heads.plan(sequence(3), 0, 4)
    heads.plan(sequence(2), 0, 4)  # another request writes the block once it is saved
    heads.end_step(saves, [])
    assert plan(heads, sequence(2, 3), 4, 5) == 0
    heads.end_step([], [HostCopy(4, 10), HostCopy(5, 11), HostCopy(6, 11, 0)])
    assert plan(heads, sequence(4, 3), 4, 5) == 0
    assert plan(heads, sequence(5, 3), 4, 5) == SIZE
    assert plan(heads, sequence(6, 3), 4, 5) == 0
    heads.end_step([HostCopy(4, 11)], [])
    heads.end_step([], [HostCopy(5, 11)])
    assert plan(heads, sequence(5, 3), 4, 5) == 0


def test_head_reads_what_it_wrote() -> None:
    """But for positions before the first one since its return, in the same block."""
    chance = random.Random(0)
    heads = HeadContexts(SIZE)
    written: dict[tuple[int, int], bool] = {}  # (block, offset) -> the head wrote it
    cached: list[int] = []
    is_computed = True
    for _ in range(300):
        shared = cached[: chance.randrange(len(cached) + 1)]
        uncached = chance.sample([block for block in range(60) if block not in cached], 10)
        request = sequence(*shared, *uncached)
        position = begin = SIZE * len(shared)
        while position < SIZE * len(request.block_ids) - 4:
            if chance.random() < 0.1:
                is_computed = not is_computed
                heads.begin_step(is_computed=is_computed)
            end = position + chance.randrange(1, 5)
            before = request.head_start
            start = plan(heads, request, position, end)
            for place in range(position, end):
                written[request.block_ids[place // SIZE], place % SIZE] = is_computed
            if is_computed:
                begin = position if before == NO_HEAD else begin
                assert start % SIZE == 0
                assert start <= position
                assert all(written.get((request.block_ids[place // SIZE], place % SIZE), True)
                           for place in range(start, end) if place // SIZE != begin // SIZE or place >= begin)
            position = end
        cached = request.block_ids[: position // SIZE] if chance.random() < 0.5 else cached
