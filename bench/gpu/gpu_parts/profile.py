"""Analysis of a trace of torch's profiler: idle time of the device, kernels, and calls that waited."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "steady steps"
"""Name of the range that is analysed; at the trace's ends the profiler itself waits for the device."""

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST = {"cuda_runtime", "cuda_driver"}
FORBIDDEN = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaMallocAsync", "cudaFree", "cudaHostAlloc",
    "cudaMallocHost", "cudaMemcpy", "cudaMemset", "cuStreamSynchronize", "cuCtxSynchronize", "cuMemAlloc", "cuMemFree",
    "cuMemCreate", "cuMemMap", "cuMemcpy", "cuModuleLoadData")
"""Forbidden calls of a warm step. The host waits for its ids by cudaEventSynchronize or cudaEventQuery."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """Summary of a trace. spans: busy times of the device, [(from, to)] in seconds, disjoint. forbidden: forbidden
    calls with their number. calls: (name, seconds) of each kernel and copy."""

    spans: list[tuple[float, float]]
    forbidden: list[str]
    calls: list[tuple[str, float]]

    @property
    def span(self) -> float:
        """Seconds from the first work's begin to the last one's end."""
        return self.spans[-1][1] - self.spans[0][0]

    @property
    def idle(self) -> float:
        """Share of the span without work, including gaps between a step's kernels."""
        return 1 - sum(end - begin for begin, end in self.spans) / self.span

    def idle_between(self, steps: int) -> float:
        """Return the share of the `steps` - 1 longest gaps, which are waits for the host if the device waits for it."""
        gaps = sorted((after[0] - before[1] for before, after in zip(self.spans, self.spans[1:], strict=False)),
                      reverse=True)
        return sum(gaps[: steps - 1]) / self.span

    @property
    def kernels(self) -> int:
        return len(self.calls)

    def table(self) -> list[tuple[str, int, float]]:
        """Return (name, calls, seconds), the longest first."""
        found: dict[str, list[float]] = defaultdict(list)
        for name, seconds in self.calls:
            found[name].append(seconds)
        return sorted(((name, len(all_), sum(all_)) for name, all_ in found.items()), key=lambda row: -row[2])


def traced(run: Callable[[], object], device: bool, keep: Path | None = None) -> list[Event]:
    """Return the events of `run`. device: trace the GPU, too. keep: file for the compressed trace."""
    import torch
    from torch.profiler import ProfilerActivity, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device else [])]
    with torch.profiler.profile(activities=activities) as made, record_function(MARK):
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        made.export_chrome_trace(str(file))
        if keep:
            keep.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as source, gzip.open(keep, "wb") as target:
                shutil.copyfileobj(source, target)
        events: list[Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events


def read(events: Sequence[Event]) -> Profile:
    """Return the summary of a trace. Raises ValueError if it has no marked range, or no device work in it."""
    whole = [event for event in events if event.get("ph") == "X"]
    marks = [event for event in whole if event["name"] == MARK and event.get("cat") == "user_annotation"]
    if not marks:
        raise ValueError(f"the trace has no range {MARK!r}")
    begin, end = marks[0]["ts"], marks[0]["ts"] + marks[0]["dur"]
    work = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in whole
                  if event.get("cat") in DEVICE and begin <= event["ts"] < end)
    if not work:
        raise ValueError("the trace has no kernel of the device: can the profiler see it?")
    spans: list[tuple[float, float]] = []
    for first, last, _ in work:
        if spans and first <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], last)
        else:
            spans.append((first, last))
    counts: dict[str, int] = defaultdict(int)
    for event in whole:
        name = event["name"].partition("_v")[0]
        if event.get("cat") in HOST and name in FORBIDDEN and begin <= event["ts"] < end:
            counts[name] += 1
    return Profile([(first * 1e-6, last * 1e-6) for first, last in spans],
                   [f"{name} {count} times" for name, count in counts.items()],
                   [(name, (last - first) * 1e-6) for first, last, name in work])
