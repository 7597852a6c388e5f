"""Kernels in Triton: what CUDA runs, and what Ascend may take where torch_npu has no fused operator.

Importing this imports no triton. The modules `launch*` call the kernels, which lie in files that need triton alone, so
that a compiler without torch reads them: tests/kernels/triton lowers those of `LOWERED` for Ascend.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from npuserve.kernels.registry import Adapter, Kernel, moved

F = TypeVar("F", bound=Callable[..., Any])

LABEL = "cuda"

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
"""Where the kernels' tensors lie: on the CPU where triton interprets. Read it as `triton.DEVICE`: see `interpret`."""

LOWERED = {
    "embedding": "sample_embed",
    "greedy": "sample_embed",
    "qk_norm_rope_kv_write": "qk_norm_rope_kv_write",
    "sample": "sample_embed",
}
"""Kernel -> the file here that does its work and is proved to lower for Ascend; `launch` calls it."""


_waiting: list[Callable[[], object]] = []
"""Registrations for which nothing is available yet."""


def available() -> bool:
    """True if triton is installed, and there is a CUDA device or triton interprets (TRITON_INTERPRET=1)."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return importlib.util.find_spec("triton") is not None and (interpreted or torch.cuda.is_available())


def interpret() -> None:
    """Have triton interpret the kernels on CPU tensors from now on, in this process and those that it starts. Call it
    before any kernel here is called. Raises ImportError without triton."""
    global DEVICE
    if importlib.util.find_spec("triton") is None:
        raise ImportError("triton is not installed")
    os.environ["TRITON_INTERPRET"] = "1"
    DEVICE = "cpu"
    while _waiting:
        _waiting.pop()()


def to_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors, and dataclasses of tensors, on `DEVICE`."""
    return moved(args, DEVICE)


def to_host(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`to_device` undone."""
    return moved(args, "cpu")


def implementation(
    kernel: Kernel[..., Any], adapt: Adapter = to_device, restore: Adapter = to_host
) -> Callable[[F], F]:
    """Registers the decorated function as the kernel's on CUDA, once triton is `available`; see
    `Kernel.implementation` for adapters."""

    def register(function: F) -> F:
        def take() -> object:
            return kernel.implementation(LABEL, adapt=adapt, restore=restore)(function)

        if available():
            take()
        else:
            _waiting.append(take)
        return function

    return register
