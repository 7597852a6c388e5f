"""Attention over the paged KV cache (Kwon et al. 2023, arXiv:2309.06180), for rows of one query and for chunks.

A launch serves rows of one kind. A tile is a run of a row's queries with the query heads that share a KV head. Keys and
values are read once for a tile, as in vLLM's unified attention kernels. An item is a tile's part of its context, for
flash attention (Dao et al. 2022, arXiv:2205.14135). Items are numbered over the whole launch, and a program finds its
item on the device. Contexts are cut by the work of all tiles together, as Stream-K divides products (Osama et al. 2023,
arXiv:2301.03598). About PROGRAMS items then have equal lengths, whatever the lengths of the rows. If a tile has several
parts, the program that ends last merges them in their order (Flash-Decoding, Dao et al. 2023). The kernel is one long
function: it is one pass over a tile, whose values stay in registers until it is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npuserve.kernels.triton.byte_conversion import bytes_to_bfloat16, fp8_to_bfloat16
from npuserve.kernels.triton.prefetch import cache_to_l2

PREFETCHED = tl.constexpr(128)
"""Keys and values that a program prefetches while the previous kernel runs."""

LEAST = tl.constexpr(-1e38)
"""Score of keys that a query must not see; finite, since a query may see no key of a part."""


@triton.jit(
    do_not_specialize=["tokens", "rows", "tables_stride"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "cu_seqlens_q"],
)
def paged_attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, block_tables, context_lens, cu_seqlens_q, out, partial, stats, arrived,
    tokens, rows, tables_stride, scale,
    CHUNKS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PROGRAMS: tl.constexpr,
    LEAST_PART: tl.constexpr, MERGED_ROWS: tl.constexpr, MERGED: tl.constexpr, BYTES: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention for the rows of one kind.

    q, out: [tokens, KV_HEADS * GROUP, D].
    k_cache, v_cache: [B, SIZE, KV_HEADS, D], viewed as int32 if BYTES is not "".
    k_scale, v_scale: [B, SIZE, KV_HEADS] bfloat16 viewed as int32, of caches in int8 or float8e4nv; None without
        scales. SIZE is even, since copies to shared memory have at least four bytes.
    scale: above 0, in units of log2.

    block_tables: [rows, ...] int32, rows tables_stride apart.
    context_lens: [rows] int32.
    cu_seqlens_q: [rows + 1] int32.

    CHUNKS: True processes rows of two or more queries, and sets queries of no row to 0. False processes rows of one
        query. The grid is n * KV_HEADS programs; n is at least PROGRAMS / KV_HEADS plus the number of tiles, plus one
        for CHUNKS.

    partial: [4 / 3 PROGRAMS, BLOCK_M // GROUP * GROUP, D] float32, results of the parts (GROUP for BLOCK_M without
        CHUNKS). The size suffices: a row in two or more parts has at most 4 / 3 of the parts of its share of the work.
    stats: as `partial` with 2 for D: peaks and sums.
    arrived: [4 / 3 PROGRAMS] int32, 0 between launches.

    ROWS: a power of two, at least rows. BLOCK_M: a power of two, at least 16 and GROUP. LEAST_PART: minimum tokens of a
        part. MERGED_ROWS, MERGED: rows and parts merged at a time, powers of two.
    BYTES: "int8" or "fp8" multiplies words of four numbers (`_accumulate_bytes`); "" else. Not with CHUNKS.
    WIDE: products take their operands, rounded, in float32, since the interpreter cannot multiply bfloat16.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP if CHUNKS else 1
    item = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS

    # Data copied by the host may be read before the previous kernel (kv_write or this one) ends. The previous kernel
    # lets its successor begin only after all earlier kernels.
    r = tl.arange(0, ROWS)
    begins = tl.load(cu_seqlens_q + r, mask=r < rows, other=0)
    queries = tl.load(cu_seqlens_q + 1 + r, mask=r < rows, other=0) - begins
    contexts = tl.load(context_lens + r, mask=r < rows, other=0)
    own = queries > 1 if CHUNKS else queries == 1
    tiles = tl.where(own, (queries + BLOCK_Q - 1) // BLOCK_Q, 0)
    work = tl.sum(tiles.to(tl.int64) * contexts, 0) * KV_HEADS
    share = tl.maximum((work + PROGRAMS - 1) // PROGRAMS, LEAST_PART).to(tl.int32)
    parts = tl.maximum((contexts + share // 2) // share, 1)
    items = tiles * parts
    row = tl.sum((tl.cumsum(items, 0) <= item).to(tl.int32), 0)
    first = tl.sum(tl.where(r < row, items, 0), 0)
    slot = tl.sum(tl.where((r < row) & (parts > 1), items, 0), 0)

    known = tl.minimum(row, rows - 1)
    begin = tl.load(cu_seqlens_q + known)
    n = tl.load(cu_seqlens_q + known + 1) - begin
    context = tl.load(context_lens + known)
    own_parts = tl.maximum((context + share // 2) // share, 1)
    part = (item - first) % own_parts
    # The last tiles have the most work, and begin first.
    query = ((n + BLOCK_Q - 1) // BLOCK_Q - 1 - (item - first) // own_parts) * BLOCK_Q
    end = tl.maximum(context - n + tl.minimum(query + BLOCK_Q, n), 1)
    length = ((end + own_parts - 1) // own_parts + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    made = (end + length - 1) // length
    table = block_tables + known.to(tl.int64) * tables_stride

    if PDL:
        if not CHUNKS:  # noqa: SIM102  known to the compiler
            if (row < ROWS) & (part < made):
                WIDTH: tl.constexpr = D if BYTES == "" else D // 4
                cache_to_l2(k_cache, v_cache, table, head, part * length, end, KV_HEADS, WIDTH, SIZE, PREFETCHED)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if row < ROWS:
        if part < made:
            _part(
                q, k_cache, v_cache, k_scale, v_scale, table, out, partial, stats, arrived, scale, head, begin, n,
                context, query, part, length, end, made, slot + item - first - part, CHUNKS, KV_HEADS, GROUP, D,
                D_BLOCK, SIZE, BLOCK_M, BLOCK_Q, BLOCK_N, MERGED_ROWS, MERGED, BYTES, WIDE)
    elif CHUNKS:
        # Excess programs share the queries of no row.
        WIDTH: tl.constexpr = GROUP * D
        POWER: tl.constexpr = triton.next_power_of_2(WIDTH)
        x = tl.arange(0, POWER)
        nothing = tl.zeros((POWER,), out.dtype.element_ty)
        step = tl.num_programs(0) // KV_HEADS - first
        for token in range(tl.load(cu_seqlens_q + rows) + item - first, tokens, step):
            tl.store(out + (tl.cast(token, tl.int64) * KV_HEADS + head) * WIDTH + x, nothing, mask=x < WIDTH)


@triton.jit
def _part(
    q, k_cache, v_cache, k_scale, v_scale, table, out, partial, stats, arrived, scale, head, begin, n, context, query,
    part, length, end, made, slot,
    CHUNKS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    MERGED_ROWS: tl.constexpr, MERGED: tl.constexpr, BYTES: tl.constexpr, WIDE: tl.constexpr,
):
    """Process queries from `query` on of a row over keys [part * length, (part + 1) * length) of [0, end).

    made: number of parts. slot: of the first part."""
    HEIGHT: tl.constexpr = BLOCK_Q * GROUP
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_BLOCK)
    own = query + m // GROUP
    inside = (m < HEIGHT) & (own < n)
    places = ((begin + own).to(tl.int64) * KV_HEADS + head) * GROUP + m % GROUP
    whole = places[:, None] * D + d[None, :]
    kept = inside[:, None] & (d[None, :] < D)
    positions = context - n + own

    start = part * length
    stop = tl.minimum(start + length, end)
    peak = tl.full((BLOCK_M,), LEAST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    heads = tl.load(q + whole, mask=kept, other=0.0)
    if BYTES != "":
        even, odd = tl.split(tl.reshape(heads, (BLOCK_M, D_BLOCK // 4, 2, 2)))
        q0, q2 = tl.split(even)
        q1, q3 = tl.split(odd)
        acc0 = tl.zeros((BLOCK_M, D_BLOCK // 4), tl.float32)
        peak, total, acc0, acc1, acc2, acc3 = _accumulate_bytes(
            peak, total, acc0, acc0, acc0, acc0, q0, q1, q2, q3, k_cache, v_cache, k_scale, v_scale, table, scale,
            head, start, stop, KV_HEADS, D, D_BLOCK, SIZE, BLOCK_N, BYTES, WIDE)
        acc = tl.reshape(tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3)), (BLOCK_M, D_BLOCK))
    else:
        acc = tl.zeros((BLOCK_M, D_BLOCK), tl.float32)
        if CHUNKS:
            # Whole blocks of keys that all of the queries see.
            seen = start + tl.maximum(tl.minimum(stop, context - n + query + 1) - start, 0) // BLOCK_N * BLOCK_N
            peak, total, acc = _accumulate(
                peak, total, acc, heads, k_cache, v_cache, k_scale, v_scale, table, scale, head, positions, start,
                seen, CHUNKS, False, KV_HEADS, D, D_BLOCK, SIZE, BLOCK_N, WIDE)
        else:
            seen = start
        peak, total, acc = _accumulate(
            peak, total, acc, heads, k_cache, v_cache, k_scale, v_scale, table, scale, head, positions, seen, stop,
            CHUNKS, True, KV_HEADS, D, D_BLOCK, SIZE, BLOCK_N, WIDE)

    if made == 1:
        tl.store(out + whole, (acc / total[:, None]).to(out.dtype.element_ty), mask=kept)
    else:
        top = (begin + query).to(tl.int64) * KV_HEADS + head
        count = tl.minimum(n - query, BLOCK_Q) * GROUP
        _keep_part(
            acc, peak, total, out, partial, stats, arrived, top, count, slot, part, head, made, inside, kept, KV_HEADS,
            GROUP, D, D_BLOCK, HEIGHT, MERGED_ROWS, MERGED)


@triton.jit
def _keep_part(
    acc, peak, total, out, partial, stats, arrived, top, count, slot, part, head, made, inside, kept,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, HEIGHT: tl.constexpr,
    MERGED_ROWS: tl.constexpr, MERGED: tl.constexpr,
):
    """Store the results of a part; the program that ends last merges the parts of the tile."""
    m = tl.arange(0, acc.shape[0])
    d = tl.arange(0, D_BLOCK)
    mine = ((slot + part) * KV_HEADS + head).to(tl.int64) * HEIGHT
    tl.store(partial + mine * D + m[:, None] * D + d[None, :], acc, mask=kept)
    tl.store(stats + 2 * mine + m, peak, mask=inside)
    tl.store(stats + 2 * mine + HEIGHT + m, total, mask=inside)
    # All threads write before one increments the counter; the program that reads the full count sees all writes.
    tl.debug_barrier()
    counter = arrived + slot * KV_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == made - 1:
        tl.store(counter, 0)
        for at in range(0, count, MERGED_ROWS):
            _merge(out, partial, stats, top, at, count, slot, head, made, KV_HEADS, GROUP, D, D_BLOCK, HEIGHT,
                   MERGED_ROWS, MERGED)


@triton.jit
def _accumulate(
    peak, total, acc, heads, k_cache, v_cache, k_scale, v_scale, table, scale, head, positions, start, stop,
    CHUNKS: tl.constexpr, MASKED: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):
    """Accumulate keys [start, stop). MASKED: the last block may be partial, and queries of CHUNKS may not see it."""
    d = tl.arange(0, D_BLOCK)
    for at in range(start, stop, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        there = keys < (stop if MASKED else at + BLOCK_N)
        if not CHUNKS:  # the last key again takes fewer instructions than a mask of each copy
            keys = tl.minimum(keys, stop - 1)
        blocks = tl.load(table + keys // SIZE, mask=there if CHUNKS else None, other=0 if CHUNKS else None)
        places = (blocks.to(tl.int64) * SIZE + keys % SIZE) * KV_HEADS + head
        whole = places[:, None] * D + d[None, :]
        kept = there[:, None] & (d < D)[None, :] if CHUNKS else (d < D)[None, :]
        k = tl.load(k_cache + whole, mask=kept, other=0.0)
        scores = _product(heads, tl.trans(k), None, WIDE)
        if k_scale is not None:
            odd = (keys * KV_HEADS + head) & 1 == 1
            scores *= _factors(tl.load(k_scale + places // 2, mask=there, other=0), odd)[None, :]
        if MASKED:
            seen = there[None, :]
            if CHUNKS:
                seen &= keys[None, :] <= positions[:, None]
            scores = tl.where(seen, scores, LEAST)
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        v = tl.load(v_cache + whole, mask=kept, other=0.0)
        if k_scale is not None:
            weights *= _factors(tl.load(v_scale + places // 2, mask=there, other=0), odd)[None, :]
        acc = _product(weights.to(heads.dtype), v, acc, WIDE)
        peak = higher
    return peak, total, acc


@triton.jit
def _accumulate_bytes(
    peak, total, acc0, acc1, acc2, acc3, q0, q1, q2, q3, k_cache, v_cache, k_scale, v_scale, table, scale, head,
    start, stop, KV_HEADS: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BYTES: tl.constexpr, WIDE: tl.constexpr,
):
    """Accumulate keys [start, stop) of a cache in bytes for one query, by four products each of keys and values.

    A thread loads words of four numbers of a head, and each product takes one byte of every word: the numbers of a head
    are added in any order. So a thread neither loads single bytes of values nor moves numbers to other threads.
    q0 to q3, acc0 to acc3: [BLOCK_M, D_BLOCK // 4], numbers 0, 4, 8, ... to 3, 7, 11, ... of the heads.
    """
    d4 = tl.arange(0, D_BLOCK // 4)
    for at in range(start, stop, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        there = keys < stop
        keys = tl.minimum(keys, stop - 1)
        blocks = tl.load(table + keys // SIZE)
        places = (blocks.to(tl.int64) * SIZE + keys % SIZE) * KV_HEADS + head
        whole = places[:, None] * (D // 4) + d4[None, :]
        kept = (d4 < D // 4)[None, :]
        k = tl.trans(tl.load(k_cache + whole, mask=kept, other=0))
        scores = _product(q0, _byte(k, 0, BYTES, q0.dtype, WIDE), None, WIDE)
        scores = _product(q1, _byte(k, 1, BYTES, q0.dtype, WIDE), scores, WIDE)
        scores = _product(q2, _byte(k, 2, BYTES, q0.dtype, WIDE), scores, WIDE)
        scores = _product(q3, _byte(k, 3, BYTES, q0.dtype, WIDE), scores, WIDE)
        odd = (keys * KV_HEADS + head) & 1 == 1
        scores *= _factors(tl.load(k_scale + places // 2), odd)[None, :]
        scores = tl.where(there[None, :], scores, LEAST)
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(v_cache + whole, mask=kept, other=0)
        weights *= _factors(tl.load(v_scale + places // 2), odd)[None, :]
        weights = weights.to(q0.dtype)
        acc0 = _product(weights, _byte(v, 0, BYTES, q0.dtype, WIDE), acc0 * fade[:, None], WIDE)
        acc1 = _product(weights, _byte(v, 1, BYTES, q0.dtype, WIDE), acc1 * fade[:, None], WIDE)
        acc2 = _product(weights, _byte(v, 2, BYTES, q0.dtype, WIDE), acc2 * fade[:, None], WIDE)
        acc3 = _product(weights, _byte(v, 3, BYTES, q0.dtype, WIDE), acc3 * fade[:, None], WIDE)
        peak = higher
    return peak, total, acc0, acc1, acc2, acc3


@triton.jit
def _byte(words, PLACE: tl.constexpr, BYTES: tl.constexpr, TO: tl.constexpr, WIDE: tl.constexpr):
    """Return byte PLACE of each word, a number of type BYTES, in the dtype TO."""
    if WIDE or tl.bfloat16 != TO:
        byte = (words >> 8 * PLACE).to(tl.int8)
        if BYTES == "fp8":
            byte = byte.to(tl.float8e4nv, bitcast=True)
        number = byte.to(tl.float32 if WIDE else TO)
    else:
        ASM: tl.constexpr = bytes_to_bfloat16(PLACE, BYTES)
        number = tl.inline_asm_elementwise(ASM, "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    return number  # no return in a branch: Triton wants one type of all returns, also of those that it never reaches


@triton.jit
def _factors(pairs, odd):
    """Return the second bfloat16 of each pair where `odd`, else the first."""
    return tl.where(odd, pairs & -65536, pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def _product(a, b, acc, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    if b.dtype == tl.float8e4nv and a.dtype == tl.bfloat16:
        ASM: tl.constexpr = fp8_to_bfloat16()
        b = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [b.to(tl.int8, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=4)
    return tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")


@triton.jit
def _merge(
    out, partial, stats, top, at, count, slot, head, made,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, HEIGHT: tl.constexpr,
    MERGED_ROWS: tl.constexpr, MERGED: tl.constexpr,
):
    """Merge rows [at, at + MERGED_ROWS) of a tile of `count` rows from its parts, from `slot` on.

    Loads bypass the first-level cache, which is not coherent with other multiprocessors' writes."""
    m = at + tl.arange(0, MERGED_ROWS)
    d = tl.arange(0, D_BLOCK)
    peak = tl.full((MERGED_ROWS,), LEAST, tl.float32)
    total = tl.zeros((MERGED_ROWS,), tl.float32)
    acc = tl.zeros((MERGED_ROWS, D_BLOCK), tl.float32)
    for first in range(0, made, MERGED):
        parts = first + tl.arange(0, MERGED)
        begins = ((slot + parts) * KV_HEADS + head).to(tl.int64) * HEIGHT
        there = (parts < made)[:, None] & (m < count)[None, :]
        numbers = 2 * begins[:, None] + m[None, :]
        peaks = tl.load(stats + numbers, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats + HEIGHT + numbers, mask=there, other=0.0, cache_modifier=".cg")
        accs = tl.load(
            partial + (begins[:, None] + m[None, :])[:, :, None] * D + d[None, None, :],
            mask=there[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, tl.max(peaks, 0))
        fade = tl.exp2(peak - higher)
        weights = tl.exp2(peaks - higher[None, :])
        total = total * fade + tl.sum(weights * totals, 0)
        acc = acc * fade[:, None] + tl.sum(accs * weights[:, :, None], 0)
        peak = higher
    rows = (top + (m // GROUP).to(tl.int64) * KV_HEADS) * GROUP + m % GROUP
    tl.store(out + rows[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty),
             mask=(m < count)[:, None] & (d < D)[None, :])
