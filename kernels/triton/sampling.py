"""Argmax and sampling over the whole vocabulary on CUDA.

A row is divided into parts of PART columns, one program each. One program of the next kernel merges the parts of a row.
Masses are integers, in units of 1 / ONE of the peak's mass. Integer sums are equal in every order, so results do not
depend on the order of the programs.

Sampling takes seven kernels, launched by `launch_vocabulary.sample`:

    peaks     parts   the most likely id of each part
    probe     parts   mass and number of the ids within PROBES distances of the peak
    probe     parts   the same, at finer distances around the cut of top_k and top_p
    gather    parts   the undecided ids, between the two distances next to the cut, and the exact mass above them
    cut       rows    the last id that is kept, by bisection among the undecided ids
    weigh     parts   the mass of the kept ids
    draw      rows    the id at which the cumulative mass exceeds `uniform` of the total

Without top_k and top_p: peaks, weigh and draw. Distances (`_halvings`) are in halvings of the mass. Probed masses are
sums in float32 with a tolerance of SLACK; the exact masses decide. PDL: see dependent.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npuserve.kernels.triton.keys import id_of, largest_key, load_scores, make_keys, score_of

PROBES = tl.constexpr(8)
"""Distances of a probe, a power of two."""

END = tl.constexpr(50.0)
"""Maximum distance: ids beyond it have no mass, since ONE is at most 2**48."""

SLACK = tl.constexpr(1e-3)
"""Upper bound of the relative error of sums in float32."""


@triton.jit
def peaks_kernel(
    logits, keys, gathered, vocabulary, stride: tl.int64, parts, PART: tl.constexpr, PDL: tl.constexpr
):
    """Store the largest key of each part.

    logits: [rows, >= vocabulary].
    keys: output [rows, parts] int64, from `make_keys`.
    gathered: output [rows] int32, set to 0; or None.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    scores = load_scores(logits + row * stride, columns, vocabulary)
    tl.store(keys + row * parts + part, tl.max(make_keys(scores, columns), 0))
    if gathered is not None:
        tl.store(gathered + row, 0)


@triton.jit
def likeliest_kernel(keys, ids, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    """Store the most likely id of each row: keys [rows, parts] -> ids [rows] int64.

    PARTS, here and below: a power of two, at least parts.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tl.store(ids + row, id_of(largest_key(keys + row * parts, parts, PARTS)))


@triton.jit
def probe_kernel(
    logits, keys, temperature, top_k, top_p, distances, sums, numbers, vocabulary, stride: tl.int64, parts,
    ROUND: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """Store the mass within several distances of the peak, for rows that top_k or top_p may filter.

    ROUND: 0 or 1.
    distances: [2, rows, PROBES] float32, of both rounds.

    Outputs:

    sums: [2, rows, parts, PROBES] float32, the mass of each part within the distances of this round.
    numbers: [2, rows, parts, PROBES] int32, the number of ids; only for rows with a top_k.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, heat = score_of(largest_key(keys + row * parts, parts, PARTS)), tl.load(temperature + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    limited = (k > 0) & (k < vocabulary)
    if _is_sampled(peak, heat) & (limited | (p < 1)):
        first, last, limited = _bounds(distances, sums, numbers, row, parts, k, p, limited, ROUND, PARTS)
        columns = part * PART + tl.arange(0, PART)
        halvings = _halvings(load_scores(logits + row * stride, columns, vocabulary), peak, heat)
        masses = tl.exp2(-halvings)
        probes = tl.arange(0, PROBES)
        if ROUND == 0:  # quadratic, up to END
            rising = (probes + 1).to(tl.float32)
            distance = tl.where(probes + 1 < PROBES, 0.35 * rising * rising, END)
        else:
            distance = first + (last - first) * ((probes + 1).to(tl.float32) / (PROBES + 1))
        at = ROUND * tl.num_programs(0) + row
        if part == 0:
            tl.store(distances + at * PROBES + probes, distance)
        at = (at * parts + part) * PROBES
        for probe in tl.static_range(PROBES):
            inside = halvings <= tl.sum(tl.where(probes == probe, distance, 0.0), 0)
            tl.store(sums + at + probe, tl.sum(tl.where(inside, masses, 0.0), 0))
            if limited:
                tl.store(numbers + at + probe, tl.sum(inside.to(tl.int32), 0))


@triton.jit
def gather_kernel(
    logits, keys, temperature, top_k, top_p, distances, sums, numbers, gathered, undecided, above, masses,
    vocabulary, stride: tl.int64, parts,
    ONE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """Store the undecided keys and the exact mass above them, for rows that top_k or top_p may filter.

    Outputs:

    undecided: [rows, vocabulary] int64, keys in any order.
    gathered: [rows] int32, the number of undecided keys.
    above: [2, rows, parts] int64, the mass and the number of the ids above the undecided keys.
    masses: [rows, parts] int64, the total mass.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, heat = score_of(largest_key(keys + row * parts, parts, PARTS)), tl.load(temperature + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    limited = (k > 0) & (k < vocabulary)
    if _is_sampled(peak, heat) & (limited | (p < 1)):
        first, last, limited = _bounds(distances, sums, numbers, row, parts, k, p, limited, 2, PARTS)
        columns = part * PART + tl.arange(0, PART)
        scores = load_scores(logits + row * stride, columns, vocabulary)
        halvings = _halvings(scores, peak, heat)
        mass, sure = _masses(halvings, ONE), halvings <= first
        at = row * parts + part
        tl.store(masses + at, tl.sum(mass, 0))
        tl.store(above + at, tl.sum(tl.where(sure, mass, 0), 0))
        tl.store(above + tl.num_programs(0).to(tl.int64) * parts + at, tl.sum(sure.to(tl.int64), 0))
        inside = (halvings > first) & (halvings <= last)
        places = tl.cumsum(inside.to(tl.int32), 0)
        number = tl.max(places, 0)
        if (number > 0) & (limited | (p < 1)):
            start = tl.atomic_add(gathered + row, number, sem="relaxed")
            own = undecided + row * tl.cast(vocabulary, tl.int64) + start
            tl.store(own + places - 1, make_keys(scores, columns), mask=inside)


@triton.jit
def cut_kernel(
    keys, temperature, top_k, top_p, gathered, undecided, above, masses, borders, vocabulary, parts,
    ONE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """Store in borders [rows] int64 the least key that each row keeps."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    border, number = tl.full((), -0x8000000000000000, tl.int64), tl.load(gathered + row)
    if number > 0:
        own = undecided + row * tl.cast(vocabulary, tl.int64)
        peak, heat = score_of(largest_key(keys + row * parts, parts, PARTS)), tl.load(temperature + row)
        sure = _total(above + row * parts, parts, PARTS)
        whole = _total(masses + row * parts, parts, PARTS)
        # If fewer ids than top_k have mass, top_k drops no mass.
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        goal = k - _total(above + (tl.num_programs(0).to(tl.int64) + row) * parts, parts, PARTS)
        if (k > 0) & (k < vocabulary) & (goal <= number):
            border = _border(own, number, peak, heat, goal, True, ONE, BLOCK)
            inside, _, _ = _tally(own, number, peak, heat, border, False, ONE, BLOCK)
            whole = sure + inside
        if p < 1:
            goal = tl.minimum(_ceil(p.to(tl.float64) * whole.to(tl.float64)), whole) - sure
            border = _border(own, number, peak, heat, goal, False, ONE, BLOCK)
    tl.store(borders + row, border)


@triton.jit
def weigh_kernel(
    logits, keys, temperature, min_p, borders, masses, vocabulary, stride: tl.int64, parts,
    ONE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """Store in masses [rows, parts] int64 the mass that sampled rows keep. borders: None without top_k and top_p."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, heat = score_of(largest_key(keys + row * parts, parts, PARTS)), tl.load(temperature + row)
    if _is_sampled(peak, heat):
        kept = _kept_masses(logits + row * stride, row, part, peak, heat, min_p, borders, vocabulary, ONE, PART)
        tl.store(masses + row * parts + part, tl.sum(kept, 0))


@triton.jit
def draw_kernel(
    logits, keys, temperature, min_p, uniform, borders, masses, ids, vocabulary, stride: tl.int64, parts,
    ONE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):
    """Store ids [rows] int64 at which the mass exceeds uniform [rows] of the total; the argmax in greedy rows.

    uniform: below 1.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    best = largest_key(keys + row * parts, parts, PARTS)
    peak, heat, chosen = score_of(best), tl.load(temperature + row), id_of(best)
    if _is_sampled(peak, heat):
        places = tl.arange(0, PARTS)
        mass = tl.load(masses + row * parts + places, mask=places < parts, other=0)
        total = tl.sum(mass, 0)
        # The peak is kept, so total >= ONE. A float64 below 1 times the total may round to the total.
        target = (tl.load(uniform + row).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        passed = tl.cumsum(mass, 0) <= target
        part = tl.sum(passed.to(tl.int32), 0)
        target -= tl.sum(tl.where(passed, mass, 0), 0)
        kept = _kept_masses(logits + row * stride, row, part, peak, heat, min_p, borders, vocabulary, ONE, PART)
        chosen = (part * PART + tl.sum((tl.cumsum(kept, 0) <= target).to(tl.int32), 0)).to(tl.int64)
    tl.store(ids + row, chosen)


@triton.jit
def _total(masses, parts, PARTS: tl.constexpr):
    """Return the sum of masses [parts]."""
    places = tl.arange(0, PARTS)
    return tl.sum(tl.load(masses + places, mask=places < parts, other=0), 0)


@triton.jit
def _is_sampled(peak, heat):
    """Return True for rows that are sampled, not greedy."""
    return (heat > 0) & (peak > float("-inf"))


@triton.jit
def _halvings(scores, peak, heat):
    """Return how often the peak's mass is halved down to that of each score; infinity without mass."""
    return tl.where(scores == peak, 0.0, (peak - scores) * (1.4426950408889634 / heat))


@triton.jit
def _masses(halvings, ONE: tl.constexpr):
    """Return masses as integers in units of 1 / ONE of the peak's."""
    return (tl.exp2(-halvings) * ONE).to(tl.int64)


@triton.jit
def _bounds(distances, sums, numbers, row, parts, k, p, limited, ROUNDS: tl.constexpr, PARTS: tl.constexpr):
    """Return (first, last, limited) after ROUNDS rounds.

    Ids up to distance `first` are kept. Ids beyond `last` are dropped or have no mass.
    limited: top_k drops ids with mass.
    """
    first, last, whole = tl.full((), -1.0, tl.float32), tl.full((), END, tl.float32), tl.full((), 0.0, tl.float32)
    for ROUND in tl.static_range(ROUNDS):
        probes = tl.arange(0, PROBES)
        at = ROUND * tl.num_programs(0) + row
        distance = tl.load(distances + at * PROBES + probes)
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
            # A lower bound of the mass that top_k keeps.
            whole = tl.maximum(whole, tl.max(tl.where(number < k, mass, 0.0), 0))
            short, enough = number < k, number >= k
        else:
            short, enough = mass < p * whole * (1 - SLACK), mass >= p * whole * (1 + SLACK)
        if limited & (p < 1):
            short = short & (mass < p * whole * (1 - SLACK))
        first = tl.maximum(first, tl.max(tl.where(short, distance, -1.0), 0))
        last = tl.minimum(last, tl.min(tl.where(enough, distance, END), 0))
    return first, last, limited


@triton.jit
def _kept_masses(logits, row, part, peak, heat, min_p, borders, vocabulary, ONE: tl.constexpr, PART: tl.constexpr):
    """Return the masses [PART] of a part, 0 for dropped ids."""
    columns = part * PART + tl.arange(0, PART)
    scores = load_scores(logits, columns, vocabulary)
    halvings = _halvings(scores, peak, heat)
    kept = tl.exp2(-halvings) >= tl.load(min_p + row)
    if borders is not None:
        kept = kept & (make_keys(scores, columns) >= tl.load(borders + row))
    return tl.where(kept, _masses(halvings, ONE), 0)


@triton.jit
def _border(keys, number, peak, heat, goal, COUNT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key for which the mass (COUNT: the number) of the keys [number] from it up reaches `goal`.

    goal: at least 1, at most the value for all keys.
    """
    _, low, _ = _tally(keys, number, peak, heat, -0x8000000000000000, COUNT, ONE, BLOCK)
    _, _, high = _tally(keys, number, peak, heat, 0x7FFFFFFFFFFFFFFF, COUNT, ONE, BLOCK)
    # Invariant: the answer is from `low` to `high`, both of them keys. Each pass removes the keys of one side.
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1) + 1
        mass, above, below = _tally(keys, number, peak, heat, middle, COUNT, ONE, BLOCK)
        low, high = tl.where(mass >= goal, above, low), tl.where(mass >= goal, high, below)
    return low


@triton.jit
def _tally(keys, number, peak, heat, border, COUNT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """Return (mass, least, below) of keys [number]; COUNT replaces the mass by the number.

    mass, least: mass and smallest key of the keys from `border` up. below: the largest other key.
    """
    total = tl.zeros((BLOCK,), tl.int64)
    above, below = tl.full((BLOCK,), 0x7FFFFFFFFFFFFFFF, tl.int64), tl.full((BLOCK,), -0x8000000000000000, tl.int64)
    for start in range(0, number, BLOCK):
        places = start + tl.arange(0, BLOCK)
        own = tl.load(keys + places, mask=places < number, other=-0x8000000000000000)
        kept = (places < number) & (own >= border)
        if COUNT:
            total += kept.to(tl.int64)
        else:
            total += tl.where(kept, _masses(_halvings(score_of(own), peak, heat), ONE), 0)
        above = tl.minimum(above, tl.where(kept, own, 0x7FFFFFFFFFFFFFFF))
        below = tl.maximum(below, tl.where(kept, -0x8000000000000000, own))
    return tl.sum(total, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def _ceil(x):
    """Return the ceiling of x, a float64 that is not negative, as int64."""
    down = x.to(tl.int64)
    return tl.where(down.to(tl.float64) < x, down + 1, down)
