"""Next token of each row and its embedding: from logits to the next step's input without leaving the device.

Compiled by Triton for CUDA and by triton-ascend for Ascend. Ascend's vector cores have no float64, so the dtype of the
masses' sums is a parameter. A program processes every n-th row, so that the grid is independent of the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "vocabulary"])
def sample_embed_kernel(
    logits, temperature, top_k, top_p, min_p, uniform, table, ids, embedded,
    rows, vocabulary, hidden, logits_stride: tl.int64, table_stride: tl.int64, embedded_stride: tl.int64,
    DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Choose ids [rows] int64 from logits [rows, >= vocabulary], and with a table their rows, embedded [rows, hidden].

    temperature: [rows] float32, 0 for greedy rows; None makes all rows greedy. Other rows are sampled as by `sample`.
    uniform: [rows], below 1; float64 if DOUBLE, else float32.
    DOUBLE: masses are summed in float64, as by `sample`; else in float32.
    BLOCK: a power of two, elements processed at a time.
    """
    SUM: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        own = logits + row * logits_stride
        peak, chosen = _largest(own, vocabulary, BLOCK)
        if temperature is not None:
            heat = tl.load(temperature + row)
            if (heat > 0) & (peak > float("-inf")):
                chosen = _sample(
                    own, vocabulary, peak, heat, tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row),
                    tl.load(uniform + row), SUM, BLOCK)
        tl.store(ids + row, chosen)
        if table is not None:
            source, target = table + chosen * table_stride, embedded + row * embedded_stride
            for start in range(0, hidden, BLOCK):
                places = start + tl.arange(0, BLOCK)
                tl.store(target + places, tl.load(source + places, mask=places < hidden), mask=places < hidden)


@triton.jit
def _largest(logits, vocabulary, BLOCK: tl.constexpr):
    """Return the largest score and the smallest id that has it."""
    peak, chosen = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scores = _scores(logits, columns, vocabulary)
        here = tl.max(scores, 0)
        first = tl.min(tl.where(scores == here, columns, 0x7FFFFFFF), 0)
        chosen = tl.where(here > peak, first, chosen)
        peak = tl.maximum(here, peak)
    return peak, chosen


@triton.jit
def _sample(
    logits, vocabulary, peak, heat, top_k, top_p, min_p, uniform, SUM: tl.constexpr, BLOCK: tl.constexpr
):
    """Sample an id.

    The order is by falling score, equal scores by id. `top_k` and `top_p` keep the ids with scores above `border`, and
    at `border` the ids below `ties`.
    """
    border, ties = tl.full((), float("-inf"), tl.float32), tl.cast(vocabulary, tl.int32)
    if (top_k > 0) & (top_k < vocabulary):
        border, ties = _cut(logits, vocabulary, peak, heat, top_k.to(SUM), True, SUM, BLOCK)
    if top_p < 1:
        total = _mass(logits, vocabulary, peak, heat, border, ties, 0.0, False, SUM, BLOCK)
        border, ties = _cut(logits, vocabulary, peak, heat, top_p.to(SUM) * total, False, SUM, BLOCK)

    # Partial sums in the same order never decrease, also in floating point, so target < total and both loops end.
    target = uniform.to(SUM) * _mass(logits, vocabulary, peak, heat, border, ties, min_p, False, SUM, BLOCK)
    before, start = tl.zeros((), SUM), tl.full((), 0, tl.int32)
    here = _part(logits, start, vocabulary, peak, heat, border, ties, min_p, False, SUM, BLOCK)
    while before + here <= target:
        before += here
        start += BLOCK
        here = _part(logits, start, vocabulary, peak, heat, border, ties, min_p, False, SUM, BLOCK)
    low, high = start, tl.minimum(start + BLOCK, vocabulary)
    while high - low > 1:
        middle = low + (high - low) // 2
        passed = before + _part(logits, start, middle, peak, heat, border, ties, min_p, False, SUM, BLOCK) > target
        low, high = tl.where(passed, low, middle), tl.where(passed, middle, high)
    return low


@triton.jit
def _cut(logits, vocabulary, peak, heat, goal, COUNT: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):
    """Return (border, ties) of the shortest prefix of the order whose mass, or number, reaches `goal`."""
    # Invariant: scores of at least rank `low` reach the goal; scores of at least rank `high` do not.
    low, high = _rank(float("-inf")), _rank(peak) + 1
    while high - 1 > low:
        middle = (low & high) + ((low ^ high) >> 1)
        mass = _mass(logits, vocabulary, peak, heat, _score(middle), vocabulary, 0.0, COUNT, SUM, BLOCK)
        low, high = tl.where(mass >= goal, middle, low), tl.where(mass >= goal, high, middle)
    border = _score(low)
    fewest, most = tl.full((), 0, tl.int32), tl.cast(vocabulary, tl.int32)
    while most > fewest:
        ties = fewest + (most - fewest) // 2
        mass = _mass(logits, vocabulary, peak, heat, border, ties, 0.0, COUNT, SUM, BLOCK)
        fewest, most = tl.where(mass >= goal, fewest, ties + 1), tl.where(mass >= goal, ties, most)
    return border, fewest


@triton.jit
def _rank(score):
    """Return int32 in the order of the floats."""
    bits = tl.cast(score, tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _score(rank):
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def _mass(
    logits, vocabulary, peak, heat, border, ties, least, COUNT: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr
):
    total = tl.zeros((), SUM)
    for start in range(0, vocabulary, BLOCK):
        total += _part(logits, start, vocabulary, peak, heat, border, ties, least, COUNT, SUM, BLOCK)
    return total


@triton.jit
def _part(
    logits, start, end, peak, heat, border, ties, least,
    COUNT: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return the sum, or number, of the kept weights of at least `least` from `start` on, below `end`, in the block."""
    columns = start + tl.arange(0, BLOCK)
    scores = _scores(logits, columns, end)
    kept = (columns < end) & ((scores > border) | ((scores == border) & (columns < ties)))
    if COUNT:
        return tl.sum(tl.where(kept, 1.0, 0.0).to(SUM), 0)
    weights = tl.exp(tl.where(scores == peak, 0.0, (scores - peak) / heat))
    return tl.sum(tl.where(kept & (weights >= least), weights, 0.0).to(SUM), 0)


@triton.jit
def _scores(logits, columns, end):
    """Load logits as float32; minus infinity for NaN and from `end` on."""
    scores = tl.load(logits + columns, mask=columns < end, other=float("-inf")).to(tl.float32)
    return tl.where(scores == scores, scores, float("-inf"))
