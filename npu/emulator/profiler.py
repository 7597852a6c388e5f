"""Profiler of the emulated NPU: the order of its tasks, without times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npuserve.npu.backends.ascend.profiler import HARDWARE, NAMES

PROCESS = 1
OPERATOR = "aclnn"
"""Beginning of the names of operators."""


class TaskProfiler:
    """Log of the device's tasks, of replayed graphs too. An event's `ts` is its number.

    log_tasks: starts and ends the log.
    tasks: returns (name, stream) of each task.
    """

    description = "emulated NPU: order of its tasks, no times"
    has_times = False
    names: Mapping[str, str] = NAMES

    def __init__(self, log_tasks: Callable[[bool], None], tasks: Callable[[], Sequence[tuple[str, int]]]):
        self._log_tasks = log_tasks
        self._tasks = tasks
        log_tasks(True)

    def stop(self) -> None:
        self._log_tasks(False)

    def events(self) -> list[dict[str, Any]]:
        head = {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": HARDWARE}}
        return [head, *({"ph": "X", "pid": PROCESS, "tid": stream, "name": name, "cat": "task", "ts": number, "dur": 1}
                        for number, (name, stream) in enumerate(self._tasks()))]

    def kernels(self, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the operators, without copies, writes of values and updates of graphs."""
        return [event | {"dur": 0} for event in events if event["ph"] == "X" and event["name"].startswith(OPERATOR)]
