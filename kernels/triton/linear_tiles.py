"""Tiles of products with weights on CUDA, by shape: measured values, and calculated ones for other shapes.

A decode step is bound by memory, so the bytes of the weight in flight matter. At 4.3 TB/s and a latency of some 800 ns,
3.5 MB must be in flight: 27 KB on each of 132 multiprocessors. A program has `stages - 1` blocks of the weight in
flight. With three stages and blocks of [64, 128] in 16 bits, that is 32 KiB. The shared memory of a multiprocessor
holds three such programs.

A tile therefore takes the minimum rows of the weight that the tensor cores accept. K is split until each
multiprocessor has two or more programs, all resident at once. A second wave of few programs would run at a fraction of
the speed. From some 90 rows in 16 bits, and 180 in 8 bits, a product is bound by arithmetic, and tiles are squarer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from npuserve.kernels.quantized import GROUP

Kind = Literal["linear", "linear_swiglu", "linear_argmax"]

LIBRARY_ROWS = 64
"""Maximum rows for products of floats and float8 in Triton at unmeasured shapes; beyond, the library multiplies."""

SHARED_BYTES = 227 << 10
"""Shared memory of a multiprocessor, also the maximum for one program."""

_RESERVED = 1 << 10
"""Shared memory reserved for each program."""

_SPLITS = 8
"""Maximum parts of K, since one program adds the parts of a tile."""

_LEAST_BLOCKS = 4
"""Minimum blocks of K in a part, so that prefetching blocks pays off."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a product.

    n: outputs of a program. It reads n rows of the weight, or 2 n rows of gate and up.
    m: rows of x.
    k: numbers of a row per block.
    split: programs that share a tile's K.

    warps: warps of a program.
    stages: blocks of a program in shared memory.
    """

    n: int
    m: int
    k: int
    split: int
    warps: int
    stages: int

    def shared_bytes(self, kind: Kind, itemsize: int) -> int:
        """Return the shared memory of a program."""
        return self.stages * (self.n * (1 + (kind == "linear_swiglu")) + self.m) * self.k * itemsize


Form = Literal["", "float8", "grouped float8", "int4"]
"""Numbers that are named, since int8 has the same itemsize, and another library. Grouped numbers have scales for groups
of columns, and so have those of 4 bits; no library multiplies them. Tiles of 4 bits have the itemsize of the floats to
which blocks are dequantized."""

Key = tuple[Kind, int | Form, int, int, int]

MEASURED: dict[Key, Tiles | None] = {
    ("linear_swiglu", 2, 16, 34816, 5120): Tiles(64, 16, 64, 1, 4, 3),
    ("linear", 1, 128, 7168, 5120): None,
    ("linear", 1, 128, 5120, 5120): None,
    ("linear", 1, 128, 5120, 17408): Tiles(128, 128, 256, 6, 8, 3),
    ("linear_argmax", 1, 128, 151936, 5120): Tiles(128, 128, 128, 1, 4, 3),
    ("linear", 1, 256, 7168, 5120): Tiles(128, 64, 128, 1, 8, 3),
    ("linear", 1, 256, 5120, 5120): Tiles(256, 128, 128, 3, 8, 3),
    ("linear_argmax", 1, 256, 151936, 5120): Tiles(128, 128, 128, 1, 4, 3),
}
"""Measured tiles by `key`; None is the library. A sweep on the device enters `candidates` here one by one and times the
kernel. Its best results are text here, so that a server's start does not depend on timings.

These are of Qwen3-14B's shape on an H200, where they are at least 2% of a step or 8% of a kernel faster than the
calculated ones (bench/RESULTS.md)."""

BUCKETS = (16, 32, 64, 128, 256, 512, 1024)
"""Buckets of rows; the last one holds all larger numbers. A bucket has one choice for a shape, so that one step of each
bucket compiles everything."""

_FLOAT32 = (32, 32, 32, 4, 3)
_CALCULATED: dict[tuple[bool, int], tuple[tuple[int, int, int, int, int], ...]] = {
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
"""Map from (gated, itemsize) to n, m, k, warps, stages by bucket. Up to 64 rows, a multiprocessor holds three or more
programs."""

_INT4: dict[tuple[bool, int], tuple[tuple[int, int, int, int, int], ...]] = {
    (False, 4): ((32, 16, 128, 4, 2), *[(32, 32, 128, 4, 2)] * 6),
    (True, 4): ((32, 16, 128, 4, 2), *[(32, 32, 128, 4, 2)] * 6),
    (False, 2): ((64, 16, 128, 4, 3), (64, 32, 128, 4, 3), (64, 64, 128, 4, 3), *[(128, 128, 128, 8, 3)] * 4),
    (True, 2): ((64, 16, 128, 4, 3), (64, 32, 128, 4, 3), (64, 64, 128, 4, 2), *[(64, 128, 128, 8, 3)] * 4),
}
"""The same for weights of 4 bits. A block has whole groups of 128 columns. Not measured on a device."""


def bucket(rows: int) -> int:
    """Return the one of BUCKETS that holds a number of rows."""
    return next((b for b in BUCKETS if rows <= b), BUCKETS[-1])


def key(kind: Kind, itemsize: int, rows: int, n: int, k: int, form: Form = "") -> Key:
    """Return the key of `MEASURED` for the arguments of `choose`; rows are replaced by their bucket."""
    return kind, form or itemsize, bucket(rows), n, k


def choose(kind: Kind, itemsize: int, rows: int, n: int, k: int, processors: int, form: Form = "") -> Tiles | None:
    """Return the tiles of a product of x [rows, k] and weight [n, k]; None for the library.

    itemsize: bytes of a number.
    processors: multiprocessors of the device.
    """
    entry = key(kind, itemsize, rows, n, k, form)
    supported = _has_library(itemsize, rows, n, k, form)
    if entry in MEASURED and (MEASURED[entry] or supported):
        return MEASURED[entry]
    if (itemsize > 1 or form) and supported and rows > LIBRARY_ROWS:
        return None
    return calculated(kind, itemsize, rows, n, k, processors, form)


def _has_library(itemsize: int, rows: int, n: int, k: int, form: Form) -> bool:
    if form:
        return form == "float8" and takes_float8(n, k)
    return itemsize > 1 or takes_int8(rows, n, k)


def takes_float8(n: int, k: int) -> bool:
    """Return True if the library multiplies float8 of these shapes (`torch._scaled_mm`)."""
    return n % 16 == 0 and k % 16 == 0


def takes_int8(rows: int, n: int, k: int) -> bool:
    """Return True if the library multiplies int8 of these shapes (`torch._int_mm`)."""
    return rows > 16 and n % 8 == 0 and k % 8 == 0


def calculated(kind: Kind, itemsize: int, rows: int, n: int, k: int, processors: int, form: Form = "") -> Tiles:
    """Return the tiles of `choose` by calculation, without MEASURED."""
    table = _INT4 if form == "int4" else _CALCULATED
    tile_n, m, tile_k, warps, stages = table[kind == "linear_swiglu", itemsize][BUCKETS.index(bucket(rows))]
    if form == "grouped float8" and m > 64:  # registers hold the sums of a group too
        tile_n, m, stages = 64 if kind == "linear_swiglu" else 128, 128, 3
    tiles = Tiles(tile_n, m, tile_k, 1, warps, stages)
    return replace(tiles, split=split(tiles, kind, itemsize, rows, n, k, processors))


def fitted(tiles: Tiles, kind: Kind, itemsize: int, shared: int) -> Tiles:
    """Return the tiles with fewer stages, and then fewer rows, until a program takes at most `shared` bytes."""
    while tiles.shared_bytes(kind, itemsize) > shared - _RESERVED:
        tiles = replace(tiles, stages=tiles.stages - 1) if tiles.stages > 2 else replace(tiles, m=tiles.m // 2)
    return tiles


def split(tiles: Tiles, kind: Kind, itemsize: int, rows: int, n: int, k: int, processors: int) -> int:
    """Return the parts of K that give each multiprocessor two or more programs, all resident at once.

    The number of rows is taken to be the bucket's maximum.
    """
    if kind == "linear_argmax" or rows > BUCKETS[-2]:
        return 1
    outputs = n // 2 if kind == "linear_swiglu" else n
    return parts_of(-(-outputs // tiles.n) * -(-bucket(rows) // tiles.m), tiles, kind, itemsize, k, processors)


def parts_of(count: int, tiles: Tiles, kind: Kind, itemsize: int, k: int, processors: int) -> int:
    """Return the parts of K of `split` for a product of `count` tiles."""
    at_once = processors * max(1, SHARED_BYTES // (tiles.shared_bytes(kind, itemsize) + _RESERVED))
    wanted = -(-min(at_once, 2 * processors) // count)
    most = min(at_once // count, -(-k // tiles.k) // _LEAST_BLOCKS, _SPLITS)
    return max(1, min(wanted, most))


def candidates(kind: Kind, itemsize: int, rows: int, n: int, k: int, processors: int, best: Tiles | None = None,
               form: Form = "") -> list[Tiles | None]:
    """Return tiles that a sweep may time for a shape: `best`, then variants of it with one changed parameter.

    best: result of a previous sweep, to refine. None takes the calculated tiles, and adds the library if it supports
        the shape.
    """
    centre = best or calculated(kind, itemsize, rows, n, k, processors, form)
    near = [replace(centre, **{name: value}) for name, value in (
        ("n", centre.n * 2), ("n", centre.n // 2), ("m", centre.m // 2), ("k", centre.k * 2), ("k", centre.k // 2),
        ("stages", centre.stages + 1), ("stages", centre.stages - 1), ("stages", centre.stages + 2),
        ("warps", 12 - centre.warps))]
    if rows > 128:
        near.append(replace(centre, m=centre.m * 2))
    made: list[Tiles | None] = [centre]
    for tiles in near:  # other sizes need another split
        parts = tiles.split if tiles.n == centre.n and tiles.m == centre.m else split(
            tiles, kind, itemsize, rows, n, k, processors)
        made.append(replace(tiles, split=parts))
    if kind != "linear_argmax":
        made += [replace(centre, split=parts) for parts in (centre.split - 1, centre.split + 1, 2 * centre.split)]
    fitting: list[Tiles | None] = [tiles for tiles in made if tiles and _fits(tiles, kind, itemsize, k, form)]
    has_argmax = kind != "linear_argmax" or itemsize > 1 or form  # the library of int8 stores no logits
    if best is None and has_argmax and _has_library(itemsize, rows, n, k, form):
        fitting.append(None)
    return list(dict.fromkeys(fitting))


def _fits(tiles: Tiles, kind: Kind, itemsize: int, k: int, form: Form) -> bool:
    """Return True if the tensor cores accept the tiles and shared memory and registers hold them.

    Each part of K must also have work. A block of grouped numbers must be within a group. A block of 4 bits must have
    whole groups of all sizes.
    """
    sums = tiles.n * tiles.m * (1 + (kind == "linear_swiglu"))
    if form == "grouped float8" and (GROUP % tiles.k or sums > 64 * 32 * tiles.warps):
        return False
    if form == "int4" and tiles.k % GROUP:
        return False
    return (min(tiles.n, tiles.m) >= 16 and tiles.k * itemsize >= 32 and tiles.stages >= 2
            and tiles.shared_bytes(kind, itemsize) <= SHARED_BYTES - _RESERVED and sums <= 128 * 32 * tiles.warps
            and 1 <= tiles.split <= min(_SPLITS, -(-k // tiles.k)))
