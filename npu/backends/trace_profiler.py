"""Profilers with torch's interface, which write a trace in Chrome's format: torch.profiler and torch_npu.profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from npuserve.npu.profile import ProfileError

Event = dict[str, Any]
MAX_FILE_BYTES = 1 << 30
"""A larger trace is not read: its events would take several times the memory."""


def cuda_kernels(events: Sequence[Event]) -> list[Event]:
    """Return the kernels of torch.profiler's trace in their order, also from replayed graphs."""
    kernels = [event for event in events if event.get("ph") == "X" and event.get("cat") == "kernel"]
    return sorted(kernels, key=lambda event: float(event["ts"]))


class TraceProfiler:
    """Running profiler. It records neither shapes nor stacks nor values, so that it has no tokens.

    profile: a profiler with `start`, `stop` and `export_chrome_trace`.
    folder: folder of the trace's file.
    select: returns the kernels among the trace's events.
    description, names, has_times: see DeviceProfiler.
    """

    def __init__(
        self, profile: Any, folder: Path, description: str, names: Mapping[str, str], *, has_times: bool = True,
        select: Callable[[Sequence[Event]], list[Event]] = cuda_kernels,
    ):
        self.description = description
        self.names = names
        self.has_times = has_times
        self._profile = profile
        self._file = folder / "device.json"
        self._select = select
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def events(self) -> list[Event]:
        """Return the trace's events. Raises ProfileError if there is no trace, or if it is too large."""
        self._profile.export_chrome_trace(str(self._file))
        if not self._file.is_file():
            raise ProfileError("the device's profiler has written no trace; the log has its messages")
        if (size := self._file.stat().st_size) > MAX_FILE_BYTES:
            raise ProfileError(f"the device's trace has {size} bytes, more than {MAX_FILE_BYTES}: record fewer steps")
        read = json.loads(self._file.read_bytes())
        events: list[Event] = read["traceEvents"] if isinstance(read, dict) else read
        return events

    def kernels(self, events: Sequence[Event]) -> list[Event]:
        return self._select(events)
