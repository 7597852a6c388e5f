"""Kernels and sizes of the acceptance check: errors against the golden function in float64.

Kernels: each kernel on its test cases. Sizes: kernels whose width or quantization may exceed what a device's operators
take, on their benchmark cases, with the widths of Qwen3-0.6B and its 151,936 ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from npuserve.cli.acceptance.report import Finding, failure

if TYPE_CHECKING:
    import torch

    from npuserve.kernels.registry import Case, Kernel
    from npuserve.npu.backends.base import Backend

WRONG_NUMBERS = ("the kernel's numbers differ from those of its golden function: compare the versions of the device's "
                 "software with docs/ascend.md or docs/cuda.md, and send this report")


@dataclass(frozen=True, slots=True)
class Size:
    """Named check on benchmark cases.

    kernels: names of the kernels.
    wanted: choice of a case by its name.
    other_ids: see `judge_cases`.
    """

    name: str
    kernels: tuple[str, ...]
    wanted: Callable[[str], bool]
    other_ids: int = 0


SIZES = (
    Size("LM head of 151,936 ids", ("linear_argmax",), lambda name: "int8" not in name),
    Size("int8 LM head of 151,936 ids", ("linear_argmax",), lambda name: "int8" in name),
    Size("W8A8 layers", ("quantize", "add_rms_norm", "linear", "linear_swiglu"), lambda name: "int8" in name),
    Size("int8 KV cache", ("qk_norm_rope_kv_write", "paged_attention"), lambda name: "int8" in name),
    Size("fp8 KV cache", ("qk_norm_rope_kv_write", "paged_attention"), lambda name: "fp8" in name),
    # A draw within the rounding of float32 sums differs.
    Size("sampling of 151,936 ids", ("penalize", "sample", "logprobs"), lambda name: True, other_ids=1),
)


def check_kernels(backend: Backend) -> Iterator[Finding]:
    """Yield a finding for each kernel and dtype."""
    import npuserve.kernels  # noqa: F401  fills the registry
    from npuserve.kernels.registry import GOLDEN, KERNELS, KernelSet
    from npuserve.npu.backends.machine import served_kernel

    for name, label in KernelSet(backend.kernels).served_labels.items():
        if label == GOLDEN:
            yield Finding("kernels", name, "served by its golden function", None)
            continue
        kernel = served_kernel(backend, KERNELS[name])
        for dtype in supported_dtypes(kernel, backend):
            yield check_kernel(kernel, dtype, backend)


def check_kernel(kernel: Kernel[..., Any], dtype: torch.dtype, backend: Backend) -> Finding:
    """Return the finding for the kernel's test cases in one dtype."""
    finding = judge_cases(kernel, supported_cases(kernel, backend, benchmark=False), dtype, backend)
    return replace(finding, name=f"{kernel.name} {str(dtype).removeprefix('torch.')}")


def judge_cases(
    kernel: Kernel[..., Any], cases: Iterable[Case], dtype: torch.dtype, backend: Backend, *, other_ids: int = 0
) -> Finding:
    """Return the finding for some of the kernel's cases in one dtype, without a name.

    other_ids: number of further ids of a case that may differ from the golden function in float64. Ids in which the
        golden function in `dtype` differs do not count.
    """
    from npuserve.kernels.bench.accuracy import Oracle
    from npuserve.kernels.registry import GOLDEN

    count = 0
    error = 0.0
    others = 0
    golden_error = 0.0
    golden_others = 0
    wrong = []
    excess = 0.0
    for case in cases:
        oracle = Oracle(kernel, case, dtype)
        golden = oracle.accuracy(GOLDEN)
        try:
            accuracy = backend.enqueue(partial(oracle.accuracy, backend.kernels)).wait()
        except Exception as refused:  # raised by the device or its software
            failed = failure("kernels", refused)
            return Finding("kernels", "", f"case {case.name}: {failed.said}", False, failed.figures, failed.advice)
        if accuracy.excess > 1 or accuracy.other_ids > golden.other_ids + other_ids:
            wrong.append(case.name)
        count += 1
        excess = max(excess, accuracy.excess)
        error = max(error, accuracy.error)
        others += accuracy.other_ids
        golden_error = max(golden_error, golden.error)
        golden_others += golden.other_ids
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
    from npuserve.npu.backends.machine import takes_case

    for case in kernel.cases:
        if case.benchmark == benchmark and takes_case(backend, case):
            yield with_levels(case, backend.capabilities.int8_levels)


def check_sizes(backend: Backend, *, quick: bool) -> Iterator[Finding]:
    """Yield a finding for each of SIZES and each of its kernels. quick: one case of a kernel, with several rows."""
    from npuserve.kernels.registry import GOLDEN, KERNELS, KernelSet
    from npuserve.npu.backends.machine import served_kernel

    labels = KernelSet(backend.kernels).served_labels
    for size in SIZES:
        for name in size.kernels:
            kernel = served_kernel(backend, KERNELS[name])
            cases = [case for case in supported_cases(kernel, backend, benchmark=True) if size.wanted(case.name)]
            if labels.get(name, GOLDEN) == GOLDEN or not cases:
                continue
            chosen = [_few(cases)] if quick else cases
            finding = judge_cases(
                kernel, chosen, supported_dtypes(kernel, backend)[0], backend, other_ids=size.other_ids)
            reduced = f", reduced: 1 of {len(cases)} cases" if quick else ""
            yield Finding("sizes", f"{size.name}, {name}", f"{finding.said}{reduced}", finding.passed,
                          finding.figures | {"reduced": quick}, finding.advice)


def _few(cases: list[Case]) -> Case:
    """Return the case with the fewest rows, but more than one if there is such a case."""
    rows = {case.name: int(case.name.split("x")[0].split()[0]) for case in cases}
    return min(cases, key=lambda case: (rows[case.name] == 1, rows[case.name]))
