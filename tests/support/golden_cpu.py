"""CPU backend that computes float8 models."""

from __future__ import annotations

from npuserve.npu.backends.cpu import CpuBackend


class GoldenCpu(CpuBackend):
    """CPU that computes all models, also in float8, by the golden functions."""

    float8 = True

    def __init__(self, place: tuple[int, int] = (0, 1)) -> None:
        super().__init__(native=False, place=place)
