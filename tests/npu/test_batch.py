from __future__ import annotations

import random

import pytest
import torch

from npuserve.npu.backends import select
from npuserve.npu.batch import BatchBuffers, make_batch
from npuserve.npu.step import Row

CPU = select("cpu")


def test_by_hand():
    rows = [
        Row(7, [50], start=5, block_ids=[9, 2], samples=True),  # a decode
        Row(8, [60, 61, 62], start=3, block_ids=[4, 0], samples=False),  # a chunk in the middle
        Row(9, [70, 71], start=0, block_ids=[1, 99], samples=True),  # a whole prompt, with a block too many
    ]
    batch = make_batch(rows, 4, CPU)
    assert batch.ids.tolist() == [50, 60, 61, 62, 70, 71]
    assert batch.positions.tolist() == [5, 3, 4, 5, 0, 1]
    assert batch.slot_mapping.tolist() == [2 * 4 + 1, 4 * 4 + 3, 0, 1, 4, 5]
    assert batch.attention.block_tables.tolist() == [[9, 2], [4, 0], [1, 0]]
    assert batch.attention.context_lens.tolist() == batch.attention.host_context_lens == [6, 6, 2]
    assert batch.attention.cu_seqlens_q.tolist() == batch.attention.host_cu_seqlens_q == [0, 1, 4, 6]
    assert batch.samples == [(7, 6), (9, 2)]
    assert batch.sample_tokens.tolist() == [0, 5]
    assert batch.phase == "mixed"
    assert {t.dtype for t in (batch.ids, batch.positions, batch.slot_mapping, batch.sample_tokens)} == {torch.int64}
    attention = batch.attention
    assert {t.dtype for t in (attention.block_tables, attention.context_lens, attention.cu_seqlens_q)} == {torch.int32}


@pytest.mark.parametrize("seed", range(20))
def test_against_one_token_at_a_time(seed):
    r = random.Random(seed)
    block_size = r.choice([1, 2, 16])
    rows = []
    for request in range(r.randint(1, 6)):
        start, length = r.choice([0, r.randint(0, 70)]), r.choice([1, r.randint(1, 40)])
        blocks = r.sample(range(200), -(-(start + length) // block_size))
        rows.append(Row(request, [r.randrange(1000) for _ in range(length)], start, blocks, r.random() < 0.5))
    batch = make_batch(rows, block_size, CPU)
    tokens = [(row, offset) for row in rows for offset in range(len(row.token_ids))]
    places = [row.start + offset for row, offset in tokens]
    assert batch.ids.tolist() == [row.token_ids[offset] for row, offset in tokens]
    assert batch.positions.tolist() == places
    assert batch.slot_mapping.tolist() == [
        row.block_ids[place // block_size] * block_size + place % block_size
        for (row, _), place in zip(tokens, places, strict=True)
    ]
    last = [index for index, (row, offset) in enumerate(tokens) if row.samples and offset == len(row.token_ids) - 1]
    assert batch.sample_tokens.tolist() == last


@pytest.mark.parametrize(
    ("rows", "phase"),
    [
        ([Row(0, [1], 4, [0], True), Row(1, [1], 9, [1], True)], "decode"),
        ([Row(0, [1, 2], 4, [0], True), Row(1, [1], 0, [1], True), Row(2, [1], 9, [2], False)], "prefill"),
        ([Row(0, [1, 2], 4, [0], True), Row(1, [1], 9, [1], True)], "mixed"),
    ],
)
def test_phases(rows, phase):
    assert make_batch(rows, 16, CPU).phase == phase


def test_batches_in_the_same_memory():
    """One after the other, they lie where the largest does, and are what they are in memory of their own."""
    r = random.Random(0)
    buffers = BatchBuffers(max_tokens=90, max_rows=5, max_blocks=8, block_size=16, backend=CPU)
    for _ in range(50):
        rows = []
        for request in range(r.randint(1, 5)):
            length = r.choice([1, r.randint(1, 18)])
            start = r.randint(0, 8 * 16 - length)
            rows.append(Row(request, [r.randrange(100) for _ in range(length)], start,
                            r.sample(range(200), -(-(start + length) // 16)), r.random() < 0.5))
        assert buffers.hold(rows)
        batch, own = buffers.fill(rows), make_batch(rows, 16, CPU)
        for name in ("ids", "positions", "slot_mapping", "sample_tokens"):
            assert getattr(batch, name).tolist() == getattr(own, name).tolist()
            if len(getattr(own, name)):
                assert getattr(batch, name).data_ptr() == getattr(buffers.batch, name).data_ptr()
        for name in ("context_lens", "cu_seqlens_q", "block_tables"):
            mine, its = getattr(batch.attention, name), getattr(own.attention, name)
            assert mine.data_ptr() == getattr(buffers.batch.attention, name).data_ptr()
            if name != "block_tables":  # what lies past a row's blocks is not read
                assert mine.tolist() == its.tolist()
        for row, table in zip(rows, batch.attention.block_tables, strict=True):
            assert table.tolist()[: len(row.block_ids)] == row.block_ids
        assert (batch.samples, batch.phase) == (own.samples, own.phase)
        assert batch.attention.host_context_lens == own.attention.host_context_lens
        assert batch.attention.host_cu_seqlens_q == own.attention.host_cu_seqlens_q


def test_what_is_too_large_for_the_memory():
    buffers = BatchBuffers(max_tokens=4, max_rows=2, max_blocks=2, block_size=16, backend=CPU)
    token = Row(0, [1], 0, [0], True)
    assert buffers.hold([token, token])
    assert not buffers.hold([token] * 3)
    assert not buffers.hold([Row(0, [1] * 5, 0, [0], True)])
    assert buffers.hold([Row(0, [1], 31, [0, 1], True)])
    assert not buffers.hold([Row(0, [1], 32, [0, 1, 2], True)])
