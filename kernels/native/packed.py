"""Weights in the order in which the native kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from npuserve.kernels import native

PER_WORD = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
"""How many numbers of a dtype the kernels take as one word of 32 bits."""


def packed_words(n: int, k: int, dtype: torch.dtype) -> int:
    """Words that a weight [n, k] takes when packed."""
    return -(-n // native.LANES) * -(-k // PER_WORD[dtype]) * native.LANES


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [n, k]. words: int32, [n / 16] panels of [k / per word] of 16 words, padded with zeros.

    A table of embeddings may be one, so that a tied model holds it once.
    """

    words: Tensor
    n: int
    k: int
    dtype: torch.dtype

    @classmethod
    def pack(cls, weight: Tensor) -> PackedWeight:
        """weight: [n, k]."""
        n, k = weight.shape
        words = torch.zeros(packed_words(n, k, weight.dtype), dtype=torch.int32)
        made = cls(words, n, k, weight.dtype)
        made.write(0, weight)
        return made

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.n, self.k

    def write(self, first: int, rows: Tensor) -> None:
        """Rows [first, first + len(rows)) of the weight become `rows` [m, k], of any float dtype, or int8 in one
        of int8. ValueError if it has no such rows."""
        if first < 0 or first + len(rows) > self.n or rows.shape[1:] != (self.k,):
            raise ValueError(f"rows {first} and following, {tuple(rows.shape)}, of a weight of {self.shape}")
        rows = rows.to(self.dtype).contiguous()
        native.call("pack", ("pack", self.dtype, [rows, self.words], [len(rows), self.k, first]))

    def rows(self, ids: Tensor) -> Tensor:
        """ids [m] int64 -> [m, k]."""
        ids = ids.contiguous()
        out = native.empty(len(ids), self.k, dtype=self.dtype)
        native.call("unpack", ("unpack", self.dtype, [self.words, out, ids], [len(ids), self.k]))
        return out

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
