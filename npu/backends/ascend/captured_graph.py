"""Captured step of one bucket, whose attention reads its lengths from the host, and what updates these lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from npuserve.npu.backends.ascend.fault_codes import INVALIDATED, OperatorFailed, is_failed_launch

Lengths = Mapping[str, list[int]]
"""Arguments of attention that are replaced before a replay, by their names."""

MAX_LAGS = 4096
"""Lags that are kept until they are taken."""

MARKS = 4
"""End events kept per graph: more than the replays that can be launched before their lengths are updated."""


@dataclass(slots=True)
class CapturedGraph:
    """Captured step of one bucket.

    rows: its rows, or its tokens if it was captured for any batch.
    output: output of all rows of the bucket. The next replay overwrites it.
    handle: the updater that it was added to.
    """

    graph: Any
    rows: int
    output: Tensor
    handle: Any = None

    @property
    def records(self) -> list[Any]:
        """Records of torch_npu of the captured calls of attention."""
        return self.graph.graph_dispatch_mode.graph_dispatch_records  # type: ignore[no-any-return]

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()

    def update_lengths(self, lengths: Sequence[Lengths], after: Any) -> None:
        """Queue the lengths of the next replay through torch_npu, behind the event `after` if it is not None.

        lengths: of each batch of the step. Each batch has as many calls of attention.
        """
        if after is not None:
            self.graph.graph_dispatch_mode.update_stream.wait_event(after)
        calls = len(self.records)
        self.graph.update(cpu_update_input=[dict(lengths[call * len(lengths) // calls]) for call in range(calls)])


class LengthUpdates(Protocol):
    """Updater of the context lengths of captured attention. For each replay, `put` precedes and `replayed` follows.

    given: number of updates requested so far, one per replay.
    native_id: the updating thread's id in the system; 0 if it is unknown.
    """

    given: int

    @property
    def native_id(self) -> int: ...

    def add(self, graph: CapturedGraph) -> None:
        """Take a graph that was captured just now."""

    def put(self, graph: CapturedGraph, *lengths: Lengths) -> None:
        """Request the lengths of the graph's next replay. Blocks only if MARKS - 1 of its updates wait.

        lengths: of each batch that the step computes, one after the other. Each has as many rows and calls of
            attention.
        """

    def replayed(self, graph: CapturedGraph) -> None:
        """Mark the end of a replay that was launched just now."""

    def check(self, given: int) -> None:
        """Block until the lengths of the first `given` replays are in the device's queue.

        Raises RuntimeError after a failed update: its replay waits forever, and so must not be waited for.
        """

    def take_lags(self) -> Sequence[float]:
        """Return the lags since the last call: seconds from the launch of a replay to the end of the update of its
        lengths, of at most MAX_LAGS updates. The device waits for a long one."""

    def close(self) -> None:
        """End the thread and wait for it, at most 5 s."""


class _LastOperator(TorchDispatchMode):
    """Mode that keeps the name of the operator that was called last, such as `aten::sort`; "" before the first."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = func.name().split(".")[0]
        return func(*args, **(kwargs or {}))


def capture(step: Callable[[int], Tensor], rows: int, stream: Any, pool: Any) -> CapturedGraph:
    """Capture `step` for `rows` rows on a stream, with memory of `pool`.

    Raises OperatorFailed from the error of a call within the step.
    """
    step(rows)  # operators that initialize at their first call do so before the capture
    graph = torch.npu.NPUGraph()
    last = _LastOperator()
    _omit_dynamo(graph.graph_dispatch_mode)
    _omit_dynamo(last)
    modes = len(_get_current_dispatch_mode_stack())
    try:
        with torch.npu.graph(graph, pool=pool, stream=stream, auto_dispatch_capture=True), last:
            output = step(rows)
            last.name = ""  # what fails from here on is the end of the capture
    except RuntimeError as error:
        # If the device refuses the begin or end, torch.npu.graph leaves its dispatch mode on.
        for mode in reversed(_get_current_dispatch_mode_stack()[modes:]):
            mode.__exit__(None, None, None)
        if is_failed_launch(error):
            message = f"a launch failed within a capture, error code is {INVALIDATED}"
            raise OperatorFailed(message, "") from error
        if last.name:
            raise OperatorFailed(str(error), last.name) from error
        raise
    return CapturedGraph(graph, rows, output)


def _omit_dynamo(mode: TorchDispatchMode) -> None:
    """Let a dispatch mode run without torch._dynamo, whose import takes half a second.

    torch imports it to exclude the mode's function from torch.compile, which nothing here uses. The attribute is
    torch's cache of the excluded function (torch/_compile.py). Without effect on a function that torch has not wrapped.
    """
    function = getattr(mode.__torch_dispatch__, "__wrapped__", None)
    if function is not None:
        vars(function).setdefault("__dynamo_disable", function)
