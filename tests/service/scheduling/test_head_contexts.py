from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from npuserve.service.scheduling.head_contexts import NO_HEAD, HeadContexts

SIZE = 4


def sequence(*block_ids: int) -> Any:
    return SimpleNamespace(block_ids=list(block_ids), head_start=NO_HEAD)


def test_head_reads_all_positions_as_long_as_it_is_computed() -> None:
    heads, request = HeadContexts(SIZE), sequence(3, 1, 2)
    assert [heads.plan(request, start, start + 3) for start in (0, 3, 6)] == [0, 0, 0]
    assert heads.plan(sequence(3, 1, 5), 8, 9) == 0


def test_head_that_returns_reads_from_its_block_on() -> None:
    heads, request = HeadContexts(SIZE), sequence(0, 1, 2, 3)
    heads.plan(request, 0, 5)
    heads.is_computed = False
    assert heads.plan(request, 5, 6) == NO_HEAD
    heads.is_computed = True
    assert heads.plan(request, 6, 7) == SIZE
    assert heads.plan(request, 7, 9) == SIZE
    assert heads.plan(request, 9, 13) == SIZE
    assert heads.plan(sequence(0, 1, 2, 3), 12, 13) == 2 * SIZE


def test_prefix_that_was_computed_without_the_head_is_not_read() -> None:
    heads = HeadContexts(SIZE)
    heads.is_computed = False
    heads.plan(sequence(5, 6), 0, 8)
    heads.is_computed = True
    assert heads.plan(sequence(5, 6, 7), 8, 10) == 2 * SIZE
    assert heads.plan(sequence(5, 6, 7, 8), 12, 13) == 2 * SIZE
    heads.plan(sequence(6, 5), 0, 8)  # written again by another request
    assert heads.plan(sequence(5, 6, 9), 8, 10) == 0


def test_blocks_from_host_memory_are_not_read_once_the_head_was_stopped() -> None:
    heads = HeadContexts(SIZE)
    heads.loaded([1])
    assert heads.plan(sequence(1, 2), 4, 5) == 0
    heads.is_computed = False
    heads.plan(sequence(7), 0, 1)
    heads.is_computed = True
    heads.loaded([1])
    assert heads.plan(sequence(1, 2), 4, 5) == SIZE


def test_head_reads_what_it_wrote() -> None:
    """But for positions before the first one since its return, in the same block."""
    chance = random.Random(0)
    heads = HeadContexts(SIZE)
    written: dict[tuple[int, int], bool] = {}  # (block, offset) -> the head wrote it
    cached: list[int] = []
    for _ in range(300):
        shared = cached[: chance.randrange(len(cached) + 1)]
        own = chance.sample([block for block in range(60) if block not in cached], 10)
        request = sequence(*shared, *own)
        position = begin = SIZE * len(shared)
        while position < SIZE * len(request.block_ids) - 4:
            if chance.random() < 0.1:
                heads.is_computed = not heads.is_computed
            end = position + chance.randrange(1, 5)
            before = request.head_start
            start = heads.plan(request, position, end)
            for place in range(position, end):
                written[request.block_ids[place // SIZE], place % SIZE] = heads.is_computed
            if heads.is_computed:
                begin = position if before == NO_HEAD else begin
                assert start % SIZE == 0
                assert start <= position
                assert all(written.get((request.block_ids[place // SIZE], place % SIZE), True)
                           for place in range(start, end) if place // SIZE != begin // SIZE or place >= begin)
            position = end
        cached = request.block_ids[: position // SIZE] if chance.random() < 0.5 else cached
