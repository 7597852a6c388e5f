"""Ceilings of the machine: its maximum rates, with which kernels and steps are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from npuserve.kernels import native
from npuserve.kernels.registry import HostSpan, Span

Peak = Literal["bf16", "int8", "fp32"]
"""Kind of numbers that are multiplied and summed."""

DTYPES: dict[Peak, torch.dtype] = {"bf16": torch.bfloat16, "int8": torch.int8, "fp32": torch.float32}

FORMS: dict[Peak, tuple[Peak, ...]] = {
    "fp32": ("fp32",), "bf16": ("bf16", "fp32"), "int8": ("int8", "bf16", "fp32"),
}
"""Kinds of instructions that can multiply numbers of each kind, since narrow numbers can be widened. On some processors
the instruction for narrow numbers is slower."""

READ_BYTES = 1 << 30
_PIECE = 1 << 20
_PASS_SECONDS = 0.01
_PASSES = 7
_TORCH_SIZES = 1024, 16384  # minimum and maximum size of the square matrices for torch


class Machine(Protocol):
    """Machine on which kernels are timed. device: of their arguments."""

    @property
    def device(self) -> torch.device: ...

    def span(self) -> Span:
        """Begin a time span on the machine's clock."""

    def synchronize(self) -> None:
        """Return once all queued work is done."""

    def record(self, calls: Callable[[], torch.Tensor]) -> Callable[[], object] | None:
        """Record the kernel calls of `calls` and return their replay as one dispatch; None if that is impossible."""


class Host:
    """The processor, with the native kernels if they are built."""

    device = torch.device("cpu")

    def span(self) -> Span:
        return HostSpan()

    def synchronize(self) -> None:
        return

    def record(self, calls: Callable[[], torch.Tensor]) -> Callable[[], object] | None:
        if not native.available():
            return None
        try:
            program = native.record(calls)
        except native.NotRecordable:
            return None
        return (lambda: program.replay(-1)) if program._ops else None


HOST = Host()


def timed(machine: Machine, run: Callable[[], object]) -> float:
    """Return the seconds of `run` on the machine's clock."""
    span = machine.span()
    run()
    span.stop()
    machine.synchronize()
    return span.read()


class Ceilings:
    """Ceilings of a machine.

    The host is measured with all threads of the kernels, on the fastest of its instruction sets. The kernels may use
    another set. The machine's speed may change within a minute. A pass therefore takes 1 to 50 ms, so that a benchmark
    can alternate it with its own passes. Without native kernels, torch's copies, products and sums replace the loops;
    the fastest of several sums counts.

    read_bytes: bytes of memory to read, in large pages if possible; more than the caches hold.
    """

    def __init__(self, read_bytes: int = READ_BYTES, *, machine: Machine = HOST):
        self.read_bytes = read_bytes = -(-read_bytes // _PIECE) * _PIECE
        self._machine, self._native = machine, machine is HOST and native.available()
        self._isas = range(len(native.library().isas)) if self._native else range(1)
        if self._native:
            self._memory = native.library().allocate(read_bytes).fill_(1)
        else:
            # Random numbers whose sum stays in the range of float32.
            self._memory = torch.rand(read_bytes // 4, device=machine.device).view(torch.uint8)
        self._reading = self._reader()
        loops = {kind: [self._computer(dtype, isa) for isa in self._isas] for kind, dtype in DTYPES.items()}
        fastest = {kind: max(each, key=self._speed) for kind, each in loops.items()}
        self._computing = {kind: max((fastest[form] for form in forms), key=self._speed)
                           for kind, forms in FORMS.items()}

    def read(self) -> float:
        """Return the bytes a second of one pass over the memory."""
        return self.read_bytes / timed(self._machine, self._reading)

    def copy(self) -> float:
        """Return the bytes a second, read and written, of torch's copy of one half of the memory to the other."""
        source, target = self._memory.chunk(2)
        return self.read_bytes / timed(self._machine, lambda: target.copy_(source))

    def peak(self, kind: Peak) -> float:
        """Return the operations a second of one pass of the fastest of FORMS; a product and its sum are two."""
        run, operations = self._computing[kind]
        return operations / timed(self._machine, run)

    def peak_of(self, dtype_name: str) -> float:
        """Return `peak` for the products of a model of that dtype."""
        dtype = {torch.float16: torch.bfloat16}.get(found := getattr(torch, dtype_name), found)  # the same units
        return self.peak(next(kind for kind, own in DTYPES.items() if own == dtype))

    def best(self) -> dict[str, float]:
        """Return the best of several passes: read_gbs, bf16_gflops, int8_gops, fp32_gflops, each in 10**9 a second."""
        names: dict[str, Callable[[], float]] = {
            "read_gbs": self.read, "bf16_gflops": lambda: self.peak("bf16"),
            "int8_gops": lambda: self.peak("int8"), "fp32_gflops": lambda: self.peak("fp32")}
        found = {name: max(one() for _ in range(_PASSES)) / 1e9 for name, one in names.items()}
        found["bf16_gflops"] = max(found["bf16_gflops"], found["fp32_gflops"])  # as FORMS implies, despite noise
        found["int8_gops"] = max(found["int8_gops"], found["bf16_gflops"])
        return found

    def _reader(self) -> Callable[[], object]:
        if not self._native:
            floats = self._memory.view(torch.float32)
            readers: list[Callable[[], object]] = [self._memory.view(torch.int64).sum, floats.sum, floats.amax]
            seconds = [min(timed(self._machine, reader) for _ in range(2)) for reader in readers]
            return readers[seconds.index(min(seconds))]
        pieces = self.read_bytes // _PIECE
        found = torch.empty(pieces, dtype=torch.int32)
        return _program("read", torch.int8, [self._memory, found], [pieces, _PIECE])

    def _speed(self, loop: tuple[Callable[[], object], int]) -> float:
        run, operations = loop
        return operations / min(timed(self._machine, run) for _ in range(3))

    def _computer(self, dtype: torch.dtype, isa: int) -> tuple[Callable[[], object], int]:
        """Return a function that runs one pass, and its operations. isa: index of the native instruction set."""
        if not self._native:
            return self._multiplier(dtype)
        pieces, iterations = 16 * native.library().threads, 100
        while True:
            done = torch.zeros(pieces, dtype=torch.int64)
            run = _program("peak", dtype, [done], [pieces, iterations], isa)
            if (taken := min(timed(HOST, run), timed(HOST, run))) >= _PASS_SECONDS / 2:
                return run, int(done.sum())
            iterations = int(iterations * min(10, _PASS_SECONDS / taken)) + 1

    def _multiplier(self, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
        """Return a product of random matrices, and its operations. Products of zeros and ones would be faster."""
        product = torch.mm if dtype.is_floating_point else torch._int_mm
        size, largest = _TORCH_SIZES
        while True:
            a, b = (torch.randn(size, size, device=self._machine.device) for _ in "ab")
            a, b = (x.to(dtype) if dtype.is_floating_point else (40 * x).clamp(-127, 127).to(dtype) for x in (a, b))

            def run(a: torch.Tensor = a, b: torch.Tensor = b) -> object:
                return product(a, b.t())

            if size >= largest or min(timed(self._machine, run) for _ in range(3)) >= _PASS_SECONDS / 10:
                return run, 2 * size**3
            size *= 2


def _program(
    name: str, dtype: torch.dtype, tensors: list[torch.Tensor], sizes: list[int], isa: int | None = None
) -> Callable[[], object]:
    """Return a function that runs one op. isa: index of an instruction set; None for the one in use."""
    lib = native.library()
    op = lib.pack(name, dtype, tensors, sizes)

    def run() -> object:
        lib.run(op, 1, isa=isa)
        return tensors  # the closure keeps them alive as long as the op

    return run
