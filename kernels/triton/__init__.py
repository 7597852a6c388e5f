"""Kernels in Triton, for CUDA, and some for Ascend where triton-ascend is installed (launch_ascend.py).

Importing this package does not import triton. The modules `launch*` check arguments and launch the kernels. The other
files hold kernels. They import only triton and each other, so that a compiler without torch can read them. Tests in
tests/kernels/triton lower the files of `LOWERED` for Ascend.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from npuserve.kernels.registry import Adapter, Kernel, moved, to_host

F = TypeVar("F", bound=Callable[..., Any])

LABEL = "cuda"

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
"""Device of the kernels' tensors: the CPU if triton interprets. `interpret` changes it, so read it as
`triton.DEVICE`."""

LOWERED = {"causal_conv_silu": "ascend_delta", "gated_delta_rule": "ascend_delta", "gated_rms_norm": "rows",
           "qk_norm_rope_kv_write": "qk_norm_rope_kv_write"}
"""Kernel -> file here that implements it and is proven to lower for Ascend; `launch_ascend` calls it."""


_waiting: list[Callable[[], object]] = []
"""Registrations that wait until triton is available."""


def available() -> bool:
    """Return True if triton is installed and a CUDA device is present or triton interprets (TRITON_INTERPRET=1)."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return importlib.util.find_spec("triton") is not None and (interpreted or torch.cuda.is_available())


def interpret() -> None:
    """Make triton interpret the kernels on CPU tensors, in this process and in processes that it starts.

    Call it before the first call of a kernel here. Raises ImportError without triton.
    """
    global DEVICE
    if importlib.util.find_spec("triton") is None:
        raise ImportError("triton is not installed")
    os.environ["TRITON_INTERPRET"] = "1"
    DEVICE = "cpu"
    while _waiting:
        _waiting.pop()()


def to_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move tensors, and dataclasses of tensors, to `DEVICE`."""
    return moved(args, DEVICE)


def implementation(
    kernel: Kernel[..., Any], adapt: Adapter = to_device, restore: Adapter = to_host
) -> Callable[[F], F]:
    """Register the decorated function as the kernel's on CUDA, once triton is `available`.

    adapt, restore: as in `Implementation`.
    """

    def register(function: F) -> F:
        def take() -> object:
            return kernel.implementation(LABEL, adapt=adapt, restore=restore)(function)

        if available():
            take()
        else:
            _waiting.append(take)
        return function

    return register
