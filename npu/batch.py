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


def make_batch(rows: Sequence[Row], block_size: int, backend: Backend) -> Batch:
    """rows: at least one. What is copied to the device need not have arrived when this returns."""
    count = len(rows)
    lengths = np.fromiter((len(row.token_ids) for row in rows), np.int64, count)
    starts = np.fromiter((row.start for row in rows), np.int64, count)
    contexts = starts + lengths
    ends = np.cumsum(lengths)
    total = int(ends[-1])

    blocks = -(-contexts // block_size)
    tables = np.zeros((count, int(blocks.max())), np.int32)
    for table, row, used in zip(tables, rows, blocks.tolist(), strict=True):
        table[:used] = row.block_ids[:used]

    positions = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    block_ids = tables[np.repeat(np.arange(count), lengths), positions // block_size]
    cu_seqlens_q = np.concatenate(([0], ends))
    sampling = np.fromiter((row.samples for row in rows), np.bool_, count)
    decodes = sum(row.is_decode for row in rows)

    def device(values: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
        buffer = backend.host_buffer(*values.shape, dtype=dtype)
        buffer.numpy()[...] = values
        return buffer.to(backend.device, non_blocking=True)

    return Batch(
        ids=device(np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, total), torch.int64),
        positions=device(positions, torch.int64),
        slot_mapping=device(block_ids.astype(np.int64) * block_size + positions % block_size, torch.int64),
        attention=AttentionMetadata(
            block_tables=device(tables, torch.int32),
            context_lens=device(contexts, torch.int32),
            cu_seqlens_q=device(cu_seqlens_q, torch.int32),
            host_context_lens=contexts.tolist(),
            host_cu_seqlens_q=cu_seqlens_q.tolist(),
        ),
        samples=[(row.request_id, row.start + len(row.token_ids)) for row in rows if row.samples],
        sample_tokens=device(ends[sampling] - 1, torch.int64),
        phase="decode" if decodes == count else "mixed" if decodes else "prefill",
    )
