"""One file per kernel: its golden reference and its implementations side by side. Importing it fills the registry."""

import os

# torch would import an installed torch_npu by itself, which fails without a CANN; the backend imports it when chosen.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from npuserve.kernels import (
    attention,
    embedding,
    greedy,
    last_ids,
    linear,
    logprobs,
    norm,
    penalize,
    qk_norm_rope_kv_write,
    quantized,
    sample,
    swiglu,
)

__all__ = [
    "attention",
    "embedding",
    "greedy",
    "last_ids",
    "linear",
    "logprobs",
    "norm",
    "penalize",
    "qk_norm_rope_kv_write",
    "quantized",
    "sample",
    "swiglu",
]
