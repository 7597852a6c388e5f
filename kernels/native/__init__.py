"""The CPU kernels in C++: how they are called, and how calls become a program that runs as one dispatch.

The library beside this file is built when the package is installed where there is a compiler. It holds every kernel
once for each instruction set; the widest that the processor has is used. Without it `available()` is False, no kernel
of this backend is registered, and the golden functions serve.

A call packs an op and runs it at once. Inside `record`, the calls of that thread are kept instead, and their outputs
lie in memory that the program owns: running the program does no work in Python and allocates nothing.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from npuserve.kernels.native.signatures import Checks, checks, refuse
from npuserve.kernels.registry import Kernel

F = TypeVar("F", bound=Callable[..., Any])

LANES = 16
"""Columns of a panel of packed weights, and tokens of a panel of packed keys."""

LARGE_PAGE = 2 << 20

_SLOTS, _FLOATS = 12, 4

OP_BYTES = 8 + 8 * (2 * _SLOTS + _FLOATS)
"""Size of a call as the library takes it (op.h): its kernel, its dtype, p, n, f."""


class _Resolved:
    """An op of one dtype.

    number: of its kernel in the library.
    checks: what its tensors are compared with.
    formats: of its calls, by the numbers of p, n and f.
    """

    __slots__ = ("_required", "checks", "formats", "number")

    def __init__(self, number: int, required: int, checks: Checks):
        self.number, self._required, self.checks = number, required, checks
        self.formats: dict[tuple[int, int, int], struct.Struct] = {}

    def add_format(self, p: int, n: int, f: int) -> struct.Struct | None:
        """Return the format of a call with so many p, n and f, or None if the op takes another number of tensors."""
        if not self._required <= p <= len(self.checks):
            return None
        made = struct.Struct(f"@ii{p}P{8 * (_SLOTS - p)}x{n}q{8 * (_SLOTS - n)}x{f}d{8 * (_FLOATS - f)}x")
        self.formats[p, n, f] = made
        return made


class Library:
    """The loaded library.

    isas: the instruction sets that it has and the processor too, the widest first.
    isa: the place of the set in use.
    compact: weights of bfloat16 are packed compact where their shape allows it (packed.py).
    choice.py chooses both; until then they are the widest set and what is usual for it.
    """

    def __init__(self, path: Path):
        lib = ctypes.CDLL(str(path))
        lib.npuserve_isa.restype = ctypes.c_char_p
        lib.npuserve_source.restype = ctypes.c_char_p
        lib.npuserve_kernel.argtypes = (ctypes.c_char_p,)
        lib.npuserve_set_threads.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_int))
        lib.npuserve_set_threads.restype = ctypes.c_int
        lib.npuserve_run.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
        lib.npuserve_run.restype = ctypes.c_int
        lib.npuserve_allocate.argtypes = (ctypes.c_size_t,)
        lib.npuserve_allocate.restype = ctypes.c_void_p
        lib.npuserve_share.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_size_t)
        lib.npuserve_share.restype = ctypes.c_void_p
        lib.npuserve_free.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        lib.npuserve_free.restype = None
        self._lib = lib
        self._kernels: dict[str, int] = {}
        self._resolved: dict[tuple[str, torch.dtype], _Resolved] = {}
        self.isas: list[str] = []
        while name := lib.npuserve_isa(len(self.isas)):
            self.isas.append(name.decode())
        self.isa = 0
        self.compact = self.usually_compact
        self.threads = 1

    @property
    def source(self) -> str:
        """Digest of the sources that it was built from, and its instruction sets."""
        digest: bytes = self._lib.npuserve_source()
        return digest.decode()

    @property
    def usually_compact(self) -> bool:
        """True where taking compact weights apart usually costs less than reading plain ones: with a fast lookup."""
        return self.isas[0] != "portable"

    def kernel(self, name: str) -> int:
        """Its number. KeyError if the library has none of that name."""
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
        """Return an op for `run`. The arguments are those of `Call`.

        Raises TypeError or ValueError for a tensor that differs from the op's signature.
        """
        op = self._resolved.get((name, dtype))
        if op is None:
            number = self.kernel(f"{name}/{str(dtype).removeprefix('torch.')}")
            op = self._resolved[name, dtype] = _Resolved(number, *checks(name, dtype))
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
        """Of all runs from now on, the caller's included. cpus: the processor that each of them stays on, the caller's
        first, to which it is to go by itself; () leaves them to the system.

        Raises OSError if the system refuses a thread.
        """
        if self._lib.npuserve_set_threads(threads, (ctypes.c_int * threads)(*cpus) if cpus else None):
            raise OSError(f"cannot start {threads} threads: the system's limit of threads or memory")
        self.threads = threads

    def run(
        self, ops: bytes, count: int, rows: int = -1, seconds: Any = None, isa: int | None = None,
    ) -> None:
        """Run ops, of which `pack` makes each.

        rows: in place of each op's own number; -1 for that.
        seconds: an array of doubles for the time of each op, or None.
        isa: the place of an instruction set in `isas`; None for the one in use.

        Raises MemoryError if the kernels have no memory for their own use.
        """
        if self._lib.npuserve_run(self.isa if isa is None else isa, ops, count, rows, seconds):
            raise MemoryError("no memory for the native kernels' own use")

    def map(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Return zeros that begin at a large page, in large pages where the system grants them.

        They go back to the system when the last tensor over them is dropped, but not at the interpreter's exit: threads
        may compute then, and the system unmaps them by itself.
        """
        return self._owned(self._lib.npuserve_allocate(nbytes), nbytes)

    def share(self, file: int, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """What an open file in memory has from `offset` on, both multiples of LARGE_PAGE, for all who map it; as `map`
        otherwise. MemoryError also where the system makes no large pages of files."""
        return self._owned(self._lib.npuserve_share(file, offset, nbytes), nbytes)

    def _owned(self, address: int | None, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        if not address:
            raise MemoryError(f"no {nbytes} bytes of memory")
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, self._lib.npuserve_free, address, nbytes).atexit = False
        return memory

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros [nbytes] uint8: a mapping of its own."""
        return torch.frombuffer(self.map(nbytes), dtype=torch.uint8)


class Arena:
    """Many tensors in few mappings, so that small ones do not take a large page each.

    It does not keep what it gave out: a mapping goes when the last tensor in it is dropped.

    file: an open file in memory that all of it lies in, in order, so that an arena of another process finds there what
    this one's tensors held, if it is asked for the same ones; -1 for memory that nobody else sees.
    """

    CHUNK, SHARED_CHUNK = 256 << 20, 32 << 20
    """Bytes taken at once, at most but for larger tensors. Of memory that is not shared they are address space: what is
    not touched is no memory."""

    def __init__(self, file: int = -1) -> None:
        self._chunk: Callable[[], ctypes.Array[ctypes.c_uint8] | None] = lambda: None
        self._used = 0
        self._file, self._end = file, 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory at a multiple of 64 bytes: zeros, or of a file what it holds there. Raises MemoryError."""
        count = torch.Size(shape).numel()
        nbytes = count * dtype.itemsize
        chunk = self._chunk()
        if chunk is None or self._used + nbytes > len(chunk):
            chunk = library().map(max(nbytes, self.CHUNK)) if self._file < 0 else self._shared(nbytes)
            self._chunk, self._used = weakref.ref(chunk), 0
        made = torch.frombuffer(chunk, dtype=dtype, count=count, offset=self._used).view(*shape)
        self._used += -(-nbytes // 64) * 64
        return made

    def _shared(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """A small model takes small ones."""
        size = -(-max(nbytes, min(self._end, self.SHARED_CHUNK)) // LARGE_PAGE) * LARGE_PAGE
        begin, self._end = self._end, self._end + size
        if os.fstat(self._file).st_size < self._end:
            os.ftruncate(self._file, self._end)
        return library().share(self._file, begin, size)


def _load() -> Library | None:
    found = sorted(Path(__file__).parent.glob("libnpuserve*.so"))
    try:
        return Library(found[0]) if found else None
    except OSError:  # built for another machine
        return None


_LIBRARY = _load()


def available() -> bool:
    """True if the library is there."""
    return _LIBRARY is not None


def library() -> Library:
    """Raises RuntimeError where it is not `available`."""
    if _LIBRARY is None:
        raise RuntimeError("the native kernels are not built; installing the package with a C++ compiler builds them")
    return _LIBRARY


@contextmanager
def using(isa: str) -> Iterator[None]:
    """Inside, calls run on that one of `library().isas`. ValueError if it is none of them."""
    lib = library()
    before, lib.isa = lib.isa, lib.isas.index(isa)
    try:
        yield
    finally:
        lib.isa = before


def implementation(kernel: Kernel[..., Any], **adapters: Any) -> Callable[[F], F]:
    """Registers the decorated function as the kernel's on the CPU, if the library is there; see
    `Kernel.implementation` for adapters."""
    def register(function: F) -> F:
        if available():
            kernel.implementation("cpu", **adapters)(function)
        return function

    return register


@dataclass
class Program:
    """Recorded calls: see `record`."""

    _output: Tensor
    _calls: list[tuple[str, int]]
    _ops: bytes
    _keep: list[Any]
    _rows: int | None = None  # of the view that was made last
    _view: Tensor = field(init=False)
    _count: int = field(init=False)  # of the ops

    def __post_init__(self) -> None:
        self._count = len(self._ops) // OP_BYTES

    def replay(self, rows: int) -> Tensor:
        """Runs them on the first `rows` rows of what they were recorded with; the output's [rows, ...]."""
        library().run(self._ops, self._count, rows)
        return self._first(rows)

    def replay_timed(self, rows: int) -> tuple[Tensor, list[tuple[str, float]]]:
        """Also (kernel, seconds) of each call."""
        seconds = (ctypes.c_double * self._count)()
        library().run(self._ops, self._count, rows, seconds)
        each = iter(seconds)
        return self._first(rows), [(name, sum(islice(each, count))) for name, count in self._calls]

    def _first(self, rows: int) -> Tensor:
        """The view that was made last is kept, since runs of as many rows follow each other."""
        if self._rows != rows:
            self._rows, self._view = rows, self._output[:rows]
        return self._view


@dataclass
class _Recording:
    """Memory goes back to `free` when the tensor that it was given out as is dropped, so that the program's outputs
    share it as the recorded function's variables would."""

    arena: Arena = field(default_factory=Arena)
    ops: list[bytes] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    blocks: list[Tensor] = field(default_factory=list)
    free: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = -(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64
        if not self.free[nbytes]:
            self.blocks.append(self.arena.empty((nbytes,), torch.uint8))
            self.free[nbytes].append(self.blocks[-1])
        block = self.free[nbytes].pop()
        made = block.view(dtype)[: torch.Size(shape).numel()].view(shape)
        weakref.finalize(made, self.free[nbytes].append, block)
        return made


class _Thread(threading.local):
    """What the calling thread records."""

    recording: _Recording | None = None


_thread = _Thread()


def record(function: Callable[[], Tensor]) -> Program:
    """Return the native calls of `function` as a program. Calls of other threads run as always.

    Tensors that it reads and has not made must outlive the program and stay where they are; so must `function`'s own
    views of what kernels returned, of which it should make none.
    """
    if _thread.recording is not None:
        raise RuntimeError("a program is being recorded already")
    _thread.recording = recording = _Recording()
    try:
        output = function()
    finally:
        _thread.recording = None
    return Program(output, recording.calls, b"".join(recording.ops), [recording.blocks, function])


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized output."""
    recording = _thread.recording
    return torch.empty(shape, dtype=dtype) if recording is None else recording.empty(shape, dtype)


def kept(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor that a recorded program keeps to itself, for what is written before it runs."""
    made = torch.empty(shape, dtype=dtype)
    if _thread.recording is not None:
        _thread.recording.blocks.append(made)
    return made


Call = (
    tuple[str, torch.dtype, Sequence[Tensor | None], Sequence[int]]
    | tuple[str, torch.dtype, Sequence[Tensor | None], Sequence[int], Sequence[float]])
"""An op: its name in the library, the dtype that completes the name, p (tensors of its signature, None for null), n
(n[0]: its rows), f."""


def call(kernel: str, *ops: Call) -> None:
    """Run a kernel's ops one after the other, or record them.

    Raises TypeError or ValueError for a tensor that differs from its op's signature (signatures.py).
    """
    lib = library()
    made = [lib.pack(*op) for op in ops]
    recording = _thread.recording
    if recording is None:
        lib.run(b"".join(made), len(made))
    else:
        recording.ops.extend(made)
        recording.calls.append((kernel, len(made)))
