"""Updates of the lengths of captured attention by torch_npu, on a thread of Python.

It serves where `NativeLengths` cannot. Its loop over the layers holds the interpreter lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from npuserve.npu.backends.ascend.captured_graph import MARKS, MAX_LAGS, CapturedGraph, Lengths


@dataclass(slots=True)
class _Ends:
    """End events of a graph's replays, in rotation.

    free: limit of waiting updates. No end event is recorded again while an update needs it.
    """

    events: list[Any]
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MARKS - 1))
    replays: int = 0


class LengthThread:
    """Thread that updates the lengths of graphs. It runs until `close`. See `LengthUpdates`.

    stream: stream of the replays.
    """

    def __init__(self, device: torch.device, stream: Any):
        self._device = device
        self._stream = stream
        self._queue: SimpleQueue[tuple[CapturedGraph, Sequence[Lengths], Any, float] | None] = SimpleQueue()
        self._lags: deque[float] = deque(maxlen=MAX_LAGS)
        self._error: BaseException | None = None
        self.given = 0
        self._done = 0
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="npuserve-lengths", daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int:
        return self._thread.native_id or 0

    def add(self, graph: CapturedGraph) -> None:
        graph.handle = _Ends([torch.npu.Event() for _ in range(MARKS)])

    def put(self, graph: CapturedGraph, *lengths: Lengths) -> None:
        ends: _Ends = graph.handle
        ends.free.acquire()
        self.given += 1
        after = ends.events[(ends.replays - 1) % MARKS] if ends.replays else None
        self._queue.put((graph, lengths, after, time.perf_counter()))

    def replayed(self, graph: CapturedGraph) -> None:
        ends: _Ends = graph.handle
        ends.events[ends.replays % MARKS].record(self._stream)
        ends.replays += 1

    def take_lags(self) -> Sequence[float]:
        return [self._lags.popleft() for _ in range(len(self._lags))]

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(5)

    def check(self, given: int) -> None:
        if self._done < given:
            with self._progress:
                self._progress.wait_for(lambda: self._done >= given)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        torch.npu.set_device(self._device)
        while (item := self._queue.get()) is not None:
            graph, lengths, after, launched = item
            try:
                graph.update_lengths(lengths, after)
            except BaseException as error:  # `check` raises it
                self._error = error
            self._lags.append(time.perf_counter() - launched)
            graph.handle.free.release()
            with self._progress:
                self._done += 1
                self._progress.notify_all()
