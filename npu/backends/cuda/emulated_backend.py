"""CUDA backend on Triton's interpreter and the substitute for torch.cuda: what differs from the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from npuserve.kernels import triton
from npuserve.npu.backends import backend_class, register_emulated
from npuserve.npu.backends.base import DEFAULT_SETTINGS, BackendError, DeviceSettings
from npuserve.npu.backends.cuda import emulated
from npuserve.npu.backends.cuda.backend import VISIBLE, CudaBackend
from npuserve.npu.backends.cuda.interpreter import quicken
from npuserve.npu.backends.device_profiler import DeviceProfiler
from npuserve.npu.backends.trace_profiler import TraceProfiler

log = logging.getLogger(__name__)


class EmulatedCuda(CudaBackend):
    """CUDA backend whose tensors and kernels are on the CPU."""

    # The largest step takes Triton's interpreter seconds, and its memory is not the device's.
    capabilities = replace(CudaBackend.capabilities, compiles=False, measures_memory=False, collectives="gloo")
    pinned = False

    def __init__(self, settings: DeviceSettings = DEFAULT_SETTINGS) -> None:
        super().__init__(settings)
        self._record = emulated.record

    @classmethod
    def unavailable(cls) -> str:
        return ""

    def profiler(self, folder: Path) -> DeviceProfiler:
        self.synchronize()
        return TraceProfiler(profile(activities=[ProfilerActivity.CPU]), folder,
                             "torch.profiler on an emulated GPU: its host's operators, no kernels", {}, has_times=False)

    def open_device(self, place: tuple[int, int]) -> tuple[Any, torch.device, tuple[int, int]]:
        self.check_count(place, emulated.device_count(), VISIBLE)
        device = torch.device("cpu")
        return emulated, device, emulated.get_device_capability(device)


def emulate(relax: Sequence[str] = ()) -> None:
    """Emulate CUDA for the rest of the process. relax: must be empty.

    Raises BackendError if triton is not installed.
    """
    if relax:
        raise BackendError(
            f"emulate_relax: {', '.join(relax)}: {CudaBackend.name} takes none, it has nothing to relax")
    try:
        triton.interpret()
    except ImportError as error:
        raise BackendError(f"emulate: {error}: pip install 'npuserve[cuda]'") from error
    quicken()
    if backend_class(CudaBackend.name) is not EmulatedCuda:
        log.warning("emulated CUDA: proves calls and numbers, not speed")
    register_emulated(EmulatedCuda)
