"""Log-probabilities, ranks and the most likely ids on CUDA, over the whole vocabulary.

A row is divided into parts of PART columns, one program each; one program of the second kernel merges the parts of a
row. PDL: see dependent.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npuserve.kernels.triton.keys import id_of, load_scores, make_keys, next_key, score_of


@triton.jit
def report_parts_kernel(
    logits, ids, candidates, peaks, sums, larger, vocabulary, stride: tl.int64, parts, count,
    PART: tl.constexpr, PDL: tl.constexpr,
):
    """Store the parts of the result.

    ids: [rows] int64.

    Outputs:

    candidates: [rows, parts, count] int64, the `count` largest keys of each part in falling order.
    peaks, sums: [rows, parts] float32, the largest score and the sum of exp(score - peak).
    larger: [rows, parts] int32, the number of scores larger than the score of the row's id.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, columns = logits + row * stride, part * PART + tl.arange(0, PART)
    scores = load_scores(own, columns, vocabulary)
    target = load_scores(own, tl.load(ids + row), vocabulary)
    at = row * parts + part
    peak = tl.max(scores, 0)
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(tl.where(scores > float("-inf"), tl.exp(scores - peak), 0.0), 0))
    tl.store(larger + at, tl.sum((scores > target).to(tl.int32), 0))
    keys = make_keys(scores, columns)
    below = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for place in range(count):
        below = next_key(keys, below)
        tl.store(candidates + at * count + place, below)


@triton.jit
def report_kernel(
    logits, ids, candidates, peaks, sums, larger, logprob, rank, top_ids, top_logprobs,
    vocabulary, stride: tl.int64, parts, count, PARTS: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):
    """Merge the parts.

    logprob: output [rows] float32. rank: output [rows] int64.
    top_ids, top_logprobs: output [rows, count] int64 and float32.
    CANDIDATES: a power of two, at least parts * count.
    """
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
    target = load_scores(logits + row * stride, tl.load(ids + row), vocabulary)
    tl.store(logprob + row, target - peak - logarithm)
    tl.store(rank + row, 1 + tl.sum(tl.load(larger + at, mask=real, other=0), 0).to(tl.int64))
    number = parts * count
    columns = tl.arange(0, CANDIDATES)
    keys = tl.load(candidates + row * number + columns, mask=columns < number, other=-0x8000000000000000)
    below = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for place in range(count):
        below = next_key(keys, below)
        tl.store(top_ids + row * count + place, id_of(below))
        tl.store(top_logprobs + row * count + place, score_of(below) - peak - logarithm)
