"""Accuracy of a kernel's implementation, against its golden function in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from npuserve.kernels.bench.tensors import QUANTIZED, copy_arguments, tensors, versions, widened
from npuserve.kernels.registry import GOLDEN, Case, Implementation, Kernel, moved

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Absolute and relative tolerance of a result in that dtype: a few roundings of values of about 1."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Error of an implementation on one case, relative to the golden function in float64.

    error: largest absolute difference of a number; infinite for NaN.
    other_ids: number of integers (ids, ranks, counts) that differ.
    excess: largest ratio of a difference to `TOLERANCE`, and to `QUANTIZED` for quantized numbers; above 1 is wrong.
    relative: largest || difference || / || golden || of a tensor, except tensors of integers.
    """

    error: float
    other_ids: int
    excess: float
    relative: float


class Oracle:
    """One case of a kernel: its arguments, and the golden results in float64.

    seed: seed of the arguments.
    device: device of the golden function.
    changed: positions of the arguments that the kernel writes.
    """

    def __init__(
        self, kernel: Kernel[..., Any], case: Case, dtype: torch.dtype, *, seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        self.kernel = kernel
        self._tolerance = max(TOLERANCE[dtype], case.tolerance)
        self.args = case.make(torch.Generator().manual_seed(seed), dtype)
        wide = tuple(widened(x) for x in moved(self.args, str(device)))
        before = [versions(x) for x in wide]
        results = tensors(kernel.golden(*wide))
        self.changed = [i for i, x in enumerate(wide) if versions(x) != before[i]]
        self._expected = [*results, *(tensor for i in self.changed for tensor in tensors(wide[i]))]

    def accuracy(self, label: str) -> Accuracy:
        """Return the accuracy of a backend's implementation, or of GOLDEN, which runs in the case's dtype."""
        made = self.implementation(label)
        args = made.adapt(copy_arguments(self.args, self.changed))
        results = tensors(made.result(made.function(*args)))
        after = made.restore(args) if self.changed else ()
        results += [tensor for i in self.changed for tensor in tensors(after[i])]
        error, other_ids, excess, relative = 0.0, 0, 0.0, 0.0
        for result, want in zip(results, self._expected, strict=True):
            got = result.to(want.device)
            if not want.is_floating_point() and want.dtype not in QUANTIZED:
                other_ids += int((got != want).sum())
            elif want.numel():
                wide, exact = got.double(), want.double()
                difference = torch.where(wide == exact, 0.0, (wide - exact).abs())
                difference = difference.nan_to_num(nan=torch.inf, posinf=torch.inf)
                error = max(error, float(difference.max()))
                rtol, atol = QUANTIZED.get(want.dtype, (self._tolerance, self._tolerance))
                tolerated = max(rtol, self._tolerance) * exact.abs() + atol
                excess = max(excess, float((difference / tolerated).max()))
                whole = float(exact.nan_to_num(posinf=0, neginf=0).norm())
                relative = max(relative, float(difference.norm()) / (whole or 1.0))
        return Accuracy(error, other_ids, excess, relative)

    def implementation(self, label: str) -> Implementation[..., Any]:
        """Return the implementation of a backend, or of GOLDEN."""
        return Implementation(self.kernel.golden) if label == GOLDEN else self.kernel.implementations[label]
