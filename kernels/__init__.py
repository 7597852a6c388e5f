"""One file per kernel: its golden reference and its implementations side by side. Importing it fills the registry."""

from npuserve.kernels import (
    attention,
    embedding,
    greedy,
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
    "linear",
    "logprobs",
    "norm",
    "penalize",
    "qk_norm_rope_kv_write",
    "quantized",
    "sample",
    "swiglu",
]
