"""Every kernel of the device compared with its golden function in float64, on fresh inputs; outputs are poisoned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_parts.cases import large_cases
from gpu_parts.worker import Context, Units
from npuserve.kernels.bench.accuracy import Accuracy, Oracle
from npuserve.kernels.bench.tensors import widened
from npuserve.kernels.linear import linear
from npuserve.kernels.quantized import FLOAT8, with_levels
from npuserve.kernels.registry import GOLDEN, KERNELS, Case, Kernel, KernelSet, moved
from npuserve.kernels.routing import Routing
from npuserve.npu.backends.base import BackendError
from npuserve.npu.backends.machine import takes_case

_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default,
          torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty_strided.default)


CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows of captured steps; these are tested first, so that their kernels are compiled."""


MOST = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""Maximum relative error: a few roundings of the dtype. A kernel that skips one number of a thousand exceeds it."""

QUANTIZED_MOST = {torch.int8: 2e-2, torch.int16: 2e-2, FLOAT8: 4e-2}
"""Maximum relative error of quantized results, where a half rounds either way; a step of float8 is up to an eighth."""


class Poisoned(TorchDispatchMode):
    """Mode that fills memory from torch.empty with values that no kernel may leave there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            made.fill_(torch.nan if made.is_floating_point() else True if made.dtype == torch.bool else 0x55)
        return made


def units(context: Context) -> Units:
    labels = KernelSet(context.backend.kernels).labels
    own = [kernel for name, kernel in KERNELS.items() if labels.get(name, GOLDEN) != GOLDEN]
    large = large_cases(context, CAPTURED)
    for kernel in own:
        if cases := large.get(kernel.name):
            yield f"{kernel.name} large", _unit(
                context, kernel, torch.bfloat16, cases, f"Numbers, {context.args.shape}")
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for kernel in own:
            cases = [with_levels(case, context.backend.capabilities.int8_levels) for case in kernel.cases
                     if not case.benchmark and takes_case(context.backend, case)]
            if cases and _takes(context, kernel, dtype):
                yield f"{kernel.name} {dtype}".replace("torch.", ""), _unit(
                    context, kernel, dtype, cases[: 2 if context.quick else None], "Numbers, all cases")


def _unit(context: Context, kernel: Kernel[..., Any], dtype: torch.dtype, cases: list[Case], table: str
          ) -> Callable[[], Iterator[dict[str, Any]]]:
    def run() -> Iterator[dict[str, Any]]:
        made = dtype if dtype in kernel.dtypes or dtype == torch.float16 else kernel.dtypes[0]
        judged = [judge(context, kernel, case, made) for case in cases]
        wrong = [case.name for case, (_, ok) in zip(cases, judged, strict=True) if not ok]
        worst = max(range(len(cases)), key=lambda i: judged[i][0])
        yield {"table": table, "kernel": kernel.name, "dtype": str(made).removeprefix("torch."), "cases": len(cases),
               "largest relative error": judged[worst][0], "of case": cases[worst].name, "ok": not wrong,
               "wrong": "; ".join(wrong[:3])}

    return run


def judge(context: Context, kernel: Kernel[..., Any], case: Case, dtype: torch.dtype) -> tuple[float, bool]:
    """Return the relative error, and True if the case is correct."""
    oracle = Chosen(kernel, case, dtype, seed=context.args.seed, device=context.backend.device)
    return judged_by(oracle, context, context.backend.kernels)


def judged_by(oracle: Chosen, context: Context, label: str) -> tuple[float, bool]:
    """Return the relative error of an implementation, and True if it is correct."""

    def compute() -> Accuracy:
        with torch.inference_mode(), Poisoned():
            return oracle.accuracy(label)

    found = context.backend.enqueue(compute).wait()
    context.backend.synchronize()
    ok = found.excess <= 1 and found.relative <= oracle.most
    if ok and found.other_ids:
        ok = oracle.as_good(label, context.backend.device) if oracle.chooses else (
            found.other_ids <= oracle.accuracy(GOLDEN).other_ids)
    return found.relative, ok


class Chosen(Oracle):
    """Oracle that accepts another argmax of a rounded product if its value is as high as the largest, and other experts
    of a token if their logits are as high as the largest ones."""

    def __init__(self, kernel: Kernel[..., Any], case: Case, dtype: torch.dtype, **where: Any):
        super().__init__(kernel, case, dtype, **where)
        self.case, self.dtype = case, dtype

    @property
    def most(self) -> float:
        """Maximum relative error of a correct result."""
        rounded = [QUANTIZED_MOST[tensor.dtype] for tensor in self._expected if tensor.dtype in QUANTIZED_MOST]
        return max(MOST[self.dtype], self.case.tolerance, *rounded)

    @property
    def chooses(self) -> bool:
        return self.kernel.name in ("linear_argmax", "route_experts")

    def as_good(self, label: str, device: torch.device) -> bool:
        return (self._routes if self.kernel.name == "route_experts" else self._finds_largest)(label, device)

    def _routes(self, label: str, device: torch.device) -> bool:
        """Return True if each token has places of distinct experts of the largest logits, all on this rank."""
        x, weight, top_k, _, first, count, *_ = (widened(arg) for arg in moved(self.args, str(device)))
        made = self.implementation(label)
        routing: Routing = made.function(*made.adapt(self.args))
        places, begins = (part.to(x.device).long() for part in (routing.places, routing.begins))
        logits = F.linear(x, weight)
        if count < len(weight) or not torch.equal(places.flatten().sort().values, torch.arange(
                places.numel(), device=places.device)):
            return False
        experts = torch.searchsorted(begins[1:], places, right=True) + first
        least = logits.topk(top_k).values[:, -1:]
        high = logits.gather(1, experts.clamp(max=len(weight) - 1)) >= least - self._tolerance * (1 + least.abs())
        return bool(high.all()) and bool((experts.sort(dim=1).values.diff(dim=1) > 0).all())

    def _finds_largest(self, label: str, device: torch.device) -> bool:
        x, weight, bias, vocabulary = (widened(arg) for arg in moved(self.args, str(device)))
        logits = linear.golden(x, weight, bias)[:, :vocabulary].double()
        made = self.implementation(label)
        ids: Tensor = made.function(*made.adapt(self.args)).to(logits.device)
        best = logits.amax(dim=1)
        inside = bool(((ids >= 0) & (ids < vocabulary)).all())
        return inside and bool((best - logits.gather(1, ids[:, :1])[:, 0] <= self._tolerance * (1 + best.abs())).all())


def _takes(context: Context, kernel: Kernel[..., Any], dtype: torch.dtype) -> bool:
    """Return True if the kernel is tested in this dtype; a float32-only kernel is tested in float32."""
    name = str(dtype).removeprefix("torch.")
    try:
        if context.backend.resolve_dtype(name, name) != name:
            return False
    except BackendError:
        return False
    return dtype in kernel.dtypes or (dtype == torch.float16 and torch.bfloat16 in kernel.dtypes)
