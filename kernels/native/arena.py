"""Arena: memory for many tensors in few mappings."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from npuserve.kernels.native.binding import CONSTANTS
from npuserve.kernels.native.shared_library import library

_MADV_POPULATE_WRITE = 23
"""Advice of madvise: map the pages as a write to each would, and leave their contents (Linux 5.14)."""


def populate(tensor: Tensor) -> None:
    """Map the pages of a contiguous tensor. Their contents do not change, and other threads may use them.

    Raises MemoryError, and OSError if not `can_populate`.
    """
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _advise(begin, tensor.data_ptr() + tensor.nbytes - begin)


@functools.cache
def can_populate() -> bool:
    """Return True if the system can map pages without a change of their contents."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    view = ctypes.c_char.from_buffer(page)
    try:
        _advise(ctypes.addressof(view), mmap.PAGESIZE)
    except (OSError, MemoryError, AttributeError):  # a C library without madvise
        return False
    return True


def _advise(address: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.ENOMEM, errno.EAGAIN, errno.EFAULT):
        raise MemoryError(f"no memory for {nbytes} bytes: {os.strerror(code)}")
    raise OSError(code, os.strerror(code))


class Arena:
    """Allocator of many tensors in few mappings, so that a small tensor does not occupy a large page.

    It holds no reference to its memory: a mapping is freed when the last tensor in it is dropped.

    file: open file in memory that holds all tensors in order of allocation; -1 for private memory. An arena of another
        process over the same file returns the same contents for the same sequence of allocations.
    """

    CHUNK, SHARED_CHUNK = 256 << 20, 1 << 30
    """Minimum bytes of a mapping, which are address space. Pages without tensors use no memory."""

    def __init__(self, file: int = -1) -> None:
        self._chunk: Callable[[], ctypes.Array[ctypes.c_uint8] | None] = lambda: None
        self._used = 0
        self._file, self._end = file, 0
        self._filled = 0  # bytes of the chunk that the file is mapped to

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor at a multiple of 64 bytes: zeros, or the contents of the file. Raises MemoryError."""
        count = torch.Size(shape).numel()
        nbytes = count * dtype.itemsize
        chunk = self._chunk()
        if chunk is None or self._used + nbytes > len(chunk):
            chunk = (library().map(max(nbytes, self.CHUNK)) if self._file < 0 else
                     library().reserve(max(nbytes, self.SHARED_CHUNK)))
            self._chunk, self._used, self._filled = weakref.ref(chunk), 0, 0
        if self._file >= 0:
            self._share(chunk, self._used + nbytes)
        made = torch.frombuffer(chunk, dtype=dtype, count=count, offset=self._used).view(*shape)
        self._used += -(-nbytes // 64) * 64
        return made

    def _share(self, chunk: ctypes.Array[ctypes.c_uint8], nbytes: int) -> None:
        """Map the next pages of the file, up to `nbytes` of the chunk.

        Tensors of a chunk follow each other, and the file has no pages beyond them: its pages are all in memory.
        """
        page = CONSTANTS["LARGE_PAGE"]
        size = -(-(nbytes - self._filled) // page) * page
        if size <= 0:
            return
        if os.fstat(self._file).st_size < self._end + size:
            os.ftruncate(self._file, self._end + size)
        library().share(chunk, self._filled, self._file, self._end, size)
        self._filled, self._end = self._filled + size, self._end + size
