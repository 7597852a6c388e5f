"""Types of a profile: what was recorded and the table of its kernels. Plain values, no tensors."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Names of profiles: one part of a path, without dots."""
MAX_PROFILE_STEPS = 1000
MAX_PROFILE_SECONDS = 600.0
DEFAULT_STEPS = 20
DEFAULT_SECONDS = 60.0
Ending = Literal["steps", "duration", "stopped"]
"""Why a profile ended: all its steps ran, its time was over, or it was stopped."""


class ProfileError(Exception):
    """A profile cannot be started, ended or written. The message is one sentence for the administrator."""


class KernelRow(msgspec.Struct, frozen=True, array_like=True):
    """Calls of one kernel in a profile.

    kernel: name in the registry of kernels, or of the device's profiler.
    calls: number of calls in all steps.
    seconds: their time; 0 if the profile has no times.
    floor_bytes: bytes that all calls have to read and write, each byte once; 0 where unknown.
    """

    kernel: str
    calls: int
    seconds: float
    floor_bytes: float


class ProfileSummary(msgspec.Struct, frozen=True, array_like=True):
    """A profile that has ended.

    name: name of the profile.
    path: file of the trace on the server; "" if the profile has no step.
    nbytes: size of the file.

    steps: number of recorded steps.
    layers: layers of the model.
    seconds: duration of the profile, from its start to its end.
    step_seconds: sum of the steps' times on the device.
    has_times: False on an emulated device, whose calls have an order and no times.
    device: description of what was recorded, such as "cpu: kernel timers of the runner".
    kernels: the longest first; in the order of the first call without times.
    """

    name: str
    path: str
    nbytes: int
    steps: int
    layers: int
    seconds: float
    step_seconds: float
    ended: Ending
    has_times: bool
    device: str
    kernels: list[KernelRow]
