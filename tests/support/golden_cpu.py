"""CPU backend that computes float8 models."""

from __future__ import annotations

from dataclasses import replace

from npuserve.npu.backends.base import DEFAULT_SETTINGS, DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend


class GoldenCpu(CpuBackend):
    """CPU that computes all models, also in float8, by the golden functions."""

    capabilities = replace(CpuBackend.capabilities, float8=True)

    def __init__(self, settings: DeviceSettings = DEFAULT_SETTINGS) -> None:
        super().__init__(native=False, settings=settings)
