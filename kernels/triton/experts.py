"""Mixture of experts on CUDA: choice of each token's experts, products by experts, and sums of their results.

Rows are ordered by expert. A tile of a product has rows of one expert, so that an expert's weights are read once for
each tile of its rows: once a step, as long as a tile holds all of them. The numbers of rows stay on the device: the
grid has as many tiles as the rows can have at most, and programs without a tile end. PDL: see dependent.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from npuserve.kernels.triton.linear import finish, is_last, place_of_tile, sums_of, whole_sums
from npuserve.kernels.triton.rows import quantize_groups


@triton.jit(do_not_specialize=["tokens", "first", "count"])
def choose_experts_kernel(
    logits, chosen, weights, places, begins, counts, rows_of_expert, tokens, experts, first, count,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr,
    RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):
    """Choose the TOP_K experts of each token with the largest logits [tokens, experts] float32.

    weights: [tokens, TOP_K] float32, softmax over all experts, or over the chosen ones if RENORMALIZE.
    places, begins, rows_of_expert: as in `route_experts`, if one program has all tokens; counts and chosen are None.
    chosen: [tokens, TOP_K] int32, and counts: [programs, EXPERTS] int32, of the experts [first, first + count), from
        which `place_experts_kernel` computes them otherwise.

    A program has TOKENS tokens. EXPERTS, CHOICES: powers of two, at least `experts` and TOP_K.
    """
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    real = (t < tokens)[:, None]
    inside = (e < experts)[None, :]
    LOWEST: tl.constexpr = -3.4028234663852886e38
    left = tl.load(logits + t.to(tl.int64)[:, None] * experts + e[None, :], mask=real & inside, other=0.0)
    # Every round finds an expert, also of numbers that are not finite.
    left = tl.where(left == left, tl.maximum(left, LOWEST), LOWEST)
    left = tl.where(inside, left, float("-inf"))
    largest = tl.max(left, 1)
    total = tl.sum(tl.exp(left - largest[:, None]), 1)
    shares = tl.zeros((TOKENS, CHOICES), tl.float32)
    picks = tl.zeros((TOKENS, CHOICES), tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(left, 1)
        expert = tl.min(tl.where(left == best[:, None], e[None, :], EXPERTS), 1)
        left = tl.where(e[None, :] == expert[:, None], float("-inf"), left)
        at_choice = (choice == j)[None, :]
        shares = tl.where(at_choice, tl.exp(best - largest)[:, None], shares)
        picks = tl.where(at_choice, expert[:, None], picks)
    if RENORMALIZE:
        total = tl.sum(shares, 1)
    pair = t.to(tl.int64)[:, None] * TOP_K + choice[None, :]
    valid = real & (choice < TOP_K)[None, :]
    tl.store(weights + pair, shares / total[:, None], mask=valid)
    held = ((e >= first) & (e < first + count))[None, :]
    taken = (real & inside & held & (left == float("-inf"))).to(tl.int32)
    rows = tl.sum(taken, 0)
    if counts is None:
        begin = tl.cumsum(rows, 0) - rows
        _store_places(places + pair, taken, picks, begin, e, first, count, valid, TOP_K, choice)
        _store_begins(begins, rows_of_expert, begin, rows, e, first, count)
    else:
        tl.store(chosen + pair, picks, mask=valid)
        tl.store(counts + tl.program_id(0) * EXPERTS + e, rows)


@triton.jit(do_not_specialize=["tokens", "first", "count", "programs"])
def place_experts_kernel(
    chosen, counts, places, begins, rows_of_expert, tokens, first, count, programs,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):
    """Place the pairs of tokens and experts that `choose_experts_kernel` chose; the grid and arguments are its own.

    programs: of that grid.
    """
    program = tl.program_id(0)
    t = program * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    before = tl.zeros((EXPERTS,), tl.int32)
    rows = tl.zeros((EXPERTS,), tl.int32)
    for other in range(programs):
        of_other = tl.load(counts + other * EXPERTS + e)
        rows += of_other
        before += tl.where(other < program, of_other, 0)
    begin = tl.cumsum(rows, 0) - rows
    pair = t.to(tl.int64)[:, None] * TOP_K + choice[None, :]
    valid = (t < tokens)[:, None] & (choice < TOP_K)[None, :]
    picks = tl.load(chosen + pair, mask=valid, other=-1)
    held = ((e >= first) & (e < first + count))[None, :]
    taken = tl.zeros((TOKENS, EXPERTS), tl.int32)
    for j in tl.static_range(TOP_K):
        expert = tl.sum(tl.where((choice == j)[None, :], picks, 0), 1)
        taken += ((expert[:, None] == e[None, :]) & held & (t < tokens)[:, None]).to(tl.int32)
    _store_places(places + pair, taken, picks, begin + before, e, first, count, valid, TOP_K, choice)
    if program == 0:
        _store_begins(begins, rows_of_expert, begin, rows, e, first, count)


@triton.jit
def _store_places(places, taken, picks, begin, e, first, count, valid, TOP_K: tl.constexpr, choice):
    """Store the place of each pair: `begin` [EXPERTS] of its expert, after those of the tokens before.

    taken: [TOKENS, EXPERTS], 1 for the chosen experts of this rank. picks: [TOKENS, CHOICES], the chosen experts.
    """
    place_of = begin[None, :] + tl.cumsum(taken, 0) - taken
    placed = picks * 0 - 1
    for j in tl.static_range(TOP_K):
        at_choice = (choice == j)[None, :]
        expert = tl.sum(tl.where(at_choice, picks, 0), 1)
        place = tl.sum(tl.where(e[None, :] == expert[:, None], place_of, 0), 1)
        held = (expert >= first) & (expert < first + count)
        placed = tl.where(at_choice & held[:, None], place[:, None], placed)
    tl.store(places, placed, mask=valid)


@triton.jit
def _store_begins(begins, rows_of_expert, begin, rows, e, first, count):
    """Store the first place of each expert of this rank, and count its rows."""
    held = (e >= first) & (e < first + count)
    tl.store(begins + e - first, begin, mask=held)
    tl.store(begins + count, tl.sum(rows, 0))
    if rows_of_expert is not None:
        counter = rows_of_expert + e - first
        tl.store(counter, tl.load(counter, mask=held, other=0) + rows, mask=held)


@triton.jit(do_not_specialize=["pairs"])
def sources_kernel(places, sources, pairs, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Store the token of each place in use: sources [pairs] int32, for places [pairs]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + pair, mask=pair < pairs, other=-1)
    tl.store(sources + place, pair // TOP_K, mask=place >= 0)


@triton.jit(do_not_specialize=["pairs", "tiles_m"])
def experts_product_kernel(
    x, x_scale, weight, weight_scale, weight_zero, places, sources, begins, out, out_scale, partial, arrived,
    pairs, x_rows, experts, tiles_m, n, k, x_stride, scale_stride,
    GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SEARCHED: tl.constexpr, EVEN: tl.constexpr,
    ONCE: tl.constexpr, WIDE: tl.constexpr, IMPRECISE: tl.constexpr, SCALED_K: tl.constexpr,
    INT4_GROUP: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply rows of x by the weights of their experts: out [pairs, n], by place.

    weight: [experts * n, k], of 2 n rows of gate and up for each expert if GATED. x_rows: number of rows of x.
    begins: [experts + 1] int32, first place of each expert.
    sources: [pairs] int32, row of x of each place; or None.
    places: [pairs] int32, place of each pair, TOP_K of each row of x, from which the rows of x are found if SEARCHED;
        or None. Without both, the row of x is the place.
    SEARCHED: a power of two, at least `pairs`; 0 without places.
    EXPERTS: a power of two, at least `experts`.
    out_scale: [groups of BLOCK_N columns, pairs] float32, scales of an out in float8, whose numbers are first rounded
        to bfloat16; or None. Only for scaled sums of gate and up.
    tiles_m: tiles of rows in the grid, at least those of all experts.
    ONCE: one tile has all rows of an expert.

    The grid is n's tiles * tiles_m * SPLIT. The other arguments are those of `product_kernel`.
    """
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0) % (tiles_n * tiles_m)
    part = tl.program_id(0) // (tiles_n * tiles_m)
    tile_n, tile_m = place_of_tile(tile, tiles_n, tiles_m, GROUP)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(k, BLOCK_K)
    begin, end = blocks * part // SPLIT, blocks * (part + 1) // SPLIT
    e = tl.arange(0, EXPERTS)
    if PDL:
        gdc_wait()
    firsts = tl.load(begins + e, mask=e < experts, other=0)
    counts = tl.load(begins + e + 1, mask=e < experts, other=0) - firsts
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile_m).to(tl.int32), 0)
    if expert < experts:
        tile_of_expert = tile_m - tl.sum(tl.where(e < expert, tiles, 0), 0)
        first = tl.sum(tl.where(e == expert, firsts, 0), 0)
        last = first + tl.sum(tl.where(e == expert, counts, 0), 0)
        rows = first + tile_of_expert * BLOCK_M + tl.arange(0, BLOCK_M)
        there = rows < last
        of_x = rows
        if sources is not None:
            of_x = tl.load(sources + rows, mask=there, other=0)
        if SEARCHED > 0:
            pair = tl.arange(0, SEARCHED)
            place = tl.load(places + pair, mask=pair < pairs, other=-1)
            of_x = tl.sum(tl.where(place[None, :] == rows[:, None], (pair // TOP_K)[None, :], 0), 1)
        base = expert.to(tl.int64) * (2 * n if GATED else n)
        of_expert = weight + base * (k // 8 if INT4_GROUP > 0 else k)
        zero_of_expert = weight_zero
        scale_of_expert = weight_scale
        if INT4_GROUP > 0:
            scale_of_expert += base * scale_stride
            if weight_zero is not None:
                zero_of_expert += base * scale_stride
        elif weight_scale is not None:
            scale_of_expert += base
        acc, acc_up = sums_of(
            x, x_scale, of_expert, scale_of_expert, zero_of_expert, of_x, there, columns, begin, end, x_rows, n, k,
            x_stride, scale_stride, GATED, BLOCK_N, BLOCK_M, BLOCK_K, EVEN, ONCE, WIDE, IMPRECISE, SCALED_K, INT4_GROUP)
        if PDL:
            gdc_launch_dependents()
        IS_SCALED: tl.constexpr = SCALED_K > 0 or INT4_GROUP > 0  # the sums are
        of_rows = None if IS_SCALED else x_scale
        of_columns = None if IS_SCALED else scale_of_expert
        if SPLIT == 1:
            _store_results(acc, acc_up, of_rows, of_columns, out, out_scale, of_x, rows, there, columns, tile_n,
                           tiles_n, pairs, n, GATED)
        else:
            if is_last(acc, acc_up, partial, arrived, tile, part, there, GATED, BLOCK_N, BLOCK_M, SPLIT):
                acc, acc_up = whole_sums(partial, arrived, tile, there, acc.dtype, GATED, BLOCK_N, BLOCK_M, SPLIT)
                _store_results(acc, acc_up, of_rows, of_columns, out, out_scale, of_x, rows, there, columns, tile_n,
                               tiles_n, pairs, n, GATED)


@triton.jit
def _store_results(
    acc, acc_up, of_rows, of_columns, out, out_scale, of_x, rows, there, columns, tile_n, tiles_n, pairs, n,
    GATED: tl.constexpr,
):
    """Store the results of a tile, in float8 if there is an `out_scale`; see `experts_product_kernel`."""
    if out_scale is None:
        finish(acc, acc_up, of_rows, of_columns, None, out, None, None, of_x, rows, there, columns, tile_n, tiles_n, n,
               GATED)
    else:
        real = (columns < n)[:, None]
        gated = (acc / (1 + tl.exp(-acc)) * acc_up).to(tl.bfloat16).to(tl.float32)
        numbers, scales = quantize_groups(tl.where(real, gated, 0.0), 448.0, 0)
        tl.store(out_scale + tile_n * pairs + rows, scales, mask=there)
        where = out + rows.to(tl.int64)[None, :] * n + columns[:, None]
        tl.store(where, numbers.to(out.dtype.element_ty), mask=there[None, :] & real)


@triton.jit
def sum_experts_kernel(
    results, places, weights, shared, gate, out, width, shared_stride: tl.int64, gate_stride: tl.int64,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Add each token's results [pairs, width] times their weights, in float32: out [tokens, width].

    places, weights: [tokens, TOP_K]. shared: [tokens, width], which is added times sigmoid(gate [tokens, 1]), or None.
    gate: None for a factor of 1. A program has BLOCK columns of a token.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + j)
        held = columns < tl.where(place >= 0, width, 0)
        part = tl.load(results + place.to(tl.int64) * width + columns, mask=held, other=0.0)
        total += tl.load(weights + token * TOP_K + j) * part.to(tl.float32)
    if shared is not None:
        part = tl.load(shared + token * shared_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            part *= 1.0 / (1.0 + tl.exp(-tl.load(gate + token * gate_stride).to(tl.float32)))
        total += part
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)
