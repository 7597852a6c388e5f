"""Thread that updates the context lengths of captured attention."""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any

import torch

from npuserve.npu.backends.ascend.captured_graph import CapturedGraph, Lengths

MAX_LAGS = 4096


class LengthThread:
    """Thread that updates the lengths of graphs. It runs until `close`.

    given: number of updates requested so far, one per replay.
    lags: seconds from the launch of a replay to the end of the update of its lengths, of the last updates. The device
        waits for a long one.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._queue: SimpleQueue[tuple[CapturedGraph, Lengths, Any, float] | None] = SimpleQueue()
        self.lags: deque[float] = deque(maxlen=MAX_LAGS)
        self._error: BaseException | None = None
        self.given = 0
        self._done = 0
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="npuserve-lengths", daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int:
        """Return the thread's id in the system; 0 if it has not started."""
        return self._thread.native_id or 0

    def put(self, graph: CapturedGraph, lengths: Lengths, after: Any) -> None:
        """Request the lengths of the replay that the caller launches next. Blocks only if MARKS - 1 updates wait.

        after: end event of the graph's last replay; None if there was none.
        """
        graph.free.acquire()
        self.given += 1
        self._queue.put((graph, lengths, after, time.perf_counter()))

    def close(self) -> None:
        """End the thread and wait for it, at most 5 s."""
        self._queue.put(None)
        self._thread.join(5)

    def check(self, given: int) -> None:
        """Block until the lengths of the first `given` replays are in the device's queue.

        Raises the error of any failed update: its replay waits forever, and so must not be waited for.
        """
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
            self.lags.append(time.perf_counter() - launched)
            graph.free.release()
            with self._progress:
                self._done += 1
                self._progress.notify_all()
