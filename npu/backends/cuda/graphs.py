"""Steps captured as CUDA graphs: one launch is the whole step, and what it reads lies on the device alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npuserve.npu.backends.graphs import Graphs

MOST_TOKENS = 512
"""Of a captured step of any tokens. In larger ones the matrix products take longer than their launches."""

Replay = Callable[[], Tensor]
"""Queues a graph's work. What it returns is the graph's own, until a graph of the same pool is replayed."""

Record = Callable[[Callable[[], Tensor], Any, Any], Replay]
"""Takes (work, stream, pool)."""


def token_buckets(largest: int) -> tuple[int, ...]:
    """Tokens of steps of any rows: powers of two up to 64, multiples of 64 up to `MOST_TOKENS`, and `largest` itself if
    it is less."""
    largest = min(largest, MOST_TOKENS)
    sizes = [1, 2, 4, 8, 16, 32, *range(64, MOST_TOKENS, 64)]
    return *(size for size in sizes if size < largest), largest


def record(work: Callable[[], Tensor], stream: Any, pool: Any) -> Replay:
    """`work` as a CUDA graph. stream: the current one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        output = work()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


class CudaGraphs(Graphs[Replay]):
    def __init__(
        self, streams: Any, step: Callable[[int], Tensor], buckets: Sequence[int], record: Record, stream: Any,
        pool: Any,
    ):
        self._record, self._stream, self._pool = record, stream, pool
        super().__init__(streams, step, buckets)

    def replay(self, rows: int, context_lens: Sequence[int]) -> Tensor:
        """context_lens: attention has them from the device."""
        return self._graph(rows)()[:rows]

    def _capture(self, step: Callable[[int], Tensor], rows: int) -> Replay:
        step(rows)  # Triton compiles at a first call, and libraries take their workspaces
        return self._record(lambda: step(rows), self._stream, self._pool)
