"""Steps captured as CUDA graphs: one launch per step, with all inputs on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npuserve.npu.backends.base import RowLengths
from npuserve.npu.backends.graphs import MAX_TOKENS, Graphs

Replay = Callable[[], Tensor]
"""Queues a graph's work and returns its output, valid until a graph of the same pool is replayed."""

Record = Callable[[Callable[[], Tensor], Any, Any], Replay]
"""Captures a graph; takes (work, stream, pool)."""


def token_buckets(largest: int) -> tuple[int, ...]:
    """Return the token counts of captured steps: powers of two up to 64, multiples of 64 up to `MAX_TOKENS`.

    The last one is `largest` if that is smaller.
    """
    largest = min(largest, MAX_TOKENS)
    sizes = [1, 2, 4, 8, 16, 32, *range(64, MAX_TOKENS, 64)]
    return *(size for size in sizes if size < largest), largest


def record(work: Callable[[], Tensor], stream: Any, pool: Any) -> Replay:
    """Capture `work` as a CUDA graph. stream: the current stream."""
    work()  # Triton compiles and libraries allocate workspaces at the first call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        output = work()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


class CudaGraphs(Graphs[Replay]):
    """Steps captured as CUDA graphs.

    streams: torch.cuda or its substitute.
    record: captures one graph.
    """

    def __init__(
        self, streams: Any, step: Callable[[int], Tensor], buckets: Sequence[int], record: Record, stream: Any,
        pool: Any,
    ):
        self._record = record
        self._stream = stream
        self._pool = pool
        super().__init__(streams, step, buckets)

    def replay(
        self, rows: int, context_lens: Sequence[int], cu_seqlens: Sequence[int] = (), further: Sequence[RowLengths] = ()
    ) -> Tensor:
        """Run the step. The lengths are not used: attention reads them on the device."""
        return self._graph(rows)()[:rows]

    def _capture(self, step: Callable[[int], Tensor], rows: int) -> Replay:
        return self._record(lambda: step(rows), self._stream, self._pool)
