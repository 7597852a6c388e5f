"""Catalogue of kernels, a file per kernel or family: golden function, cases, and implementations by backend.

Importing this package fills `registry.KERNELS`. Folders: native (C++ for the CPU), triton and cuda (CUDA),
bench (timing).
"""

import os

# `import torch` also imports an installed torch_npu, which fails without CANN. The Ascend backend imports it itself.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from npuserve.kernels import (
    attention,
    causal_conv_silu,
    collectives,
    decoder_layers,
    embedding,
    experts,
    gated_delta_rule,
    gated_rms_norm,
    greedy,
    keep_rows,
    last_ids,
    linear,
    logprobs,
    mask_logits,
    norm,
    penalize,
    qk_norm_rope_kv_write,
    quantize,
    sample,
    sigmoid_gate,
    swiglu,
)

__all__ = [
    "attention",
    "causal_conv_silu",
    "collectives",
    "decoder_layers",
    "embedding",
    "experts",
    "gated_delta_rule",
    "gated_rms_norm",
    "greedy",
    "keep_rows",
    "last_ids",
    "linear",
    "logprobs",
    "mask_logits",
    "norm",
    "penalize",
    "qk_norm_rope_kv_write",
    "quantize",
    "sample",
    "sigmoid_gate",
    "swiglu",
]
