"""Profiles by a profiler with torch's interface, on the CPU, and its failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from npuserve.npu.backends import trace_profiler
from npuserve.npu.backends.trace_profiler import TraceProfiler
from npuserve.npu.execution.runner import Runner
from npuserve.npu.profile import ProfileError
from npuserve.npu.profiling.session import Profiler
from npuserve.npu.profiling.trace_folder import TraceFolder
from tests.npu.backends.small import asks, saved
from tests.npu.profiling.test_session import answered, finished, load


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return load(saved(tmp_path / "model", layers=1), kernel_sampling=1)


def use(monkeypatch: pytest.MonkeyPatch, runner: Runner, profiler: Any) -> None:
    """Let the runner's backend have a profiler of its own. profiler: makes it for a folder."""
    monkeypatch.setattr(runner.backend, "profiler", profiler)


def test_launches_are_ranges_and_kernels_are_not_timed(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answered(runner, asks(2, 6))
    use(monkeypatch, runner, lambda folder: TraceProfiler(
        profile(activities=[ProfilerActivity.CPU]), folder, "torch", {}, has_times=False))
    profiler = Profiler(runner, TraceFolder(tmp_path / "traces"))
    profiler.start("mine", 4, 60.0)
    got, results = answered(runner, asks(2, 6))
    assert got == expected
    assert not any(result.timed for result in results[:4])
    made = finished(profiler)
    assert (made.steps, made.device, made.has_times, made.kernels) == (4, "torch", False, [])
    assert made.step_seconds > 0
    trace = json.loads(Path(made.path).read_bytes())
    names = [event.get("name") for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names == [f"step {number}" for number in range(4)]
    assert [step["rows"] for step in trace["otherData"]["steps"]] == [1, 2, 2, 2]
    assert not [event for event in trace["traceEvents"] if {"Input Dims", "Concrete Inputs", "Call stack"}
                & event.get("args", {}).keys()]
    assert list((tmp_path / "traces").iterdir()) == [Path(made.path)]


class Broken:
    """Profiler that fails in `stage`, or writes no trace."""

    def __init__(self, stage: str):
        self._stage = stage

    def _reach(self, stage: str) -> None:
        if self._stage == stage:
            raise RuntimeError(f"broken at {stage}")

    def start(self) -> None:
        self._reach("start")

    def stop(self) -> None:
        self._reach("stop")

    def export_chrome_trace(self, path: str) -> None:
        self._reach("export")
        if self._stage == "large":
            Path(path).write_text("[" + " " * 100 + "]")


@pytest.mark.parametrize(("stage", "said"), [
    ("stop", "the device's profiler failed: broken at stop"), ("export", "RuntimeError: broken at export"),
    ("nothing", "has written no trace"), ("large", "the device's trace has 102 bytes, more than 50")])
def test_failures_of_the_profiler_are_the_result(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, said: str
) -> None:
    monkeypatch.setattr(trace_profiler, "MAX_FILE_BYTES", 50)
    use(monkeypatch, runner, lambda folder: TraceProfiler(Broken(stage), folder, "broken", {}))
    profiler = Profiler(runner, TraceFolder(tmp_path / "traces"))
    profiler.start("", 2, 60.0)
    answered(runner, asks(1, 4))
    while not profiler.poll():
        pass
    assert isinstance(profiler.last, ProfileError)
    assert said in str(profiler.last)
    assert list((tmp_path / "traces").iterdir()) == []
    assert not profiler.is_active


def test_profiler_that_does_not_start_refuses_the_profile(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, runner, lambda folder: TraceProfiler(Broken("start"), folder, "broken", {}))
    profiler = Profiler(runner, TraceFolder(tmp_path / "traces"))
    with pytest.raises(ProfileError, match="the device's profiler does not start: broken at start"):
        profiler.start("", 2, 60.0)
    assert not profiler.is_active
    assert runner._recording is None
    assert list((tmp_path / "traces").iterdir()) == []
