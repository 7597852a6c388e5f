"""Profile of an emulated NPU: the order of the device's tasks, of replayed graphs too, and that it has no times."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu.backends.ascend.profiler import ascend_profiler
from npuserve.npu.backends.device_profiler import DeviceProfiler
from npuserve.npu.execution.in_flight import LaunchedStep
from npuserve.npu.profile import ProfileSummary
from npuserve.npu.profiling.session import Profiler
from npuserve.npu.profiling.trace_folder import TraceFolder
from npuserve.npu.step import Step
from tests.npu.backends.ascend.test_backend import load
from tests.npu.backends.small import answers, asks, saved, saved_w8a8
from tests.npu.emulator.child import emulated
from tests.support.benches import bench

STEPS = 8
ATTENTION = "aclnnFusedInferAttentionScoreV3"


def profile(
    folder: Path, layers: int, make: Callable[..., Path] = saved,
    start: Callable[[Path], DeviceProfiler] | None = None,
) -> ProfileSummary:
    """Return a profile of decode steps of one greedy request.

    start: starts the profiler in place of the emulated device's own.

    The heads and the rows of SwiGLU have sizes that take the fused operators, as Qwen3-14B has.
    """
    runner = load(make(folder / f"{layers}", layers=layers, head_dim=128, inner=1024), dtype="bfloat16",
                  decode_buckets=(1, 2), kv_cache_memory=64 << 20)
    if start:
        runner.backend.profiler = start  # type: ignore[method-assign]
    profiler, launch, launches = Profiler(runner, TraceFolder(folder / "traces")), runner.launch, 0

    def started(step: Step) -> LaunchedStep:
        nonlocal launches
        launches += 1
        if launches == 4:  # after the prompt
            profiler.start("", STEPS, 60.0)
        return launch(step)

    runner.launch = started  # type: ignore[method-assign]
    answers(runner, asks(1, STEPS + 12))
    while not profiler.poll():
        time.sleep(0.01)
    assert isinstance(profiler.last, ProfileSummary), profiler.last
    return profiler.last


@emulated()
def test_profile_has_the_order_of_tasks_in_graphs_without_times(tmp_path: Path):
    made = profile(tmp_path, 3)
    assert (made.steps, made.ended, made.has_times) == (STEPS, "steps", False)
    assert made.device == "emulated NPU: order of its tasks, no times"
    calls = {row.kernel: row.calls for row in made.kernels}
    assert calls[ATTENTION] == 3 * STEPS
    assert sum(count for name, count in calls.items() if "matmul" in name.lower()) == (4 * 3 + 1) * STEPS
    assert all(row.seconds == 0 for row in made.kernels)
    assert next(row.floor_bytes for row in made.kernels if row.kernel == ATTENTION) > 0
    events = [event for event in json.loads(Path(made.path).read_bytes())["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] for event in events] == list(range(len(events)))
    names = [event["name"] for event in events]
    assert Counter(name for name in names if name.startswith("aclnn")) == calls
    first = names.index(ATTENTION)
    assert any("ScatterPaKvCache" in name for name in names[:first])


@emulated()
def test_torch_npus_profiler_records_the_launches(tmp_path: Path):
    """On a device it also records the kernels, which the emulator's CANN refuses."""
    here, before = tmp_path / "here", Path.cwd()
    here.mkdir()
    os.chdir(here)
    try:
        made = profile(tmp_path, 1, start=ascend_profiler)
    finally:
        os.chdir(before)
    assert (made.steps, made.device, made.has_times, made.kernels) == (STEPS, "torch_npu.profiler", True, [])
    events = json.loads(Path(made.path).read_bytes())["traceEvents"]
    ranges = sorted(event["name"] for event in events if str(event.get("name")).startswith("step "))
    assert ranges == [f"step {number}" for number in range(STEPS)]
    assert not [event for event in events if {"Input Dims", "Call stack"} & (event.get("args") or {}).keys()]
    assert not list((tmp_path / "traces").glob(".*"))
    assert not list(here.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "w8a8"])
@emulated()
def test_launches_of_the_roofline_are_the_tasks_of_a_step(tmp_path: Path, name: str):
    roofline: Any = bench("kernels.roofline")
    make = {"bf16": saved, "w8a8": saved_w8a8}[name]
    two, three = (sum(row.calls for row in profile(tmp_path, layers, make).kernels) / STEPS for layers in (2, 3))
    launches = three - two, 3 * two - 2 * three
    assert launches == roofline.LAUNCHES[name], launches
