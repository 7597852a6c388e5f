"""Profiles of a small model on the CPU: bounds, contents and tokens."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu.execution.load import load_runner
from npuserve.npu.execution.runner import Runner
from npuserve.npu.profile import ProfileError, ProfileSummary
from npuserve.npu.profiling import session
from npuserve.npu.profiling.session import Profiler
from npuserve.npu.profiling.trace_folder import TraceFolder
from npuserve.npu.step import NewRequest, Row, Step, StepResult
from tests.npu.backends.small import GREEDY, Ask, answers, asks, saved

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), layers=LAYERS)


def load(folder: Path, **options: Any) -> Runner:
    return load_runner(folder, backend="cpu", dtype="float32", max_num_seqs=4, max_num_batched_tokens=64,
                       kv_cache_memory=8 << 20, threads=1, progress=lambda done, total: None, **options)


def answered(runner: Runner, requests: list[Ask]) -> tuple[list[list[int]], list[StepResult]]:
    """Return the answers and the results of all steps. The runner forgets the requests."""
    made = answers(runner, requests)
    runner.launch(Step([], ended=list(range(len(requests)))))
    return made


def finished(profiler: Profiler) -> ProfileSummary:
    deadline = time.monotonic() + 30
    while profiler.is_active and not profiler.poll():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert isinstance(profiler.last, ProfileSummary), profiler.last
    return profiler.last


def trace_of(summary: ProfileSummary) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(Path(summary.path).read_bytes())
    return read


def test_profile_has_each_kernel_of_each_step_and_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    requests = asks(3, 12)
    expected, _ = answered(load(folder), asks(3, 12))
    runner = load(folder, kernel_sampling=2)
    profiler = Profiler(runner, TraceFolder(tmp_path))
    assert profiler.start("", 10, 60.0) == "profile-1"
    assert profiler.is_active
    got, results = answered(runner, requests)
    assert got == expected
    made = finished(profiler)
    assert not profiler.is_active
    assert (made.steps, made.ended, made.layers, made.has_times) == (10, "steps", LAYERS, True)
    calls = {row.kernel: row.calls for row in made.kernels}
    for kernel, per_layer in (("linear", 3), ("paged_attention", 1), ("qk_norm_rope_kv_write", 1), ("linear_swiglu", 1),
                              ("add_rms_norm", 2)):
        assert calls[kernel] == per_layer * LAYERS * 10
    assert calls["embedding"] == 10
    assert all(row.seconds > 0 for row in made.kernels)
    assert sum(row.seconds for row in made.kernels) <= made.step_seconds
    assert [result.timed for result in results[:10]] == [True] * 10
    assert [result.timed for result in results[11:15]].count(True) == 2  # every second step again
    assert all(row.floor_bytes > 0 for row in made.kernels if row.kernel in ("linear", "paged_attention"))


def test_trace_has_steps_and_kernels_in_order_and_numbers_only(folder: Path, tmp_path: Path) -> None:
    runner = load(folder)
    profiler = Profiler(runner, TraceFolder(tmp_path))
    profiler.start("mine", 6, 60.0)
    answered(runner, asks(2, 6))
    trace = trace_of(finished(profiler))
    assert Path(profiler.last.path).name == "mine.trace.json"  # type: ignore[union-attr]
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in events if event["cat"] == "step"]
    assert [step["args"]["step"] for step in steps] == list(range(6))
    assert steps[0]["name"] == "prefill"
    kernels = [event for event in events if event["cat"] == "kernel"]
    assert [event["ts"] for event in kernels] == sorted(event["ts"] for event in kernels)
    for kernel in kernels:
        step = steps[kernel["args"]["step"]]
        assert step["ts"] - 1 <= kernel["ts"] <= kernel["ts"] + kernel["dur"] <= step["ts"] + step["dur"] + 1
    assert trace["otherData"]["layers"] == LAYERS
    keys = {key for event in events for key in event["args"]}
    assert keys == {"step", "rows", "tokens", "sampled", "context"}
    assert all(isinstance(value, int) for event in events for value in event["args"].values())


def test_profile_ends_after_its_time_without_steps(folder: Path, tmp_path: Path) -> None:
    profiler = Profiler(load(folder), TraceFolder(tmp_path))
    profiler.start("", 5, 0.05)
    made = finished(profiler)
    assert (made.steps, made.ended, made.path, made.kernels) == (0, "duration", "", [])
    assert list(tmp_path.iterdir()) == []


def test_stop_ends_a_profile_with_its_steps_in_flight(folder: Path, tmp_path: Path) -> None:
    runner = load(folder)
    profiler = Profiler(runner, TraceFolder(tmp_path))
    profiler.start("", 100, 60.0)
    launched = runner.launch(Step([Row(0, [1, 2], 0, [0], True)], [NewRequest(0, [1, 2], [], GREEDY)]))
    profiler.stop()
    assert not profiler.poll()  # the step is in flight
    token = runner.collect(launched).token_ids[0][0]
    runner.collect(runner.launch(Step([Row(0, [token], 2, [0], True)])))  # not in the profile
    made = finished(profiler)
    assert (made.steps, made.ended) == (1, "stopped")


def test_one_profile_at_a_time_and_one_of_a_name(folder: Path, tmp_path: Path) -> None:
    profiler = Profiler(load(folder), TraceFolder(tmp_path))
    profiler.start("a", 1, 60.0)
    with pytest.raises(ProfileError, match="a profile is running already"):
        profiler.start("b", 1, 60.0)
    profiler.stop()
    finished(profiler)
    assert profiler.start("b", 1, 60.0) == "b"
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_close_waits_for_a_trace_that_is_being_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, joined = load(folder), threading.Event()
    profiler = Profiler(runner, traces := TraceFolder(tmp_path))
    write, join = traces.write, threading.Thread.join

    def write_when_joined(name: str, trace: bytes) -> Path:
        assert joined.wait(30)
        return write(name, trace)

    def joining(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.set()
        join(thread, timeout)

    monkeypatch.setattr(traces, "write", write_when_joined)
    monkeypatch.setattr(threading.Thread, "join", joining)
    profiler.start("a", 1, 60.0)
    answered(runner, asks(1, 4))
    assert not profiler.poll()
    profiler.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.trace.json"]
    assert isinstance(profiler.last, ProfileSummary)


def test_folder_that_was_removed_is_made_again_and_an_unusable_one_refuses_the_profile(
    folder: Path, tmp_path: Path
) -> None:
    profiler = Profiler(load(folder), traces := TraceFolder(tmp_path / "traces"))
    traces.path.rmdir()
    assert profiler.start("a", 1, 60.0) == "a"
    profiler.stop()
    finished(profiler)
    for file in traces.path.iterdir():
        file.unlink()
    traces.path.rmdir()
    traces.path.write_text("a file")
    for name in ("", "b"):
        with pytest.raises(ProfileError, match="profile_dir: the folder cannot be used: File exists"):
            profiler.start(name, 1, 60.0)
    assert not profiler.is_active


def test_read_only_folder_refuses_the_profile_and_blames_no_device(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, mode: int = 0o777, **options: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    profiler = Profiler(load(folder), TraceFolder(tmp_path))
    monkeypatch.setattr(TraceFolder, "reserve", lambda self, name: name)  # mkdir of a folder that exists passes
    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(ProfileError, match="profile_dir: the folder cannot be used: Read-only file system"):
        profiler.start("a", 1, 60.0)
    assert not profiler.is_active


def test_trace_that_cannot_be_written_is_the_result(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(folder)
    traces = TraceFolder(tmp_path)
    profiler = Profiler(runner, traces)

    def full(name: str, trace: bytes) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(traces, "write", full)
    profiler.start("", 2, 60.0)
    answered(runner, asks(1, 4))
    while not profiler.poll():
        time.sleep(0.005)
    assert isinstance(profiler.last, ProfileError)
    assert "No space left on device" in str(profiler.last)
    monkeypatch.undo()
    profiler.start("", 2, 60.0)
    answered(runner, asks(1, 4))
    assert finished(profiler).steps == 2


def test_profile_without_a_further_thread_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    runner = load(folder)
    profiler = Profiler(runner, TraceFolder(tmp_path))
    profiler.start("", 2, 60.0)
    answered(runner, asks(1, 4))
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        assert profiler.poll()
    assert str(profiler.last) == "the system has no thread to write the trace"
    assert not profiler.is_active
    profiler.start("", 2, 60.0)
    answered(runner, asks(1, 4))
    assert finished(profiler).steps == 2


def test_profile_with_too_many_calls_ends_early(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_CALLS", 100)
    runner = load(folder)
    profiler = Profiler(runner, TraceFolder(tmp_path))
    profiler.start("", 1000, 60.0)
    token, launched = 2, runner.launch(Step([Row(0, [1], 0, [0], True)], [NewRequest(0, [1], [], GREEDY)]))
    for position in range(1, 20):
        token = runner.collect(launched).token_ids[0][0]
        profiler.poll()
        launched = runner.launch(Step([Row(0, [token], position, [0], True)]))
    runner.collect(launched)
    made = finished(profiler)
    assert made.ended == "steps"
    assert 100 <= sum(row.calls for row in made.kernels) < 100 + 2 * (8 * LAYERS + 5)
