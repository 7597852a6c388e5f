"""Variants of a kernel that run here: its golden function and its implementations, C++ ones on every instruction set.

Without --slow only the widest and the narrowest instruction set of this processor are tested: all are compiled from the
same sources. test_ascend.py tests the implementations for Ascend, since an emulated device belongs to one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.decoder_layers import register_cuda
from npuserve.kernels.registry import GOLDEN, Implementation, Kernel

if triton.available() and triton.DEVICE == "cuda":
    register_cuda(torch.device("cuda", 0))

ISAS = native.library().isas if native.available() else []


def marks_of(isa: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a test on an instruction set."""
    return [pytest.mark.slow] if isa in ISAS[1:-1] else []


EACH_ISA = [pytest.param(isa, marks=marks_of(isa)) for isa in ISAS]
"""Parameters of tests on each instruction set."""


def variants(kernel: Kernel[..., Any]) -> list[str]:
    """Return "golden", "cpu/avx2" and so on; other backends by their name."""
    made = [f"cpu/{isa}" for isa in ISAS] if "cpu" in kernel.implementations else []
    return [GOLDEN, *made, *(label for label in kernel.implementations if label not in ("cpu", ascend.LABEL))]


def params(kernel: Kernel[..., Any]) -> list[Any]:
    """Return the variants as parameters of tests."""
    return [pytest.param(variant, marks=marks_of(variant.partition("/")[2])) for variant in variants(kernel)]


@contextmanager
def implementation(kernel: Kernel[..., Any], variant: str) -> Iterator[Implementation[..., Any]]:
    """Yield the implementation, valid inside the context only."""
    label, _, isa = variant.partition("/")
    with native.using(isa) if isa else nullcontext():
        yield Implementation(kernel.golden) if label == GOLDEN else kernel.implementations[label]
