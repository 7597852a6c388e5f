"""How products with weights are cut on CUDA, by shape: what was measured, and where nothing was, what is reasoned.

A decode step is bound by memory, so what counts is how much of the weight is under way: at 4.3 TB/s and some 800 ns
from asking to having, 3.5 MB, or 27 KB on each of 132 multiprocessors. A program has stages - 1 blocks of the weight
under way; with [64, 128] of 16 bits, 16 KiB each, that is 32 KiB at three stages, and three such programs fit the
shared memory of one multiprocessor. So a tile takes the least rows of the weight that the tensor cores take at once,
and K is split until each multiprocessor has two programs or more, all at once: a second wave of few would run at a part
of the speed. From some 90 rows in 16 bits, and 180 in int8, a product waits for arithmetic, and tiles are squarer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["linear", "linear_swiglu", "linear_argmax"]

LIBRARY_ROWS = 64
"""Rows up to which products of floats are computed here, beyond by the library, where nothing was measured."""

SHARED_BYTES = 227 << 10
"""Shared memory of a multiprocessor, and of a program at most."""

_RESERVED = 1 << 10
"""Of it, for each program."""

_SPLITS = 8
"""At most, since a program adds up the parts of a tile alone."""

_LEAST_BLOCKS = 4
"""Of K, that a part has, so that asking for blocks ahead begins to pay."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """n: outputs of a program; the rows of the weight that it reads, or half of them where gate and up are two. m: rows
    of x. k: numbers of a row at a time. split: programs that share a tile's K. warps, stages: of a program, the latter
    being the blocks in shared memory."""

    n: int
    m: int
    k: int
    split: int
    warps: int
    stages: int

    def shared_bytes(self, kind: Kind, itemsize: int) -> int:
        """Of a program."""
        return self.stages * (self.n * (1 + (kind == "linear_swiglu")) + self.m) * self.k * itemsize


MEASURED: dict[tuple[Kind, int, int, int, int], Tiles | None] = {}
"""By `key`; None is the library. A sweep on the device enters `candidates` here one by one and times the kernel; what
it found best stands here as text, so that a server's start depends on no timing."""

BUCKETS = (16, 32, 64, 128, 256, 512, 1024)
"""Of rows; the last of all more. A bucket has one choice for a shape, so that a step of each has all compiled."""

_FLOAT32 = (32, 32, 32, 4, 3)
_REASONED: dict[tuple[bool, int], tuple[tuple[int, int, int, int, int], ...]] = {
    (False, 4): ((32, 16, 32, 4, 3), *[_FLOAT32] * 6),
    (True, 4): ((32, 16, 32, 4, 3), *[_FLOAT32] * 6),
    (False, 2): ((64, 16, 128, 4, 3), (64, 32, 128, 4, 3), (64, 64, 64, 4, 4), (128, 128, 64, 8, 4),
                 *[(128, 256, 64, 8, 4)] * 3),
    (True, 2): ((64, 16, 64, 4, 4), (64, 32, 64, 4, 3), (64, 64, 64, 4, 3), (64, 128, 64, 8, 3),
                *[(128, 128, 64, 8, 4)] * 3),
    (False, 1): ((64, 16, 128, 4, 4), (64, 32, 128, 4, 4), (64, 64, 128, 4, 4), (128, 128, 128, 8, 3),
                 *[(128, 128, 128, 8, 3)] * 2, (128, 256, 128, 8, 4)),
    (True, 1): ((64, 16, 128, 4, 3), (64, 32, 128, 4, 3), (64, 64, 128, 4, 3), (64, 128, 128, 8, 3),
                (64, 256, 128, 8, 4), *[(128, 128, 128, 8, 4)] * 2),
}
"""(gated, itemsize) -> n, m, k, warps, stages by bucket. Three programs or more to a multiprocessor up to 64 rows."""


def bucket(rows: int) -> int:
    return next((b for b in BUCKETS if rows <= b), BUCKETS[-1])


def key(kind: Kind, itemsize: int, rows: int, n: int, k: int) -> tuple[Kind, int, int, int, int]:
    """Of `MEASURED`: as the arguments of `choose`, but for rows, of which it has the bucket."""
    return kind, itemsize, bucket(rows), n, k


def choose(kind: Kind, itemsize: int, rows: int, n: int, k: int, processors: int) -> Tiles | None:
    """The tiles of a product of x [rows, k] and a weight [n, k] of numbers of so many bytes; None for the library.
    processors: multiprocessors of the device."""
    entry = key(kind, itemsize, rows, n, k)
    if entry in MEASURED and (MEASURED[entry] or itemsize > 1 or takes_int8(rows, n, k)):
        return MEASURED[entry]
    if itemsize > 1 and rows > LIBRARY_ROWS:
        return None
    return reasoned(kind, itemsize, rows, n, k, processors)


def takes_int8(rows: int, n: int, k: int) -> bool:
    """Whether the library multiplies int8 of these shapes (`torch._int_mm`)."""
    return rows > 16 and n % 8 == 0 and k % 8 == 0


def reasoned(kind: Kind, itemsize: int, rows: int, n: int, k: int, processors: int) -> Tiles:
    """As `choose`, of what is here."""
    tile_n, m, tile_k, warps, stages = _REASONED[kind == "linear_swiglu", itemsize][BUCKETS.index(bucket(rows))]
    tiles = Tiles(tile_n, m, tile_k, 1, warps, stages)
    return replace(tiles, split=split(tiles, kind, itemsize, rows, n, k, processors))


def split(tiles: Tiles, kind: Kind, itemsize: int, rows: int, n: int, k: int, processors: int) -> int:
    """Parts of K, so that two programs or more have a multiprocessor, and all programs have one at once, if there are
    as many rows as the bucket has."""
    if kind == "linear_argmax" or rows > BUCKETS[-2]:
        return 1
    outputs = n // 2 if kind == "linear_swiglu" else n
    count = -(-outputs // tiles.n) * -(-bucket(rows) // tiles.m)
    at_once = processors * max(1, SHARED_BYTES // (tiles.shared_bytes(kind, itemsize) + _RESERVED))
    wanted = -(-min(at_once, 2 * processors) // count)
    most = min(at_once // count, -(-k // tiles.k) // _LEAST_BLOCKS, _SPLITS)
    return max(1, min(wanted, most))


def candidates(kind: Kind, itemsize: int, rows: int, n: int, k: int, processors: int, best: Tiles | None = None
               ) -> list[Tiles | None]:
    """What a sweep may time for a shape: first `best`, or what is reasoned, then what differs from it in one thing;
    without a best, also the library where it has such products. A sweep from the best of one before comes nearer."""
    centre = best or reasoned(kind, itemsize, rows, n, k, processors)
    near = [replace(centre, **{name: value}) for name, value in (
        ("n", centre.n * 2), ("n", centre.n // 2), ("m", centre.m // 2), ("k", centre.k * 2), ("k", centre.k // 2),
        ("stages", centre.stages + 1), ("stages", centre.stages - 1), ("stages", centre.stages + 2),
        ("warps", 12 - centre.warps))]
    if rows > 128:
        near.append(replace(centre, m=centre.m * 2))
    made: list[Tiles | None] = [centre]
    for tiles in near:  # of another size, they are cut anew
        parts = tiles.split if tiles.n == centre.n and tiles.m == centre.m else split(
            tiles, kind, itemsize, rows, n, k, processors)
        made.append(replace(tiles, split=parts))
    if kind != "linear_argmax":
        made += [replace(centre, split=parts) for parts in (centre.split - 1, centre.split + 1, 2 * centre.split)]
    fitting: list[Tiles | None] = [tiles for tiles in made if tiles and _fits(tiles, kind, itemsize, k)]
    if best is None and (itemsize > 1 or (kind != "linear_argmax" and takes_int8(rows, n, k))):
        fitting.append(None)
    return list(dict.fromkeys(fitting))


def _fits(tiles: Tiles, kind: Kind, itemsize: int, k: int) -> bool:
    """The tensor cores take it, a program's shared memory and registers hold it, and each part of K has work."""
    sums = tiles.n * tiles.m * (1 + (kind == "linear_swiglu"))
    return (min(tiles.n, tiles.m) >= 16 and tiles.k * itemsize >= 32 and tiles.stages >= 2
            and tiles.shared_bytes(kind, itemsize) <= SHARED_BYTES - _RESERVED and sums <= 128 * 32 * tiles.warps
            and 1 <= tiles.split <= min(_SPLITS, -(-k // tiles.k)))
