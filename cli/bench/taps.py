"""Kernel sets whose calls are intercepted, to execute them otherwise or to record their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.bench.tensors import tensors
from npuserve.kernels.quantized import Quantized
from npuserve.kernels.registry import KernelSet, to_host

Args = tuple[Any, ...]
Results = dict[str, Tensor]
"""Tensors of a call. "result.0", ...: returned tensors, int8 followed by its scale. "argument.N": the N-th argument
after the call if the call modified it, with "argument.N.scale" for int8."""

Tap = Callable[[str, Callable[..., Any], Args], Any]
"""Executes a kernel call; takes the kernel's name, its function and the arguments."""


class TappedKernels(KernelSet):
    """Kernel set whose calls are executed by `tap`."""

    def __init__(self, backend: str, tap: Tap):
        super().__init__(backend, fuse=False)

        def tapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: tap(name, function, args)

        self.__dict__.update({name: tapped(name, getattr(self, name)) for name in self.labels})


def golden_tap(results: list[Results]) -> Tap:
    """Return a tap that executes calls in the golden layout on the host and appends their results to `results`."""

    def call(name: str, function: Callable[..., Any], args: Args) -> Any:
        args = to_host(args)
        before = {name: x._version for name, x in _arguments(args).items()}
        result = function(*args)
        changed = [name for name, x in _arguments(args).items() if x._version > before[name]]
        results.append(results_of(result, args, changed))
        return result

    return call


def _arguments(args: Args) -> Results:
    """Return the tensors among the arguments, which a kernel may modify."""
    arguments: Results = {}
    for i, x in enumerate(args):
        if isinstance(x, Quantized):
            arguments |= {f"argument.{i}": x.values, f"argument.{i}.scale": x.scale}
        elif isinstance(x, Tensor):
            arguments[f"argument.{i}"] = x
    return arguments


def results_of(result: Any, args: Args, names: list[str]) -> Results:
    """Return the result and copies of the arguments in `names`, on the host."""
    results = {f"result.{i}": x.cpu() for i, x in enumerate(tensors(result))}
    return results | {name: x.cpu().clone() for name, x in _arguments(args).items() if name in names}


def cloned(args: Args) -> Args:
    """Return copies of the arguments."""

    def clone(x: Any) -> Any:
        if isinstance(x, Quantized):
            return Quantized(*map(clone, (x.values, x.scale, x.zero, x.sums)))
        return x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x

    return tuple(map(clone, args))
