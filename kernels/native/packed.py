"""Weights in the order in which the native kernels read them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from npuserve.kernels import native

log = logging.getLogger(__name__)

PER_WORD = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
"""How many numbers of a dtype the kernels take as one word of 32 bits."""

_BLOCK, _HEADER = 128, 16
"""Of a compact weight: numbers along K to a block, words of a block's header (compact.cpp)."""


def compacts(k: int, dtype: torch.dtype) -> bool:
    """True for the weights [n, k] that are held compact now: in 12.25 bits a number instead of 16, without loss."""
    return dtype == torch.bfloat16 and k % 8 == 0 and native.library().compact


def packed_words(n: int, k: int, dtype: torch.dtype, compact: bool | None = None) -> int:
    """Words that a weight [n, k] takes when packed, in the form that `compacts` says unless told."""
    panels = -(-n // native.LANES)
    if compacts(k, dtype) if compact is None else compact:
        return panels * (-(-k // _BLOCK) * _HEADER + k * native.LANES * 3 // 8)
    return panels * -(-k // PER_WORD[dtype]) * native.LANES


@dataclass(slots=True, eq=False)
class PackedWeight:
    """A weight [n, k]. words: int32, [n / 16] panels of [k / per word] of 16 words, padded with zeros; if compact,
    those panels as compact.cpp has them.

    A table of embeddings may be one, so that a tied model holds it once. A weight whose numbers do not become compact
    turns plain as they are written: refused is then True, and `words` is memory of its own.
    """

    words: Tensor
    n: int
    k: int
    dtype: torch.dtype
    compact: bool = False
    refused: bool = False

    @classmethod
    def pack(cls, weight: Tensor, compact: bool | None = None) -> PackedWeight:
        """weight: [n, k]. compact: as `packed_words` takes it."""
        n, k = weight.shape
        made = cls.allocate(n, k, weight.dtype, compact)
        made.write(0, weight)
        return made

    @classmethod
    def allocate(
        cls, n: int, k: int, dtype: torch.dtype, compact: bool | None = None,
        memory: Callable[..., Tensor] = torch.zeros,
    ) -> PackedWeight:
        """Return a weight over new memory.

        memory: allocates it as `torch.zeros` does; zeros, or what `write` left there before.
        """
        compact = compacts(k, dtype) if compact is None else compact
        return cls(memory((packed_words(n, k, dtype, compact),), dtype=torch.int32), n, k, dtype, compact)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.n, self.k

    def op(self, name: str) -> str:
        """The native op of that name for weights of this form."""
        return f"{name}_compact" if self.compact else name

    def write(self, first: int, rows: Tensor) -> None:
        """Rows [first, first + len(rows)) of the weight become `rows` [m, k], of any float dtype, or int8 in one
        of int8. ValueError if it has no such rows."""
        if first < 0 or first + len(rows) > self.n or rows.shape[1:] != (self.k,):
            raise ValueError(f"rows {first} and following, {tuple(rows.shape)}, of a weight of {self.shape}")
        rows = rows.to(self.dtype).contiguous()
        failed = torch.zeros(1, dtype=torch.int32)
        native.call("pack", (self.op("pack"), self.dtype, [rows, self.words, failed], [len(rows), self.k, first]))
        if failed:
            self._turn_plain()
            self.write(first, rows)

    def _turn_plain(self) -> None:
        log.warning("a weight of %d x %d takes 16 bits a number: its exponents differ too much for 12", *self.shape)
        plain = PackedWeight.pack(self.dense(), compact=False)
        self.words, self.compact, self.refused = plain.words, False, True

    def rows(self, ids: Tensor) -> Tensor:
        """ids [m] int64 -> [m, k]."""
        out = native.empty(len(ids), self.k, dtype=self.dtype)
        native.call("unpack", self.unpack(ids.contiguous(), out))
        return out

    def unpack(self, ids: Tensor, out: Tensor) -> native.Call:
        """The call that puts rows `ids` [m] int64 into out [m, k]."""
        return self.op("unpack"), self.dtype, [self.words, out, ids], [len(ids), self.k]

    def dense(self) -> Tensor:
        """[n, k], a copy."""
        return self.rows(torch.arange(self.n))


Matrix = Tensor | PackedWeight
"""What numbers [N, K] of a weight are to a kernel: each backend has its own form."""


def dense(matrix: Matrix) -> Tensor:
    """[N, K]: for golden functions."""
    return matrix.dense() if isinstance(matrix, PackedWeight) else matrix


def write(matrix: Matrix, first: int, rows: Tensor) -> None:
    """Rows [first, first + len(rows)) of the matrix become `rows` [m, K], of any float dtype, or int8 in one of
    int8."""
    if isinstance(matrix, PackedWeight):
        matrix.write(first, rows)
    else:
        matrix[first : first + len(rows)] = rows
