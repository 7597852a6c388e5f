"""Fixtures of the device side's tests."""

from __future__ import annotations

import pytest

from npuserve.kernels.native import available
from npuserve.npu.backends.cpu import CpuBackend


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.skipif(
    not available(), reason="the native kernels are not built"))], ids=["golden", "native"])
def cpu(request) -> CpuBackend:
    """CPU backend with the golden functions, and with the native kernels."""
    return CpuBackend(native=request.param)
