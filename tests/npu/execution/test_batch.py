from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import msgspec
import numpy as np
import pytest
import torch

from npuserve.kernels.registry import KERNELS
from npuserve.npu.backends import select
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.batch import Batch, BatchBuffers, make_batch
from npuserve.npu.execution.staged import Part
from npuserve.npu.step import PENDING, Row

CPU = select("cpu")


def test_make_batch_values():
    rows = [
        Row(7, [50], start=5, block_ids=[9, 2], samples=True),  # decode row
        Row(8, [60, 61, 62], start=3, block_ids=[4, 0], samples=False),  # middle chunk
        Row(9, [70, 71], start=0, block_ids=[1, 99], samples=True),  # whole prompt, with an unused block
    ]
    batch = make_batch(rows, 4, CPU)
    assert batch.ids.tolist() == [50, 60, 61, 62, 70, 71]
    assert batch.positions.tolist() == [5, 3, 4, 5, 0, 1]
    assert batch.slot_mapping.tolist() == [2 * 4 + 1, 4 * 4 + 3, 0, 1, 4, 5]
    assert batch.attention.block_tables.tolist() == [[9, 2], [4, 0], [1, 0]]
    assert batch.attention.context_lens.tolist() == batch.attention.host_context_lens == [6, 6, 2]
    assert batch.attention.cu_seqlens_q.tolist() == batch.attention.host_cu_seqlens_q == [0, 1, 4, 6]
    assert batch.sample_tokens.tolist() == [0, 5]
    assert {t.dtype for t in (batch.ids, batch.positions, batch.slot_mapping, batch.sample_tokens)} == {torch.int64}
    attention = batch.attention
    assert {t.dtype for t in (attention.block_tables, attention.context_lens, attention.cu_seqlens_q)} == {torch.int32}


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_make_batch_equals_one_token_at_a_time(block_size):
    r = random.Random(block_size)
    rows = []
    for request in range(r.randint(1, 6)):
        start, length = r.choice([0, r.randint(0, 70)]), r.choice([1, r.randint(1, 40)])
        blocks = r.sample(range(200), -(-(start + length) // block_size))
        rows.append(Row(request, [r.randrange(1000) for _ in range(length)], start, blocks, r.randint(0, length)))
    batch = make_batch(rows, block_size, CPU)
    tokens = [(row, offset) for row in rows for offset in range(len(row.token_ids))]
    places = [row.start + offset for row, offset in tokens]
    assert batch.ids.tolist() == [row.token_ids[offset] for row, offset in tokens]
    assert batch.positions.tolist() == places
    assert batch.slot_mapping.tolist() == [
        row.block_ids[place // block_size] * block_size + place % block_size
        for (row, _), place in zip(tokens, places, strict=True)
    ]
    sampled = [index for index, (row, offset) in enumerate(tokens) if offset >= len(row.token_ids) - row.samples]
    assert batch.sample_tokens.tolist() == sampled


def filled(buffers: BatchBuffers, *parts: tuple[list[Row], int], sampled: dict[int, int] | None = None
           ) -> list[tuple[Part, Batch]]:
    staged = buffers.fill(parts, sampled or {})
    staged.upload()
    return [(part, buffers.batch(part)) for part in staged.parts]


def random_rows(r: random.Random, number: int, most: int = 18) -> list[Row]:
    rows = []
    for request in range(number):
        length = r.choice([1, r.randint(1, most)])
        start = r.randint(0, 8 * 16 - length)
        rows.append(Row(request, [r.randrange(100) for _ in range(length)], start,
                        r.sample(range(200), -(-(start + length) // 16)), r.random() < 0.5))
    return rows


def same(batch: Batch, own: Batch) -> None:
    for name in ("ids", "positions", "slot_mapping"):
        assert getattr(batch, name).tolist() == getattr(own, name).tolist()
    assert batch.sample_tokens.tolist() == own.sample_tokens.tolist()
    for name in ("context_lens", "cu_seqlens_q", "host_context_lens", "host_cu_seqlens_q"):
        mine, its = getattr(batch.attention, name), getattr(own.attention, name)
        assert list(mine) == list(its)
    tables = zip(batch.attention.block_tables.tolist(), own.attention.block_tables.tolist(), strict=True)
    for (mine, its), context in zip(tables, own.attention.host_context_lens, strict=True):
        used = -(-context // 16)
        assert mine[:used] == its[:used]  # further columns are not read


def test_fill_reused_buffers_equal_fresh_ones():
    """Consecutive batches use the memory of the largest and equal batches in memory of their own."""
    r = random.Random(0)
    buffers = BatchBuffers(90, 5, 8, 16, None, CPU)
    for _ in range(50):
        rows = random_rows(r, r.randint(1, 5))
        ((part, batch),) = filled(buffers, (rows, len(rows)))
        same(batch, make_batch(rows, 16, CPU))
        whole = buffers.tokens(90)
        assert batch.ids.data_ptr() == whole.ids.data_ptr()
        assert batch.attention.block_tables.data_ptr() == whole.attention.block_tables.data_ptr()
        for row, table in zip(rows, batch.attention.block_tables, strict=True):
            assert table.tolist()[: len(row.block_ids)] == row.block_ids  # further columns are not read
        assert part.samples == [(row.request_id, row.start + len(row.token_ids)) for row in rows if row.samples]
        assert part.tokens == len(batch.ids)
        assert part.decodes == sum(row.is_decode for row in rows)


def test_fill_next_step_keeps_host_buffer():
    """The host buffer of a step is not overwritten while the next step is filled."""
    buffers = BatchBuffers(90, 5, 8, 16, None, CPU)
    r = random.Random(1)
    before, rows = None, []
    for _ in range(20):
        following = random_rows(r, r.randint(1, 5))
        staged = buffers.fill([(following, len(following))])
        if before:
            before.upload()
            same(buffers.batch(before.parts[0]), make_batch(rows, 16, CPU))
        before, rows = staged, following


def test_fill_block_lists_grow_and_are_replaced():
    buffers = BatchBuffers(9, 3, 4, 2, None, CPU)
    own: list[int] = []
    for step, block in enumerate([7, 3, 9, 1]):
        own.append(block)
        other = [20 + step]
        rows = [Row(0, [1], 2 * step + 1, own, True, 1), Row(1, [1], 1, other, True, 2 + step)]
        if step % 2:
            rows.reverse()
        ((_, batch),) = filled(buffers, (rows, 2))
        for row, table in zip(rows, batch.attention.block_tables.tolist(), strict=True):
            assert table[: len(row.block_ids)] == row.block_ids
        assert batch.slot_mapping.tolist() == [row.block_ids[row.start // 2] * 2 + 1 for row in rows]


def test_fill_pending_tokens_refer_to_sampled_ids():
    buffers = BatchBuffers(9, 3, 4, 4, None, CPU)
    rows = [Row(5, [PENDING], 3, [0], True), Row(6, [8, 9], 0, [1], True), Row(7, [PENDING], 6, [2, 3], True)]
    ((_, batch),) = filled(buffers, (rows, 3), sampled={7: 0, 9: 1, 5: 2})
    assert batch.ids.tolist() == [-3, 8, 9, -1]
    last = torch.tensor([50, 60, 70])
    assert KERNELS["take_ids"](batch.ids, last).tolist() == [70, 8, 9, 50]
    with pytest.raises(KeyError):
        buffers.fill([(rows, 3)], {5: 0})


def test_fill_padded_decodes_with_chunks_equal_single_parts():
    """Padding writes to its own block, and each part equals the same part alone."""
    r = random.Random(2)
    buffers = BatchBuffers(90, 8, 8, 16, 300, CPU)
    for _ in range(30):
        count = r.randint(1, 5)
        decodes = [Row(q, [r.randrange(100)], s := r.randint(0, 127), r.sample(range(200), s // 16 + 1), True)
                   for q in range(count)]
        chunks = random_rows(r, r.randint(0, 3))
        size = r.choice([count, 8])
        (part, batch), *others = filled(buffers, (decodes, size), *([(chunks, 1)] if chunks else []))
        same(batch, make_batch(decodes, 16, CPU))
        for other, rows in zip(others, [chunks], strict=False):
            same(other[1], make_batch(rows, 16, CPU))
            assert other[0].first == size
        assert part.context_lens == [row.start + 1 for row in decodes] + [1] * (size - count)
        whole = buffers.decode(size)
        padding = slice(count, size)
        assert set(whole.ids[padding].tolist()) <= {0}
        assert set(whole.positions[padding].tolist()) <= {0}
        assert whole.slot_mapping[padding].tolist() == [300 * 16 + i for i in range(size - count)]
        assert set(whole.attention.context_lens[padding].tolist()) <= {1}
        assert set(whole.attention.block_tables[padding, 0].tolist()) <= {300}
        assert whole.attention.cu_seqlens_q.tolist() == list(range(size + 1)) == part.cu_seqlens
        assert whole.attention.host_cu_seqlens_q == list(range(size + 1))


def test_buffers_initially_hold_padding():
    buffers = BatchBuffers(20, 3, 2, 16, 9, CPU)
    whole = buffers.decode(3)
    assert whole.ids.tolist() == whole.positions.tolist() == [0, 0, 0]
    assert whole.slot_mapping.tolist() == [159, 158, 157]
    assert whole.attention.context_lens.tolist() == whole.attention.host_context_lens == [1] * 3
    assert whole.attention.cu_seqlens_q.tolist() == whole.attention.host_cu_seqlens_q == [0, 1, 2, 3]
    assert whole.attention.block_tables.tolist() == [[9, 9]] * 3


def test_put_values_are_uploaded_with_batch():
    buffers = BatchBuffers(9, 3, 4, 4, None, CPU)
    staged = buffers.fill([([Row(0, [1], 0, [0], True)], 1)])
    values = [np.arange(5), np.array([0.5, 1.5], np.float32), np.random.default_rng(0).random((2, 3))]
    places = [staged.put(value) for value in values]
    staged.upload()
    for place, value in zip(places, values, strict=True):
        assert place.data_ptr() % 8 == 0
        np.testing.assert_array_equal(place.numpy(), value)


def test_fill_step_at_all_limits():
    buffers = BatchBuffers(64, 8, 500, 16, None, CPU)
    rows = [Row(request, [1] * 8, 7992, list(range(500)), True) for request in range(8)]
    ((_, batch),) = filled(buffers, (rows, 8))
    same(batch, make_batch(rows, 16, CPU))


@pytest.mark.parametrize("rows", [
    [Row(0, [1], 0, [0], True)] * 3, [Row(0, [1] * 5, 0, [0], True)], [Row(0, [1], 32, [0, 1, 2], True)],
])
def test_fill_beyond_limits_is_refused(rows):
    buffers = BatchBuffers(4, 2, 2, 16, None, CPU)
    buffers.fill([([Row(0, [1], 31, [0, 1], True)] * 2, 2)])
    with pytest.raises(ValueError, match="while the buffers hold at most 4, 2, 2"):
        buffers.fill([(rows, len(rows))])


class Padded(CpuBackend):
    """Backend with attention that reads lengths from the host, as on Ascend."""

    capabilities = replace(CpuBackend.capabilities, padding_blocks=2, host_lengths=True)


def test_padding_rows_and_tokens_have_distinct_slots():
    """Padding writes to all padding blocks in turn. The first batch, for captures, uses the slots of the cache."""
    buffers = BatchBuffers(60, 40, 4, 16, 3, Padded())
    assert buffers.most_tokens == 48
    assert sorted(buffers.tokens(60).slot_mapping.tolist()) == list(range(20, 80))
    ((part, _),) = filled(buffers, ([Row(i, [1], 15, [i], True) for i in range(2)], 34))
    assert buffers.decode(34).slot_mapping.tolist() == [15, 31, *range(48, 80)]
    assert part.padded == 34

    staged = buffers.fill([([Row(0, [1, 2], 15, [0, 2], True)], 1)])
    buffers.pad_tokens(staged.parts[0], 30)
    staged.upload()
    assert buffers.tokens(30).slot_mapping.tolist() == [15, 32, *range(48, 76)]


def test_tokens_of_a_capture_are_divided_into_rows_that_fit_their_blocks():
    buffers = BatchBuffers(60, 3, 2, 8, 9, Padded())
    for tokens, lengths in ((5, [5, 0, 0, 0]), (40, [16, 16, 8, 0]), (60, [16, 16, 16, 12])):
        attention = buffers.tokens(tokens).attention
        assert attention.host_context_lens == lengths
        assert attention.host_cu_seqlens_q == [0, *accumulate(lengths)]


def test_pad_adds_tokens_and_rows_without_effect():
    """Inputs of longer steps that remain in the buffers have no effect."""
    r = random.Random(3)
    buffers = BatchBuffers(40, 4, 8, 16, 300, CPU)
    buffers.clear()
    whole = buffers.tokens(7)
    assert whole.slot_mapping.tolist() == [-1] * 7
    assert whole.attention.context_lens.tolist() == [0] * 4
    assert whole.attention.cu_seqlens_q.tolist() == [0] * 5
    for _ in range(30):
        rows = random_rows(r, r.randint(1, 4), 9)
        staged = buffers.fill([(rows, len(rows))])
        (part,) = staged.parts
        size = min(40, part.tokens + r.randint(0, 9))
        buffers.pad_tokens(part, size)
        staged.upload()
        same(buffers.batch(part), make_batch(rows, 16, CPU))
        whole, beyond = buffers.tokens(size), slice(part.tokens, size)
        assert len(whole.ids) == len(whole.positions) == len(whole.slot_mapping) == size
        assert set(whole.ids[beyond].tolist() + whole.positions[beyond].tolist()) <= {0}
        assert set(whole.slot_mapping[beyond].tolist()) <= {-1}
        assert set(whole.attention.context_lens[len(rows) :].tolist()) <= {0}
        assert whole.attention.cu_seqlens_q.tolist() == part.cu_seqlens + [part.tokens] * (4 - len(rows))
        assert len(whole.attention.block_tables) == 4
        assert whole.attention.host_context_lens == whole.attention.host_cu_seqlens_q == []


@pytest.mark.parametrize("backend", [CPU, Padded()], ids=["lengths on the device", "lengths on the host"])
def test_rows_beyond_a_padded_step_have_the_padding_slot(backend: CpuBackend) -> None:
    """The device sees the step's own rows, then at most one row that takes the padding tokens, then empty rows."""
    r = random.Random(5)
    buffers = BatchBuffers(40, 4, 8, 16, 300, backend, num_slots=9)
    buffers.clear()
    captured = buffers.tokens(7)
    assert captured.attention.cu_seqlens_q.tolist() == [0] * (len(captured.state_slots) + 1)
    assert captured.attention.context_lens.tolist() == [0] * len(captured.state_slots)
    for _ in range(30):
        rows = [msgspec.structs.replace(row, state_slot=r.randrange(9)) for row in random_rows(r, r.randint(1, 4), 9)]
        (part,) = (staged := buffers.fill([(rows, len(rows))])).parts
        size = min(40, part.tokens + r.randint(0, 9))
        buffers.pad_tokens(part, size)
        staged.upload()
        whole = buffers.tokens(size)
        lengths = whole.attention.cu_seqlens_q.diff().tolist()
        more = len(whole.state_slots) - len(rows)
        padding = [size - part.tokens] if backend.capabilities.host_lengths else [0]
        assert lengths == [len(row.token_ids) for row in rows] + (padding + [0] * 4)[:more]
        assert whole.attention.context_lens.tolist()[len(rows) :] == (padding + [0] * 4)[:more]
        assert whole.state_slots.tolist() == [row.state_slot for row in rows] + [9] * more


def test_padded_decode_rows_begin_in_the_padding_slot() -> None:
    """A context of one token begins with a state of zeros."""
    buffers = BatchBuffers(40, 4, 8, 16, 300, Padded(), num_slots=9)
    row = Row(0, [1], 20, [3, 4], True, state_slot=2)
    filled(buffers, ([row], 4))
    batch = buffers.decode(4)
    assert batch.state_slots.tolist() == [2, 9, 9, 9]
    assert batch.attention.context_lens.tolist() == [21, 1, 1, 1]
    assert batch.attention.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("starts", [(0, 0), (0, 4), (2, 0), (-1, -1)])
def test_fill_head_reads_its_own_tables_where_they_differ(starts):
    """They begin at `head_start`, for blocks of two tokens. Where all begin at 0, no second table is copied."""
    buffers = BatchBuffers(9, 3, 4, 2, None, CPU, has_mtp=True)
    rows = [Row(0, [1], 6, [7, 3, 9, 1], 1, 1, head_start=starts[0]),
            Row(1, [1], 5, [2, 8, 5], 1, 2, head_start=starts[1])]
    ((part, batch),) = filled(buffers, (rows, 2))
    assert batch.head is not None
    has_table = max(starts) > 0
    assert (batch.head.block_tables.data_ptr() == batch.attention.block_tables.data_ptr()) == (not has_table)
    for row, table, begin in zip(rows, batch.head.block_tables.tolist(), starts, strict=True):
        used = row.block_ids[max(0, begin) // 2 :]
        assert table[: len(used)] == used
    assert part.head_context_lens == [7 - max(0, starts[0]), 6 - max(0, starts[1])]
