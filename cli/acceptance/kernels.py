"""Kernels part of the acceptance check: errors on the test cases against the golden function in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from npuserve.cli.acceptance.report import Finding, failure

if TYPE_CHECKING:
    import torch

    from npuserve.kernels.registry import Case, Kernel
    from npuserve.npu.backends.base import Backend

WRONG_NUMBERS = ("the kernel's numbers differ from those of its golden function: compare the versions of the device's "
                 "software with docs/ascend.md or docs/cuda.md, and send this report")


def check_kernels(backend: Backend) -> Iterator[Finding]:
    """Yield a finding for each kernel and dtype."""
    import npuserve.kernels  # noqa: F401  fills the registry
    from npuserve.kernels.registry import GOLDEN, KERNELS, KernelSet

    for name, label in KernelSet(backend.kernels).labels.items():
        if label == GOLDEN:
            yield Finding("kernels", name, "served by its golden function", None)
            continue
        kernel = KERNELS[name]
        for dtype in supported_dtypes(kernel, backend):
            yield check_kernel(kernel, dtype, backend)


def check_kernel(kernel: Kernel[..., Any], dtype: torch.dtype, backend: Backend) -> Finding:
    """Return the finding for the kernel's test cases in one dtype."""
    found = judge_cases(kernel, supported_cases(kernel, backend, benchmark=False), dtype, backend)
    return replace(found, name=f"{kernel.name} {str(dtype).removeprefix('torch.')}")


def judge_cases(
    kernel: Kernel[..., Any], cases: Iterable[Case], dtype: torch.dtype, backend: Backend, *, other_ids: int = 0
) -> Finding:
    """Return the finding for some of the kernel's cases in one dtype, without a name.

    other_ids: number of further ids of a case that may differ from the golden function in float64. Ids in which the
        golden function in `dtype` differs do not count.
    """
    from npuserve.kernels.bench.accuracy import Oracle
    from npuserve.kernels.registry import GOLDEN

    count, error, others, golden_error, golden_others, wrong, excess = 0, 0.0, 0, 0.0, 0, [], 0.0
    for case in cases:
        oracle = Oracle(kernel, case, dtype)
        golden = oracle.accuracy(GOLDEN)
        try:
            found = backend.enqueue(partial(oracle.accuracy, backend.kernels)).wait()
        except Exception as refused:  # raised by the device or its software
            failed = failure("kernels", refused)
            return Finding("kernels", "", f"case {case.name}: {failed.said}", False, failed.figures, failed.advice)
        if found.excess > 1 or found.other_ids > golden.other_ids + other_ids:
            wrong.append(case.name)
        count, excess = count + 1, max(excess, found.excess)
        error, others = max(error, found.error), others + found.other_ids
        golden_error, golden_others = max(golden_error, golden.error), golden_others + golden.other_ids
    said = f"{count} cases, error {error:.1e} (golden {golden_error:.1e}), {excess:.2f} of the limit"
    said += f", {others} other ids (golden {golden_others})" if others or golden_others else ""
    return Finding(
        "kernels", "", said, bool(count) and not wrong,
        {"cases": count, "error": error, "golden_error": golden_error, "other_ids": others,
         "golden_other_ids": golden_others, "wrong": wrong, "share_of_limit": excess},
        f"{f'case {wrong[0]}' if wrong else 'no case is for this device'}: {WRONG_NUMBERS}")


def supported_dtypes(kernel: Kernel[..., Any], backend: Backend) -> list[torch.dtype]:
    """Return the kernel's dtypes that the device supports; the kernel's first dtype if it supports none."""
    import torch

    dtypes = [*kernel.dtypes, *([torch.float16] if torch.bfloat16 in kernel.dtypes else [])]
    supported = [dtype for dtype in dtypes if supports_dtype(backend, str(dtype).removeprefix("torch."))]
    return supported or [kernel.dtypes[0]]


def supports_dtype(backend: Backend, dtype: str) -> bool:
    """Return whether the device computes in `dtype`."""
    from npuserve.npu.backends.base import BackendError

    try:
        return backend.resolve_dtype(dtype, dtype) == dtype
    except BackendError:
        return False


def supported_cases(kernel: Kernel[..., Any], backend: Backend, *, benchmark: bool) -> Iterator[Case]:
    """Yield the kernel's benchmark or test cases that the device supports."""
    from npuserve.kernels.quantized import with_levels
    from npuserve.npu.diagnostics.machine import takes_case

    for case in kernel.cases:
        if case.benchmark == benchmark and takes_case(backend, case):
            yield with_levels(case, backend.int8_levels)
