"""Products with weights on CUDA, and their fused epilogues: bias, scales of int8 and float8, SwiGLU, argmax.

A program computes a tile [BLOCK_N, BLOCK_M] of the transposed result, with the weight as the left operand. On Hopper a
warpgroup multiplies at least 64 rows of the left operand and 8 of the right. A decode step thus pads x, not the weight.
The weight is copied to shared memory, from which the tensor cores read it. The kernel is one long function: it is one
pass over a tile, whose values stay in registers from the first product to the epilogue.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from npuserve.kernels.triton.prefetch import to_l2


@triton.jit(do_not_specialize=["tokens", "ahead"])
def product_kernel(
    x, x_scale, weight, weight_scale, weight_zero, bias, out, best, places, partial, arrived,
    tokens, n, k, x_stride, ahead, scale_stride,
    GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, WIDE: tl.constexpr, IMPRECISE: tl.constexpr,
    SCALED_K: tl.constexpr, INT4_GROUP: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply x [tokens, k], rows x_stride apart, by weight [n, k]: out [tokens, n].

    x_scale [tokens], weight_scale [n]: float32, for operands of int8 and float8; else None.
    SCALED_K: numbers of a row that share a scale, a multiple of BLOCK_K; 0 for all. Otherwise the scales are x_scale
        [groups, tokens] and weight_scale [groups, rows of the weight], rows `scale_stride` apart.
    INT4_GROUP: columns of a group of a weight of 4 bits, a divisor of BLOCK_K; 0 for other weights. Then weight is
        [n, k / 8] int32 as in int4.py, weight_scale [n, `scale_stride`] of floats, and weight_zero the same in int8 or
        None. Numbers are dequantized to the dtype of x.
    bias: [n] or None.
    GATED: weight, weight_scale and bias have 2 n rows, of gate and up. The result is silu(gate) * up.
    best, places: [tokens, tiles of n] float32 and int32, or None. They replace `out`. They are the largest number of
        each tile after rounding to out's dtype, and its first column; see `argmax_merge_kernel`.
    WIDE: operands are converted to float32 first, since Triton's interpreter cannot multiply bfloat16.
    IMPRECISE: numbers of K that Hopper's tensor cores sum up before the sum is added to float32 sums; None for all.
        They sum float8 products with some 14 bits. At most BLOCK_K.
    SPLIT: programs that share the k of a tile.
    partial: float32, or int32 for int8, [tiles, SPLIT, 1 or 2 if GATED, BLOCK_M, BLOCK_N].
    arrived: [tiles] int32, 0 between launches. The last program of a tile adds the parts in their order, so that the
        result does not depend on which program is last.
    GROUP: tiles of tokens that pass over the weight together.
    EVEN: BLOCK_K divides k.
    ONCE: only one tile of tokens reads the weight.
    PDL: the launch may begin before the previous one ends; see dependent.py. Meanwhile it prefetches the first `ahead`
        numbers of its rows of the weight into the L2 cache.
    ahead: a multiple of 16; 0 if rows of the weight, or scales of a group, do not begin at multiples of 16 bytes.
    """
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles_m = tl.cdiv(tokens, BLOCK_M)
    tile = tl.program_id(0) % (tiles_n * tiles_m)
    part = tl.program_id(0) // (tiles_n * tiles_m) if SPLIT > 1 else 0
    tile_n, tile_m = place_of_tile(tile, tiles_n, tiles_m, GROUP)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    blocks = tl.cdiv(k, BLOCK_K)
    begin, end = blocks * part // SPLIT, blocks * (part + 1) // SPLIT
    if PDL:
        if ahead > 0:
            PACKED: tl.constexpr = 8 if INT4_GROUP > 0 else 1  # numbers of an element of the weight
            LINE: tl.constexpr = BLOCK_K // PACKED
            own = weight + tl.minimum(columns, n - 1).to(tl.int64) * (k // PACKED) + begin * LINE
            SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
            nbytes = tl.minimum(tl.minimum(ahead, (end - begin) * LINE), k // PACKED - begin * LINE) * SIZE
            to_l2(own, nbytes)
            if GATED:
                to_l2(own + tl.cast(n, tl.int64) * (k // PACKED), nbytes)
            if SCALED_K > 0:  # all scales of the tile's part, up to 64 groups
                groups = tl.minimum(begin * BLOCK_K // SCALED_K + tl.arange(0, 64), (end * BLOCK_K - 1) // SCALED_K)
                scales = weight_scale + tl.maximum(groups, 0).to(tl.int64) * scale_stride + tile_n * BLOCK_N
                of_tile = tl.minimum(BLOCK_N, n - tile_n * BLOCK_N) * 4
                to_l2(scales, of_tile)
                if GATED:
                    to_l2(scales + n, of_tile)
        gdc_wait()

    there = rows < tokens
    acc, acc_up = sums_of(
        x, x_scale, weight, weight_scale, weight_zero, rows, there, columns, begin, end, tokens, n, k, x_stride,
        scale_stride, GATED, BLOCK_N, BLOCK_M, BLOCK_K, EVEN, ONCE, WIDE, IMPRECISE, SCALED_K, INT4_GROUP)
    if PDL:
        gdc_launch_dependents()  # before the loop it costs 5% of a step on an H200
    if SCALED_K > 0 or INT4_GROUP > 0:  # the sums are scaled
        x_scale = None
        weight_scale = None

    if SPLIT == 1:
        finish(acc, acc_up, x_scale, weight_scale, bias, out, best, places, rows, rows, there, columns, tile_n, tiles_n,
               n, GATED)
    else:
        if is_last(acc, acc_up, partial, arrived, tile, part, there, GATED, BLOCK_N, BLOCK_M, SPLIT):
            acc, acc_up = whole_sums(partial, arrived, tile, there, acc.dtype, GATED, BLOCK_N, BLOCK_M, SPLIT)
            finish(acc, acc_up, x_scale, weight_scale, bias, out, best, places, rows, rows, there, columns, tile_n,
                   tiles_n, n, GATED)


@triton.jit
def place_of_tile(tile, tiles_n, tiles_m, GROUP: tl.constexpr):
    """Return the tile of n and the tile of rows of a program. GROUP tiles of rows pass over the weight together."""
    first_m = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first_m, GROUP)
    return tile % (GROUP * tiles_n) // height, first_m + tile % (GROUP * tiles_n) % height


@triton.jit
def sums_of(
    x, x_scale, weight, weight_scale, weight_zero, rows, there, columns, begin, end, x_rows, n, k, x_stride,
    scale_stride,
    GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    ONCE: tl.constexpr, WIDE: tl.constexpr, IMPRECISE: tl.constexpr, SCALED_K: tl.constexpr, INT4_GROUP: tl.constexpr,
):
    """Return the sums [BLOCK_N, BLOCK_M] of `columns` of the weight times `rows` of x, and those of up.

    rows: [BLOCK_M], of the x_rows rows of x. there: [BLOCK_M], which of them are computed.
    begin, end: blocks of K. Other arguments as in `product_kernel`.
    """
    ACC: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    KEEP: tl.constexpr = "evict_first" if ONCE else ""
    NOTHING: tl.constexpr = 0 if INT4_GROUP > 0 else 0.0
    PACKED: tl.constexpr = 8 if INT4_GROUP > 0 else 1  # numbers of an element of the weight
    LINE: tl.constexpr = BLOCK_K // PACKED
    inner = tl.arange(0, BLOCK_K)
    places_of_line = tl.arange(0, LINE)
    own = weight + tl.minimum(columns, n - 1).to(tl.int64) * (k // PACKED) + begin * LINE
    up = tl.cast(n, tl.int64) * (k // PACKED)  # offset from a gate to its up
    acc = tl.zeros((BLOCK_N, BLOCK_M), ACC)
    acc_up = acc
    w = own[:, None] + places_of_line[None, :]
    xs = x + rows.to(tl.int64)[None, :] * x_stride + (begin * BLOCK_K + inner)[:, None]
    if SCALED_K > 0:  # scales are loaded a block before their use; Triton does not pipeline loops that load earlier
        of_now = _scales_of(x_scale, weight_scale, tl.minimum(begin, tl.maximum(end - 1, 0)) * BLOCK_K // SCALED_K,
                            rows, there, columns, x_rows, n, scale_stride, GATED)
    for block in range(begin, end):
        if EVEN:
            right = tl.load(xs, mask=there[None, :], other=0.0)
            left = tl.load(w, eviction_policy=KEEP)
        else:
            right = tl.load(xs, mask=there[None, :] & (inner < k - block * BLOCK_K)[:, None], other=0.0)
            within = places_of_line < k // PACKED - block * LINE
            left = tl.load(w, mask=within[None, :], other=NOTHING, eviction_policy=KEEP)
        if INT4_GROUP > 0:
            left = _dequantized(left, weight_scale, weight_zero, columns, columns < n, block, scale_stride, BLOCK_N,
                                BLOCK_K, INT4_GROUP, x.dtype.element_ty)
        if WIDE:
            right, left = right.to(tl.float32), left.to(tl.float32)
        if SCALED_K > 0:
            of_next = _scales_of(x_scale, weight_scale, tl.minimum(block + 1, end - 1) * BLOCK_K // SCALED_K, rows,
                                 there, columns, x_rows, n, scale_stride, GATED)
            acc += tl.dot(left, right) * (of_now[0][:, None] * of_now[2][None, :])
        else:
            acc = tl.dot(left, right, acc, input_precision="ieee", max_num_imprecise_acc=IMPRECISE, out_dtype=ACC)
        if GATED:
            if EVEN:
                left = tl.load(w + up, eviction_policy=KEEP)
            else:
                left = tl.load(w + up, mask=within[None, :], other=NOTHING, eviction_policy=KEEP)
            if INT4_GROUP > 0:
                left = _dequantized(left, weight_scale, weight_zero, columns + n, columns < n, block, scale_stride,
                                    BLOCK_N, BLOCK_K, INT4_GROUP, x.dtype.element_ty)
            if WIDE:
                left = left.to(tl.float32)
            if SCALED_K > 0:
                acc_up += tl.dot(left, right) * (of_now[1][:, None] * of_now[2][None, :])
            else:
                acc_up = tl.dot(
                    left, right, acc_up, input_precision="ieee", max_num_imprecise_acc=IMPRECISE, out_dtype=ACC)
        if SCALED_K > 0:
            of_now = of_next
        w += LINE
        xs += BLOCK_K
    return acc, acc_up


@triton.jit
def is_last(
    acc, acc_up, partial, arrived, tile, part, there, GATED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLIT: tl.constexpr,
):
    """Store this program's sums of a tile whose K is split; return True in the last program of the tile.

    Arguments as in `product_kernel`. there: [BLOCK_M], rows that are computed.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    TILE: tl.constexpr = BLOCK_N * BLOCK_M
    own = _parts_of(partial, tile, PARTS, BLOCK_N, BLOCK_M, SPLIT)
    tl.store(own + part * (PARTS * TILE), acc, mask=there[None, :])
    if GATED:
        tl.store(own + part * (PARTS * TILE) + TILE, acc_up, mask=there[None, :])
    tl.debug_barrier()  # all stores of the program precede its arrival
    return tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1


@triton.jit
def whole_sums(
    partial, arrived, tile, there, TYPE: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLIT: tl.constexpr,
):
    """Return the sums of a tile whose programs have all stored theirs, and reset their count; see `is_last`."""
    PARTS: tl.constexpr = 2 if GATED else 1
    TILE: tl.constexpr = BLOCK_N * BLOCK_M
    parts = _parts_of(partial, tile, PARTS, BLOCK_N, BLOCK_M, SPLIT)
    tl.debug_barrier()
    tl.store(arrived + tile, 0)
    acc = tl.zeros((BLOCK_N, BLOCK_M), TYPE)
    acc_up = acc
    if TILE <= 4096:  # the registers hold all parts at once
        for each in tl.static_range(SPLIT):
            acc += _part(parts, each, 0, there[None, :], PARTS, TILE)
            if GATED:
                acc_up += _part(parts, each, 1, there[None, :], PARTS, TILE)
    else:
        for each in tl.range(SPLIT, num_stages=1):
            acc += _part(parts, each, 0, there[None, :], PARTS, TILE)
            if GATED:
                acc_up += _part(parts, each, 1, there[None, :], PARTS, TILE)
    return acc, acc_up


@triton.jit
def _parts_of(partial, tile, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr):
    here = tl.arange(0, BLOCK_M)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    return partial + tl.cast(tile, tl.int64) * (SPLIT * PARTS * BLOCK_N * BLOCK_M) + here


@triton.jit(do_not_specialize=["tokens"])
def finish_kernel(
    sums, x_scale, weight_scale, bias, out, tokens, n, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Apply the epilogue of `product_kernel` to int8 sums [tokens, n] int32, [tokens, 2 n] if GATED: out [tokens, n].

    The grid is tokens times blocks of n."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = sums + rows.to(tl.int64)[None, :] * (2 * n if GATED else n) + columns[:, None]
    acc = tl.load(own, mask=(columns < n)[:, None], other=0)
    acc_up = acc
    if GATED:
        acc_up = tl.load(own + n, mask=(columns < n)[:, None], other=0)
    finish(acc, acc_up, x_scale, weight_scale, bias, out, None, None, rows, rows, rows < tokens, columns, 0, 0, n,
           GATED)


@triton.jit
def _dequantized(
    words, scale, zero, rows, real, block, groups, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SIZE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Return the numbers [BLOCK_N, BLOCK_K] of words [BLOCK_N, BLOCK_K / 8] of the rows `rows`, in TYPE.

    scale, zero: [rows of the weight, groups]. Where `real` is false, the numbers are 0.
    SIZE: columns of a group.
    """
    place = tl.arange(0, 8)
    shifts = place % 2 * 16 + place // 2 * 4  # int4.SHIFTS
    codes = (words[:, :, None] >> shifts[None, None, :]) & 15
    # In units of 32 columns for groups of all sizes: with larger ones the compiler spills registers.
    UNIT: tl.constexpr = 32
    levels = tl.reshape(codes, (BLOCK_N, BLOCK_K // UNIT, UNIT)).to(tl.float32) - 8
    group = (block * BLOCK_K + tl.arange(0, BLOCK_K // UNIT) * UNIT) // SIZE
    place_of_group = rows.to(tl.int64)[:, None] * groups + group[None, :]
    inside = real[:, None] & (group < groups)[None, :]
    if zero is not None:
        levels -= tl.load(zero + place_of_group, mask=inside, other=0).to(tl.float32)[:, :, None]
    levels *= tl.load(scale + place_of_group, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    return tl.reshape(levels, (BLOCK_N, BLOCK_K)).to(TYPE)


@triton.jit
def _scales_of(
    x_scale, weight_scale, group, rows, there, columns, x_rows, n, scale_stride, GATED: tl.constexpr,
):
    """Return the scales of a group: of the weight's rows, of the rows of up, and of x; see `sums_of`."""
    own = weight_scale + tl.cast(group, tl.int64) * scale_stride + columns
    of_rows = tl.load(own, mask=columns < n, other=0.0)
    of_up = of_rows
    if GATED:
        of_up = tl.load(own + n, mask=columns < n, other=0.0)
    return of_rows, of_up, tl.load(x_scale + group * x_rows + rows, mask=there, other=0.0)


@triton.jit
def _part(parts, each, up, there, PARTS: tl.constexpr, TILE: tl.constexpr):
    return tl.load(parts + (each * PARTS + up) * TILE, mask=there, other=0, cache_modifier=".cg")


@triton.jit
def finish(
    acc, acc_up, x_scale, weight_scale, bias, out, best, places, sources, rows, there, columns, tile_n, tiles_n, n,
    GATED: tl.constexpr,
):
    """Apply the epilogue to the sums of a tile and store the results.

    sources, rows: [BLOCK_M], rows of x and of the results. there: [BLOCK_M], which of them are stored. Other arguments
    as in `product_kernel`.
    """
    scales = None
    if x_scale is not None:
        scales = tl.load(x_scale + sources, mask=there, other=0)
    value = _scaled(acc, scales, weight_scale, bias, columns, columns < n)
    if GATED:
        value = value / (1 + tl.exp(-value)) * _scaled(acc_up, scales, weight_scale, bias, columns + n, columns < n)
    value = value.to(out.dtype.element_ty)
    if best is None:
        where = out + rows.to(tl.int64)[None, :] * n + columns[:, None]
        tl.store(where, value, mask=there[None, :] & (columns < n)[:, None])
    else:
        real = (columns < n)[:, None]
        score = value.to(tl.float32)
        score = tl.where(real & (score == score), score, float("-inf"))
        largest = tl.max(score, 0)
        first = tl.min(tl.where(real & (score == largest[None, :]), columns[:, None], 0x7FFFFFFF), 0)
        where = rows.to(tl.int64) * tiles_n + tile_n
        tl.store(best + where, largest, mask=there)
        tl.store(places + where, first, mask=there)


@triton.jit
def _scaled(acc, scales, weight_scale, bias, columns, real):
    value = acc.to(tl.float32)
    if scales is not None:
        value = value * scales[None, :] * tl.load(weight_scale + columns, mask=real, other=0)[:, None]
    if bias is not None:
        value += tl.load(bias + columns, mask=real, other=0).to(tl.float32)[:, None]
    return value


@triton.jit(do_not_specialize=["tiles"])
def argmax_merge_kernel(best, places, ids, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Merge best, places [rows, tiles] of `product_kernel` into ids [rows] int64, one program per row.

    The id is the smallest column of the largest number. The first tile always has a column."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    largest, first = tl.full((), float("-inf"), tl.float32), tl.full((), 0x7FFFFFFF, tl.int32)
    for start in range(0, tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        scores = tl.load(best + row * tiles + at, mask=at < tiles, other=float("-inf"))
        columns = tl.load(places + row * tiles + at, mask=at < tiles, other=0x7FFFFFFF)
        here = tl.max(scores, 0)
        column = tl.min(tl.where(scores == here, columns, 0x7FFFFFFF), 0)
        first = tl.where(here > largest, column, tl.where(here == largest, tl.minimum(first, column), first))
        largest = tl.maximum(largest, here)
    tl.store(ids + row, first.to(tl.int64))
