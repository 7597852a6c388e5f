"""Steps captured as graphs, one graph per bucket of rows or tokens.

A graph computes as many rows as its bucket; smaller batches are padded to it. All graphs share one memory pool, since
only one runs at a time. The largest is captured first, so that the others fit into its memory.
"""

from __future__ import annotations

import bisect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

log = logging.getLogger(__name__)

Graph = TypeVar("Graph")

MAX_TOKENS = 512
"""Tokens of the largest captured step of any rows. In larger steps the GEMMs take longer than the launches."""


def default_buckets(largest: int) -> tuple[int, ...]:
    """Return the row counts of captured decode steps: 1, 2, 4, multiples of 8 up to 64, of 16 up to 256, of 64 beyond,
    and `largest`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest, 64)]
    return *(size for size in sizes if size < largest), largest


def row_buckets(configured: Sequence[int], largest: int) -> Sequence[int]:
    """Return the row counts of captured decode steps up to `largest`.

    configured: `DeviceSettings.decode_buckets`. If all are larger, the only count is `largest`.
    """
    return [rows for rows in configured or default_buckets(largest) if rows <= largest] or [largest]


class Graphs(ABC, Generic[Graph]):
    """`Captured` step with one graph per bucket.

    streams: torch module of the device (torch.cuda, torch.npu).
    seconds: duration of the capture.
    nbytes: device memory that the capture took.
    """

    def __init__(self, streams: Any, step: Callable[[int], Tensor], buckets: Sequence[int]):
        self._buckets = sorted(set(buckets))
        log.info("capturing %d graphs of up to %d rows or tokens", len(self._buckets), self.largest)
        began = time.perf_counter()
        free = streams.mem_get_info()[0]
        self._graphs = {rows: self._capture(step, rows) for rows in reversed(self._buckets)}
        self.seconds = time.perf_counter() - began
        self.nbytes = max(0, free - streams.mem_get_info()[0])

    def log_capture(self, *, decode: bool) -> None:
        """Log the buckets, `seconds` and `nbytes`. decode: buckets are numbers of rows; False: of tokens."""
        log.info("captured %s steps of %s %s in %.1f s, %.1f MiB of device memory", "decode" if decode else "mixed",
                 ", ".join(map(str, self._buckets)), "rows" if decode else "tokens", self.seconds, self.nbytes / 2**20)

    @property
    def largest(self) -> int:
        return self._buckets[-1]

    def size(self, rows: int) -> int:
        return self._buckets[bisect.bisect_left(self._buckets, rows)]

    def replay_timed(self, rows: int, context_lens: Sequence[int]) -> None:
        """Return None: a graph is one dispatch and cannot be split into kernels."""
        return

    def _graph(self, rows: int) -> Graph:
        """Return the graph that serves `rows` rows. Raises ValueError if no graph is large enough."""
        if rows > self.largest:
            raise ValueError(f"{rows} rows, where the largest graph has {self.largest}")
        return self._graphs[self.size(rows)]

    @abstractmethod
    def _capture(self, step: Callable[[int], Tensor], rows: int) -> Graph:
        """Capture `step` for `rows` rows, whose memory stays at its address."""
