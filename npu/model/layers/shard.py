"""Division of a model among the ranks of a tensor-parallel group. Imports no torch.

Queries, keys, values, gate and up are divided by rows (heads and intermediate columns), the attention's output and down
by columns, embedding and LM head by rows of the vocabulary (Megatron-LM, https://arxiv.org/abs/1909.08053). Norms are
on each rank. If there are more ranks than key and value heads, several ranks hold the same head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Range of the rows or columns of a tensor in the checkpoint.

    first: first row or column of the range.
    size: number of rows or columns in the range.
    whole: rows or columns of the tensor.
    """

    first: int
    size: int
    whole: int

    @staticmethod
    def all(size: int) -> Span:
        """Return the range of all rows or columns."""
        return Span(0, size, size)

    def times(self, width: int) -> Span:
        """Return the range of rows if each unit of this one has `width` rows."""
        return Span(self.first * width, self.size * width, self.whole * width)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(first row, number of rows) of the range, as `Rows.ranges`."""
        return ((self.first, self.size),)


class Rows(NamedTuple):
    """Ranges of rows of a tensor in the checkpoint, stacked in this order.

    ranges: (first row, number of rows) of each.
    whole: rows of the tensor.
    """

    ranges: tuple[tuple[int, int], ...]
    whole: int

    @property
    def size(self) -> int:
        """Number of rows in all ranges."""
        return sum(size for _, size in self.ranges)

    @staticmethod
    def stacked(*spans: Span) -> Rows:
        """Return the rows of spans of tensors that the checkpoint has stacked into one, in this order."""
        ranges = []
        begin = 0
        for span in spans:
            ranges.append((begin + span.first, span.size))
            begin += span.whole
        return Rows(tuple(ranges), begin)

    @staticmethod
    def of_units(units: Span, size: int, *parts: tuple[int, int], by_unit: bool = False) -> Rows:
        """Return parts of each of the units: the first part of all units, then the second, and so on.

        size: rows of a unit.
        parts: (first row, number of rows) in a unit.
        by_unit: all parts of the first unit, then those of the second, and so on.
        """
        firsts = [unit * size for unit in range(units.first, units.first + units.size)]
        if by_unit:
            ranges = [(begin + first, rows) for begin in firsts for first, rows in parts]
        else:
            ranges = [(begin + first, rows) for first, rows in parts for begin in firsts]
        return Rows(tuple(ranges), units.whole * size)


class DivisionError(ValueError):
    """The ranks cannot divide a layer; the message says why."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a model.

    rank, size: number of the rank, from 0, and of all ranks.
    whole_experts: each rank has whole experts. Otherwise it has a part of the rows of each.
    """

    rank: int = 0
    size: int = 1
    whole_experts: bool = False

    def part(self, whole: int) -> Span:
        """Return this rank's part of `whole` units, which the number of ranks divides."""
        size = whole // self.size
        return Span(self.rank * size, size, whole)

    def kv_heads(self, whole: int) -> Span:
        """Return the key and value heads of this rank's query heads: one at least, which other ranks may have too."""
        return Span(self.rank * whole // self.size, max(1, whole // self.size), whole)

    def vocabulary(self, whole: int, padded: int) -> Span:
        """Return this rank's ids of `whole`, if each rank has the same number of the `padded` rows."""
        rows = padded // self.size
        first = min(self.rank * rows, whole)
        return Span(first, min(rows, whole - first), whole)


WHOLE = Shard()
