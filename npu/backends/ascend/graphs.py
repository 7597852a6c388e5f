"""Decode steps captured as graphs, whose attention takes its lengths from the host.

The context lengths of a captured call must be replaced before each replay:

    launching thread   replay n     replay n + 1                       in the queue of steps
    lengths' thread    lengths n    lengths n + 1                      in a queue of their own
    device             |-- layers of n: each attention waits for its own lengths --|-- layers of n + 1

- A graph's attention waits on an event that its new lengths record, and clears it: a replay may be launched first.
- The lengths of n + 1 may not take the place of those of n before n is done with them: their queue waits for the end
  of the last replay of the same graph. It is the device that waits; the launching thread makes no such call.
- A task group must not be updated by two threads at a time (CANN, "Task Update"): one thread makes all updates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.ascend import BLOCK, LABEL
from npuserve.kernels.attention import AttentionMetadata, paged_attention
from npuserve.npu.backends.graphs import Graphs

MARKS = 4
"""Ends of replays of one graph that are kept: more than may be launched before their lengths are on their way."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """output: of all the bucket's rows, until the next replay. ends: events, recorded in turn after each replay."""

    graph: Any
    rows: int
    output: Tensor
    ends: list[Any]
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MARKS - 1))


class Lengths:
    """The thread that gives graphs their lengths. It ends with `close`. given: how many replays it was given lengths
    for so far."""

    def __init__(self, device: torch.device):
        self._device = device
        self._queue: SimpleQueue[tuple[_Graph, list[int], Any] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self.given = 0
        self._done = 0
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="npuserve-lengths", daemon=True)
        self._thread.start()

    def put(self, graph: _Graph, lengths: list[int], after: Any) -> None:
        """after: the end of the graph's last replay, None if there was none. Waits only where the thread is so far
        behind that the events would not do."""
        graph.free.acquire()
        self.given += 1
        self._queue.put((graph, lengths, after))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(5)

    def check(self, given: int) -> None:
        """Return once the lengths of the first `given` replays are in the device's queue. Raises what went wrong with
        those of any replay, which waits for them in vain: so must nobody for the replay."""
        if self._done < given:
            with self._progress:
                self._progress.wait_for(lambda: self._done >= given)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        torch.npu.set_device(self._device)
        while (item := self._queue.get()) is not None:
            graph, lengths, after = item
            try:
                if after is not None:
                    graph.graph.graph_dispatch_mode.update_stream.wait_event(after)
                graph.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
            except BaseException as error:  # whoever waits for the step raises it
                self._error = error
            graph.free.release()
            with self._progress:
                self._done += 1
                self._progress.notify_all()


class AscendGraphs(Graphs[_Graph]):
    def __init__(self, step: Callable[[int], Tensor], buckets: Sequence[int], lengths: Lengths, stream: Any, pool: Any):
        self._lengths, self._stream, self._pool = lengths, stream, pool
        self._last: dict[int, int] = {}
        super().__init__(torch.npu, step, buckets)

    def replay(self, rows: int, context_lens: Sequence[int]) -> Tensor:
        made = self._graph(rows)
        if len(context_lens) != made.rows:
            raise ValueError(f"{len(context_lens)} context lengths for a graph of {made.rows} rows")
        count = self._last.get(made.rows)
        self._lengths.put(made, list(context_lens), None if count is None else made.ends[count % MARKS])
        made.graph.replay()
        self._last[made.rows] = count = 0 if count is None else count + 1
        made.ends[count % MARKS].record(self._stream)
        return made.output[:rows]

    def _capture(self, step: Callable[[int], Tensor], rows: int) -> _Graph:
        step(rows)  # operators that set up something at their first call do so now
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, pool=self._pool, stream=self._stream, auto_dispatch_capture=True):
            output = step(rows)
        return _Graph(graph, rows, output, [torch.npu.Event() for _ in range(MARKS)])


def takes_lengths(lengths: Lengths, stream: Any, pool: Any, device: torch.device) -> bool:
    """True if captured attention does take new lengths here. A driver that is too old may refuse that without an error,
    and would go on with the lengths of the capture.

    Of values that are their slots' numbers, a context of n gives the mean of 0 ... n - 1."""
    slots = torch.arange(BLOCK).to(torch.float16).view(1, BLOCK, 1, 1).repeat(1, 1, 1, 128)
    values, keys, query = slots.to(device), torch.zeros_like(slots).to(device), slots[0, :1].to(device)
    tables = torch.zeros(1, 1, dtype=torch.int32).to(device)
    attend = paged_attention.implementations[LABEL].function
    metadata = AttentionMetadata.from_lengths(tables, [1], [1])
    graphs = AscendGraphs(lambda rows: attend(query, keys, values, metadata, 1.0), [1], lengths, stream, pool)
    for context in (1, 3, 2):
        out = graphs.replay(1, [context])
        lengths.check(lengths.given)
        if float(out[0, 0]) != (context - 1) / 2:
            return False
    return True
