"""Kernels in Triton: what CUDA runs, and what Ascend may take where torch_npu has no fused operator.

Importing this imports no triton. `launch` calls the kernels, each of which lies in a file of its own that needs triton
alone, so that a compiler without torch reads it: tests/kernels/triton lowers them for Ascend.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from npuserve.kernels.registry import Kernel

F = TypeVar("F", bound=Callable[..., Any])

LOWERED = {
    "embedding": "sample_embed",
    "greedy": "sample_embed",
    "qk_norm_rope_kv_write": "qk_norm_rope_kv_write",
    "sample": "sample_embed",
}
"""Kernel -> the file here that serves it, proved to lower for Ascend."""


def available() -> bool:
    """True if triton is installed, and there is a CUDA device or triton interprets (TRITON_INTERPRET=1)."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return importlib.util.find_spec("triton") is not None and (interpreted or torch.cuda.is_available())


def implementation(kernel: Kernel[..., Any], **adapters: Any) -> Callable[[F], F]:
    """Registers the decorated function as the kernel's on CUDA, if triton is `available`; see
    `Kernel.implementation` for adapters."""

    def register(function: F) -> F:
        if available():
            kernel.implementation("cuda", **adapters)(function)
        return function

    return register
