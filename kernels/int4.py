"""Numbers of 4 bits in groups, with a scale and optionally a zero point for each group of a row.

A code of 0 to 15 stands for (code - 8 - zero) * scale. Codes are stored as int32 words of 8, in the order of the native
kernels (kernels/native/gemm/int4.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from npuserve.kernels.native.binding import LANES

GROUPS = 32, 64, 128
"""Possible numbers of columns of a group."""

WORD_CODES = 8
"""Codes in a word, and of a line of the packed form."""

SHIFTS = tuple(16 * (i % 2) + 4 * (i // 2) for i in range(WORD_CODES))
"""Bit of each code in a word."""

MAX_ZERO = 8
"""Largest magnitude of a zero point."""

SCALE_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Dtype of scales -> ScaleType of int4.cpp."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Form of the groups of a weight.

    size: columns of a group, one of GROUPS. The last group of a row may be shorter.
    scales: dtype of the scales.
    zeros: groups have zero points.
    """

    size: int
    scales: torch.dtype
    zeros: bool = False

    @property
    def code(self) -> int:
        """The form as the native kernels take it."""
        return SCALE_TYPES[self.scales] + 4 * self.zeros

    @property
    def header_bytes(self) -> int:
        """Bytes before the codes of a group of a packed panel."""
        return LANES * (self.scales.itemsize + self.zeros)

    def groups(self, k: int) -> int:
        """Return the number of groups of a row of k columns."""
        return -(-k // self.size)

    def plain_bytes(self, n: int, k: int) -> int:
        """Return the bytes of `PlainInt4` numbers [n, k]."""
        return n * (k // 2 + self.groups(k) * (self.scales.itemsize + self.zeros))

    def packed_bytes(self, n: int, k: int) -> int:
        """Return the bytes of `PackedInt4` numbers [n, k]."""
        return -(-n // LANES) * (self.groups(k) * self.header_bytes + k * LANES // 2)


def to_words(codes: Tensor) -> Tensor:
    """Return codes [..., K] of 0 to 15 as words [..., K / 8] int32."""
    eights = codes.unflatten(-1, (-1, WORD_CODES)).int()
    words: Tensor = eights[..., 0].clone()
    for i, shift in enumerate(SHIFTS[1:], 1):
        words |= eights[..., i] << shift
    return words


def to_codes(words: Tensor) -> Tensor:
    """Return words [..., K / 8] as codes [..., K] uint8."""
    return torch.stack([(words >> shift & 15).to(torch.uint8) for shift in SHIFTS], dim=-1).flatten(-2)


@dataclass(slots=True, eq=False)
class PlainInt4:
    """Numbers [N, K], row by row.

    words: [N, K / 8] int32.
    scale: [N, groups].
    zero: [N, groups] int8, or None for 0.
    """

    grouping: Grouping
    words: Tensor
    scale: Tensor
    zero: Tensor | None = None

    @classmethod
    def allocate(cls, n: int, k: int, grouping: Grouping, memory: Callable[..., Tensor] = torch.zeros) -> PlainInt4:
        """Return numbers over new memory. memory: allocator with the interface of `torch.zeros`."""
        shape = n, grouping.groups(k)
        return cls(grouping, memory((n, k // WORD_CODES), dtype=torch.int32), memory(shape, dtype=grouping.scales),
                   memory(shape, dtype=torch.int8) if grouping.zeros else None)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return len(self.words), self.words.shape[1] * WORD_CODES

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.words, self.scale, self.zero) if part is not None)

    def write(self, first: int, words: Tensor, column: int = 0) -> None:
        """Write words [m, w] to rows [first, first + m), from column `column` on."""
        begin = column // WORD_CODES
        self.words[first : first + len(words), begin : begin + words.shape[1]] = words

    def write_scale(self, first: int, scale: Tensor, group: int = 0) -> None:
        """Write scales [m, g] of rows, from group `group` on."""
        self.scale[first : first + len(scale), group : group + scale.shape[1]] = scale

    def write_zero(self, first: int, zero: Tensor, group: int = 0) -> None:
        """Write zero points [m, g] of rows, from group `group` on."""
        assert self.zero is not None
        self.zero[first : first + len(zero), group : group + zero.shape[1]] = zero

    def rows(self, ids: Tensor) -> PlainInt4:
        """Return rows `ids` [m] int64."""
        ids = ids.to(self.words.device)
        return replace(self, words=self.words[ids], scale=self.scale[ids],
                       zero=None if self.zero is None else self.zero[ids])


@dataclass(slots=True, eq=False)
class PackedInt4:
    """Numbers [n, k] in the form of kernels/native/gemm/int4.cpp.

    packed: int32, [n / 16] panels.
    """

    grouping: Grouping
    packed: Tensor
    n: int
    k: int

    @classmethod
    def allocate(cls, n: int, k: int, grouping: Grouping, memory: Callable[..., Tensor] = torch.zeros) -> PackedInt4:
        """Return numbers over new memory. memory: allocator with the interface of `torch.zeros`; zeros."""
        return cls(grouping, memory((grouping.packed_bytes(n, k) // 4,), dtype=torch.int32), n, k)

    @classmethod
    def pack(cls, plain: PlainInt4) -> PackedInt4:
        """Return a packed copy."""
        packed = cls.allocate(*plain.shape, plain.grouping)
        packed.write(0, plain.words)
        packed.write_scale(0, plain.scale)
        if plain.zero is not None:
            packed.write_zero(0, plain.zero)
        return packed

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.n, self.k

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def write(self, first: int, words: Tensor, column: int = 0) -> None:
        """Write words [m, w] to rows [first, first + m), from column `column` on, the first of a group."""
        begin = column // WORD_CODES
        end = begin + words.shape[1]
        first_of_view = 0
        for view in self._lines():  # [panels, groups, lines, 16]
            groups, lines = view.shape[1:3]
            low, high = max(begin, first_of_view), min(end, first_of_view + groups * lines)
            if low < high:
                part = words[:, low - begin : high - begin].unflatten(1, (-1, lines))
                group = (low - first_of_view) // lines
                _put(view[:, group : group + part.shape[1]], first, part)
            first_of_view += groups * lines

    def write_scale(self, first: int, scale: Tensor, group: int = 0) -> None:
        """Write scales [m, g] of rows, from group `group` on."""
        _put(self._scales()[:, group : group + scale.shape[1]], first, scale)

    def write_zero(self, first: int, zero: Tensor, group: int = 0) -> None:
        """Write zero points [m, g] of rows, from group `group` on."""
        _put(self._zeros()[:, group : group + zero.shape[1]], first, zero)

    def rows(self, ids: Tensor) -> PlainInt4:
        """Return copies of rows `ids` [m] int64."""
        words = torch.cat([_taken(view, ids).flatten(1) for view in self._lines()], dim=1)
        zero = _taken(self._zeros(), ids) if self.grouping.zeros else None
        return PlainInt4(self.grouping, words, _taken(self._scales(), ids), zero)

    def _lines(self) -> list[Tensor]:
        """Return views of the codes, [panels, groups, lines, 16] int32: of whole groups, and of a shorter last one."""
        whole, rest = divmod(self.k, self.grouping.size)
        lines, header = self.grouping.size // WORD_CODES, self.grouping.header_bytes // 4
        strides = (self._panel_bytes // 4, self._group_bytes // 4, LANES, 1)

        def view(first: int, groups: int, count: int) -> Tensor:
            """Return the view of `groups` groups of `count` lines, from group `first` on."""
            offset = self.packed.storage_offset() + first * self._group_bytes // 4 + header
            return self.packed.as_strided((self._panels, groups, count, LANES), strides, offset)

        views = [view(0, whole, lines)] if whole else []
        if rest >= WORD_CODES:
            views.append(view(whole, 1, rest // WORD_CODES))
        return views

    def _scales(self) -> Tensor:
        return self._of_groups(self.grouping.scales, 0)

    def _zeros(self) -> Tensor:
        return self._of_groups(torch.int8, self.grouping.header_bytes - LANES)

    def _of_groups(self, dtype: torch.dtype, begin: int) -> Tensor:
        """Return a view [panels, groups, 16] of what begins `begin` bytes after the beginnings of groups."""
        numbers, size = self.packed.view(dtype), dtype.itemsize
        return numbers.as_strided(
            (self._panels, self.grouping.groups(self.k), LANES),
            (self._panel_bytes // size, self._group_bytes // size, 1), numbers.storage_offset() + begin // size)

    @property
    def _panels(self) -> int:
        return -(-self.n // LANES)

    @property
    def _panel_bytes(self) -> int:
        return self.nbytes // max(1, self._panels)

    @property
    def _group_bytes(self) -> int:
        return self.grouping.header_bytes + self.grouping.size * LANES // 2


Int4 = PlainInt4 | PackedInt4
"""Numbers of 4 bits, in the form of the backend."""


def _put(view: Tensor, first: int, rows: Tensor) -> None:
    """Write rows [m, ...] to a view [panels, ..., 16], from row `first` on."""
    begin, count = 0, len(rows)
    while begin < count:
        panel, lane = divmod(first + begin, LANES)
        if lane == 0 and count - begin >= LANES:
            panels = (count - begin) // LANES
            of_panels = rows[begin : begin + panels * LANES].unflatten(0, (panels, LANES))
            view[panel : panel + panels] = of_panels.movedim(1, -1)
            begin += panels * LANES
        else:
            some = min(LANES - lane, count - begin)
            view[panel][..., lane : lane + some] = rows[begin : begin + some].movedim(0, -1)
            begin += some


def _taken(view: Tensor, ids: Tensor) -> Tensor:
    """Return rows of a view [panels, ..., 16] as [m, ...]."""
    return view.movedim(-1, 1)[ids // LANES, ids % LANES]


class Rows(Protocol):
    """Numbers of 4 bits [N, K] in any form."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, ids: Tensor) -> PlainInt4: ...


def dequantized(numbers: Rows, ids: Tensor | None = None) -> Tensor:
    """Return numbers, or their rows `ids`, in float32 [N, K]."""
    plain = numbers if ids is None and isinstance(numbers, PlainInt4) else numbers.rows(
        torch.arange(numbers.shape[0]) if ids is None else ids)
    k = plain.shape[1]
    levels = to_codes(plain.words).float() - 8
    size = plain.grouping.size
    if plain.zero is not None:
        levels -= plain.zero.float().repeat_interleave(size, dim=1)[:, :k]
    return levels * plain.scale.float().repeat_interleave(size, dim=1)[:, :k]


def rounded(weight: Tensor, size: int, scales: torch.dtype) -> PlainInt4:
    """Round weight [N, K] float32 to the nearest symmetric numbers in groups of `size`.

    A group's scale is its largest magnitude / 7.5, as in compressed-tensors; 1 for a group of zeros.
    """
    k = weight.shape[1]
    whole = torch.nn.functional.pad(weight, (0, -k % size)).unflatten(1, (-1, size))
    scale = (whole.abs().amax(dim=2) / 7.5).to(scales)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    levels = (whole / scale.float().unsqueeze(2)).round().clamp(-8, 7)
    codes = (levels + 8).to(torch.uint8).flatten(1)[:, :k]
    return PlainInt4(Grouping(size, scales), to_words(codes), scale)

