"""Packed weights, in the order in which the native kernels read them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.native.binding import CONSTANTS, LANES

log = logging.getLogger(__name__)


NIBBLES_MULTIPLE = 8
"""K of a weight of nibbles is a multiple of this."""


def compacts(k: int, dtype: torch.dtype) -> bool:
    """Return True if weights [n, k] are packed compact: losslessly in 12.25 bits a number instead of 16."""
    return dtype == torch.bfloat16 and k % 8 == 0 and native.library().compact


def packed_words(n: int, k: int, dtype: torch.dtype, compact: bool | None = None, *, nibbles: bool = False) -> int:
    """Return the words of a packed weight [n, k].

    compact: its form; None for that of `compacts`.
    nibbles: see `PackedWeight`.
    """
    panels, word = -(-n // LANES), CONSTANTS["WORD_BYTES"]
    if nibbles:
        return panels * (k // NIBBLES_MULTIPLE) * LANES
    if compacts(k, dtype) if compact is None else compact:
        blocks = -(-k // CONSTANTS["COMPACT_BLOCK"])
        return panels * (blocks * CONSTANTS["COMPACT_HEADER_BYTES"] // word + k * LANES * 3 // 8)
    return panels * -(-k // (word // dtype.itemsize)) * LANES


@dataclass(slots=True, eq=False)
class PackedWeight:
    """Packed weight [n, k].

    words: int32, [n / 16] panels of [words of k] of 16 words (gemm/dot.h), padded with zeros. Compact panels have the
        form of gemm/compact.h. int8 panels depend on the instruction set, which must not change afterwards.
    nibbles: the numbers are from -8 to 7, and int8 panels have 4 bits a number (gemm/nibbles.cpp).
    refused: True if the numbers could not be packed compact. The weight then became plain when it was written, and
        `words` is separate memory.

    An embedding table may be a packed weight, so that a model with tied embeddings stores it once.
    """

    words: Tensor
    n: int
    k: int
    dtype: torch.dtype
    compact: bool = False
    nibbles: bool = False
    refused: bool = False

    @classmethod
    def pack(cls, weight: Tensor, compact: bool | None = None) -> PackedWeight:
        """Pack weight [n, k]. compact: as in `packed_words`."""
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

        memory: allocator with the interface of `torch.zeros`; its memory is zero or holds the result of earlier
            writes.
        """
        compact = compacts(k, dtype) if compact is None else compact
        return cls(memory((packed_words(n, k, dtype, compact),), dtype=torch.int32), n, k, dtype, compact)

    @classmethod
    def allocate_nibbles(cls, n: int, k: int, memory: Callable[..., Tensor] = torch.zeros) -> PackedWeight:
        """Return an int8 weight of nibbles over new memory, as `allocate` does."""
        words = packed_words(n, k, torch.int8, nibbles=True)
        return cls(memory((words,), dtype=torch.int32), n, k, torch.int8, nibbles=True)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.n, self.k

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def op(self, name: str) -> str:
        """Return the name of the native op for weights of this form."""
        return f"{name}_compact" if self.compact else f"{name}_nibbles" if self.nibbles else name

    def write(self, first: int, rows: Tensor) -> None:
        """Write `rows` [m, k] to rows [first, first + m). Rows of an int8 weight are int8, others of any float dtype.

        Raises ValueError if the weight has no such rows, and for numbers that are no nibbles.
        """
        if first < 0 or first + len(rows) > self.n or rows.shape[1:] != (self.k,):
            raise ValueError(f"rows {first} and following, {tuple(rows.shape)}, of a weight of {self.shape}")
        if self.nibbles and bool(((rows < -8) | (rows > 7)).any()):
            raise ValueError("has numbers that are not from -8 to 7")
        if not self._pack(first, rows):
            self._store_plain()
            self.write(first, rows)

    def _pack(self, first: int, rows: Tensor) -> bool:
        """Write rows. Return False if not all could be packed compact."""
        rows = rows.to(self.dtype).contiguous()
        failed = torch.zeros(1, dtype=torch.int32)
        native.call("pack", (self.op("pack"), self.dtype, [rows, self.words, failed], [len(rows), self.k, first]))
        return not failed

    def _store_plain(self) -> None:
        log.warning("a weight of %d x %d takes 16 bits a number: its exponents differ too much for 12", *self.shape)
        plain = PackedWeight.pack(self.dense(), compact=False)
        self.words, self.compact, self.refused = plain.words, False, True

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [m] int64 as [m, k]."""
        out = native.empty(len(ids), self.k, dtype=self.dtype)
        native.call("unpack", self.unpack(ids.contiguous(), out))
        return out

    def unpack(self, ids: Tensor, out: Tensor) -> native.Call:
        """Return the op that copies rows `ids` [m] int64 to out [m, k]."""
        return self.op("unpack"), self.dtype, [self.words, out, ids], [len(ids), self.k]

    def dense(self) -> Tensor:
        """Return a copy [n, k]."""
        return self.rows(torch.arange(self.n))


def packs_compact(rows: Tensor) -> bool:
    """Return True if a compact weight can hold rows [m, k]."""
    m, k = rows.shape
    return PackedWeight.allocate(m, k, torch.bfloat16, compact=True)._pack(0, rows)


Matrix = Tensor | PackedWeight
"""Numbers [N, K] of a weight, in the form of the backend."""


def packed_of(matrix: Matrix) -> PackedWeight:
    """Return the matrix as the native kernels take it. Raises TypeError for a tensor."""
    if not isinstance(matrix, PackedWeight):
        raise TypeError("weight: not packed for the native kernels")
    return matrix


def tensor_of(matrix: Matrix) -> Tensor:
    """Return the matrix as other kernels take it. Raises TypeError for a packed one."""
    if isinstance(matrix, PackedWeight):
        raise TypeError("weight: not a matrix of a tensor")
    return matrix


def dense(matrix: Matrix) -> Tensor:
    """Return the matrix as a tensor [N, K], for golden functions."""
    return matrix.dense() if isinstance(matrix, PackedWeight) else matrix


def rows_of(matrix: Matrix, ids: Tensor) -> Tensor:
    """Return rows `ids` [m] int64 as [m, K]."""
    return matrix.rows(ids) if isinstance(matrix, PackedWeight) else F.embedding(ids, matrix)


def first_row(matrix: Matrix) -> Tensor:
    """Return row 0 as [1, K]."""
    return matrix.rows(torch.zeros(1, dtype=torch.int64)) if isinstance(matrix, PackedWeight) else matrix[:1]


def unpack_call(matrix: Matrix, ids: Tensor, out: Tensor) -> native.Call:
    """Return the op that copies rows `ids` [m] int64 to out [m, K]."""
    if isinstance(matrix, PackedWeight):
        return matrix.unpack(ids, out)
    return "embedding", matrix.dtype, [ids, matrix, out], [*out.shape]


def write(matrix: Matrix, first: int, rows: Tensor) -> None:
    """Write `rows` [m, K] to rows [first, first + m). Rows of an int8 matrix are int8, others of any float dtype."""
    if isinstance(matrix, PackedWeight):
        matrix.write(first, rows)
    else:
        matrix[first : first + len(rows)] = rows


def unplanned(matrix: Matrix) -> tuple[int, int]:
    """Return the bytes of a matrix that could not be packed compact, and those that it has beyond the compact form."""
    if not isinstance(matrix, PackedWeight) or not matrix.refused:
        return 0, 0
    return matrix.nbytes, matrix.nbytes - 4 * packed_words(matrix.n, matrix.k, matrix.dtype, True)
