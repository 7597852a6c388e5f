"""Sizes of the acceptance check: kernels whose width or quantization may exceed what a device's operators take.

The cases are benchmark cases of the kernels, with the widths of Qwen3-0.6B and its 151,936 ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npuserve.cli.acceptance.kernels import judge_cases, supported_cases, supported_dtypes
from npuserve.cli.acceptance.report import Finding

if TYPE_CHECKING:
    from npuserve.kernels.registry import Case
    from npuserve.npu.backends.base import Backend


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


def check_sizes(backend: Backend, *, quick: bool) -> Iterator[Finding]:
    """Yield a finding for each of SIZES and each of its kernels. quick: one case of a kernel, with several rows."""
    from npuserve.kernels.registry import GOLDEN, KERNELS, KernelSet

    labels = KernelSet(backend.kernels).labels
    for size in SIZES:
        for name in size.kernels:
            kernel = KERNELS[name]
            cases = [case for case in supported_cases(kernel, backend, benchmark=True) if size.wanted(case.name)]
            if labels.get(name, GOLDEN) == GOLDEN or not cases:
                continue
            chosen = [_few(cases)] if quick else cases
            found = judge_cases(
                kernel, chosen, supported_dtypes(kernel, backend)[0], backend, other_ids=size.other_ids)
            reduced = f", reduced: 1 of {len(cases)} cases" if quick else ""
            yield Finding("sizes", f"{size.name}, {name}", f"{found.said}{reduced}", found.passed,
                          found.figures | {"reduced": quick}, found.advice)


def _few(cases: list[Case]) -> Case:
    """Return the case with the fewest rows, but more than one if there is such a case."""
    rows = {case.name: int(case.name.split("x")[0].split()[0]) for case in cases}
    return min(cases, key=lambda case: (rows[case.name] == 1, rows[case.name]))
