"""Arena: memory for many tensors in few mappings."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from npuserve.kernels.native.binding import CONSTANTS
from npuserve.kernels.native.shared_library import library


class Arena:
    """Allocator of many tensors in few mappings, so that a small tensor does not occupy a large page.

    It holds no reference to its memory: a mapping is freed when the last tensor in it is dropped.

    file: open file in memory that holds all tensors in order of allocation; -1 for private memory. An arena of another
        process over the same file returns the same contents for the same sequence of allocations.
    """

    CHUNK = 256 << 20
    """Bytes of a private mapping, except for larger tensors. It reserves only address space: untouched pages use no
    memory."""

    def __init__(self, file: int = -1) -> None:
        self._chunk: Callable[[], ctypes.Array[ctypes.c_uint8] | None] = lambda: None
        self._used = 0  # bytes of the mapping
        self._file, self._end = file, 0  # bytes of all tensors

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor at a multiple of 64 bytes: zeros, or the contents of the file. Raises MemoryError."""
        count = torch.Size(shape).numel()
        nbytes = count * dtype.itemsize
        chunk = self._chunk()
        if chunk is None or self._used + nbytes > len(chunk):
            chunk = library().map(max(nbytes, self.CHUNK)) if self._file < 0 else self._map_shared(nbytes)
            self._chunk = weakref.ref(chunk)
            self._used = 0 if self._file < 0 else self._end % CONSTANTS["LARGE_PAGE"]
        made = torch.frombuffer(chunk, dtype=dtype, count=count, offset=self._used).view(*shape)
        rounded = -(-nbytes // 64) * 64
        self._used, self._end = self._used + rounded, self._end + rounded
        return made

    def _map_shared(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Map the pages of the file that the next tensor needs. The first of them may also hold other tensors.

        The pages of a shared mapping are all in memory, so none is mapped beyond the tensors.
        """
        page = CONSTANTS["LARGE_PAGE"]
        begin = self._end // page * page
        size = -(-(self._end - begin + max(nbytes, 1)) // page) * page
        if os.fstat(self._file).st_size < begin + size:
            os.ftruncate(self._file, begin + size)
        return library().share(self._file, begin, size)
