"""Interface of the profilers of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class DeviceProfiler(Protocol):
    """Profiler of the device's maker. It records from its creation to `stop`.

    description: what it records, in one sentence.
    has_times: False on an emulated device, whose kernels have an order and no times.
    names: regular expression of the names of its kernels -> kernels of the registry, separated by commas. The first
        expression that matches counts.
    """

    @property
    def description(self) -> str: ...

    @property
    def has_times(self) -> bool: ...

    @property
    def names(self) -> Mapping[str, str]: ...

    def stop(self) -> None:
        """End the recording. Call it in the thread that created the profiler, with no step in flight."""

    def events(self) -> list[dict[str, Any]]:
        """Return the trace's events in Chrome's format. Call it once after `stop`, in any thread.

        Raises ProfileError if there is no trace.
        """

    def kernels(self, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the events of kernels on the device, in their order."""
