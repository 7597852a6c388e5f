"""Profiler of the NPU: torch_npu.profiler, which records graphs' tasks by CANN's msprof."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from npuserve.npu.backends.trace_profiler import Event, TraceProfiler

HARDWARE = "Ascend Hardware"
"""Name of the process in the trace whose events are the device's tasks."""
NAMES = {
    "fusedinferattention|pagedattention": "paged_attention",
    "addrmsnorm": "add_rms_norm",
    "rmsnorm|rope|rotary|scatterpakv": "rms_norm,qk_norm_rope_kv_write",
    "matmul|batchmm": "linear,linear_swiglu,linear_argmax",
    "embedding": "embedding",
    "gateddeltarule": "gated_delta_rule",
}
"""See DeviceProfiler.names. kernels/ascend.py and the files of the kernels call these operators."""


def hardware_tasks(events: Sequence[Event]) -> list[Event]:
    """Return the device's tasks in a trace of torch_npu.profiler, in their order."""
    processes = {event.get("pid") for event in events if event.get("ph") == "M" and event.get("name") == "process_name"
                 and event.get("args", {}).get("name") == HARDWARE}
    tasks = [event for event in events if event.get("ph") == "X" and event.get("pid") in processes]
    return sorted(tasks, key=lambda event: float(event["ts"]))


def ascend_profiler(folder: Path) -> TraceProfiler:
    """Start the profiler, of host and NPU by default. It has no memory, stack or shape records.

    Without the handler, torch_npu would write to the process's working directory. `TraceProfiler` reads the trace.
    """
    import torch_npu

    handler = torch_npu.profiler.tensorboard_trace_handler(str(folder), analyse_flag=False)
    profile = torch_npu.profiler.profile(on_trace_ready=handler)
    return TraceProfiler(profile, folder, "torch_npu.profiler", NAMES, select=hardware_tasks)
