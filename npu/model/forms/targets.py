"""Targets of the checkpoint's tensors: where the loader puts their rows, and what it accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from npuserve.npu.model.layers.shard import Rows, Span

FLOATS = ("F32", "F16", "BF16", "F64")
INT8 = ("I8",)
INTEGERS = ("I8", "I16", "I32", "I64")
FLOAT8S = ("F8_E4M3",)
INT32 = ("I32",)
INT64 = ("I64",)
"""Names of dtypes in safetensors."""

Put = Callable[[int, Tensor], None]
"""Function of a row and the tensor's rows from there on. Raises ValueError for invalid numbers."""

Shapes = tuple[tuple[int, ...], ...]

SINGLE: Shapes = ((1,), (), (1, 1))
"""Shapes of a single number."""


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a tensor of the checkpoint.

    put: writes rows of the tensor.
    shapes: accepted shapes. The tensor is reshaped to the first.
    nbytes: size of the stored form.
    dtypes: accepted dtypes.
    required: the checkpoint must contain it.
    early: the tensor is put before those that are not, since they are put by its numbers.
    rows, columns: part of the tensor that is put, after the reshape; None for all.
    """

    put: Put
    shapes: Shapes
    nbytes: int
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True
    early: bool = False
    rows: Span | None = None
    columns: Span | None = None


Targets = dict[str, Target]
"""Tensor name of the checkpoint -> target."""


def target_of_rows(
    put: Put, rows: Span | Rows | None, shapes: Shapes, nbytes: int, dtypes: tuple[str, ...] = FLOATS, *,
    columns: Span | None = None,
) -> Target:
    """Return the target of some rows of a tensor; None for all of them."""
    if isinstance(rows, Rows):
        return Target(partial(put_ranges, put, rows.ranges), shapes, nbytes, dtypes, columns=columns)
    return Target(put, shapes, nbytes, dtypes, rows=rows, columns=columns)


def put_ranges(put: Put, ranges: tuple[tuple[int, int], ...], row: int, piece: Tensor) -> None:
    """Put the rows of a piece that lie in `ranges`, which are stacked at the target."""
    begin = 0
    for first, size in ranges:
        low = max(first, row)
        high = min(first + size, row + len(piece))
        if low < high:
            put(begin + low - first, piece[low - row : high - row])
        begin += size


def put_both(first: Put, second: Put, row: int, piece: Tensor) -> None:
    """Put rows that two targets take."""
    first(row, piece)
    second(row, piece)


def put_after(put: Put, first: int, row: int, piece: Tensor) -> None:
    """Put rows behind `first` others."""
    put(first + row, piece)


def put_columns(put: Put, columns: Span, row: int, piece: Tensor) -> None:
    """Put some columns of rows."""
    put(row, piece[:, columns.first : columns.first + columns.size])


def put_copy(into: Tensor, first: int, row: int, piece: Tensor) -> None:
    """Copy rows to `into`, behind `first` others."""
    into[first + row : first + row + len(piece)] = piece


def ignore(row: int, piece: Tensor) -> None:
    """Ignore a bias that another rank adds, and scales of inputs that are not quantized."""


def put_scales(into: Tensor, row: int, piece: Tensor) -> None:
    """Copy scales."""
    if not bool((piece.isfinite() & (piece > 0)).all()):
        raise ValueError("scales must be numbers above 0")
    into[row : row + len(piece)] = piece


def zeros_target(into: Tensor | None, shapes: Shapes, rows: Span | Rows | None = None) -> Target:
    """Return the target of zero points. into: None for a symmetric scheme; some checkpoints contain zeros even then."""
    if into is None:
        return Target(_put_no_zeros, shapes, 0, INTEGERS + FLOAT8S, required=False)
    return target_of_rows(partial(_put_zeros, into), rows, shapes, into.nbytes, INTEGERS)


def _put_zeros(into: Tensor, row: int, piece: Tensor) -> None:
    if bool(((piece < -128) | (piece > 127)).any()):
        raise ValueError("zero points must be in [-128, 127]")
    into[row : row + len(piece)] = piece


def _put_no_zeros(row: int, piece: Tensor) -> None:
    if bool(piece.any()):
        raise ValueError("is not 0, though config.json says that the quantization is symmetric")
