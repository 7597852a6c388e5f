"""Captured steps with chunks at each size, compared with the same kernels one by one.

As in `replays`, the cache holds random numbers, and the first layers of the model serve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from npuserve.npu.backends.base import Captured
from npuserve.npu.diagnostics.acceptance import Loaded
from npuserve.npu.diagnostics.differences import norm_of
from npuserve.npu.diagnostics.replays import randomize, shortened
from npuserve.npu.execution.batch import BatchBuffers
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.step import Row

TOKENS = 512
"""Tokens of the largest step."""

SHORT, LONG = (2, 2), (1100, 960)
"""Context of the decode row, and tokens before the chunk. A wrong length changes attention over a short context most.
From 1,024 tokens on CANN chooses other tilings."""


@dataclass(frozen=True, slots=True)
class ChunkBucket:
    """Captured step of any rows compared with single kernel calls.

    tokens: number of tokens of the bucket.
    difference: largest || captured - single || / || single || of a token's hidden states, over short contexts; 0 if
        bit-identical.
    long_difference: `difference` over long contexts, with padding tokens in the captured step.
    """

    tokens: int
    difference: float
    long_difference: float


def chunk_buckets(loaded: Loaded) -> Iterator[ChunkBucket]:
    """Yield the sizes of captured steps with chunks, smallest first. A step is a decode row and a chunk.

    Yields none if the backend captures no steps with chunks, or if they need no padding: one dispatch then serves steps
    of any size. Raises BackendError as `Backend.capture` does.
    """
    backend, size = loaded.backend, loaded.runner.block_size
    if not (backend.padding_blocks and backend.captures_chunks(loaded.runner.cache_dtype)):
        return
    longest = max(LONG) + TOKENS
    model, per_row = shortened(loaded, longest), -(-longest // size)
    cache = StateStore.allocate(
        model.config, 2 * per_row + backend.padding_blocks, size, loaded.runner.cache_dtype, backend)
    backend.enqueue(partial(randomize, cache)).wait()
    buffers = BatchBuffers(TOKENS, 2, per_row, size, 2 * per_row, backend)
    with torch.inference_mode():
        buffers.clear()
        captured = backend.capture(lambda n: model.hidden(buffers.tokens(n), cache), TOKENS, decode=False)
    if captured is None:
        return
    for tokens in sorted({captured.size(n) for n in range(1, captured.largest + 1)}):
        steps = (_rows(model, tokens, per_row, *SHORT), _rows(model, max(2, tokens - 5), per_row, *LONG))
        found = [backend.enqueue(partial(_difference, model, captured, buffers, cache, rows)).wait() for rows in steps]
        backend.synchronize()
        yield ChunkBucket(tokens, *found)


def _rows(model: Model, tokens: int, per_row: int, context: int, start: int) -> list[Row]:
    """Return a decode row, and a chunk of the other tokens."""
    ids = torch.randint(model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    blocks = list(range(2 * per_row))
    return [Row(0, ids[:1], context - 1, blocks[:per_row], True),
            Row(1, ids[1:], start, blocks[per_row:], True)]


def _difference(model: Model, captured: Captured, buffers: BatchBuffers, cache: StateStore, rows: list[Row]) -> float:
    staged = buffers.fill([(rows, len(rows))])
    part = staged.parts[0]
    buffers.pad(part, captured.size(part.tokens))
    staged.upload()
    replayed = captured.replay(part.tokens, part.context_lens, part.cu_seqlens)
    got = replayed[: part.tokens].to("cpu", copy=True)
    return norm_of(got, model.hidden(buffers.batch(part), cache), dim=1)
