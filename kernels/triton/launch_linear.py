"""Calls of the products with weights: checks of arguments, and division into tiles (see `linear_tiles`)."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.quantized import Int8, Int8Weight, Weight
from npuserve.kernels.triton.common import FLOATS, INT32, check, matrix, power, within
from npuserve.kernels.triton.dependent import dependent
from npuserve.kernels.triton.linear import argmax_merge_kernel, finish_kernel, product_kernel
from npuserve.kernels.triton.linear_tiles import Kind, Tiles, choose, takes_int8

TILES = 1 << 16
"""Maximum number of tiles whose K is split."""

AHEAD_BYTES = 32 << 20
"""Bytes of a weight that a launch may prefetch into the L2 cache while the previous one runs: half of an H200's."""

_GROUP = 8
_MERGED = 4096
_FINISHED = 1024


def linear(x: Tensor | Int8, weight: Weight, bias: Tensor | None, tiles: Tiles | None = None) -> Tensor:
    """Launch the kernel `linear`, for x and weight both int8 or both floats.

    tiles: replace the tiles of the table.

    Raises TypeError or ValueError.
    """
    values, numbers = _operands(x, weight, bias)
    tiles = tiles or _choose("linear", values, numbers)
    if tiles is None and not isinstance(weight, Int8Weight):
        return F.linear(values, numbers, bias)
    return _outputs("linear", x, weight, bias, tiles)


def linear_swiglu(x: Tensor | Int8, weight: Weight, bias: Tensor | None, tiles: Tiles | None = None) -> Tensor | None:
    """Launch the kernel `linear_swiglu` without a scheme; None where `linear` and `swiglu` are faster by the table."""
    values, numbers = _operands(x, weight, bias)
    if len(numbers) % 2:
        raise ValueError(f"weight: {len(numbers)} rows are not as many of gate and up")
    tiles = tiles or _choose("linear_swiglu", values, numbers)
    if tiles is None and not isinstance(weight, Int8Weight):
        return None
    return _outputs("linear_swiglu", x, weight, bias, tiles)


def linear_argmax(
    x: Tensor | Int8, weight: Weight, bias: Tensor | None, vocabulary: int, tiles: Tiles | None = None
) -> Tensor | None:
    """Launch the kernel `linear_argmax`; None where `linear` and `greedy` are faster by the table."""
    values, numbers = _operands(x, weight, bias)
    within("vocabulary", vocabulary, 1, len(numbers))
    tiles = tiles or _choose("linear_argmax", values, numbers)
    if tiles is None:
        return None
    if tiles.split != 1:
        raise ValueError(f"tiles: {tiles.split} parts of K; a choice is made of whole sums")
    count = -(-vocabulary // tiles.n)
    best = torch.empty(len(values), count, dtype=torch.float32, device=values.device)
    places = torch.empty(len(values), count, dtype=torch.int32, device=values.device)
    ids = torch.empty(len(values), 1, dtype=torch.int64, device=values.device)
    nothing = torch.empty(0, dtype=weight.dtype, device=values.device)
    _product("linear_argmax", x, weight, bias, nothing, tiles, vocabulary, best, places)
    if len(values):
        argmax_merge_kernel[(len(values),)](
            best=best, places=places, ids=ids, tiles=count, BLOCK=min(_MERGED, power(count)), **dependent(values))
    return ids


def library(kind: Kind, x: Tensor | Int8, weight: Weight, bias: Tensor | None) -> Tensor:
    """Compute `linear` or `linear_swiglu` of int8 by torch's library, which stores the sums [T, N] in memory.

    Raises ValueError for shapes that the library does not support.
    """
    values, numbers = _operands(x, weight, bias)
    if not isinstance(x, Int8) or not takes_int8(len(values), *numbers.shape):
        raise ValueError(f"x: {list(values.shape)} and a weight {list(numbers.shape)} are no product of the library's")
    return _outputs(kind, x, weight, bias, None)


def _outputs(kind: Kind, x: Tensor | Int8, weight: Weight, bias: Tensor | None, tiles: Tiles | None) -> Tensor:
    """Return the output for checked operands. tiles: None computes int8 by the library."""
    gated = kind == "linear_swiglu"
    shape = len(x), weight.shape[0] // (1 + gated)
    out = torch.empty(shape, dtype=weight.dtype, device=x.values.device if isinstance(x, Int8) else x.device)
    if tiles is not None:
        _product(kind, x, weight, bias, out, tiles)
        return out
    assert isinstance(x, Int8)
    assert isinstance(weight, Int8Weight)
    assert isinstance(weight.values, Tensor)
    sums = torch._int_mm(x.values, weight.values.t())
    finish_kernel[(shape[0], -(-shape[1] // _FINISHED))](
        sums=sums, x_scale=x.scale, weight_scale=weight.scale, bias=bias, out=out, tokens=shape[0], n=shape[1],
        GATED=gated, BLOCK=_FINISHED, **dependent(sums))
    return out


def _operands(x: Tensor | Int8, weight: Weight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Check x [T, K], weight [N, K] and their scales, and return the numbers of both."""
    if isinstance(x, Int8) != isinstance(weight, Int8Weight):
        raise TypeError("x and weight: one is int8, the other is not")
    values = x.values if isinstance(x, Int8) else x
    numbers = weight.values if isinstance(weight, Int8Weight) else weight
    if not isinstance(numbers, Tensor) or numbers.dim() != 2:
        raise TypeError("weight: not a matrix of a tensor")
    device, (n, k) = values.device, numbers.shape
    within("rows of weight", n, 1, INT32 // 4)
    within("columns of weight", k, 1, 1 << 15 if isinstance(weight, Int8Weight) else 1 << 20)
    if values.dim() != 2 or values.shape[1] != k:
        raise ValueError(f"x: {list(values.shape)} is not [rows, {k}]")
    within("rows of x", len(values), 0, 1 << 22)
    if isinstance(x, Int8) and isinstance(weight, Int8Weight):
        if x.zero is not None or weight.zero is not None:
            raise ValueError("zero: on CUDA int8 activations and weights have no zeros")
        check("values of x", values, (len(values), k), (torch.int8,), device)
        check("scale of x", x.scale, (len(values),), (torch.float32,), device)
        check("values of weight", numbers, (n, k), (torch.int8,), device)
        check("scale of weight", weight.scale, (n,), (torch.float32,), device)
        if weight.dtype not in FLOATS:
            raise ValueError(f"weight: products of {weight.dtype}")
    else:
        matrix("x", values, device)
        check("weight", numbers, (n, k), (values.dtype,), device)
    if bias is not None:
        check("bias", bias, (n,), FLOATS, device)
    return values, numbers


def _choose(kind: Kind, values: Tensor, numbers: Tensor) -> Tiles | None:
    n, k = numbers.shape
    return choose(kind, numbers.itemsize, len(values), n, k, processors(values.device))


@cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a device; if Triton interprets, of the device of the tables."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def _arrived(device: torch.device) -> Tensor:
    """Return [TILES] int32, 0 between launches. All products of a device run in sequence on one stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first product of a process cannot be captured: run a step before")
    return torch.zeros(TILES, dtype=torch.int32, device=device)


def _ahead(weight: Tensor, rows: int) -> int:
    """Return the numbers to prefetch of each row; rows: of all programs together."""
    if weight.shape[1] * weight.itemsize % 16:
        return 0
    return AHEAD_BYTES // (rows * weight.itemsize) // 16 * 16


def _product(
    kind: Kind, x: Tensor | Int8, weight: Weight, bias: Tensor | None, out: Tensor, tiles: Tiles,
    vocabulary: int = 0, best: Tensor | None = None, places: Tensor | None = None,
) -> None:
    """Fill `out`, or `best` and `places`, of which `out` is then the dtype, for checked operands."""
    values, x_scale = (x.values, x.scale) if isinstance(x, Int8) else (x, None)
    numbers, weight_scale = (weight.values, weight.scale) if isinstance(weight, Int8Weight) else (weight, None)
    assert isinstance(numbers, Tensor)
    gated = kind == "linear_swiglu"
    (rows, k), n = values.shape, len(numbers) // (1 + gated)
    if not rows:
        return
    columns = n if best is None else vocabulary  # padding rows of an LM head are not read
    heights, widths = -(-rows // tiles.m), -(-columns // tiles.n)
    within("tiles", heights * widths * tiles.split, 1, INT32)
    partial, arrived = None, None
    if tiles.split > 1:
        within("tiles whose K is split", heights * widths, 1, TILES)
        size = heights * widths * tiles.split * (1 + gated) * tiles.n * tiles.m
        whole = torch.int32 if weight_scale is not None else torch.float32
        partial, arrived = torch.empty(size, dtype=whole, device=values.device), _arrived(values.device)
    product_kernel[(heights * widths * tiles.split,)](
        x=values, x_scale=x_scale, weight=numbers, weight_scale=weight_scale, bias=bias, out=out, best=best,
        places=places, partial=partial, arrived=arrived, tokens=rows, n=columns, k=k, x_stride=values.stride(0),
        ahead=_ahead(numbers, heights * widths * tiles.split * tiles.n * (1 + gated)), GATED=gated, BLOCK_N=tiles.n,
        BLOCK_M=tiles.m, BLOCK_K=tiles.k, SPLIT=tiles.split, GROUP=_GROUP, EVEN=k % tiles.k == 0, ONCE=heights == 1,
        WIDE=not values.is_cuda and values.dtype == torch.bfloat16, num_warps=tiles.warps, num_stages=tiles.stages,
        **dependent(values))
