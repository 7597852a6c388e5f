"""The native library: its instruction sets, threads, memory, and runs of ops."""

from __future__ import annotations

import ctypes
import itertools
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.native.binding import BINDING, CONSTANTS
from npuserve.kernels.native.signatures import Checks, checks, refuse


class _ResolvedOp:
    """Op of one dtype.

    number: number of its kernel in the library.
    checks: checks of the tensors of a call.
    formats: structs of its calls, by the lengths of p, n and f.
    """

    __slots__ = ("_required", "checks", "formats", "number")

    def __init__(self, number: int, required: int, checks: Checks):
        self.number, self._required, self.checks = number, required, checks
        self.formats: dict[tuple[int, int, int], struct.Struct] = {}

    def add_format(self, p: int, n: int, f: int) -> struct.Struct | None:
        """Return the format of a call with p tensors, n sizes and f floats; None if the op takes another number of
        tensors."""
        if not self._required <= p <= len(self.checks):
            return None
        rest = [8 * (CONSTANTS[name] - used) for name, used in (("OP_POINTERS", p), ("OP_SIZES", n), ("OP_FLOATS", f))]
        made = struct.Struct(f"@ii{p}P{rest[0]}x{n}q{rest[1]}x{f}d{rest[2]}x")
        self.formats[p, n, f] = made
        return made


def _names(name_of: Callable[[int], bytes | None]) -> list[str]:
    """Return all names of a function of the library that returns the i-th one, or None past the last."""
    names: list[str] = []
    while name := name_of(len(names)):
        names.append(name.decode())
    return names


class Library:
    """The loaded library.

    isas: instruction sets that both the library and the processor have, the widest first; none: not `available`.
    missing_isas: instruction sets of the processor that come before all of the library.
    isa: index of the set in use.
    compact: True if bfloat16 weights are packed compact where their shape allows it (packed.py).
    threads: number of threads of a run, including the caller.

    choice.py sets `isa` and `compact`; before that, `isa` is the widest set and `compact` its usual form.
    """

    def __init__(self, lib: ctypes.CDLL):
        self._lib = lib
        self._kernels: dict[str, int] = {}
        self._resolved: dict[tuple[str, torch.dtype], _ResolvedOp] = {}
        self.isas = _names(lib.npuserve_isa)
        processor = _names(lib.npuserve_processor_isa)
        self.missing_isas = list(itertools.takewhile(lambda name: name not in self.isas, processor))
        self.isa = 0
        self.compact = self.usually_compact
        self.threads = 1

    @property
    def source(self) -> str:
        """Digest of the sources from which the library was built, and its instruction sets."""
        digest: bytes = self._lib.npuserve_source()
        return digest.decode()

    @property
    def built(self) -> list[str]:
        """Instruction sets of the library, the widest first."""
        return self.source.split()[1:]

    @property
    def usually_compact(self) -> bool:
        """True if unpacking compact weights usually costs less than reading plain ones, as with a fast table lookup."""
        return self.isas[:1] != ["portable"]

    def kernel(self, name: str) -> int:
        """Return the number of the kernel. Raises KeyError if the library has none of that name."""
        if name not in self._kernels:
            number = self._lib.npuserve_kernel(name.encode())
            if number < 0:
                raise KeyError(name)
            self._kernels[name] = number
        return self._kernels[name]

    def pack(
        self, name: str, dtype: torch.dtype, tensors: Sequence[Tensor | None], n: Sequence[int],
        f: Sequence[float] = (),
    ) -> bytes:
        """Return an op for `run`. The arguments are the fields of `Call`.

        Raises TypeError or ValueError for a tensor that differs from the op's signature.
        """
        op = self._resolved.get((name, dtype))
        if op is None:
            number = self.kernel(f"{name}/{str(dtype).removeprefix('torch.')}")
            op = self._resolved[name, dtype] = _ResolvedOp(number, *checks(name, dtype))
        sizes = len(tensors), len(n), len(f)
        form = op.formats.get(sizes) or op.add_format(*sizes) or refuse(name, dtype, tensors, n)
        p = []
        for tensor, (wanted, least, optional) in zip(tensors, op.checks, strict=False):
            if tensor is None:
                if not optional:
                    refuse(name, dtype, tensors, n)
                p.append(0)
            elif (tensor.dtype is wanted and tensor.is_contiguous() and tensor.is_cpu
                  and (least is None or tensor.numel() >= least(n))):
                p.append(tensor.data_ptr())
            else:
                refuse(name, dtype, tensors, n)
        return form.pack(op.number, 0, *p, *n, *f)

    def set_threads(self, threads: int, cpus: Sequence[int] = ()) -> None:
        """Set the number of threads of later runs.

        threads: including the caller.
        cpus: processor of each thread, beginning with the caller, which binds itself to the first. () leaves the
            choice to the system.

        Raises OSError if the system refuses a thread; later runs then use the caller's thread alone.
        """
        if self._lib.npuserve_set_threads(threads, (ctypes.c_int * threads)(*cpus) if cpus else None):
            self.threads = 1
            raise OSError(f"cannot start {threads} threads: the system's limit of threads or memory")
        self.threads = threads

    def run(
        self, ops: bytes, count: int, rows: int = -1, seconds: Any = None, isa: int | None = None,
    ) -> None:
        """Run ops made by `pack`, in sequence.

        ops, count: ops and their number.
        rows: number of rows that replaces the number of each op; -1 keeps it.
        seconds: array of doubles for the time of each op, or None.
        isa: index in `isas`; None for the instruction set in use.

        Raises MemoryError if the kernels have no memory for their own use.
        """
        if self._lib.npuserve_run(self.isa if isa is None else isa, ops, count, rows, seconds):
            raise MemoryError("no memory for the native kernels' own use")

    def map(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Return zeroed memory that begins at a large page, in large pages where the system grants them.

        It is unmapped when the last tensor over it is dropped. At the interpreter's exit the system unmaps it, since
        threads may still compute then.
        """
        return self._owned(self._lib.npuserve_allocate(nbytes), nbytes)

    def reserve(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Return address space without memory, for `share`; otherwise as `map`."""
        return self._owned(self._lib.npuserve_reserve(nbytes), nbytes)

    def share(self, reserved: ctypes.Array[ctypes.c_uint8], begin: int, file: int, offset: int, nbytes: int) -> None:
        """Map the contents of an open file in memory to reserved address space. All processes that map it share them.

        begin: first byte of the address space.
        offset: first byte of the file. begin, offset and nbytes are multiples of LARGE_PAGE.

        Raises MemoryError, also if the system makes no large pages of files.
        """
        if self._lib.npuserve_share(ctypes.addressof(reserved) + begin, file, offset, nbytes):
            raise MemoryError(f"no {nbytes} bytes of memory in large pages of a file")

    def _owned(self, address: int | None, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        if not address:
            raise MemoryError(f"no {nbytes} bytes of memory")
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, self._lib.npuserve_free, address, nbytes).atexit = False
        return memory

    def allocate(self, nbytes: int) -> Tensor:
        """Return zeros [nbytes] uint8 in a mapping of their own."""
        return torch.frombuffer(self.map(nbytes), dtype=torch.uint8)


_LIBRARY = Library(BINDING) if BINDING else None


def available() -> bool:
    """Return True if the library is loaded and has an instruction set of this processor."""
    return _LIBRARY is not None and bool(_LIBRARY.isas)


def library() -> Library:
    """Return the library. Raises RuntimeError if it is not `available`."""
    if _LIBRARY is None or not _LIBRARY.isas:
        raise RuntimeError(unavailable_text())
    return _LIBRARY


def unavailable_text() -> str:
    """Return why the library is not `available`, and the remedy."""
    if _LIBRARY is None:
        return ("the native CPU kernels are not built, so plain torch computes, much slower; install the package again "
                "with a C++ compiler")
    return (f"the native CPU kernels are built for {', '.join(_LIBRARY.built)} and not for this processor, which has "
            f"{', '.join(_LIBRARY.missing_isas)}, so plain torch computes, much slower; install the package again on "
            "this machine, or with NATIVE_ISAS=all")


@contextmanager
def using(isa: str) -> Iterator[None]:
    """Run the calls in the body on the instruction set `isa`. Raises ValueError unless it is in `library().isas`."""
    lib = library()
    before, lib.isa = lib.isa, lib.isas.index(isa)
    try:
        yield
    finally:
        lib.isa = before
