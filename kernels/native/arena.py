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

    CHUNK, SHARED_CHUNK = 256 << 20, 32 << 20
    """Maximum bytes of a mapping, except for larger tensors. Private mappings reserve only address space: untouched
    pages use no memory."""

    def __init__(self, file: int = -1) -> None:
        self._chunk: Callable[[], ctypes.Array[ctypes.c_uint8] | None] = lambda: None
        self._used = 0
        self._file, self._end = file, 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor at a multiple of 64 bytes: zeros, or the contents of the file. Raises MemoryError."""
        count = torch.Size(shape).numel()
        nbytes = count * dtype.itemsize
        chunk = self._chunk()
        if chunk is None or self._used + nbytes > len(chunk):
            chunk = library().map(max(nbytes, self.CHUNK)) if self._file < 0 else self._map_shared(nbytes)
            self._chunk, self._used = weakref.ref(chunk), 0
        made = torch.frombuffer(chunk, dtype=dtype, count=count, offset=self._used).view(*shape)
        self._used += -(-nbytes // 64) * 64
        return made

    def _map_shared(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Map the next chunk of the file. Chunks grow with the file, so that a small model has a small file."""
        page = CONSTANTS["LARGE_PAGE"]
        size = -(-max(nbytes, min(self._end, self.SHARED_CHUNK)) // page) * page
        begin, self._end = self._end, self._end + size
        if os.fstat(self._file).st_size < self._end:
            os.ftruncate(self._file, self._end)
        return library().share(self._file, begin, size)
