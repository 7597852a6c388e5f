"""Trace in Chrome's format ("Trace Event Format"), which Perfetto, chrome://tracing and MindStudio Insight open.

Times are microseconds from the start of the profile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from npuserve.npu.execution.in_flight import StepRecord

Event = dict[str, Any]
PROCESS = 1
HOST = 1
STEPS = 2
KERNELS = 3
"""Thread ids, which Perfetto shows as tracks."""
TRACKS = {HOST: "host", STEPS: "steps", KERNELS: "kernels"}


def encode(events: Iterable[Event], properties: Mapping[str, Any]) -> bytes:
    """Return the file of a trace, encoding one event after the other. properties: shown as its metadata."""
    encoder = msgspec.json.Encoder()
    head = encoder.encode({"displayTimeUnit": "ms", "otherData": properties})
    return head[:-1] + b',"traceEvents":[' + b",\n".join(map(encoder.encode, events)) + b"]}"


def step_events(steps: Sequence[StepRecord], began: float) -> Iterator[Event]:
    """Yield the events of steps whose kernels the runner timed. began: of the profile, of time.perf_counter."""
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "npuserve engine"}}
    for thread, name in TRACKS.items():
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": thread, "args": {"sort_index": thread}}
    for step in steps:
        yield from _events(step, began)


def numbers(step: StepRecord) -> dict[str, int]:
    """Return the numbers of a step that a trace shows."""
    return {"step": step.index, "rows": step.rows, "tokens": step.tokens, "sampled": step.samples,
            "context": step.context}


def _events(step: StepRecord, began: float) -> Iterator[Event]:
    def whole(track: int, name: str, category: str, begin: float, seconds: float, **args: Any) -> Event:
        return {"ph": "X", "pid": PROCESS, "tid": track, "name": name, "cat": category,
                "ts": _microseconds(begin - began), "dur": _microseconds(seconds), "args": args}

    begin, end = step.launch
    yield whole(HOST, "launch", "host", begin, end - begin, step=step.index)
    yield {"ph": "i", "s": "t", "pid": PROCESS, "tid": HOST, "name": "collected", "cat": "host",
           "ts": _microseconds(step.collected - began), "args": {"step": step.index}}
    for begin, seconds in step.spans:
        yield whole(STEPS, step.phase, "step", begin, seconds, **numbers(step))
    for kernel, begin, seconds in step.calls:
        yield whole(KERNELS, kernel, "kernel", begin, seconds, step=step.index)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
