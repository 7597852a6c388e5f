"""Backend as a `Machine` on which kernels and ceilings are measured (kernels/bench), and the cases that it supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from npuserve.kernels.bench.ceilings import HOST, Machine
from npuserve.kernels.registry import Case, Kernel, Span
from npuserve.npu.backends.base import Backend, BackendError, Captured
from npuserve.npu.backends.cpu import CpuBackend


@dataclass(frozen=True, slots=True)
class Device:
    """Machine of a backend whose work is queued in the caller's thread."""

    backend: Backend

    @property
    def device(self) -> torch.device:
        return self.backend.device

    def span(self) -> Span:
        return self.backend.span()

    def synchronize(self) -> None:
        self.backend.synchronize()

    def record(self, calls: Callable[[], torch.Tensor]) -> Callable[[], object] | None:
        """Capture the calls as a decode step of one row that reads no lengths from the host."""

        def step(rows: int) -> torch.Tensor:
            calls()
            return torch.zeros(rows, device=self.device)

        captured = capture_bucket(self.backend, step, 1)
        if captured is None:
            return None

        @torch.inference_mode()
        def replay() -> object:
            return captured.replay(1, [1])

        return replay


@torch.inference_mode()
def capture_bucket(backend: Backend, step: Callable[[int], torch.Tensor], rows: int) -> Captured | None:
    """Capture a decode step of `rows` rows in one bucket. Returns None and raises BackendError as `Backend.capture`."""
    return backend.capture(step, rows, decode=True, buckets=(rows,))


def machine_of(backend: Backend) -> Machine:
    """Return the machine of a backend; the CPU's kernels are measured without a backend."""
    return HOST if isinstance(backend, CpuBackend) else Device(backend)


def served_kernel(backend: Backend, kernel: Kernel[..., Any]) -> Kernel[..., Any]:
    """Return a kernel with the backend's own function for it, if it has one."""
    if kernel.name not in backend.own_kernels:
        return kernel
    registered = kernel.implementations[backend.kernels]
    own = replace(registered, function=backend.own_kernels[kernel.name])
    return replace(kernel, implementations={**kernel.implementations, backend.kernels: own})


def takes_case(backend: Backend, case: Case) -> bool:
    """Return True if the device supports the features that the case uses."""
    can = backend.capabilities
    if case.cache and case.cache not in can.cache_dtypes:
        return False
    if case.zeros > can.int8_zeros or case.float8 > can.float8 or case.ragged > can.ragged_experts:
        return False
    if case.w4a8 > can.w4a8 or (case.int4 and (not can.int4 or case.int4 % can.int4_rows)):
        return False
    try:
        if case.head_dim:
            backend.check_heads(case.head_dim)
    except BackendError:
        return False
    return True
