"""Keys of logits: int64 numbers that order (score, id), shared by sampling.py and logprobs.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_scores(logits, columns, end):
    """Load logits as float32: minus infinity for NaN and from `end` on, and no negative zero."""
    scores = tl.load(logits + columns, mask=columns < end, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    return tl.where(scores == 0, 0.0, scores)


@triton.jit
def make_keys(scores, columns):
    """Return distinct int64 keys in the order of scores; of equal scores the smaller column has the larger key."""
    return (rank_of(scores).to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)


@triton.jit
def score_of(key):
    """Return the score of a key."""
    return score_of_rank((key >> 32).to(tl.int32))


@triton.jit
def id_of(key):
    """Return the column of a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def rank_of(scores):
    """Return int32 in the order of the scores, float32 without negative zeros."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def score_of_rank(rank):
    """Return the score of a rank; the inverse of `rank_of`."""
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def largest_key(keys, parts, PARTS: tl.constexpr):
    """Return the largest of keys [parts]."""
    places = tl.arange(0, PARTS)
    return tl.max(tl.load(keys + places, mask=places < parts, other=-0x8000000000000000), 0)


@triton.jit
def next_key(keys, below):
    """Return the largest key below `below`; the least int64 if there is none."""
    return tl.max(tl.where(keys < below, keys, -0x8000000000000000), 0)
