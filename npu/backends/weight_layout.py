"""Layout of weights on a device: their allocation, their bytes, and the conversion to what its kernels read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from npuserve.kernels.int4 import Grouping, Int4, PlainInt4
from npuserve.kernels.native.packed import Matrix
from npuserve.kernels.weight import WeightForm

Empty = Callable[[Sequence[int], torch.dtype], Tensor]
"""Function from a shape and a dtype to an uninitialized tensor on a device: `DeviceMemory.empty`."""


class WeightLayout:
    """Weights as rows of plain tensors on a device."""

    def __init__(self, empty: Empty):
        self._empty = empty

    def allocate(self, n: int, k: int, dtype: torch.dtype) -> Matrix:
        """Allocate a linear weight [n, k] or a table of n embeddings, to be filled with `packed.write`."""
        return self._empty((n, k), dtype)

    def nbytes(self, n: int, k: int, dtype: torch.dtype) -> int:
        """Return the bytes of a weight, after `prepare`."""
        return n * k * dtype.itemsize

    def allocate_nibbles(self, n: int, k: int) -> Matrix:
        """Allocate an int8 weight [n, k] of numbers from -8 to 7, in as few bits as the kernels read."""
        return self.allocate(n, k, torch.int8)

    def nibbles_bytes(self, n: int, k: int) -> int:
        """Return the bytes of such a weight, after `prepare`."""
        return self.nbytes(n, k, torch.int8)

    def allocate_int4(self, n: int, k: int, grouping: Grouping) -> Int4:
        """Allocate the numbers of a linear weight [n, k] of 4 bits."""
        return PlainInt4.allocate(n, k, grouping, lambda shape, dtype: self._empty(shape, dtype).zero_())

    def int4_bytes(self, n: int, k: int, grouping: Grouping) -> int:
        """Return the bytes of the numbers of a weight of 4 bits, after `prepare`."""
        return grouping.plain_bytes(n, k)

    def int4_refusal(self, n: int, k: int, grouping: Grouping, dtype: torch.dtype, experts: int = 0) -> str:
        """Return why the kernels do not multiply activations of `dtype` by a weight of 4 bits, after "layers"; "" if
        they do. Such weights become floats while loading.

        experts: number of the experts whose matrices are the rows; 0 for one matrix.
        """
        return ""

    def prepare(self, weight: WeightForm, *, table: bool, experts: int = 0) -> None:
        """Convert a completely written weight in place to the layout that the kernels read.

        table: the embedding kernel reads it too.
        experts: number of the experts whose matrices are its rows; 0 for one matrix.
        """
        return
