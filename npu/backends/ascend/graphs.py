"""Steps captured as graphs whose attention reads its lengths from the host.

The context lengths of a captured call must be updated before each replay:

    launching thread   replay n     replay n + 1                       in the queue of steps
    updater's thread   lengths n    lengths n + 1                      in a queue of their own
    device             |-- layers of n: each attention waits for its own lengths --|-- layers of n + 1

- The update of the lengths records an event. The graph's attention waits for this event and resets it. A replay may
  therefore be launched before its lengths are updated.
- The lengths of n + 1 must not overwrite the lengths of n before n has read them. The length queue therefore waits for
  the end of the last replay of the same graph. The device waits; the launching thread makes no blocking call.
- Two threads must not update a task group at the same time (CANN, "Task Update"). One thread makes all updates: of the
  native library (`NativeLengths`), or of Python (`LengthThread`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.ascend import BLOCK, LABEL
from npuserve.kernels.attention import AttentionMetadata, paged_attention
from npuserve.npu.backends.ascend.captured_graph import CapturedGraph, LengthUpdates, capture
from npuserve.npu.backends.base import RowLengths
from npuserve.npu.backends.graphs import Graphs


class AscendGraphs(Graphs[CapturedGraph]):
    """Steps captured as NPU graphs, with lengths updated by `lengths`.

    decode: each row has one token. False: `cu_seqlens` has the rows. Their number was captured, and buckets are numbers
        of tokens.
    """

    def __init__(
        self, step: Callable[[int], Tensor], buckets: Sequence[int], lengths: LengthUpdates, stream: Any, pool: Any,
        *, decode: bool = True,
    ):
        self._lengths = lengths
        self._stream = stream
        self._pool = pool
        self._decode = decode
        super().__init__(torch.npu, step, buckets)

    def replay(
        self, rows: int, context_lens: Sequence[int], cu_seqlens: Sequence[int] = (), further: Sequence[RowLengths] = ()
    ) -> Tensor:
        graph = self._graph(rows)
        if not graph.records:
            graph.replay()
            return graph.output[:rows]
        lengths = [(context_lens, cu_seqlens), *further]
        self._check(graph, lengths)
        self._lengths.put(graph, *(
            {"actual_seq_lengths_kv": list(contexts)} if self._decode else
            {"actual_seq_lengths_kv": list(contexts), "actual_seq_lengths": list(starts[1:])}
            for contexts, starts in lengths))
        graph.replay()
        self._lengths.replayed(graph)
        return graph.output[:rows]

    def _check(self, graph: CapturedGraph, lengths: Sequence[RowLengths]) -> None:
        """Raise ValueError if the lengths of a batch are not of its captured rows and tokens."""
        calls = len(graph.records)
        if calls % len(lengths):
            raise ValueError(f"lengths of {len(lengths)} batches for {calls} calls of attention")
        for number, (contexts, starts) in enumerate(lengths):
            captured = graph.records[number * calls // len(lengths)].kwargs
            rows = len(captured["actual_seq_lengths_kv"])
            if self._decode and len(contexts) != rows:
                raise ValueError(f"{len(contexts)} context lengths for a graph of {rows} rows")
            if self._decode:
                continue
            tokens = captured["actual_seq_lengths"][-1]
            if len(contexts) != rows or len(starts) != rows + 1 or starts[-1] != tokens:
                raise ValueError(f"{len(contexts)} context lengths and {list(starts[-1:])} tokens for a graph of "
                                 f"{tokens} tokens and {rows} rows")

    def _capture(self, step: Callable[[int], Tensor], rows: int) -> CapturedGraph:
        graph = capture(step, rows, self._stream, self._pool)
        if graph.records:
            self._lengths.add(graph)
        return graph


def takes_lengths(lengths: LengthUpdates, stream: Any, pool: Any, device: torch.device) -> bool:
    """Return True if captured attention applies new lengths. An old driver may ignore them without an error.

    The test's values are their slots' numbers, so that a context of n tokens yields the mean of 0 ... n - 1. They
    are in bfloat16, the only dtype that CANN 8.5 documents for attention in this layout. Raises AclError if an
    update fails, and UnsupportedCall if `lengths` cannot update attention; no replay waits then.
    """
    slots = torch.arange(BLOCK).to(torch.bfloat16).view(1, BLOCK, 1, 1).repeat(1, 1, 1, 128)
    values = slots.to(device)
    keys = torch.zeros_like(slots).to(device)
    query = slots[0, :1].to(device)
    tables = torch.zeros(1, 1, dtype=torch.int32).to(device)
    attend = paged_attention.implementations[LABEL].function
    metadata = AttentionMetadata.from_lengths(tables, [1], [1])
    graphs = AscendGraphs(lambda rows: attend(query, keys, values, metadata, 1.0), [1], lengths, stream, pool)
    graph = graphs._graph(1)
    for context in (1, 3, 2):
        lengths.put(graph, {"actual_seq_lengths_kv": [context]})
        lengths.check(lengths.given)  # a replay would wait forever for an update that failed
        graph.replay()
        lengths.replayed(graph)
        if float(graph.output[0, 0]) != (context - 1) / 2:
            return False
    return True
