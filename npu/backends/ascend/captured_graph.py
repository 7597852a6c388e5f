"""Captured step of one bucket, whose attention reads its lengths from the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Lengths = Mapping[str, list[int]]
"""Arguments of attention that are replaced before a replay, by their names."""

MARKS = 4
"""End events kept per graph: more than the replays that can be launched before their lengths are updated."""


@dataclass(slots=True)
class CapturedGraph:
    """Captured step of one bucket.

    rows: its rows, or its tokens if it was captured for any batch.
    output: output of all rows of the bucket. The next replay overwrites it.
    ends: events recorded after the replays, in rotation.
    free: limit of waiting updates. No end event is recorded again while an update needs it.
    replays: number of replays so far.
    """

    graph: Any
    rows: int
    output: Tensor
    ends: list[Any]
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MARKS - 1))
    replays: int = 0

    @property
    def last_end(self) -> Any:
        """End event of the last replay; None if there was none."""
        return self.ends[(self.replays - 1) % MARKS] if self.replays else None

    def replay(self, stream: Any) -> None:
        """Launch the graph on the current stream, which is `stream`."""
        self.graph.replay()
        self.ends[self.replays % MARKS].record(stream)
        self.replays += 1

    def update_lengths(self, lengths: Lengths, after: Any) -> None:
        """Queue the lengths of the next replay, behind the event `after` if it is not None."""
        if after is not None:
            self.graph.graph_dispatch_mode.update_stream.wait_event(after)
        self.graph.update(cpu_update_input=[dict(lengths)])


def capture(step: Callable[[int], Tensor], rows: int, stream: Any, pool: Any) -> CapturedGraph:
    """Capture `step` for `rows` rows on a stream, with memory of `pool`."""
    step(rows)  # operators that initialize at their first call do so before the capture
    graph = torch.npu.NPUGraph()
    modes = len(_get_current_dispatch_mode_stack())
    try:
        with torch.npu.graph(graph, pool=pool, stream=stream, auto_dispatch_capture=True):
            output = step(rows)
    except RuntimeError:
        # If the device refuses the begin or end, torch.npu.graph leaves its dispatch mode on.
        for mode in reversed(_get_current_dispatch_mode_stack()[modes:]):
            mode.__exit__(None, None, None)
        raise
    return CapturedGraph(graph, rows, output, [torch.npu.Event() for _ in range(MARKS)])
