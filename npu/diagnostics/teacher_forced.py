"""Logits of a model at every position of given sequences or steps, computed as the engine does: in chunks, several
sequences per step, over a paged cache. Used to compare devices or dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from npuserve.npu.backends.base import Backend
from npuserve.npu.execution.batch import make_batch
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.step import Row

SEQUENCES_PER_STEP = 4
"""Number of sequences per step, and in the cache."""


def forced_logits(
    model: Model, backend: Backend, sequences: Sequence[Sequence[int]], budget: int, block_size: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> Iterator[Tensor]:
    """Yield the logits of each sequence in order, [tokens, vocabulary] float32 on the host.

    budget: maximum tokens per step.
    block_size: tokens of a block; 0 for the backend's default.
    cache_dtype: dtype of the KV cache; None for the weights' dtype.
    """
    size = block_size or backend.block_size
    per_row = -(-max(map(len, sequences)) // size)
    cache = StateStore.allocate(
        model.config, per_row * SEQUENCES_PER_STEP, size, cache_dtype or model.weights.norm.dtype, backend)
    for first in range(0, len(sequences), SEQUENCES_PER_STEP):
        group = sequences[first : first + SEQUENCES_PER_STEP]
        found: list[list[Tensor]] = [[] for _ in group]
        done = [0] * len(group)
        while rows := _rows(group, done, budget, per_row, size):
            logits = backend.enqueue(partial(_step, model, backend, rows, cache, size)).wait()
            for row, part in zip(rows, logits.split([len(r.token_ids) for r in rows]), strict=True):
                found[row.request_id].append(part)
                done[row.request_id] += len(row.token_ids)
        yield from map(torch.cat, found)


def step_logits(
    model: Model, backend: Backend, steps: Iterable[list[Row]], blocks: int, block_size: int,
    cache_dtype: torch.dtype | None = None,
) -> Iterator[Tensor]:
    """Yield the logits of each step's tokens, [tokens, vocabulary] float32 on the host.

    blocks: number of blocks of the cache, which the steps' rows name.
    cache_dtype: dtype of the KV cache; None for the weights' dtype.
    """
    cache = StateStore.allocate(model.config, blocks, block_size, cache_dtype or model.weights.norm.dtype, backend)
    for rows in steps:
        yield backend.enqueue(partial(_step, model, backend, rows, cache, block_size)).wait()


def _rows(group: Sequence[Sequence[int]], done: list[int], budget: int, per_row: int, size: int) -> list[Row]:
    rows = []
    for place, ids in enumerate(group):
        part = list(ids[done[place] : done[place] + budget])
        if part:
            end = done[place] + len(part)
            blocks = list(range(place * per_row, place * per_row + -(-end // size)))
            rows.append(Row(place, part, done[place], blocks, False))
            budget -= len(part)
    return rows


def _step(model: Model, backend: Backend, rows: list[Row], cache: StateStore, size: int) -> Tensor:
    logits = model.logits(model.hidden(make_batch(rows, size, backend), cache))
    return logits[:, : model.config.vocab_size].to("cpu", torch.float32, copy=True)
