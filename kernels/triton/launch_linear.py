"""Calls of the products with weights: checks of arguments, and division into tiles (see `linear_tiles`)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.int4 import WORD_CODES, PlainInt4
from npuserve.kernels.int4_weight import Int4Weight
from npuserve.kernels.quantized import FLOAT8, GROUP, Quantized
from npuserve.kernels.triton.common import FLOATS, INT32, check, matrix, power, processors, shared_memory, within
from npuserve.kernels.triton.dependent import dependent
from npuserve.kernels.triton.linear import argmax_merge_kernel, finish_kernel, product_kernel
from npuserve.kernels.triton.linear_tiles import (
    Form,
    Kind,
    Tiles,
    calculated,
    choose,
    fitted,
    takes_float8,
    takes_int8,
)
from npuserve.kernels.weight import Weight, form_of

TILES = 1 << 16
"""Maximum number of tiles whose K is split."""

AHEAD_BYTES = 6 << 20
"""Bytes of a weight that a launch may prefetch into the L2 cache while the previous one runs.

Measured on an H200 in decode steps of Qwen3-14B's shape, by MiB: in bf16 1: 7.53 ms, 6: 7.56, 13: 7.63, 20: 7.78,
28: 7.94; in W8A8 1: 4.66, 6: 4.63, 13: 4.73, 20: 4.87, 28: 5.04. More is evicted before its use."""

PRECISE_ROWS = 64
"""Maximum rows of x in a tile whose float8 products are summed in float32 after each block of K.

Hopper's tensor cores sum products of float8 with some 14 bits, which over a K of 4096 can make errors of 2%
(DeepSeek-V3, arXiv:2412.19437, 3.3.2). A decode step waits for memory, so the additional sums take no time there.
Larger tiles and the library sum fast, as the default kernels of vLLM do. On an H200 the error of the library's sums
over a K of 17408 is 0.4% of their norm. Rounding x and weight to float8 makes one of 3 to 4%."""

_GROUP = 8
_MERGED = 4096
_FINISHED = 1024


def linear(x: Tensor | Quantized, weight: Weight, bias: Tensor | None, tiles: Tiles | None = None) -> Tensor:
    """Launch the kernel `linear`, for x and weight both int8, both float8 or both floats, or for a weight of 4 bits.

    tiles: replace the tiles of the table.

    Raises TypeError or ValueError.
    """
    operands = operands_of(x, weight, bias)
    tiles = tiles or _choose("linear", operands, bias)
    if tiles is None and operands.weight_scale is None:
        return F.linear(operands.x, operands.weight, bias)
    return _outputs("linear", operands, bias, tiles)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, K] by a weight [N, K] of floats; the result is float32. Raises TypeError or ValueError."""
    operands = operands_of(x, weight, None)._replace(dtype=torch.float32)
    n, k = weight.shape
    tiles = calculated("linear", x.itemsize, len(x), n, k, processors(x.device))
    return _outputs("linear", operands, None, fitted(tiles, "linear", x.itemsize, shared_memory(x.device)))


def linear_swiglu(
    x: Tensor | Quantized, weight: Weight, bias: Tensor | None, tiles: Tiles | None = None
) -> Tensor | None:
    """Launch the kernel `linear_swiglu` without a scheme; None where `linear` and `swiglu` are faster by the table."""
    operands = operands_of(x, weight, bias)
    if len(operands.weight) % 2:
        raise ValueError(f"weight: {len(operands.weight)} rows are not as many of gate and up")
    tiles = tiles or _choose("linear_swiglu", operands, bias)
    if tiles is None and operands.weight.dtype != torch.int8:
        return None
    return _outputs("linear_swiglu", operands, bias, tiles)


def linear_argmax(
    x: Tensor | Quantized, weight: Weight, bias: Tensor | None, vocabulary: int, tiles: Tiles | None = None
) -> Tensor | None:
    """Launch the kernel `linear_argmax`; None where `linear` and `greedy` are faster by the table."""
    operands = operands_of(x, weight, bias)
    values = operands.x
    within("vocabulary", vocabulary, 1, len(operands.weight))
    tiles = tiles or _choose("linear_argmax", operands, bias)
    if tiles is None:
        return None
    if tiles.split != 1:
        raise ValueError(f"tiles: {tiles.split} parts of K; a choice is made of whole sums")
    count = -(-vocabulary // tiles.n)
    best = torch.empty(len(values), count, dtype=torch.float32, device=values.device)
    places = torch.empty(len(values), count, dtype=torch.int32, device=values.device)
    ids = torch.empty(len(values), 1, dtype=torch.int64, device=values.device)
    nothing = torch.empty(0, dtype=operands.dtype, device=values.device)
    _product("linear_argmax", operands, bias, nothing, tiles, vocabulary, best, places)
    if len(values):
        argmax_merge_kernel[(len(values),)](
            best=best, places=places, ids=ids, tiles=count, BLOCK=min(_MERGED, power(count)), **dependent(values))
    return ids


def library(kind: Kind, x: Tensor | Quantized, weight: Weight, bias: Tensor | None) -> Tensor:
    """Compute `linear` or `linear_swiglu` of int8, or `linear` of float8, by torch's library.

    It stores the sums [T, N] of int8 in memory. Raises ValueError for operands that the library does not support.
    """
    operands = operands_of(x, weight, bias)
    values, numbers = operands.x, operands.weight
    if numbers.dtype == FLOAT8:
        supported = kind == "linear" and _multiplies_float8(operands, bias)
    else:
        supported = operands.x_scale is not None and takes_int8(len(values), *numbers.shape)
    if not supported:
        raise ValueError(f"x: {list(values.shape)} and a weight {list(numbers.shape)} are no product of the library's")
    return _outputs(kind, operands, bias, None)


class Operands(NamedTuple):
    """Operands of a product.

    x: [T, K]; weight: [N, K], or words [N, K / 8] of 4 bits.
    x_scale, weight_scale, weight_zero: None for floats, and for 0.
    dtype: of the result.
    k: numbers of a row.
    int4_group: columns of a group of a weight of 4 bits; 0 for other weights.
    """

    x: Tensor
    weight: Tensor
    x_scale: Tensor | None
    weight_scale: Tensor | None
    dtype: torch.dtype
    k: int
    weight_zero: Tensor | None = None
    int4_group: int = 0

    @property
    def scale_stride(self) -> int:
        """Numbers between successive scales, of rows of 4 bits or of groups of float8."""
        if self.int4_group and self.weight_scale is not None:
            return self.weight_scale.shape[1]
        return len(self.weight)

    @property
    def form(self) -> Form:
        """Form by which tiles are chosen."""
        if self.int4_group:
            return "int4"
        if self.weight_scale is None or self.weight.dtype != FLOAT8:
            return ""
        return "grouped float8" if self.weight_scale.dim() == 2 else "float8"


def _outputs(kind: Kind, operands: Operands, bias: Tensor | None, tiles: Tiles | None) -> Tensor:
    """Return the output for checked operands. tiles: None computes int8 and float8 by the library."""
    gated = kind == "linear_swiglu"
    x, weight, x_scale, weight_scale, dtype, *_ = operands
    shape = len(x), len(weight) // (1 + gated)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    if tiles is not None:
        _product(kind, operands, bias, out, tiles)
        return out
    assert x_scale is not None
    assert weight_scale is not None
    if weight.dtype == FLOAT8:
        assert not gated
        return torch._scaled_mm(
            x, weight.t(), x_scale.unsqueeze(1), weight_scale.unsqueeze(0), out_dtype=dtype, use_fast_accum=True)
    sums = torch._int_mm(x, weight.t())
    finish_kernel[(shape[0], -(-shape[1] // _FINISHED))](
        sums=sums, x_scale=x_scale, weight_scale=weight_scale, bias=bias, out=out, tokens=shape[0], n=shape[1],
        GATED=gated, BLOCK=_FINISHED, **dependent(sums))
    return out


def operands_of(x: Tensor | Quantized, weight: Weight, bias: Tensor | None) -> Operands:
    """Return the operands after checks of x [T, K], weight [N, K] and their scales."""
    form = form_of(weight)
    if isinstance(form, Int4Weight):
        return _int4_operands(x, form, bias)
    numbers, weight_scale, weight_zero = form.parts
    values, x_scale, x_zero = (x.values, x.scale, x.zero) if isinstance(x, Quantized) else (x, None, None)
    if (x_scale is None) != (weight_scale is None):
        raise TypeError("x and weight: one is quantized, the other is not")
    if numbers.dim() != 2:
        raise TypeError("weight: not a matrix of a tensor")
    device, (n, k) = values.device, numbers.shape
    within("rows of weight", n, 1, INT32 // 4)
    within("columns of weight", k, 1, 1 << 15 if numbers.dtype == torch.int8 else 1 << 20)
    if values.dim() != 2 or values.shape[1] != k:
        raise ValueError(f"x: {list(values.shape)} is not [rows, {k}]")
    within("rows of x", len(values), 0, 1 << 22)
    if x_scale is None or weight_scale is None:
        matrix("x", values, device)
        check("weight", numbers, (n, k), (values.dtype,), device)
    else:
        if x_zero is not None or weight_zero is not None:
            raise ValueError("zero: on CUDA quantized activations and weights have no zeros")
        check("values of x", values, (len(values), k), (numbers.dtype,), device)
        groups = (-(-k // GROUP),) if weight_scale.dim() == 2 else ()
        check("scale of x", x_scale.t(), (*groups, len(values)), (torch.float32,), device)
        check("values of weight", numbers, (n, k), (torch.int8, FLOAT8), device)
        check("scale of weight", weight_scale.t(), (*groups, n), (torch.float32,), device)
        if form.dtype not in FLOATS:
            raise ValueError(f"weight: products of {form.dtype}")
    if bias is not None:
        check("bias", bias, (n,), FLOATS, device)
    return Operands(values, numbers, x_scale, weight_scale, form.dtype, k)


def _int4_operands(x: Tensor | Quantized, weight: Int4Weight, bias: Tensor | None) -> Operands:
    """Return the operands after checks of x [T, K] and a weight [N, K] of 4 bits."""
    numbers = weight.numbers
    if isinstance(x, Quantized):
        raise TypeError("x is quantized, and the weight of 4 bits takes floats")
    if not isinstance(numbers, PlainInt4):
        raise TypeError("weight: its numbers of 4 bits are not row by row")
    n, k = numbers.shape
    device = x.device
    within("rows of weight", n, 1, INT32 // 4)
    within("columns of weight", k, 1, 1 << 20)
    within("rows of x", len(x), 0, 1 << 22)
    matrix("x", x, device)
    if x.shape[1] != k or x.dtype != weight.dtype:
        raise ValueError(f"x: {list(x.shape)} {x.dtype} is not [rows, {k}] {weight.dtype}")
    groups = n, numbers.grouping.groups(k)
    check("words of weight", numbers.words, (n, k // WORD_CODES), (torch.int32,), device)
    check("scale of weight", numbers.scale, groups, FLOATS, device)
    if numbers.zero is not None:
        check("zero points of weight", numbers.zero, groups, (torch.int8,), device)
    if bias is not None:
        check("bias", bias, (n,), FLOATS, device)
    return Operands(x, numbers.words, None, numbers.scale, weight.dtype, k, numbers.zero, numbers.grouping.size)


def _choose(kind: Kind, operands: Operands, bias: Tensor | None) -> Tiles | None:
    values, numbers, form = operands.x, operands.weight, operands.form
    shape = kind, values.itemsize, len(values), len(numbers), operands.k, processors(values.device), form
    tiles = choose(*shape)
    if tiles is None and form and not _multiplies_float8(operands, bias):
        tiles = calculated(*shape)
    return tiles and fitted(tiles, kind, values.itemsize, shared_memory(values.device))


def _multiplies_float8(operands: Operands, bias: Tensor | None) -> bool:
    """Return True if the library multiplies float8 by this weight. On a CPU it does not take scales of rows."""
    return (_on_gpu(operands.weight) and takes_float8(*operands.weight.shape) and operands.dtype == torch.bfloat16
            and bias is None and operands.form == "float8")


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


@cache
def arrived_of(device: torch.device) -> Tensor:
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
    kind: Kind, operands: Operands, bias: Tensor | None, out: Tensor, tiles: Tiles, vocabulary: int = 0,
    best: Tensor | None = None, places: Tensor | None = None,
) -> None:
    """Fill `out`, or `best` and `places`, of which `out` is then the dtype, for checked operands."""
    values, numbers, x_scale, weight_scale, *_ = operands
    gated = kind == "linear_swiglu"
    rows = len(values)
    k = operands.k
    n = len(numbers) // (1 + gated)
    if not rows:
        return
    columns = n if best is None else vocabulary  # padding rows of an LM head are not read
    heights, widths = -(-rows // tiles.m), -(-columns // tiles.n)
    within("tiles", heights * widths * tiles.split, 1, INT32)
    partial, arrived = parts_memory(heights * widths, kind, tiles, operands)
    is_grouped = operands.form == "grouped float8"
    product_kernel[(heights * widths * tiles.split,)](
        x=values, x_scale=x_scale, weight=numbers, weight_scale=weight_scale, weight_zero=operands.weight_zero,
        bias=bias, out=out, best=best, places=places, partial=partial, arrived=arrived, tokens=rows, n=columns, k=k,
        x_stride=values.stride(0), ahead=0 if is_grouped and (columns % 4 or len(numbers) % 4) else _ahead(
            numbers, heights * widths * tiles.split * tiles.n * (1 + gated)),
        scale_stride=operands.scale_stride, GATED=gated, ONCE=heights == 1, **constants_of(operands, tiles),
        **dependent(values))


def constants_of(operands: Operands, tiles: Tiles) -> dict[str, int | bool | None]:
    """Return the constants of a product's kernel that depend on the tiles and on the form of the numbers.

    Raises ValueError for tiles that are not possible.
    """
    is_grouped = operands.form == "grouped float8"
    if is_grouped and GROUP % tiles.k:
        raise ValueError(f"tiles: blocks of {tiles.k} numbers, and {GROUP} share a scale")
    if operands.int4_group and tiles.k % operands.int4_group:
        raise ValueError(f"tiles: blocks of {tiles.k} numbers, and {operands.int4_group} share a scale")
    values = operands.x
    is_precise = operands.weight.dtype == FLOAT8 and tiles.m <= PRECISE_ROWS
    return {
        "BLOCK_N": tiles.n, "BLOCK_M": tiles.m, "BLOCK_K": tiles.k, "SPLIT": tiles.split, "GROUP": _GROUP,
        "EVEN": operands.k % tiles.k == 0, "WIDE": not values.is_cuda and values.dtype == torch.bfloat16,
        "IMPRECISE": tiles.k if is_precise else None, "SCALED_K": GROUP if is_grouped else 0,
        "INT4_GROUP": operands.int4_group, "num_warps": tiles.warps, "num_stages": tiles.stages}


def parts_memory(
    count: int, kind: Kind, tiles: Tiles, operands: Operands
) -> tuple[Tensor | None, Tensor | None]:
    """Return memory for the parts of `count` tiles whose K is split, and for the numbers of those that arrived.

    None if no tile is split. Raises ValueError for too many tiles.
    """
    if tiles.split == 1:
        return None, None
    within("tiles whose K is split", count, 1, TILES)
    size = count * tiles.split * (1 + (kind == "linear_swiglu")) * tiles.n * tiles.m
    whole = torch.int32 if operands.weight.dtype == torch.int8 else torch.float32
    device = operands.x.device
    return torch.empty(size, dtype=whole, device=device), arrived_of(device)
