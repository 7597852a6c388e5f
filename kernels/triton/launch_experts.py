"""Calls of the Triton kernels of mixtures of experts: checks of arguments, and division into tiles.

Grids depend on the number of tokens alone, never on the experts that they choose, so that a captured step serves any
choice.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from npuserve.kernels.quantized import FLOAT8, GROUP, Quantized, Scheme
from npuserve.kernels.routing import Routing, distinct_experts
from npuserve.kernels.triton.common import FLOATS, INT32, check, matrix, power, processors, shared_memory, within
from npuserve.kernels.triton.dependent import dependent
from npuserve.kernels.triton.experts import (
    choose_experts_kernel,
    experts_product_kernel,
    place_experts_kernel,
    sources_kernel,
    sum_experts_kernel,
)
from npuserve.kernels.triton.launch_linear import constants_of, operands_of, parts_memory, wide_linear
from npuserve.kernels.triton.linear_tiles import BUCKETS, Form, Kind, Tiles, calculated, fitted, parts_of
from npuserve.kernels.weight import Weight, form_of

MAX_EXPERTS = 4096

CHOSEN_AT_ONCE = 8192
"""Logits of a program that chooses experts: up to 64 tokens of 128 experts, which are chosen in one launch."""

_FEW_TOKENS = 1, 16
"""Tokens of such a program in small steps: few different numbers, since each is compiled."""

SEARCHED = 64, 512
"""Pairs of tokens and experts among which each program searches those of its rows. More are sorted by a launch of
their own."""

_SEARCHES = 16 * SEARCHED[-1]
"""Maximum comparisons of a program that searches."""

_GROUPED_ROWS = 32
"""Maximum rows of a tile whose results the same program quantizes in groups."""

_COLUMNS = 1024
"""Columns of a program that adds the results of a token, and pairs of one that sorts them."""


def route_experts(
    x: Tensor, weight: Tensor, top_k: int, renormalize: bool, first: int, count: int, tokens: Tensor | None
) -> Routing:
    """Launch the kernel `route_experts`. Raises ValueError."""
    logits = wide_linear(x, weight)
    rows, experts = logits.shape
    within("experts", experts, 1, MAX_EXPERTS)
    within("top_k", top_k, 1, experts)
    within("first", first, 0, experts - 1)
    within("count", count, 1, experts - first)
    if tokens is not None:
        check("tokens", tokens, (count,), (torch.int64,), x.device)
    places = torch.empty(rows, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    begins = torch.empty(count + 1, dtype=torch.int32, device=x.device)
    if not rows:
        return Routing(weights, places, begins.zero_(), experts)
    width = power(experts)
    most = max(1, CHOSEN_AT_ONCE // width)
    block = min(most, next((few for few in _FEW_TOKENS if rows <= few), most))
    programs = -(-rows // block)
    sizes = {"EXPERTS": width, "TOP_K": top_k, "CHOICES": power(top_k), "TOKENS": block,
             "num_warps": min(max(block * width // 1024, 1), 8)}
    chosen = counts = None
    if programs > 1:
        chosen = torch.empty_like(places)
        counts = torch.empty(programs, width, dtype=torch.int32, device=x.device)
    choose_experts_kernel[(programs,)](
        logits=logits, chosen=chosen, weights=weights, places=places, begins=begins, counts=counts,
        rows_of_expert=tokens, tokens=rows, experts=experts, first=first, count=count, RENORMALIZE=renormalize, **sizes,
        **dependent(x))
    if programs > 1:
        place_experts_kernel[(programs,)](
            chosen=chosen, counts=counts, places=places, begins=begins, rows_of_expert=tokens, tokens=rows,
            first=first, count=count, programs=programs, **sizes, **dependent(x))
    return Routing(weights, places, begins, experts)


def experts_swiglu(
    x: Tensor | Quantized, weight: Weight, routing: Routing, scheme: Scheme | None = None, tiles: Tiles | None = None
) -> Tensor | Quantized:
    """Launch the kernel `experts_swiglu`.

    scheme: a scheme that quantizes in groups of float8 is computed by the same launch, for few rows. For other schemes
        the result is not quantized.
    tiles: replace the calculated ones.

    Raises ValueError.
    """
    return _product("linear_swiglu", x, weight, routing, tiles, scheme)


def experts_linear(
    x: Tensor | Quantized, weight: Weight, routing: Routing, tiles: Tiles | None = None
) -> Tensor:
    """Multiply the rows x [T k, I], by place, by their experts: [T k, H]. Arguments as for `experts_swiglu`."""
    results = _product("linear", x, weight, routing, tiles)
    assert isinstance(results, Tensor)
    return results


def sum_experts(results: Tensor, routing: Routing, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """Launch the sum of the kernel `experts_sum` over results [T k, H] by place: [T, H]. Raises ValueError."""
    rows, top_k = _check_routing(routing, results.device)
    check("results", results, tuple(results.shape), FLOATS, results.device)
    if results.dim() != 2 or len(results) != rows * top_k:
        raise ValueError(f"results: {list(results.shape)} is not [{rows} * {top_k}, columns]")
    width = results.shape[1]
    for name, given, columns in (("shared", shared, width), ("gate", gate, 1)):
        if given is not None:
            matrix(name, given, results.device)
            if given.shape != (rows, columns):
                raise ValueError(f"{name}: {list(given.shape)} is not [{rows}, {columns}]")
    out = torch.empty(rows, width, dtype=results.dtype, device=results.device)
    if out.numel():
        sum_experts_kernel[(rows, -(-width // _COLUMNS))](
            results=results, places=routing.places, weights=routing.weights, shared=shared, gate=gate, out=out,
            width=width, shared_stride=0 if shared is None else shared.stride(0),
            gate_stride=0 if gate is None else gate.stride(0), TOP_K=top_k, BLOCK=min(_COLUMNS, power(width)),
            **dependent(results))
    return out


def choose_tiles(
    kind: Kind, itemsize: int, tokens: int, top_k: int, experts: int, n: int, k: int, processors: int, form: Form = "",
    *, all_experts: int = 0, groups: bool = False,
) -> Tiles:
    """Return the tiles of a product by `experts`, if tokens choose each expert as often as another.

    top_k: number of experts of each of `tokens`.
    experts: number of experts of this rank.
    n: rows of the weight of an expert.
    all_experts: number of experts of all ranks; 0 if this rank has all.
    The other arguments are those of `linear_tiles.choose`.
    groups: the results are to be quantized in groups, which tiles of few rows then have whole (`quantizes`).

    A tile holds half as many rows again as an expert has on average, so that few weights are read twice. Nothing was
    measured on a device.
    """
    all_experts = all_experts or experts
    chosen = max(1.0, distinct_experts(tokens, top_k, all_experts, experts))
    rows = math.ceil(1.5 * tokens * top_k * experts / all_experts / chosen) if tokens > BUCKETS[0] else 1
    tiles = replace(calculated(kind, itemsize, rows, n, k, processors, form), split=1)
    if form == "int4" and kind == "linear_swiglu" and tiles.m == 64:  # the pointers of x take registers too
        tiles = replace(tiles, m=32)
    if groups and form == "grouped float8" and tiles.m <= _GROUPED_ROWS:
        tiles = replace(tiles, n=GROUP, warps=8, stages=3)
    outputs = n // 2 if kind == "linear_swiglu" else n
    count = -(-outputs // tiles.n) * -(-rows // tiles.m) * round(chosen)
    if rows > BUCKETS[-2]:
        return tiles
    return replace(tiles, split=parts_of(count, tiles, kind, itemsize, k, processors))


def quantizes(tiles: Tiles, form: Form, scheme: Scheme) -> bool:
    """Return True if a program has whole groups of columns, and registers for their scales."""
    return (scheme.grouped and scheme.dtype == FLOAT8 and form == "grouped float8" and tiles.n == GROUP
            and tiles.m <= _GROUPED_ROWS)


def tile_bound(tokens: int, top_k: int, experts: int, m: int) -> int:
    """Return the most tiles of m rows of one expert that `tokens` can have, if each chooses `top_k` of `experts`."""
    pairs = tokens * top_k
    chosen = min(pairs, experts)
    return min(experts * -(-tokens // m), (pairs + chosen * (m - 1)) // m)


def _product(
    kind: Kind, x: Tensor | Quantized, weight: Weight, routing: Routing, tiles: Tiles | None,
    scheme: Scheme | None = None,
) -> Tensor | Quantized:
    gated = kind == "linear_swiglu"
    operands = operands_of(x, weight, None)
    values = operands.x
    tokens, top_k = _check_routing(routing, values.device)
    experts, pairs = routing.experts, tokens * top_k
    if len(values) != (tokens if gated else pairs):
        raise ValueError(f"x: {len(values)} rows are not those of {tokens} tokens with {top_k} experts each")
    rows_of_expert = len(form_of(weight)) // experts
    if len(form_of(weight)) % experts or rows_of_expert % (1 + gated):
        raise ValueError(f"weight: {len(form_of(weight))} rows are not those of {experts} experts")
    n = rows_of_expert // (1 + gated)
    if not pairs:
        return torch.empty(0, n, dtype=operands.dtype, device=values.device)
    shape = kind, values.itemsize, tokens, top_k, experts, rows_of_expert, operands.k
    tiles = tiles or fitted(
        choose_tiles(*shape, processors(values.device), operands.form, all_experts=routing.all_experts,
                     groups=scheme is not None and scheme.grouped),
        kind, values.itemsize, shared_memory(values.device))
    out = torch.empty(pairs, n, dtype=operands.dtype, device=values.device)
    out_scale = None
    if scheme is not None and operands.dtype == torch.bfloat16 and quantizes(tiles, operands.form, scheme):
        out = torch.empty(pairs, n, dtype=scheme.dtype, device=values.device)
        out_scale = torch.empty(*scheme.scale_shape(pairs, n)[::-1], dtype=torch.float32, device=values.device)
    heights, widths = tile_bound(tokens, top_k, experts, tiles.m), -(-n // tiles.n)
    within("tiles", heights * widths * tiles.split, 1, INT32)
    partial, arrived = parts_memory(heights * widths, kind, tiles, operands)
    searched, sources = 0, None
    if gated:
        searched = next((most for most in SEARCHED if pairs <= most and tiles.m * most <= _SEARCHES), 0)
        sources = None if searched else _sources(routing)
    experts_product_kernel[(heights * widths * tiles.split,)](
        x=values, x_scale=operands.x_scale, weight=operands.weight, weight_scale=operands.weight_scale,
        weight_zero=operands.weight_zero, places=routing.places if searched else None, sources=sources,
        begins=routing.begins, out=out, out_scale=out_scale, partial=partial, arrived=arrived, pairs=pairs,
        x_rows=len(values), experts=experts, tiles_m=heights, n=n, k=operands.k, x_stride=values.stride(0),
        scale_stride=operands.scale_stride, GATED=gated, EXPERTS=power(experts), TOP_K=top_k, SEARCHED=searched,
        ONCE=tokens <= tiles.m, **constants_of(operands, tiles), **dependent(values))
    return out if out_scale is None else Quantized(out, out_scale.t())


def _sources(routing: Routing) -> Tensor:
    """Return [T k] int32, the token of each place in use."""
    places = routing.places
    sources = torch.empty(places.numel(), dtype=torch.int32, device=places.device)
    sources_kernel[(-(-places.numel() // _COLUMNS),)](
        places=places, sources=sources, pairs=places.numel(), TOP_K=places.shape[1], BLOCK=_COLUMNS,
        **dependent(places))
    return sources


def _check_routing(routing: Routing, device: torch.device) -> tuple[int, int]:
    """Return the number of tokens, and of experts of each. Raises ValueError."""
    if routing.places.dim() != 2:
        raise ValueError(f"places: {list(routing.places.shape)} is not [tokens, top k]")
    tokens, top_k = routing.places.shape
    within("experts", routing.experts, 1, MAX_EXPERTS)
    within("pairs", tokens * top_k, 0, INT32 // 16)
    check("places", routing.places, (tokens, top_k), (torch.int32,), device)
    check("weights", routing.weights, (tokens, top_k), (torch.float32,), device)
    check("begins", routing.begins, (routing.experts + 1,), (torch.int32,), device)
    return tokens, top_k
