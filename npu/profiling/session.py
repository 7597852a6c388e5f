"""One profile at a time: its start, limits and end, and the writing of its trace and table in a thread.

    start ──► records steps ──► steps, time or `stop` ──► writing, in a thread ──► summary

The loop calls `poll` while `is_active`. Every profile has limits, so it also ends without a call of `stop`.

A profiler of the device starts and ends when no step is in flight, so that its trace has the recorded steps alone. The
loop therefore waits for the device twice in a profile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from npuserve.npu.backends.device_profiler import DeviceProfiler
from npuserve.npu.execution.in_flight import Recording, StepRecord
from npuserve.npu.execution.runner import Runner
from npuserve.npu.profile import Ending, ProfileError, ProfileSummary
from npuserve.npu.profiling.floor import MetaModel
from npuserve.npu.profiling.kernel_table import kernel_table
from npuserve.npu.profiling.trace_file import Event, encode, numbers, step_events
from npuserve.npu.profiling.trace_folder import TraceFolder

MAX_CALLS = 1 << 18
"""Kernel calls of a profile. A profile that reaches it ends as if its steps were over."""
CLOSE_SECONDS = 5.0
"""Time that the end of the engine waits for a trace that is being written."""


class Profiler:
    """Profiles of a runner. Use it from one thread.

    last: result of the last profile that has ended; None before.
    wake: called in another thread once a profile is written.
    """

    def __init__(self, runner: Runner, folder: TraceFolder, wake: Callable[[], None] = lambda: None):
        self.last: ProfileSummary | ProfileError | None = None
        self._runner = runner
        self._folder = folder
        self._wake = wake
        self._recording: Recording | None = None
        self._device: DeviceProfiler | None = None
        self._name = ""
        self._began = self._until = self._seconds = 0.0
        self._failure: ProfileError | None = None
        self._ending: Ending | None = None
        self._writer: threading.Thread | None = None
        self._is_written = False  # set by the writer

    @property
    def is_active(self) -> bool:
        """Whether a profile is recorded or written, so that `poll` has work."""
        return self._recording is not None

    def start(self, name: str, steps: int, seconds: float) -> str:
        """Start a profile of the next `steps` steps, for at most `seconds`. Return its name.

        name: see TraceFolder.reserve.

        Raises ProfileError if a profile runs, or the name, the folder or the device's profiler cannot be used.
        """
        if self.is_active:
            raise ProfileError("a profile is running already: StopProfile ends it")
        try:
            self._name = self._folder.reserve(name)
            scratch = self._folder.scratch(self._name)
        except OSError as error:
            raise ProfileError(f"profile_dir: the folder cannot be used: {error.strerror}") from error
        self._device = None
        self._failure = None
        try:
            self._device = self._runner.backend.profiler(scratch)
        except (OSError, RuntimeError, ImportError) as error:
            self._folder.discard(self._name)
            raise ProfileError(f"the device's profiler does not start: {error}") from error
        self._recording = Recording(steps, is_timed=self._device is None, on_full=partial(self._end, "steps"))
        self._runner.record(self._recording)
        self._began = time.perf_counter()
        self._ending = None
        self._is_written = False
        self._until = self._began + seconds
        return self._name

    def stop(self) -> None:
        """End the profile. Its steps in flight are part of it. Nothing if none runs."""
        self._end("stopped")

    def poll(self) -> bool:
        """End the profile if it is due. Return True if it has been written, and `last` is set."""
        recording = self._recording
        if recording is None:
            return False
        if not recording.left or recording.num_calls >= MAX_CALLS:
            self._end("steps")
        elif time.perf_counter() >= self._until:
            self._end("duration")
        if self._ending is None or recording.in_flight:
            return False
        if self._writer is None and not self._is_written:
            self._write(recording, self._ending)
        if not self._is_written:
            return False
        self._recording = self._writer = None
        return True

    def close(self) -> None:
        """End without a result, at the end of the engine."""
        self._runner.record(None)
        if self._writer:
            self._writer.join(CLOSE_SECONDS)
        if self.is_active:
            self._folder.discard(self._name)

    def _end(self, ending: Ending) -> None:
        """End the recording. A profiler of the device is stopped here, since that needs the thread that started it."""
        if self._recording is None or self._ending is not None:
            return
        self._ending = ending
        self._runner.record(None)
        if self._device:
            self._runner.backend.synchronize()
            try:
                self._device.stop()
            except (OSError, RuntimeError) as error:
                self._failure = ProfileError(f"the device's profiler failed: {error}")
        self._seconds = time.perf_counter() - self._began

    def _write(self, recording: Recording, ending: Ending) -> None:
        """Write the trace in another thread. Without one the profile fails."""

        def work() -> None:
            try:
                if self._failure:
                    raise self._failure
                self.last = self._summary(recording.steps, self._device, ending, self._seconds)
            except ProfileError as error:
                self.last = error
            except Exception as error:  # a thread has no caller, and the reply must not be missing
                self.last = ProfileError(f"the trace cannot be written: {type(error).__name__}: {error}")
            finally:
                self._folder.discard(self._name)
                self._is_written = True
                self._wake()

        self._writer = threading.Thread(target=work, name="npuserve-profile", daemon=True)
        try:
            self._writer.start()
        except RuntimeError:
            self._writer = None
            self._failure = ProfileError("the system has no thread to write the trace")
            work()

    def _summary(
        self, steps: Sequence[StepRecord], device: DeviceProfiler | None, ending: Ending, seconds: float
    ) -> ProfileSummary:
        """Write the trace and return the summary. Runs in a thread."""
        runner = self._runner
        calls = [(kernel, spent) for step in steps for kernel, _, spent in step.calls]
        events: Iterable[Event] = step_events(steps, self._began)
        names: Mapping[str, str] | None = None
        has_times = True
        said = f"{runner.backend_name}: kernel timers of the runner"
        if device:
            events = recorded = device.events()
            names = device.names
            has_times = device.has_times
            said = device.description
            calls = [(event["name"], float(event.get("dur", 0.0)) * 1e-6) for event in device.kernels(recorded)]
        dtype: torch.dtype = getattr(torch, runner.dtype_name)
        model = MetaModel(
            runner.config, dtype, vocabulary_tile=runner.backend.capabilities.vocabulary_tile,
            int8_levels=runner.backend.capabilities.int8_levels, cache_dtype=runner.cache_dtype,
            scale_dtype=runner.backend.capabilities.scale_dtype, state_dtype=runner.backend.state_dtype(dtype))
        table = kernel_table(calls, model.nbytes(steps) if steps else {}, names)
        properties: dict[str, Any] = {
            "npuserve": said, "has_times": has_times, "layers": runner.config.num_layers, "ended": ending,
            "steps": [{"phase": step.phase, "seconds": step.seconds, **numbers(step)} for step in steps]}
        path = ""
        nbytes = 0
        if steps:
            file = self._folder.write(self._name, encode(events, properties))
            path = str(file.resolve())
            nbytes = file.stat().st_size
        return ProfileSummary(
            self._name, path, nbytes, len(steps), runner.config.num_layers, seconds,
            sum(step.seconds for step in steps), ending, has_times, said, table)
