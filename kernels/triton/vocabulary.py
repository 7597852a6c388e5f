"""Logits over the whole vocabulary for CUDA: the likeliest id, an id by chance, logprobs.

A row is cut into parts of PART columns, each a program's, which meet in a row's own program of the next kernel. Nothing
depends on the order in which programs run: masses are whole numbers, in units of 1 / ONE of the likeliest id's, and
whole numbers add up to the same in any order.

An id by chance takes seven kernels, all told by `launch_vocabulary.sample`:

    peaks     parts   the likeliest id of each part
    probe     parts   the mass, and the number, of ids at most so far below the peak, at PROBES distances at a time;
    probe     parts   the second time at distances between those between which top_k and top_p cut
    gather    parts   the ids between the two distances that remain, where the cut is, and the exact mass above them
    cut       rows    the last id that is kept, by bisection among those ids
    weigh     parts   the mass of what is kept
    draw      rows    the id at which the mass of all before it passes `uniform` of the whole

With neither top_k nor top_p: peaks, weigh and draw. Distances, `_falls`, are in halvings of the mass. The masses that
are probed are sums in float32, which SLACK allows for; what decides is exact. PDL: see dependent.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

PROBES = tl.constexpr(8)
"""Distances that a pass probes. A power of two."""

END = tl.constexpr(50.0)
"""The largest of the distances: what lies beyond it has no mass, since ONE is at most 2**48."""

SLACK = tl.constexpr(1e-3)
"""By which part sums in float32 may be off, and more."""


@triton.jit
def peaks_kernel(
    logits, keys, gathered, vocabulary, stride: tl.int64, parts, PART: tl.constexpr, PDL: tl.constexpr
):
    """logits [rows, >= vocabulary] -> keys [rows, parts] int64, the largest `_keys`. Also zeroes gathered [rows] int32,
    if there is such."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    scores = _scores(logits + row * stride, columns, vocabulary)
    tl.store(keys + row * parts + part, tl.max(_keys(scores, columns), 0))
    if gathered is not None:
        tl.store(gathered + row, 0)


@triton.jit
def likeliest_kernel(keys, ids, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    """keys [rows, parts] -> ids [rows] int64. PARTS, here and below: a power of two, at least parts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tl.store(ids + row, _id(_peak(keys + row * parts, parts, PARTS)))


@triton.jit
def probe_kernel(
    logits, keys, temperature, top_k, top_p, distances, sums, numbers, vocabulary, stride: tl.int64, parts,
    ROUND: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """Of rows that top_k or top_p may cut, at this ROUND, 0 or 1: distances [2, rows, PROBES] float32, the masses of
    each part within them, sums [2, rows, parts, PROBES] float32, and where there is a top_k the numbers of its ids,
    numbers [2, rows, parts, PROBES] int32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, heat = _score(_peak(keys + row * parts, parts, PARTS)), tl.load(temperature + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    limited = (k > 0) & (k < vocabulary)
    if _by_chance(peak, heat) & (limited | (p < 1)):
        first, last, limited = _span(distances, sums, numbers, row, parts, k, p, limited, ROUND, PARTS)
        columns = part * PART + tl.arange(0, PART)
        falls = _falls(_scores(logits + row * stride, columns, vocabulary), peak, heat)
        masses = tl.exp2(-falls)
        probes = tl.arange(0, PROBES)
        if ROUND == 0:  # rising with the square, the last one END
            rising = (probes + 1).to(tl.float32)
            tried = tl.where(probes + 1 < PROBES, 0.35 * rising * rising, END)
        else:
            tried = first + (last - first) * ((probes + 1).to(tl.float32) / (PROBES + 1))
        at = ROUND * tl.num_programs(0) + row
        if part == 0:
            tl.store(distances + at * PROBES + probes, tried)
        at = (at * parts + part) * PROBES
        for probe in tl.static_range(PROBES):
            inside = falls <= tl.sum(tl.where(probes == probe, tried, 0.0), 0)
            tl.store(sums + at + probe, tl.sum(tl.where(inside, masses, 0.0), 0))
            if limited:
                tl.store(numbers + at + probe, tl.sum(inside.to(tl.int32), 0))


@triton.jit
def gather_kernel(
    logits, keys, temperature, top_k, top_p, distances, sums, numbers, gathered, asked, above, masses,
    vocabulary, stride: tl.int64, parts,
    ONE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """Of rows that top_k or top_p may cut: asked [rows, vocabulary] int64 takes, in any order, the keys in question,
    gathered [rows] their number, and above and masses [2, rows, parts] int64 the mass and the number above them, and
    the whole mass."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, heat = _score(_peak(keys + row * parts, parts, PARTS)), tl.load(temperature + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    limited = (k > 0) & (k < vocabulary)
    if _by_chance(peak, heat) & (limited | (p < 1)):
        first, last, limited = _span(distances, sums, numbers, row, parts, k, p, limited, 2, PARTS)
        columns = part * PART + tl.arange(0, PART)
        scores = _scores(logits + row * stride, columns, vocabulary)
        falls = _falls(scores, peak, heat)
        mass, sure = _masses(falls, ONE), falls <= first
        at = row * parts + part
        tl.store(masses + at, tl.sum(mass, 0))
        tl.store(above + at, tl.sum(tl.where(sure, mass, 0), 0))
        tl.store(above + tl.num_programs(0).to(tl.int64) * parts + at, tl.sum(sure.to(tl.int64), 0))
        inside = (falls > first) & (falls <= last)
        places = tl.cumsum(inside.to(tl.int32), 0)
        number = tl.max(places, 0)
        if (number > 0) & (limited | (p < 1)):
            start = tl.atomic_add(gathered + row, number, sem="relaxed")
            own = asked + row * tl.cast(vocabulary, tl.int64) + start
            tl.store(own + places - 1, _keys(scores, columns), mask=inside)


@triton.jit
def cut_kernel(
    keys, temperature, top_k, top_p, gathered, asked, above, masses, borders, vocabulary, parts,
    ONE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """borders [rows] int64 of each row: the least key that is kept."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    border, number = tl.full((), -0x8000000000000000, tl.int64), tl.load(gathered + row)
    if number > 0:
        own = asked + row * tl.cast(vocabulary, tl.int64)
        peak, heat = _score(_peak(keys + row * parts, parts, PARTS)), tl.load(temperature + row)
        sure = _total(above + row * parts, parts, PARTS)
        whole = _total(masses + row * parts, parts, PARTS)
        # Where fewer ids than top_k have mass, it cuts nothing that matters.
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        goal = k - _total(above + (tl.num_programs(0).to(tl.int64) + row) * parts, parts, PARTS)
        if (k > 0) & (k < vocabulary) & (goal <= number):
            border = _last(own, number, peak, heat, goal, True, ONE, BLOCK)
            inside, _, _ = _tally(own, number, peak, heat, border, False, ONE, BLOCK)
            whole = sure + inside
        if p < 1:
            goal = tl.minimum(_least_whole(p.to(tl.float64) * whole.to(tl.float64)), whole) - sure
            border = _last(own, number, peak, heat, goal, False, ONE, BLOCK)
    tl.store(borders + row, border)


@triton.jit
def weigh_kernel(
    logits, keys, temperature, min_p, borders, masses, vocabulary, stride: tl.int64, parts,
    ONE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """Of rows by chance: masses [rows, parts] int64 of what is kept. borders: None where nothing is cut."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, heat = _score(_peak(keys + row * parts, parts, PARTS)), tl.load(temperature + row)
    if _by_chance(peak, heat):
        kept = _kept(logits + row * stride, row, part, peak, heat, min_p, borders, vocabulary, ONE, PART)
        tl.store(masses + row * parts + part, tl.sum(kept, 0))


@triton.jit
def draw_kernel(
    logits, keys, temperature, min_p, uniform, borders, masses, ids, vocabulary, stride: tl.int64, parts,
    ONE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """ids [rows] int64: where the mass passes uniform [rows], below 1; the likeliest in rows that are not by chance."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    best = _peak(keys + row * parts, parts, PARTS)
    peak, heat, chosen = _score(best), tl.load(temperature + row), _id(best)
    if _by_chance(peak, heat):
        places = tl.arange(0, PARTS)
        mass = tl.load(masses + row * parts + places, mask=places < parts, other=0)
        total = tl.sum(mass, 0)
        # The likeliest is kept: total >= ONE. A float64 below 1 times it may round to all of it.
        target = (tl.load(uniform + row).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        passed = tl.cumsum(mass, 0) <= target
        part = tl.sum(passed.to(tl.int32), 0)
        target -= tl.sum(tl.where(passed, mass, 0), 0)
        kept = _kept(logits + row * stride, row, part, peak, heat, min_p, borders, vocabulary, ONE, PART)
        chosen = (part * PART + tl.sum((tl.cumsum(kept, 0) <= target).to(tl.int32), 0)).to(tl.int64)
    tl.store(ids + row, chosen)


@triton.jit
def report_parts_kernel(
    logits, ids, candidates, peaks, sums, larger, vocabulary, stride: tl.int64, parts, count,
    PART: tl.constexpr, PDL: tl.constexpr,
):
    """Of each part: its `count` largest keys, in that order, to candidates [rows, parts, count] int64; its peak and
    the sum of exp(score - peak) to peaks and sums [rows, parts] float32; how many scores are larger than that of the
    row's id in ids [rows] int64 to larger [rows, parts] int32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, columns = logits + row * stride, part * PART + tl.arange(0, PART)
    scores = _scores(own, columns, vocabulary)
    asked = _scores(own, tl.load(ids + row), vocabulary)
    at = row * parts + part
    peak = tl.max(scores, 0)
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(tl.where(scores > float("-inf"), tl.exp(scores - peak), 0.0), 0))
    tl.store(larger + at, tl.sum((scores > asked).to(tl.int32), 0))
    keys = _keys(scores, columns)
    below = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for place in range(count):
        below = _next(keys, below)
        tl.store(candidates + at * count + place, below)


@triton.jit
def report_kernel(
    logits, ids, candidates, peaks, sums, larger, logprob, rank, top_ids, top_logprobs,
    vocabulary, stride: tl.int64, parts, count, PARTS: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):
    """The parts together: logprob [rows] float32, rank [rows] int64, top_ids [rows, count] int64 and top_logprobs
    [rows, count] float32. CANDIDATES: a power of two, at least parts * count."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PARTS)
    real = places < parts
    at = row * parts + places
    tops = tl.load(peaks + at, mask=real, other=float("-inf"))
    peak = tl.max(tops, 0)
    mass = tl.where(tops > float("-inf"), tl.load(sums + at, mask=real, other=0.0) * tl.exp(tops - peak), 0.0)
    logarithm = tl.log(tl.sum(mass, 0))
    asked = _scores(logits + row * stride, tl.load(ids + row), vocabulary)
    tl.store(logprob + row, asked - peak - logarithm)
    tl.store(rank + row, 1 + tl.sum(tl.load(larger + at, mask=real, other=0), 0).to(tl.int64))
    number = parts * count
    columns = tl.arange(0, CANDIDATES)
    keys = tl.load(candidates + row * number + columns, mask=columns < number, other=-0x8000000000000000)
    below = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for place in range(count):
        below = _next(keys, below)
        tl.store(top_ids + row * count + place, _id(below))
        tl.store(top_logprobs + row * count + place, _score(below) - peak - logarithm)


@triton.jit
def _next(keys, below):
    """The largest key below that one; the least int64 if there is none."""
    return tl.max(tl.where(keys < below, keys, -0x8000000000000000), 0)


@triton.jit
def _scores(logits, columns, end):
    """Logits as float32; minus infinity for NaN and from `end` on, and no negative zero."""
    scores = tl.load(logits + columns, mask=columns < end, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    return tl.where(scores == 0, 0.0, scores)


@triton.jit
def _keys(scores, columns):
    """int64, distinct: in the order of scores, of equal ones the larger for the smaller column."""
    return (_rank(scores).to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)


@triton.jit
def _score(key):
    return _score_of((key >> 32).to(tl.int32))


@triton.jit
def _id(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _rank(scores):
    """float32 without negative zeros as int32 in the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _score_of(rank):
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def _peak(keys, parts, PARTS: tl.constexpr):
    places = tl.arange(0, PARTS)
    return tl.max(tl.load(keys + places, mask=places < parts, other=-0x8000000000000000), 0)


@triton.jit
def _total(masses, parts, PARTS: tl.constexpr):
    places = tl.arange(0, PARTS)
    return tl.sum(tl.load(masses + places, mask=places < parts, other=0), 0)


@triton.jit
def _by_chance(peak, heat):
    return (heat > 0) & (peak > float("-inf"))


@triton.jit
def _falls(scores, peak, heat):
    """How many times the likeliest's mass is halved on the way to theirs, infinite for those without any."""
    return tl.where(scores == peak, 0.0, (peak - scores) * (1.4426950408889634 / heat))


@triton.jit
def _masses(falls, ONE: tl.constexpr):
    return (tl.exp2(-falls) * ONE).to(tl.int64)


@triton.jit
def _span(distances, sums, numbers, row, parts, k, p, limited, ROUNDS: tl.constexpr, PARTS: tl.constexpr):
    """(first, last, limited) after so many rounds: ids up to distance `first` are kept, those beyond `last` are not,
    or have no mass. limited: top_k cuts what has mass."""
    first, last, whole = tl.full((), -1.0, tl.float32), tl.full((), END, tl.float32), tl.full((), 0.0, tl.float32)
    for ROUND in tl.static_range(ROUNDS):
        probes = tl.arange(0, PROBES)
        at = ROUND * tl.num_programs(0) + row
        tried = tl.load(distances + at * PROBES + probes)
        places = tl.arange(0, PARTS)[:, None]
        at = (at * parts + places) * PROBES + probes[None, :]
        mass = tl.sum(tl.load(sums + at, mask=places < parts, other=0.0), 0)
        number = tl.zeros((PROBES,), tl.int32)
        if limited:
            number = tl.sum(tl.load(numbers + at, mask=places < parts, other=0), 0)
        if ROUND == 0:
            limited = limited & (tl.max(number, 0) >= k)
            if not limited:
                whole = tl.max(mass, 0)
        if limited:
            # Of what top_k keeps this much is known.
            whole = tl.maximum(whole, tl.max(tl.where(number < k, mass, 0.0), 0))
            short, enough = number < k, number >= k
        else:
            short, enough = mass < p * whole * (1 - SLACK), mass >= p * whole * (1 + SLACK)
        if limited & (p < 1):
            short = short & (mass < p * whole * (1 - SLACK))
        first = tl.maximum(first, tl.max(tl.where(short, tried, -1.0), 0))
        last = tl.minimum(last, tl.min(tl.where(enough, tried, END), 0))
    return first, last, limited


@triton.jit
def _kept(logits, row, part, peak, heat, min_p, borders, vocabulary, ONE: tl.constexpr, PART: tl.constexpr):
    """Masses [PART] of a part, 0 of what is not kept."""
    columns = part * PART + tl.arange(0, PART)
    scores = _scores(logits, columns, vocabulary)
    falls = _falls(scores, peak, heat)
    kept = tl.exp2(-falls) >= tl.load(min_p + row)
    if borders is not None:
        kept = kept & (_keys(scores, columns) >= tl.load(borders + row))
    return tl.where(kept, _masses(falls, ONE), 0)


@triton.jit
def _last(keys, number, peak, heat, goal, COUNT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of keys [number] such that the mass, or number, of those at least that reaches `goal`, which is at
    least 1 and at most that of all of them."""
    _, low, _ = _tally(keys, number, peak, heat, -0x8000000000000000, COUNT, ONE, BLOCK)
    _, _, high = _tally(keys, number, peak, heat, 0x7FFFFFFFFFFFFFFF, COUNT, ONE, BLOCK)
    # The answer is a key from `low` to `high`, both of them keys: each pass leaves out those of one side.
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1) + 1
        mass, above, below = _tally(keys, number, peak, heat, middle, COUNT, ONE, BLOCK)
        low, high = tl.where(mass >= goal, above, low), tl.where(mass >= goal, high, below)
    return low


@triton.jit
def _tally(keys, number, peak, heat, border, COUNT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """Of keys [number]: mass, or number, of those that are at least `border`, the least of these, and the largest of
    the others."""
    total = tl.zeros((BLOCK,), tl.int64)
    above, below = tl.full((BLOCK,), 0x7FFFFFFFFFFFFFFF, tl.int64), tl.full((BLOCK,), -0x8000000000000000, tl.int64)
    for start in range(0, number, BLOCK):
        places = start + tl.arange(0, BLOCK)
        own = tl.load(keys + places, mask=places < number, other=-0x8000000000000000)
        kept = (places < number) & (own >= border)
        if COUNT:
            total += kept.to(tl.int64)
        else:
            total += tl.where(kept, _masses(_falls(_score(own), peak, heat), ONE), 0)
        above = tl.minimum(above, tl.where(kept, own, 0x7FFFFFFFFFFFFFFF))
        below = tl.maximum(below, tl.where(kept, -0x8000000000000000, own))
    return tl.sum(total, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def _least_whole(x):
    """The least whole number, int64, that is at least x float64, which is not negative."""
    down = x.to(tl.int64)
    return tl.where(down.to(tl.float64) < x, down + 1, down)
