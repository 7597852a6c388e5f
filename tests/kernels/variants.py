"""Variants of a kernel that run here: its golden function and its implementations, C++ ones on every instruction set.

test_ascend.py tests the implementations for Ascend, since an emulated device belongs to one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.decoder_layers import register_cuda
from npuserve.kernels.registry import GOLDEN, Implementation, Kernel

if triton.available() and triton.DEVICE == "cuda":
    register_cuda(torch.device("cuda", 0))

ISAS = native.library().isas if native.available() else []


def variants(kernel: Kernel[..., Any]) -> list[str]:
    """Return "golden", "cpu/avx2" and so on; other backends by their name."""
    made = [f"cpu/{isa}" for isa in ISAS] if "cpu" in kernel.implementations else []
    return [GOLDEN, *made, *(label for label in kernel.implementations if label not in ("cpu", ascend.LABEL))]


@contextmanager
def implementation(kernel: Kernel[..., Any], variant: str) -> Iterator[Implementation[..., Any]]:
    """Yield the implementation, valid inside the context only."""
    label, _, isa = variant.partition("/")
    with native.using(isa) if isa else nullcontext():
        yield Implementation(kernel.golden) if label == GOLDEN else kernel.implementations[label]
