"""Minimum bytes and operations of each kernel, from the arguments of its golden function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.bench.ceilings import DTYPES, Peak
from npuserve.kernels.collectives import Ranks
from npuserve.kernels.kv_cache import Cache, block_size
from npuserve.kernels.layer import LayerWeights
from npuserve.kernels.quantized import Quantized, Scheme
from npuserve.kernels.routing import Routing, distinct_experts
from npuserve.kernels.weight import Weight, form_of

_KINDS: dict[torch.dtype, Peak] = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one call.

    nbytes: bytes read and written, each once.
    operations: number of operations. A product and its sum are two. An exponential or a root is one.
    kind: peak to compare the operations with.
    cold: positions of arguments that are in no cache when a step reads them.
    """

    nbytes: int
    operations: int
    kind: Peak
    cold: tuple[int, ...] = ()


def cost(name: str, args: tuple[Any, ...]) -> Cost:
    """Return the cost of a call. Raises KeyError for a kernel without an entry; a test checks that each has one."""
    return COSTS[name](*args)


def nbytes(*values: Any) -> int:
    """Return the bytes of tensors, also in sequences and dataclasses; 0 for other values."""
    made = 0
    for value in values:
        if isinstance(value, Tensor):
            made += value.nbytes
        elif isinstance(value, tuple | list):
            made += nbytes(*value)
        elif is_dataclass(value):
            made += nbytes(*(getattr(value, field.name) for field in fields(value)))
    return made


def _embedding(ids: Tensor, table: Weight) -> Cost:
    return Cost(nbytes(ids) + len(ids) * (form_of(table).row_bytes + table.shape[1] * table.dtype.itemsize), 0, "fp32")


def _embedding_shard(ids: Tensor, table: Weight, first: int, count: int) -> Cost:
    return _embedding(ids, table)


def _all_reduce(x: Tensor, ranks: Ranks) -> Cost:
    """Return the cost of writing this rank's part and reading the parts of all ranks."""
    return Cost((2 + 1 + ranks.size) * x.nbytes, ranks.size * x.numel(), "fp32")


def _all_gather(x: Tensor, ranks: Ranks) -> Cost:
    return Cost((2 + 2 * ranks.size) * x.nbytes, 0, "fp32")


def _take_ids(ids: Tensor, last: Tensor) -> Cost:
    return Cost(3 * ids.nbytes, 0, "fp32")


def _keep_ids(ids: Tensor, last: Tensor) -> Cost:
    return Cost(2 * last.nbytes, 0, "fp32")


def _keep_rows(x: Tensor, memory: Tensor) -> Cost:
    return Cost(2 * x.nbytes, 0, "fp32")


def _quantized(shape: Sequence[int], scheme: Scheme) -> int:
    """Return the bytes of a quantized tensor of this shape."""
    rows, columns = shape
    return rows * (columns + 4 * scheme.has_zero) + 4 * prod(scheme.scale_shape(rows, columns))


def _quantize(x: Tensor, scheme: Scheme) -> Cost:
    return Cost(x.nbytes + _quantized(x.shape, scheme), 3 * x.numel(), "fp32")


def _rms_norm(x: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None) -> Cost:
    out = x.nbytes if scheme is None else _quantized(x.shape, scheme)
    return Cost(x.nbytes + gamma.nbytes + out, (4 if scheme is None else 7) * x.numel(), "fp32")


def _add_rms_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None, widens: bool = False
) -> Cost:
    normed = _rms_norm(x, gamma, eps, scheme)
    return Cost(2 * x.nbytes + normed.nbytes, x.numel() + normed.operations, "fp32")


def _product(x: Tensor | Quantized, weight: Weight, bias: Tensor | None, out: int) -> Cost:
    """Return the cost of a product. out: bytes of the result."""
    n, k = weight.shape
    return Cost(nbytes(x, weight, bias) + out, 2 * len(x) * n * k, _KINDS[form_of(weight).operand_dtype], cold=(1,))


def _linear(x: Tensor | Quantized, weight: Weight, bias: Tensor | None) -> Cost:
    return _product(x, weight, bias, len(x) * weight.shape[0] * weight.dtype.itemsize)


def _linear_swiglu(x: Tensor | Quantized, weight: Weight, bias: Tensor | None, scheme: Scheme | None = None) -> Cost:
    rows, columns = len(x), weight.shape[0] // 2
    out = rows * columns * weight.dtype.itemsize if scheme is None else _quantized((rows, columns), scheme)
    return _product(x, weight, bias, out)


def _linear_argmax(x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, *masks: Tensor | None) -> Cost:
    made = _product(x, weight, bias, 8 * len(x))
    return replace(made, nbytes=made.nbytes + nbytes(*masks))


def _linear_argmax_shard(
    x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, first: int, ranks: Ranks
) -> Cost:
    return _linear_argmax(x, weight, bias, vocabulary)


def _qk_norm_rope_kv_write(qkv: Tensor, q_gamma: Tensor | None, k_gamma: Tensor | None, eps: float, cos_sin: Tensor,
                           positions: Tensor, slots: Tensor, keys: Cache, values: Cache, q_heads: int) -> Cost:
    tokens, (kv_heads, dim) = len(qkv), (keys.values if isinstance(keys, Quantized) else keys).shape[2:]
    turned = tokens * cos_sin.shape[1] * (q_heads + kv_heads)
    normed = tokens * dim * ((q_gamma is not None) * q_heads + (k_gamma is not None) * kv_heads)
    written = tokens * (q_heads * dim * qkv.itemsize + _token_bytes(keys) + _token_bytes(values))
    moved = qkv.nbytes + written + tokens * cos_sin[:1].nbytes + nbytes(q_gamma, k_gamma, positions, slots)
    return Cost(moved, 3 * turned + 4 * normed, "fp32")


def _token_bytes(cache: Cache) -> int:
    slots = len(cache) * block_size(cache)
    return nbytes(cache) // slots if slots else 0


def _paged_attention(q: Tensor, keys: Cache, values: Cache, metadata: AttentionMetadata, scale: float) -> Cost:
    starts, contexts = metadata.host_cu_seqlens_q, metadata.host_context_lens
    seen = 0  # keys that the queries of one head attend to
    for begin, end, context in zip(starts, starts[1:], contexts, strict=False):
        n = end - begin
        seen += n * context - n * (n - 1) // 2
    token = _token_bytes(keys) + _token_bytes(values)
    # int8 times int16 has as many products a word
    kind: Peak = "bf16" if isinstance(keys, Quantized) else _KINDS[q.dtype]
    return Cost(2 * q.nbytes + sum(contexts) * token, 4 * seen * q.shape[1] * q.shape[2], kind, cold=(1, 2))


def _decoder_layers(
    residual: Tensor, layers: Sequence[LayerWeights], caches: Sequence[tuple[Cache, Cache]], eps: float,
    cos_sin: Tensor, positions: Tensor, slots: Tensor, metadata: AttentionMetadata, heads: int, scale: float,
) -> Cost:
    """Count weights and caches once, and the operations of products and attention."""
    moved, operations = 2 * residual.nbytes, 0
    kind: Peak = "bf16"
    for layer, (keys, values) in zip(layers, caches, strict=True):
        q = residual.new_empty(len(residual), heads, layer.o.weight.shape[1] // heads)
        attention = _paged_attention(q, keys, values, metadata, scale)
        moved += nbytes(layer) + attention.nbytes
        operations += attention.operations
        for linear in layer.linears:
            operations += 2 * len(residual) * prod(linear.weight.shape)
            kind = _KINDS[form_of(linear.weight).operand_dtype]
    return Cost(moved, operations, kind, cold=(1, 2))


def _causal_conv_silu(
    x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata, state_slots: Tensor
) -> Cost:
    moved = 2 * x.nbytes + nbytes(weight, state_slots) + _states(state, metadata)
    return Cost(moved, (2 * weight.shape[1] + 4) * x.numel(), "fp32", cold=(2,))


def _states(state: Tensor, metadata: AttentionMetadata) -> int:
    """Return the bytes of the rows' states: written, and read by rows that continue them."""
    starts, accesses = metadata.host_cu_seqlens_q, 0
    for begin, end, context in zip(starts, starts[1:], metadata.host_context_lens, strict=False):
        accesses += (end > begin) + (context > end - begin > 0)
    return accesses * prod(state.shape[1:]) * state.itemsize


def _gated_delta_rule(qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
                      metadata: AttentionMetadata, state_slots: Tensor, key_heads: int) -> Cost:
    """Count decay, two products with a vector and a sum with an outer product for each token and head."""
    value_heads, key_dim, value_dim = state.shape[1:]
    out = len(qkv) * value_heads * value_dim * qkv.itemsize
    moved = nbytes(qkv, a, b, a_log, dt_bias, state_slots) + out + _states(state, metadata)
    return Cost(moved, 7 * len(qkv) * value_heads * key_dim * value_dim, "fp32", cold=(5,))


def _gated_rms_norm(x: Tensor, z: Tensor, gamma: Tensor, eps: float) -> Cost:
    return Cost(3 * x.nbytes + gamma.nbytes, 9 * x.numel(), "fp32")


def _route_experts(
    x: Tensor, weight: Tensor, top_k: int, renormalize: bool, first: int, count: int, tokens: Tensor | None = None
) -> Cost:
    moved = nbytes(x, weight) + 8 * len(x) * top_k + 4 * count + 2 * nbytes(tokens)
    return Cost(moved, 2 * len(x) * weight.numel(), "fp32", cold=(1,))


def _by_experts(x: Tensor | Quantized, weight: Weight, routing: Routing, out: int) -> Cost:
    """Return the cost of products by experts, which read the weights of experts with rows. out: bytes of the result.

    On tensors without memory, tokens choose experts independently, and each expert as often as another.
    """
    form = form_of(weight)
    tokens, top_k = routing.places.shape
    experts = routing.experts
    if routing.begins.is_meta:
        rows = tokens * top_k * experts // routing.all_experts
        read = distinct_experts(tokens, top_k, routing.all_experts, experts)
    else:
        rows = int(routing.begins[-1])
        read = float((routing.begins.diff() > 0).sum())
    return Cost(nbytes(x, routing) + int(nbytes(weight) * read / experts) + out, 2 * rows * prod(form.shape) // experts,
                _KINDS[form.operand_dtype], cold=(1,))


def _experts_swiglu(x: Tensor | Quantized, weight: Weight, routing: Routing, scheme: Scheme | None = None) -> Cost:
    rows, columns = routing.places.numel(), weight.shape[0] // routing.experts // 2
    out = rows * columns * weight.dtype.itemsize if scheme is None else _quantized((rows, columns), scheme)
    return _by_experts(x, weight, routing, out)


def _experts_sum(
    x: Tensor | Quantized, weight: Weight, routing: Routing, shared: Tensor | None = None, gate: Tensor | None = None
) -> Cost:
    out = len(routing.places) * weight.shape[0] // routing.experts * weight.dtype.itemsize
    return _by_experts(x, weight, routing, out + nbytes(shared, gate))


def _sigmoid_gate(x: Tensor, gate: Tensor) -> Cost:
    return Cost(3 * x.nbytes, 4 * x.numel(), "fp32")


def _swiglu(gate_up: Tensor) -> Cost:
    return Cost(gate_up.nbytes * 3 // 2, 5 * gate_up.numel() // 2, "fp32")


def _greedy(logits: Tensor, vocabulary: int) -> Cost:
    return Cost(len(logits) * (vocabulary * logits.itemsize + 8), len(logits) * vocabulary, "fp32")


def _mask_logits(logits: Tensor, vocabulary: int, bits: Tensor, mask_of_row: Tensor) -> Cost:
    """Count writes of all logits of the rows, as if every row had a mask that allows nothing."""
    return Cost(len(logits) * vocabulary * logits.itemsize + nbytes(bits, mask_of_row), 0, "fp32")


def _penalize(logits: Tensor, in_prompt: Tensor, output_counts: Tensor, *penalties: Tensor) -> Cost:
    return Cost(2 * logits.nbytes + nbytes(in_prompt, output_counts, *penalties), 5 * logits.numel(), "fp32")


def _sample(logits: Tensor, vocabulary: int, *params: Tensor) -> Cost:
    rows = len(logits)
    return Cost(rows * (vocabulary * logits.itemsize + 8) + nbytes(*params), 3 * rows * vocabulary, "fp32")


def _logprobs(logits: Tensor, vocabulary: int, ids: Tensor, n: int) -> Cost:
    rows = len(logits)
    reports = rows * (8 + 4 + 8 + 12 * n)
    return Cost(rows * vocabulary * logits.itemsize + reports, 4 * rows * vocabulary, "fp32")


COSTS: dict[str, Callable[..., Cost]] = {
    "take_ids": _take_ids,
    "keep_ids": _keep_ids,
    "keep_rows": _keep_rows,
    "embedding": _embedding,
    "embedding_shard": _embedding_shard,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "quantize": _quantize,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "linear": _linear,
    "linear_argmax": _linear_argmax,
    "linear_argmax_shard": _linear_argmax_shard,
    "linear_swiglu": _linear_swiglu,
    "qk_norm_rope_kv_write": _qk_norm_rope_kv_write,
    "paged_attention": _paged_attention,
    "sigmoid_gate": _sigmoid_gate,
    "route_experts": _route_experts,
    "experts_swiglu": _experts_swiglu,
    "experts_sum": _experts_sum,
    "causal_conv_silu": _causal_conv_silu,
    "gated_delta_rule": _gated_delta_rule,
    "gated_rms_norm": _gated_rms_norm,
    "decoder_layers": _decoder_layers,
    "swiglu": _swiglu,
    "greedy": _greedy,
    "mask_logits": _mask_logits,
    "penalize": _penalize,
    "sample": _sample,
    "logprobs": _logprobs,
}
