"""What serves a kernel here: its golden function and its implementations, those in C++ on every instruction set.

Those for Ascend are tested in test_ascend.py, since an emulated device is a process's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from npuserve.kernels import ascend, native
from npuserve.kernels.registry import GOLDEN, Implementation, Kernel

ISAS = native.library().isas if native.available() else []


def ways(kernel: Kernel[..., Any]) -> list[str]:
    """"golden", "cpu/avx2" and so on, other backends by their name."""
    made = [f"cpu/{isa}" for isa in ISAS] if "cpu" in kernel.implementations else []
    return [GOLDEN, *made, *(label for label in kernel.implementations if label not in ("cpu", ascend.LABEL))]


@contextmanager
def implementation(kernel: Kernel[..., Any], way: str) -> Iterator[Implementation[..., Any]]:
    """Use it inside only."""
    label, _, isa = way.partition("/")
    with native.using(isa) if isa else nullcontext():
        yield Implementation(kernel.golden) if label == GOLDEN else kernel.implementations[label]
