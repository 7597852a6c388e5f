"""A step's rows as device tensors. The one place where host values become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.npu.backends.base import Backend
from npuserve.npu.step import Row

Phase = Literal["prefill", "decode", "mixed"]

_VIEWS = 256
"""Views of a buffer that are kept."""


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of all rows, one row after the other.

    ids, positions, slot_mapping: [T] int64; slot = block * block_size + offset. attention: where each row's queries
    and keys are. samples: (request_id, index of the next token in prompt + output) of the S rows that yield one.
    sample_tokens: [S] int64, the last token of each of these. phase: of all rows together.
    """

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: AttentionMetadata
    samples: list[tuple[int, int]]
    sample_tokens: Tensor
    phase: Phase


_MIXED: Phase = "mixed"
_DECODE: Phase = "decode"


class _Buffer:
    """A tensor on the device and the host memory that fills it, which are one where the device is the host."""

    def __init__(self, backend: Backend, *shape: int, dtype: torch.dtype):
        self._host = backend.host_buffer(*shape, dtype=dtype).zero_()
        self.array = self._host.numpy()
        self.tensor = self._host.to(backend.device)
        self._shared = self.tensor.data_ptr() == self._host.data_ptr()
        self._views: dict[int, Tensor] = {}

    def first(self, count: int) -> Tensor:
        """The first `count` rows. Batches of one size follow each other: their views are made once."""
        view = self._views.get(count)
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[count] = self.tensor[:count]
        return view

    def put(self, values: np.ndarray[Any, Any] | None, count: int) -> Tensor:
        """The first `count` rows, filled with `values`, or with what `array` holds already if that is None."""
        if values is not None:
            self.array[:count] = values
        view = self.first(count)
        if not self._shared:
            view.copy_(self._host[:count], non_blocking=True)
        return view


class BatchBuffers:
    """Memory for one batch at a time, of at most max_tokens tokens of max_rows rows of max_blocks blocks.

    batch, decode: the largest one and the largest of one token a row, of made-up numbers. `fill` gives batches that lie
    at the same places, so that a step captured on these reads what `fill` wrote last.
    """

    def __init__(self, max_tokens: int, max_rows: int, max_blocks: int, block_size: int, backend: Backend):
        self.max_tokens, self.max_rows, self.max_blocks = max_tokens, max_rows, max_blocks
        self._block_size = block_size
        self._ids, self._positions, self._slots = (_Buffer(backend, max_tokens, dtype=torch.int64) for _ in range(3))
        self._tables = _Buffer(backend, max_rows, max_blocks, dtype=torch.int32)
        self._contexts = _Buffer(backend, max_rows, dtype=torch.int32)
        self._cu_seqlens = _Buffer(backend, max_rows + 1, dtype=torch.int32)
        self._sample_tokens = _Buffer(backend, max_rows, dtype=torch.int64)
        attention = AttentionMetadata(
            self._tables.tensor, self._contexts.tensor, self._cu_seqlens.tensor, [], [])
        self.batch, self.decode = (
            Batch(self._ids.first(tokens), self._positions.first(tokens), self._slots.first(tokens), attention, [],
                  self._sample_tokens.tensor, phase)
            for tokens, phase in ((max_tokens, _MIXED), (min(max_rows, max_tokens), _DECODE)))

    def hold(self, rows: Sequence[Row]) -> bool:
        """True if they are not too many."""
        return (
            len(rows) <= self.max_rows
            and sum(len(row.token_ids) for row in rows) <= self.max_tokens
            and -(-max(row.start + len(row.token_ids) for row in rows) // self._block_size) <= self.max_blocks
        )

    def fill(self, rows: Sequence[Row]) -> Batch:
        """rows: at least one. The batch stands until the next call; what is copied to the device need not have arrived
        when this returns."""
        count, size = len(rows), self._block_size
        lengths = np.fromiter((len(row.token_ids) for row in rows), np.int64, count)
        starts = np.fromiter((row.start for row in rows), np.int64, count)
        contexts = starts + lengths
        ends = np.cumsum(lengths)
        total = int(ends[-1])

        tables = self._tables.array
        for table, row, used in zip(tables, rows, (-(-contexts // size)).tolist(), strict=False):
            table[:used] = row.block_ids[:used]

        decodes = sum(row.is_decode for row in rows)
        if total == count:  # one token each
            positions, place = starts, np.arange(count)
        else:
            positions = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
            place = np.repeat(np.arange(count), lengths)
        slots = tables[place, positions // size].astype(np.int64) * size + positions % size
        cu_seqlens_q = np.concatenate(([0], ends))
        sampling = np.fromiter((row.samples for row in rows), np.bool_, count)
        last = ends[sampling] - 1

        ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, total)
        return Batch(
            ids=self._ids.put(ids, total),
            positions=self._positions.put(positions, total),
            slot_mapping=self._slots.put(slots, total),
            attention=AttentionMetadata(
                block_tables=self._tables.put(None, count),
                context_lens=self._contexts.put(contexts, count),
                cu_seqlens_q=self._cu_seqlens.put(cu_seqlens_q, count + 1),
                host_context_lens=contexts.tolist(),
                host_cu_seqlens_q=cu_seqlens_q.tolist(),
            ),
            samples=[(row.request_id, row.start + len(row.token_ids)) for row in rows if row.samples],
            sample_tokens=self._sample_tokens.put(last, len(last)),
            phase="decode" if decodes == count else "mixed" if decodes else "prefill",
        )


def make_batch(rows: Sequence[Row], block_size: int, backend: Backend) -> Batch:
    """rows: at least one. A batch in memory of its own."""
    tokens = sum(len(row.token_ids) for row in rows)
    blocks = max(-(-(row.start + len(row.token_ids)) // block_size) for row in rows)
    return BatchBuffers(tokens, len(rows), blocks, block_size, backend).fill(rows)
