"""Mixture of experts: a router chooses a few of the experts for each token (Shazeer et al. 2017, arXiv:1701.06538).

The weights of all experts are one matrix, the rows of each expert after those of the one before. Rows of x are ordered
by expert, so that each expert multiplies its rows together and its weights are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.ascend_experts import AscendRouting, routing_of
from npuserve.kernels.case_numbers import FLOATS, Numbers, int4, w4a8
from npuserve.kernels.quantize import ascend_quantize, int8_of, native_quantize, quantize
from npuserve.kernels.quantized import DYNAMIC, FLOAT8_DYNAMIC, FLOAT8_GROUPED, Quantized, Scheme, scheme_of
from npuserve.kernels.registry import Case, kernel, map_leaves, to_host
from npuserve.kernels.routing import Routing
from npuserve.kernels.swiglu import swiglu
from npuserve.kernels.weight import Weight, floats_of, form_of, packed

FLIPS = 3e-2
"""Tolerance of products whose x is quantized inside, as for `linear`."""


# Router


def _route_case(
    tokens: int, hidden: int, experts: int, top_k: int, renormalize: bool = False,
    part: tuple[int, int] | None = None, benchmark: bool = False,
) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        x = torch.randn(tokens, hidden, generator=generator)
        weight = torch.randn(experts, hidden, generator=generator) * hidden**-0.5
        first, count = part or (0, experts)
        return x.to(dtype), weight.to(dtype), top_k, renormalize, first, count, torch.arange(count)

    name = f"{tokens}x{hidden} top {top_k} of {experts}{' renormalized' if renormalize else ''}"
    return Case(name + (f" from {part[0]}" if part else ""), make, benchmark)


@kernel("route_experts", by_layer=True, cases=[
    _route_case(1, 8, 4, 1), _route_case(5, 33, 7, 7), _route_case(19, 64, 128, 8, True),
    _route_case(9, 40, 12, 3, True, (4, 5)), _route_case(150, 16, 128, 4),
    _route_case(40, 24, 300, 10, True, (90, 150)),
    *(_route_case(tokens, 2048, 128, 8, True, benchmark=True) for tokens in (1, 32, 512))])
def route_experts(
    x: Tensor, weight: Tensor, top_k: int, renormalize: bool, first: int, count: int, tokens: Tensor | None = None
) -> Routing:
    """Choose the `top_k` experts of x [T, H] with the largest logits; weight: [E, H].

    Logits and weights are computed in float32. The first of equal logits is chosen. The weights are the softmax over
    all experts, or over the chosen ones if `renormalize`.

    first, count: experts of this rank; the places of others are -1.
    tokens: [count] int64, to which the number of each expert's rows is added; or None. On Ascend the first product
        adds it, once the rows are ordered.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), weight.to(wide))
    largest, experts = (each[:, :top_k] for each in logits.sort(dim=-1, descending=True, stable=True))
    weights = largest.softmax(-1) if renormalize else logits.softmax(-1).gather(1, experts)
    local = experts.flatten() - first
    local = torch.where((local >= 0) & (local < count), local, count)
    order = local.argsort(stable=True)
    begins = torch.searchsorted(local[order], torch.arange(count + 1, device=x.device)).int()
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    places = torch.where(local < count, places, -1).int().view_as(experts)
    if tokens is not None:
        tokens += begins.diff()
    return Routing(weights, places, begins, len(weight))


@native.implementation(route_experts)
def _(
    x: Tensor, weight: Tensor, top_k: int, renormalize: bool, first: int, count: int, tokens: Tensor | None = None
) -> Routing:
    rows, experts = len(x), len(weight)
    logits = native.empty(rows, experts, dtype=torch.float32)
    chosen, places = (native.empty(rows, top_k, dtype=torch.int32) for _ in range(2))
    weights = native.empty(rows, top_k, dtype=torch.float32)
    begins = native.empty(count + 1, dtype=torch.int32)
    native.call(
        "route_experts",
        ("router_logits", x.dtype, [x, weight, logits], [*x.shape, experts]),
        ("choose_experts", torch.float32, [logits, chosen, weights], [rows, experts, top_k, renormalize]),
        ("group_experts", torch.int32, [chosen, places, begins, tokens], [rows, top_k, first, count]))
    return Routing(weights, places, begins, experts)


@triton.implementation(route_experts)
def _(
    x: Tensor, weight: Tensor, top_k: int, renormalize: bool, first: int, count: int, tokens: Tensor | None = None
) -> Routing:
    from npuserve.kernels.triton import launch_experts

    return launch_experts.route_experts(x, weight, top_k, renormalize, first, count, tokens)


# Products


def _routing(generator: torch.Generator, tokens: int, experts: int, top_k: int, *, one: bool) -> Routing:
    """Return the routing of a case. one: all tokens choose the same experts."""
    logits = torch.randn(tokens, experts, generator=generator)
    if one:
        logits = logits[:1].expand(tokens, -1)
    return route_experts(logits, torch.eye(experts), top_k, False, 0, experts)


# The kernel quantizes x, except where a case says `given`.
INT8 = Numbers("int8", DYNAMIC)
INT8_ZEROS = Numbers("zeros", Scheme(symmetric=False))
FLOAT8_ROWS = Numbers("float8", FLOAT8_DYNAMIC)
FLOAT8_GROUPS = Numbers("grouped float8", FLOAT8_GROUPED)


def _weight(generator: torch.Generator, n: int, k: int, dtype: torch.dtype, numbers: Numbers) -> Weight:
    """Return the weight of a case."""
    return numbers.weight(torch.randn(n, k, generator=generator) * k**-0.5, generator, dtype)


def _features(numbers: Numbers, rows: int) -> dict[str, Any]:
    """Return what a case with these numbers needs of a device, and its tolerance. rows: of the weight."""
    return {"zeros": numbers.has_zeros, "float8": numbers.is_float8, "int4": numbers.rows_of_4_bits(rows),
            "w4a8": numbers.is_w4a8, "tolerance": 0 if numbers.scheme is None else FLIPS}


def _is_ragged(numbers: Numbers, columns: int) -> bool:
    """Return True if groups of a case's numbers do not divide its columns."""
    size = numbers.group_size
    return size > 0 and columns > size and columns % size > 0


Shape = tuple[int, int, int, int, int]
"""Tokens, experts, top k, K, I."""

_SHAPES: Sequence[Shape] = (1, 4, 1, 8, 16), (3, 8, 3, 40, 32), (21, 5, 2, 64, 48), (90, 6, 2, 72, 16)
_FLOAT8_SHAPES: Sequence[Shape] = (1, 4, 1, 40, 16), (40, 5, 2, 300, 144)
_QWEN3_30B: Sequence[Shape] = tuple((tokens, 128, 8, 2048, 768) for tokens in (1, 8, 32, 512))


def _name(shape: Shape, numbers: Numbers, *, one: bool) -> str:
    tokens, experts, top_k, k, width = shape
    label = f" {numbers.label}" if numbers.label else ""
    return f"{tokens}x{k}x{width} top {top_k} of {experts}{label}{' all the same' if one else ''}"


def _swiglu_case(
    shape: Shape, numbers: Numbers = FLOATS, scheme: str = "", *, one: bool = False, given: bool = False,
    benchmark: bool = False,
) -> Case:
    """Return a case. given: x is in int8."""
    tokens, experts, top_k, k, width = shape

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        floats = torch.randn(tokens, k, generator=generator)
        x = int8_of(floats, generator, DYNAMIC) if given else floats.to(dtype)
        weight = _weight(generator, experts * 2 * width, k, dtype, numbers)
        routing = _routing(generator, tokens, experts, top_k, one=one)
        return x, weight, routing, scheme_of(scheme, generator)

    name = _name(shape, numbers, one=one) + (" given" if given else "") + (scheme and " to " + scheme)
    return Case(name, make, benchmark, ragged=_is_ragged(numbers, k), **_features(numbers, experts * 2 * width))


@kernel("experts_swiglu", by_layer=True, cases=[
    *(_swiglu_case(shape, numbers, scheme, one=one)
      for numbers, scheme in ((FLOATS, ""), (FLOATS, "int8"), (INT8, ""), (INT8_ZEROS, ""))
      for one in (False, True) for shape in _SHAPES),
    *(_swiglu_case(shape, numbers) for numbers in (int4(32), w4a8("w4a8", 32)) for shape in _SHAPES),
    *(_swiglu_case(shape, numbers, numbers.label) for numbers in (FLOAT8_ROWS, FLOAT8_GROUPS)
      for shape in _FLOAT8_SHAPES),
    _swiglu_case((21, 5, 2, 200, 48), int4(64, zeros=True)),
    *(_swiglu_case(shape, INT8, "int8", given=True) for shape in _SHAPES),
    *(_swiglu_case(shape, benchmark=True) for shape in _QWEN3_30B)])
def experts_swiglu(
    x: Tensor | Quantized, weight: Weight, routing: Routing, scheme: Scheme | None = None
) -> Tensor | Quantized:
    """Apply `linear_swiglu` of each expert to its rows of x [T, K]; weight: [E * 2 I, K]. Returns [T k, I] by place.

    scheme: quantizes the result; None leaves it as it is. Rows of places that are not in use are undefined.
    """
    form = form_of(weight)
    given = _by_place(x if form.inputs is None or isinstance(x, Quantized) else quantize(x, form.inputs), routing)
    gated = torch.zeros(len(given), len(form) // routing.experts // 2, dtype=form.dtype, device=routing.places.device)
    for rows, of_expert in _parts(form, routing):
        gated[rows] = swiglu(of_expert.linear(_rows(given, rows), None))
    return gated if scheme is None else quantize(gated, scheme)


def _parts(weight: Any, routing: Routing) -> list[tuple[slice, Any]]:
    """Return the rows of each expert that has any, and its weight."""
    begins = routing.begins.tolist()
    size = len(weight) // routing.experts
    return [(slice(begin, end), weight.part(expert * size, size))
            for expert, (begin, end) in enumerate(pairwise(begins)) if end > begin]


def _by_place(x: Tensor | Quantized, routing: Routing) -> Any:
    """Return the rows of x [T, K] by place: [T k, K]. Rows of places that are not in use repeat row 0."""
    tokens, top_k = routing.places.shape
    used = routing.places.flatten() >= 0
    token = torch.zeros(tokens * top_k, dtype=torch.int64, device=used.device)
    numbers = torch.arange(tokens, device=used.device).repeat_interleave(top_k)
    token[routing.places.flatten()[used].long()] = numbers[used]
    return _rows(x, token)


def _rows(x: Any, index: Any) -> Any:
    """Return rows of a tensor or of quantized activations."""
    if isinstance(x, Tensor):
        return x[index]
    return map_leaves(lambda part: part[index] if isinstance(part, Tensor) else part, x)


def _sum_case(
    shape: Shape, numbers: Numbers = FLOATS, *, shared: bool = False, one: bool = False, benchmark: bool = False
) -> Case:
    """Return a case. The sizes of the weight are those of the first product, changed: [H, I] of each expert."""
    tokens, experts, top_k, hidden, width = shape
    hidden = -(-hidden // native.LANES) * native.LANES

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        routing = _routing(generator, tokens, experts, top_k, one=one)
        gated = torch.randn(tokens * top_k, width, generator=generator).to(dtype)
        weight = _weight(generator, experts * hidden, width, dtype, numbers)
        if not shared:
            return gated, weight, routing, None, None
        return gated, weight, routing, *(torch.randn(tokens, n, generator=generator).to(dtype) for n in (hidden, 1))

    return Case(_name(shape, numbers, one=one) + (" shared" if shared else ""), make, benchmark,
                ragged=_is_ragged(numbers, width), **_features(numbers, experts * hidden))


@kernel("experts_sum", by_layer=True, cases=[
    *(_sum_case(shape, numbers, shared=shared, one=shared) for numbers in (FLOATS, INT8, int4(32), w4a8("w4a8", 32))
      for shared in (False, True) for shape in _SHAPES),
    *(_sum_case(shape, numbers) for numbers in (FLOAT8_ROWS, FLOAT8_GROUPS) for shape in _FLOAT8_SHAPES),
    _sum_case((21, 5, 2, 64, 200), int4(64, zeros=True)),
    *(_sum_case(shape, benchmark=True) for shape in _QWEN3_30B)])
def experts_sum(
    x: Tensor | Quantized, weight: Weight, routing: Routing, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Multiply the rows x [T k, I] by their experts, and sum each token's results times their weights: [T, H].

    weight: [E * H, I].
    shared: [T, H], output of an expert of all tokens, which is added times sigmoid(gate [T, 1]), or times 1; or None.

    The sum is in float32, in the order of the token's experts, and is rounded once.
    """
    form = form_of(weight)
    if form.inputs is not None and not isinstance(x, Quantized):
        x = quantize(x, form.inputs)
    wide = torch.promote_types(form.dtype, torch.float32)
    results = torch.zeros(len(x), len(form) // routing.experts, dtype=form.dtype, device=routing.places.device)
    for rows, of_expert in _parts(form, routing):
        results[rows] = of_expert.linear(_rows(x, rows), None)
    total = torch.zeros(len(routing.places), results.shape[1], dtype=wide, device=results.device)
    for places, weights in zip(routing.places.t(), routing.weights.t(), strict=True):
        factor = torch.where(places >= 0, weights, 0).to(wide).unsqueeze(1)
        total += factor * results[places.clamp(min=0).long()].to(wide)
    if shared is not None:
        total += shared.to(wide) * (1 if gate is None else torch.sigmoid(gate.to(wide)))
    return total.to(form.dtype)


def _grouped(
    name: str, x: Tensor | Quantized, weight: Weight, routing: Routing, columns: int
) -> tuple[Tensor, list[native.Call]]:
    """Return the output [R, columns] of a product by experts of x [R, K], and its calls."""
    form = form_of(weight)
    tokens, top_k = routing.places.shape
    experts = routing.experts
    size, k = len(form) // experts, form.shape[1]
    if size % native.LANES or columns % native.LANES:
        raise ValueError(f"weight: {columns} columns of an expert; they must be a multiple of {native.LANES}")
    out = native.empty(tokens * top_k, columns, dtype=form.dtype)
    plan = native.empty(2 * experts + 4, dtype=torch.int64)
    calls = form.native_product(
        name, x, [None, out, None], [routing.begins, plan], [tokens, k, size, experts, top_k])
    return out, calls


@native.implementation(experts_swiglu, adapt=packed)
def _(
    x: Tensor | Quantized, weight: Weight, routing: Routing, scheme: Scheme | None = None
) -> Tensor | Quantized:
    form = form_of(weight)
    tokens, top_k = routing.places.shape
    calls: list[native.Call] = []
    rows: Tensor | Quantized
    if form.inputs is None:
        x = floats_of(x)
        rows = native.empty(tokens * top_k, x.shape[1], dtype=x.dtype)
        calls.append(("gather_experts", x.dtype, [x, routing.places, rows], [*x.shape, top_k]))
    else:
        if isinstance(x, Quantized):
            given = x
        else:
            given, call = native_quantize(x, form.inputs)
            calls.append(call)
        rows = replace(given, **{
            name: native.empty(tokens * top_k, *part.shape[1:], dtype=part.dtype)
            for name in ("values", "scale", "zero", "sums") if (part := getattr(given, name)) is not None})
        pairs = (given.scale, rows.scale), (given.zero, rows.zero), (given.sums, rows.sums)
        tensors = [given.values, routing.places, rows.values, *(each for pair in pairs for each in pair)]
        calls.append(("gather_experts_int8", torch.int8, tensors, [*given.values.shape, top_k]))
    gated, product = _grouped("linear_swiglu_experts", rows, form, routing, len(form) // routing.experts // 2)
    calls += product
    if scheme is None:
        native.call("experts_swiglu", *calls)
        return gated
    out, call = native_quantize(gated, scheme, top_k)
    native.call("experts_swiglu", *calls, call)
    return out


@native.implementation(experts_sum, adapt=packed)
def _(
    x: Tensor | Quantized, weight: Weight, routing: Routing, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    form = form_of(weight)
    tokens, top_k = routing.places.shape
    calls: list[native.Call] = []
    if form.inputs is not None and not isinstance(x, Quantized):
        x, call = native_quantize(x, form.inputs, top_k)
        calls.append(call)
    hidden = len(form) // routing.experts
    results, product = _grouped("linear_experts", x, form, routing, hidden)
    out = native.empty(tokens, hidden, dtype=form.dtype)
    tensors = [results, routing.places, routing.weights, shared, gate, out]
    native.call("experts_sum", *calls, *product, ("sum_experts", form.dtype, tensors, [tokens, hidden, top_k]))
    return out


@triton.implementation(experts_swiglu)
def _(x: Tensor, weight: Weight, routing: Routing, scheme: Scheme | None = None) -> Tensor | Quantized:
    """Quantize x before it is read by expert, and the gated values in the product or in a launch of their own."""
    from npuserve.kernels.triton import launch_experts

    form = form_of(weight)
    gated: Tensor | Quantized = launch_experts.experts_swiglu(form.cuda_input(x), form, routing, scheme)
    if scheme is None or isinstance(gated, Quantized):
        return gated
    return quantize.implementations[triton.LABEL].function(gated, scheme)


@triton.implementation(experts_sum)
def _(
    x: Tensor | Quantized, weight: Weight, routing: Routing, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    from npuserve.kernels.triton import launch_experts

    form = form_of(weight)
    results = launch_experts.experts_linear(form.cuda_input(x), form, routing)
    return launch_experts.sum_experts(results, routing, shared, gate)


# Ascend


def _to_ascend(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a case's arguments of a product as the Ascend implementations take them."""
    x, weight, routing, *rest = args
    form = form_of(weight)
    order = routing_of(routing.weights, routing.places, routing.begins, form.dtype)
    x, form, order, *rest = ascend.to_device((x, form, order, *rest))
    return x, form.for_ascend(table=False, experts=routing.experts), order, *rest


def _from_ascend(args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, weight, _, *rest = to_host(args)
    return x, form_of(weight).from_ascend(), None, *rest


def _golden_routing(routing: AscendRouting) -> Routing:
    """Return the golden form of a routing whose rows were not gathered yet."""
    routing.gather(routing.weights.new_zeros(len(routing.chosen), native.LANES), None)
    places, groups = routing.gathered
    begins = F.pad(groups.tokens.cumsum(0), (1, 0)).int()
    return Routing(routing.weights, places.view_as(routing.chosen), begins, routing.experts)


@ascend.implementation(route_experts, result=_golden_routing)
def _(
    x: Tensor, weight: Tensor, top_k: int, renormalize: bool, first: int, count: int, tokens: Tensor | None = None
) -> AscendRouting:
    """Multiply in float32, as the other devices do: a rounded logit may choose another expert."""
    logits = F.linear(ascend.in_float32(x), ascend.table_as(weight, torch.float32))
    weights, chosen, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(logits, k=top_k, renorm=int(renormalize))
    if x.dtype == torch.float16:  # beside which the sum takes weights of the same dtype
        weights = weights.to(x.dtype)
    return AscendRouting(weights, chosen, first, count, len(weight), tokens)


@ascend.implementation(experts_swiglu, adapt=_to_ascend, restore=_from_ascend)
def _(
    x: Tensor | Quantized, weight: Weight, routing: AscendRouting, scheme: Scheme | None = None
) -> Tensor | Quantized:
    form = form_of(weight)
    rows = routing.gather(x, form.inputs)
    _, groups = routing.gathered
    fused = form.ascend_grouped_swiglu(rows, groups, scheme)
    if fused is not None:
        return fused
    gated: Tensor = torch_npu.npu_swiglu(form.ascend_grouped(rows, groups), dim=-1)
    return gated if scheme is None else ascend_quantize(gated, scheme)


@ascend.implementation(experts_sum, adapt=_to_ascend, restore=_from_ascend)
def _(
    x: Tensor | Quantized, weight: Weight, routing: AscendRouting, shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    form = form_of(weight)
    if form.inputs is not None and not isinstance(x, Quantized):
        x = ascend_quantize(x, form.inputs)
    _, groups = routing.gathered
    if shared is not None and gate is not None:
        shared = shared * torch.sigmoid(gate)
    return routing.sum(form.ascend_grouped(x, groups), shared)
