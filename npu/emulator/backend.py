"""Ascend backend on the emulated CANN libraries, with the differences from the device."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from npuserve.kernels.ascend import MAX_HEAD_DIM, FusedHeads
from npuserve.kernels.ascend_delta import DeltaLaunches
from npuserve.npu.backends.ascend.backend import AscendBackend
from npuserve.npu.backends.device_profiler import DeviceProfiler
from npuserve.npu.cann import preflight
from npuserve.npu.cann.readings import Readings
from npuserve.npu.cann.versions import pair_of
from npuserve.npu.emulator import fused_delta, fused_heads
from npuserve.npu.notices import Notice


class EmulatedAscend(AscendBackend):
    """Ascend backend of a process in which the emulator is active.

    relaxations: names of the omitted checks (parameter `relax` of `emulator.activate`).
    triton: parameter of `emulator.activate`.
    new_profiler: starts a profiler. `emulator.activate` sets all three, and `capabilities`.
    """

    relaxations: ClassVar[frozenset[str]] = frozenset()
    triton: ClassVar[bool] = False
    new_profiler: ClassVar[Callable[[], DeviceProfiler]]

    @classmethod
    def missing_cann(cls) -> str:
        """Return "": the emulator has loaded its libraries."""
        return ""

    @classmethod
    def cann_version(cls) -> str:
        """Return the newest version for which the installed torch_npu is made: the emulator takes its calls."""
        pair = pair_of(importlib.metadata.version("torch_npu"))
        return pair.cann[1] if pair else ""

    @classmethod
    def preflight(cls, *, captures: bool, ranks: int = 1) -> Sequence[Notice]:
        """Check the environment variables, which torch_npu reads here too. Driver and CANN are emulated."""
        return list(preflight.environment(Readings(environ=os.environ), captures=captures, ranks=ranks))

    def profiler(self, folder: Path) -> DeviceProfiler:
        self.synchronize()
        return type(self).new_profiler()

    def fused_heads(self) -> FusedHeads | None:
        """Return the stand-in for the Triton kernel if there is to be one."""
        return fused_heads.launch if self.triton else None

    def delta_launches(self) -> DeltaLaunches | None:
        """Return the stand-ins for the Triton kernels of linear attention if there are to be any."""
        return fused_delta.LAUNCHES if self.triton else None

    def supports_heads(self, head_dim: int) -> bool:
        return head_dim <= MAX_HEAD_DIM if "small_heads" in self.relaxations else super().supports_heads(head_dim)
