"""CPU kernels in C++: the library, calls of its ops, and programs of calls.

The library has a table of kernels for each instruction set. The process uses the widest set of the processor, unless
choice.py selects another. Without the library, or without a set of this processor in it, `available()` is False and no
kernel of this backend is registered. The golden functions are used then.

Folders of C++ sources:

    runtime      interface, thread pool, vectors; included by the folders below
    gemm         products with weights
    attention    KV cache and attention; includes `gemm`
    rows         kernels that compute each row from one row

    ascend       no kernels: the thread that updates the lengths of captured attention
                 (npu/backends/ascend/native_lengths.py)

Python here imports only `npuserve.kernels.registry` from the other folders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from npuserve.kernels.native.arena import Arena
from npuserve.kernels.native.binding import CONSTANTS, LANES
from npuserve.kernels.native.program import Call, NotRecordable, Program, call, empty, record
from npuserve.kernels.native.shared_library import Library, available, library, unavailable_text, using
from npuserve.kernels.registry import Kernel

__all__ = [
    "CONSTANTS",
    "LANES",
    "Arena",
    "Call",
    "Library",
    "NotRecordable",
    "Program",
    "available",
    "call",
    "empty",
    "implementation",
    "library",
    "record",
    "unavailable_text",
    "using",
]

F = TypeVar("F", bound=Callable[..., Any])


def implementation(kernel: Kernel[..., Any], **adapters: Any) -> Callable[[F], F]:
    """Register the decorated function as the kernel's on the CPU if the library is available.

    adapters: as for `Kernel.implementation`.
    """
    def register(function: F) -> F:
        if available():
            kernel.implementation("cpu", **adapters)(function)
        return function

    return register
