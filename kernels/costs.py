"""What each kernel must at least move and compute, from the arguments of its golden function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.ceilings import DTYPES, Peak

_KINDS: dict[torch.dtype, Peak] = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call. nbytes: read and written, each once. operations: a product and its sum are two; an exponential or a
    root is one. kind: whose peak they are held against. cold: the positions of the arguments that a step does not find
    in a cache."""

    nbytes: int
    operations: int
    kind: Peak
    cold: tuple[int, ...] = ()


def cost(name: str, args: tuple[Any, ...]) -> Cost:
    """KeyError for a kernel without an entry; a test sees that each has one."""
    return COSTS[name](*args)


def _nbytes(*values: Tensor | None) -> int:
    return sum(x.nbytes for x in values if x is not None)


def _embedding(ids: Tensor, table: Tensor) -> Cost:
    return Cost(_nbytes(ids) + 2 * len(ids) * table[:1].nbytes, 0, "fp32")


def _take_ids(ids: Tensor, last: Tensor) -> Cost:
    return Cost(3 * ids.nbytes, 0, "fp32")


def _keep_ids(ids: Tensor, last: Tensor) -> Cost:
    return Cost(2 * last.nbytes, 0, "fp32")


def _rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Cost:
    return Cost(2 * x.nbytes + gamma.nbytes, 4 * x.numel(), "fp32")


def _add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, eps: float) -> Cost:
    return Cost(4 * x.nbytes + gamma.nbytes, 5 * x.numel(), "fp32")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Cost:
    out = len(x) * len(weight)
    return Cost(_nbytes(x, weight, bias) + out * x.itemsize, 2 * out * x.shape[1], _KINDS[x.dtype], cold=(1,))


def _linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Cost:
    out = len(x) * len(weight) // 2
    return Cost(_nbytes(x, weight, bias) + out * x.itemsize, 4 * out * x.shape[1], _KINDS[x.dtype], cold=(1,))


def _linear_argmax(x: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int) -> Cost:
    return Cost(_nbytes(x, weight, bias) + 8 * len(x), 2 * x.numel() * len(weight), _KINDS[x.dtype], cold=(1,))


def _quantize_per_token(x: Tensor) -> Cost:
    return Cost(x.nbytes + x.numel() + 4 * len(x), 3 * x.numel(), "fp32")


def _linear_w8a8(x: Tensor, x_scale: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None,
                 dtype: torch.dtype) -> Cost:
    out = len(x) * len(weight)
    moved = _nbytes(x, x_scale, weight, w_scale, bias) + out * dtype.itemsize
    return Cost(moved, 2 * out * x.shape[1], "int8", cold=(2,))


def _qk_norm_rope_kv_write(qkv: Tensor, q_gamma: Tensor | None, k_gamma: Tensor | None, eps: float, cos_sin: Tensor,
                           positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor, q_heads: int) -> Cost:
    tokens, dim = len(qkv), keys.shape[-1]
    turned = tokens * dim * (q_heads + keys.shape[2])
    normed = tokens * dim * ((q_gamma is not None) * q_heads + (k_gamma is not None) * keys.shape[2])
    moved = 2 * qkv.nbytes + tokens * cos_sin[:1].nbytes + _nbytes(q_gamma, k_gamma, positions, slots)
    return Cost(moved, 3 * turned + 4 * normed, "fp32")


def _paged_attention(q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, scale: float) -> Cost:
    starts, contexts = metadata.host_cu_seqlens_q, metadata.host_context_lens
    seen = 0  # keys, by all queries of a head
    for begin, end, context in zip(starts, starts[1:], contexts, strict=False):
        n = end - begin
        seen += n * context - n * (n - 1) // 2
    token = (keys[0, 0].numel() + values[0, 0].numel()) * keys.itemsize
    return Cost(2 * q.nbytes + sum(contexts) * token, 4 * seen * q.shape[1] * q.shape[2], _KINDS[q.dtype], cold=(1, 2))


def _swiglu(gate_up: Tensor) -> Cost:
    return Cost(gate_up.nbytes * 3 // 2, 5 * gate_up.numel() // 2, "fp32")


def _greedy(logits: Tensor, vocabulary: int) -> Cost:
    return Cost(len(logits) * (vocabulary * logits.itemsize + 8), len(logits) * vocabulary, "fp32")


def _penalize(logits: Tensor, in_prompt: Tensor, output_counts: Tensor, *penalties: Tensor) -> Cost:
    return Cost(2 * logits.nbytes + _nbytes(in_prompt, output_counts, *penalties), 5 * logits.numel(), "fp32")


def _sample(logits: Tensor, vocabulary: int, *params: Tensor) -> Cost:
    rows = len(logits)
    return Cost(rows * (vocabulary * logits.itemsize + 8) + _nbytes(*params), 3 * rows * vocabulary, "fp32")


def _logprobs(logits: Tensor, vocabulary: int, ids: Tensor, n: int) -> Cost:
    rows = len(logits)
    reports = rows * (8 + 4 + 8 + 12 * n)
    return Cost(rows * vocabulary * logits.itemsize + reports, 4 * rows * vocabulary, "fp32")


COSTS: dict[str, Callable[..., Cost]] = {
    "take_ids": _take_ids,
    "keep_ids": _keep_ids,
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "linear": _linear,
    "linear_argmax": _linear_argmax,
    "linear_swiglu": _linear_swiglu,
    "quantize_per_token": _quantize_per_token,
    "linear_w8a8": _linear_w8a8,
    "qk_norm_rope_kv_write": _qk_norm_rope_kv_write,
    "paged_attention": _paged_attention,
    "swiglu": _swiglu,
    "greedy": _greedy,
    "penalize": _penalize,
    "sample": _sample,
    "logprobs": _logprobs,
}
