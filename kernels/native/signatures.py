"""Signatures of the native ops: their tensors in order, with dtype and minimum size.

The head of the C++ file of an op describes its pointers `p` and sizes `n`. The library accesses memory by these sizes,
so `native.call` compares the tensors of every call with the signature here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from npuserve.kernels.native.binding import CONSTANTS

Size = Callable[[Sequence[int]], int]
"""Number of elements, from an op's sizes `n`."""


class Argument(NamedTuple):
    """Tensor argument of an op. It must be contiguous and on the CPU.

    name: for error messages.
    dtype: None for the op's own dtype.
    least: number of elements that the op accesses; None if its sizes do not determine it.
    optional: True if the tensor may be None.
    """

    name: str
    dtype: torch.dtype | None = None
    least: Size | None = None
    optional: bool = False


Signature = tuple[Argument | None, ...]
"""Arguments in order; None stands for a pointer that is always null."""

Checks = list[tuple[torch.dtype | None, Size | None, bool]]
"""(dtype, least, optional) of each tensor; dtype is None for a pointer that is always null."""


def _one(n: Sequence[int]) -> int:
    return 1


def _rows(n: Sequence[int]) -> int:
    return n[0]


def _matrix(n: Sequence[int]) -> int:
    return n[0] * n[1]


def _pairs(n: Sequence[int]) -> int:
    return n[0] * n[2]


FLOAT32, FLOAT64, BFLOAT16 = torch.float32, torch.float64, torch.bfloat16
BOOL, UINT8, INT8, INT32, INT64 = torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64

# n: T, K, N. x [T, K], weight [N, K].

_PACKED, _IDS = Argument("packed", INT32), Argument("ids", INT64, _rows)
_INT8_SCALES: Signature = (
    Argument("x_scale", FLOAT32, _rows),
    Argument("scale", FLOAT32, lambda n: n[2]),
    Argument("sums", INT32, lambda n: n[2]),
    Argument("x_zero", INT32, _rows, optional=True),
    Argument("zero", INT32, lambda n: n[2], optional=True),
    Argument("x_sums", INT32, _rows),
)
_LINEAR: Signature = (Argument("out", None, lambda n: n[0] * n[2]), None)
_SWIGLU: Signature = (Argument("out", None, lambda n: n[0] * (n[2] // 2)), None)
_BEST: Signature = (Argument("best", FLOAT32), Argument("places", INT32))
_MASKS: Signature = (
    Argument("bits", INT32, lambda n: n[4], optional=True), Argument("mask_of_row", INT32, _rows, optional=True))
_MERGED: Signature = (*_BEST, Argument("out", INT64, _rows))
_PAIRS: Signature = (Argument("pairs", FLOAT32, lambda n: 2 * n[0], optional=True),)
_REGION = Argument("region", UINT8, lambda n: n[3] * (CONSTANTS["RANK_LINE_BYTES"] + 2 * n[4]))
_PACK: Signature = (Argument("dense", None, _matrix), _PACKED, Argument("failed", INT32, _one))
_UNPACK: Signature = (_PACKED, Argument("dense", None, _matrix), _IDS)


def _product(out: Signature) -> Signature:
    return Argument("x", None, _matrix), _PACKED, Argument("bias", None, lambda n: n[2], optional=True), *out


def _product_int4_int8(out: Signature) -> Signature:
    return Argument("x", INT8, _matrix), *_product(out)[1:], Argument("x_scale", FLOAT32, _rows)


def _product_int8(out: Signature) -> Signature:
    return Argument("x", INT8, _matrix), *_product(out)[1:], *_INT8_SCALES


# n: T, K, N of one expert, E, R / T. x [R, K], weight [E * N, K].


def _expert_rows(n: Sequence[int]) -> int:
    return n[0] * n[4]


def _of_experts(n: Sequence[int]) -> int:
    return n[2] * n[3]


_BEGINS: Signature = (Argument("begins", INT32, lambda n: n[3] + 1), Argument("plan", INT64, lambda n: 2 * n[3] + 4))


def _experts(parts: int, x: torch.dtype | None = None, scales: Signature = ()) -> Signature:
    """Return the signature of a product by experts. parts: columns of the weight for one of the output."""
    return (
        Argument("x", x, lambda n: _expert_rows(n) * n[1]), _PACKED, None,
        Argument("out", None, lambda n: _expert_rows(n) * n[2] // parts), None, *scales, *_BEGINS)


_X_SCALE_BY_EXPERTS: Signature = (Argument("x_scale", FLOAT32, _expert_rows),)


def _experts_int8(parts: int) -> Signature:
    return _experts(parts, INT8, (
        Argument("x_scale", FLOAT32, _expert_rows), Argument("scale", FLOAT32, _of_experts),
        Argument("sums", INT32, _of_experts), Argument("x_zero", INT32, _expert_rows, optional=True),
        Argument("zero", INT32, _of_experts, optional=True), Argument("x_sums", INT32, _expert_rows)))


# n: T, R, Hq, Hkv, D, block_size, stride, items.

_ATTENTION_OUTPUTS: Signature = (
    Argument("context_lens", INT32, lambda n: n[1]),
    Argument("cu_seqlens_q", INT32, lambda n: n[1] + 1),
    Argument("out", None, lambda n: n[0] * n[2] * n[4]),
    Argument("plan", INT32, lambda n: n[1] + 2),
    Argument("partial", FLOAT32),
)
_SCALES: Signature = (Argument("key_scales", BFLOAT16), Argument("value_scales", BFLOAT16))


def _attention(cached: torch.dtype | None) -> Signature:
    """Return the signature of attention. cached: dtype of the KV cache; None for the op's own."""
    return (
        Argument("q", None, lambda n: n[0] * n[2] * n[4]), Argument("keys", cached), Argument("values", cached),
        Argument("block_tables", INT32, lambda n: n[1] * n[6]), *_ATTENTION_OUTPUTS, *(_SCALES if cached else ()))


# n: T, Hq, Hkv, D, block_size.


def _rope(cached: torch.dtype | None) -> Signature:
    """Return the signature of the cache write. cached: dtype of the KV cache; None for the op's own."""
    return (
        Argument("qkv", None, lambda n: n[0] * (n[1] + 2 * n[2]) * n[3]),
        Argument("q_gamma", None, lambda n: n[3], optional=True),
        Argument("k_gamma", None, lambda n: n[3], optional=True),
        Argument("cos_sin", FLOAT32), Argument("positions", INT64, _rows), Argument("slot_mapping", INT64, _rows),
        Argument("keys", cached), Argument("values", cached), Argument("q", None, lambda n: n[0] * n[1] * n[3]),
        *(_SCALES if cached else (None, None)),
        Argument("wide_q_gamma", FLOAT32, lambda n: n[3], optional=True),
        Argument("wide_k_gamma", FLOAT32, lambda n: n[3], optional=True))


# n: T, H.


def _int8(optional: bool, rows: Size = _rows) -> Signature:
    """Return the arguments of an int8 output [rows, H]. optional: the op may write its output without quantization."""
    return (
        Argument("values", INT8, lambda n: rows(n) * n[1], optional), Argument("scale", FLOAT32, rows, optional),
        Argument("zero", INT32, rows, optional=True), Argument("sums", INT32, rows, optional),
        Argument("static_scale", FLOAT32, _one, optional=True), Argument("static_zero", INT32, _one, optional=True))


# n: T, Vp, vocabulary, top.

_LOGPROBS: Signature = (
    Argument("logits", None, _matrix), _IDS,
    Argument("sums", FLOAT64, lambda n: n[0] * -(-n[2] // CONSTANTS["LOGPROBS_PART"]) * 3),
    Argument("largest", FLOAT32, lambda n: n[0] * -(-n[2] // CONSTANTS["LOGPROBS_BLOCK"])))

_X = Argument("x", None, _matrix)
_PLACES = Argument("places", INT32, _pairs)
_NORMED: Signature = (
    Argument("gamma", None, lambda n: n[1], optional=True), Argument("out", None, _matrix, optional=True))
_WIDE_GAMMA = Argument("wide_gamma", FLOAT32, lambda n: n[1], optional=True)

# n: T, R.


def _slot_rows(out: Size) -> Signature:
    """Return the arguments of rows with states in slots, and the output. out: its number of elements."""
    return (
        Argument("context_lens", INT32, lambda n: n[1]), Argument("cu_seqlens_q", INT32, lambda n: n[1] + 1),
        Argument("state_slots", INT64, lambda n: n[1]), Argument("out", None, out))


# n: T, R, C, K.

_CONVOLUTION: Signature = (
    Argument("x", None, lambda n: n[0] * n[2]), Argument("weight", None, lambda n: n[2] * n[3]), Argument("state"),
    *_slot_rows(lambda n: n[0] * n[2]))

# n: T, R, Hk, Hv, Dk, Dv.

_DELTA: Signature = (
    Argument("qkv", None, lambda n: n[0] * (2 * n[2] * n[4] + n[3] * n[5])),
    Argument("a", None, lambda n: n[0] * n[3]), Argument("b", None, lambda n: n[0] * n[3]),
    Argument("a_log", FLOAT32, lambda n: n[3]), Argument("dt_bias", FLOAT32, lambda n: n[3]),
    Argument("state", FLOAT32), *_slot_rows(lambda n: n[0] * n[3] * n[5]))

INT8_FORMS = "_int8", "_int8_nibbles"
"""Suffixes of products of int8 weights, by the form in which they are packed."""

SIGNATURES: dict[str, Signature] = {
    "linear": _product(_LINEAR),
    **{f"linear{form}": _product_int8(_LINEAR) for form in INT8_FORMS},
    "linear_compact": _product(_LINEAR),
    "linear_int4": _product(_LINEAR),
    "linear_int4_int8": _product_int4_int8(_LINEAR),
    "linear_swiglu": _product(_SWIGLU),
    **{f"linear_swiglu{form}": _product_int8(_SWIGLU) for form in INT8_FORMS},
    "linear_swiglu_compact": _product(_SWIGLU),
    "linear_swiglu_int4": _product(_SWIGLU),
    "linear_swiglu_int4_int8": _product_int4_int8(_SWIGLU),
    "linear_argmax": (*_product(_BEST), *_MASKS),
    **{f"linear_argmax{form}": (*_product_int8(_BEST), *_MASKS) for form in INT8_FORMS},
    "linear_argmax_compact": (*_product(_BEST), *_MASKS),
    "linear_argmax_int4": (*_product(_BEST), *_MASKS),
    "linear_argmax_int4_int8": (*_product_int4_int8(_BEST), *_MASKS),
    **{f"linear_experts{form}": _experts(1) for form in ("", "_compact", "_int4")},
    **{f"linear_swiglu_experts{form}": _experts(2) for form in ("", "_compact", "_int4")},
    **{f"linear_experts{form}": _experts_int8(1) for form in INT8_FORMS},
    **{f"linear_swiglu_experts{form}": _experts_int8(2) for form in INT8_FORMS},
    "linear_experts_int4_int8": _experts(1, INT8, _X_SCALE_BY_EXPERTS),
    "linear_swiglu_experts_int4_int8": _experts(2, INT8, _X_SCALE_BY_EXPERTS),
    "router_logits": (
        _X, Argument("weight", None, lambda n: n[1] * n[2]), Argument("out", FLOAT32, lambda n: n[0] * n[2])),
    "choose_experts": (
        Argument("logits", FLOAT32, _matrix), Argument("experts", INT32, _pairs), Argument("weights", FLOAT32, _pairs)),
    "group_experts": (
        Argument("experts", INT32, _matrix), Argument("places", INT32, _matrix),
        Argument("begins", INT32, lambda n: n[3] + 1), Argument("tokens", INT64, lambda n: n[3], optional=True)),
    "gather_experts": (_X, _PLACES, Argument("out", None, lambda n: n[0] * n[1] * n[2])),
    "gather_experts_int8": (
        _X, _PLACES, Argument("out", None, lambda n: n[0] * n[1] * n[2]), Argument("scale", FLOAT32, _rows),
        Argument("scales", FLOAT32, _pairs), Argument("zero", INT32, _rows, optional=True),
        Argument("zeros", INT32, _pairs, optional=True), Argument("sums", INT32, _rows),
        Argument("all_sums", INT32, _pairs)),
    "sum_experts": (
        Argument("x", None, lambda n: n[0] * n[1] * n[2]), _PLACES, Argument("weights", FLOAT32, _pairs),
        Argument("shared", None, _matrix, optional=True), Argument("gate", None, _rows, optional=True),
        Argument("out", None, _matrix)),
    "argmax_of_units": (*_MERGED, *_PAIRS),
    **{f"argmax_of_units{form}": (*_MERGED, *_PAIRS) for form in INT8_FORMS},
    "argmax_of_units_compact": (*_MERGED, *_PAIRS),
    "argmax_of_units_int4": (*_MERGED, *_PAIRS),
    "argmax_of_units_int4_int8": (*_MERGED, *_PAIRS),
    "pack": _PACK,
    "pack_compact": _PACK,
    "pack_nibbles": _PACK,
    "unpack": _UNPACK,
    "unpack_compact": _UNPACK,
    "unpack_nibbles": _UNPACK,
    "embedding": (_IDS, Argument("table"), Argument("out", None, _matrix)),
    "embedding_int8": (
        _IDS, _PACKED, Argument("out", None, _matrix), Argument("scale", FLOAT32),
        Argument("zero", INT32, optional=True)),
    "attention": _attention(None),
    "attention_int8": _attention(INT8),
    "attention_merge": (None, None, None, None, *_ATTENTION_OUTPUTS),
    "qk_norm_rope_kv_write": _rope(None),
    "qk_norm_rope_kv_write_int8": _rope(INT8),
    "causal_conv_silu": _CONVOLUTION,
    "gated_delta_rule": _DELTA,
    "rms_norm": (_X, None, *_NORMED, None, *_int8(True), _WIDE_GAMMA),
    "add_rms_norm": (
        _X, Argument("residual", None, _matrix), *_NORMED, Argument("sum", None, _matrix), *_int8(True), _WIDE_GAMMA),
    "gated_rms_norm": (
        _X, Argument("z", None, _matrix), Argument("gamma", None, lambda n: n[2], optional=True),
        Argument("out", None, _matrix), Argument("wide_gamma", FLOAT32, lambda n: n[2], optional=True)),
    "sigmoid_gate": (_X, Argument("gate", None, _matrix), Argument("out", None, _matrix)),
    "swiglu": (Argument("gate_up", None, lambda n: 2 * n[0] * n[1]), Argument("out", None, _matrix)),
    "quantize": (Argument("x", None, lambda n: _pairs(n) * n[1]), *_int8(False, _pairs)),
    "rank_share": (_X, _REGION),
    "rank_arrive": (_REGION,),
    "rank_sum": (_REGION, Argument("out", None, _matrix)),
    "rank_concatenate": (_REGION, Argument("out", None, lambda n: _matrix(n) * n[3])),
    "rank_argmax": (_REGION, Argument("out", INT64, _rows)),
    "local_ids": (_IDS, Argument("out", INT64, _rows)),
    "zero_outside": (_IDS, Argument("x", None, _matrix)),
    "take_ids": (_IDS, Argument("last", INT64), Argument("out", INT64, _rows)),
    "keep_ids": (Argument("ids", INT64, _matrix), Argument("last", INT64, _rows)),
    "keep_rows": (_X, Argument("memory", None, _matrix)),
    "greedy": (Argument("logits", None, _matrix), *_BEST),
    "greedy_merge": _MERGED,
    "sample": (
        Argument("logits", None, _matrix), Argument("temperature", FLOAT32, _rows), Argument("top_k", INT64, _rows),
        Argument("top_p", FLOAT32, _rows), Argument("min_p", FLOAT32, _rows), Argument("uniform", FLOAT64, _rows),
        Argument("out", INT64, _rows)),
    "penalize": (
        Argument("logits", FLOAT32, _matrix), Argument("in_prompt", BOOL, _matrix),
        Argument("output_counts", INT32, _matrix), Argument("repetition", FLOAT32, _rows),
        Argument("presence", FLOAT32, _rows), Argument("frequency", FLOAT32, _rows)),
    "mask_logits": (
        Argument("logits", None, _matrix), Argument("bits", INT32, lambda n: n[3]),
        Argument("mask_of_row", INT32, _rows)),
    "logprobs": _LOGPROBS,
    "logprobs_merge": (
        *_LOGPROBS, Argument("logprob", FLOAT32, _rows), Argument("rank", INT64, _rows),
        Argument("top_ids", INT64, lambda n: n[0] * n[3]), Argument("top_logprobs", FLOAT32, lambda n: n[0] * n[3])),
    "uniform": (
        Argument("seeds", INT64, _rows), Argument("positions", INT64, _rows), Argument("out", FLOAT64, _rows)),
    "read": (Argument("memory", UINT8, _matrix), Argument("found", INT32, _rows)),
    "peak": (Argument("done", INT64, _rows),),
}


def checks(op: str, dtype: torch.dtype) -> tuple[int, Checks]:
    """Return the minimum number of tensors of a call, and the checks of each tensor."""
    made: Checks = [(None, None, True) if each is None else (each.dtype or dtype, each.least, each.optional)
                    for each in SIGNATURES[op]]
    return 1 + max(i for i, (_, _, optional) in enumerate(made) if not optional), made


def refuse(op: str, dtype: torch.dtype, tensors: Sequence[Tensor | None], n: Sequence[int]) -> NoReturn:
    """Raise the error for the first tensor of a call that differs from the op's signature.

    Raises TypeError for a wrong dtype or number of tensors, ValueError for a wrong device, layout or size.
    """
    signature = SIGNATURES[op]
    for place, (each, tensor) in enumerate(zip(signature, tensors, strict=False)):
        if tensor is None:
            if each is not None and not each.optional:
                raise TypeError(f"{op}: {each.name} is None")
            continue
        if each is None:
            raise TypeError(f"{op}: tensor {place} must be None")
        if tensor.dtype != (each.dtype or dtype):
            raise TypeError(f"{op}: {each.name} is {tensor.dtype}, not {each.dtype or dtype}")
        if not tensor.is_cpu:
            raise ValueError(f"{op}: {each.name} is on {tensor.device}, not on the CPU")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {each.name} is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}")
        if each.least is not None and tensor.numel() < each.least(n):
            raise ValueError(f"{op}: {each.name} has {tensor.numel()} elements, fewer than the {each.least(n)} needed")
    raise TypeError(f"{op}: {len(tensors)} tensors do not match its {len(signature)} arguments")
