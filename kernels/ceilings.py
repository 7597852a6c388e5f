"""What this machine does at most: the ceilings that kernels and steps are measured against."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch

from npuserve.kernels import native

Peak = Literal["bf16", "int8", "fp32"]
"""Whose products and sums: those of the fastest instruction that the kernels have for them."""

DTYPES: dict[Peak, torch.dtype] = {"bf16": torch.bfloat16, "int8": torch.int8, "fp32": torch.float32}

READ_BYTES = 1 << 30
_PIECE = 1 << 20
_PASS_SECONDS = 0.01
_PASSES = 7
_TORCH_SIZE = 1024  # of the square matrices that torch multiplies


class Ceilings:
    """The ceilings of all threads that the kernels have now, on the instruction set in use.

    A pass takes 10 to 50 ms, so that a benchmark can take one between its own: the machine may be another a minute
    later. Without the native kernels torch's own sums and products stand for the loops.

    read_bytes: of the memory that is read, in large pages where there are such; beyond what caches hold.
    """

    def __init__(self, read_bytes: int = READ_BYTES):
        self.read_bytes = read_bytes = -(-read_bytes // _PIECE) * _PIECE
        if native.available():
            self._memory = native.library().allocate(read_bytes)
        else:
            self._memory = torch.empty(read_bytes, dtype=torch.uint8)
        self._memory.fill_(1)
        self._reading = self._reader()
        self._computing = {kind: self._computer(dtype) for kind, dtype in DTYPES.items()}

    def read(self) -> float:
        """Bytes a second of one pass over the memory."""
        return self.read_bytes / _seconds(self._reading)

    def peak(self, kind: Peak) -> float:
        """Operations a second of one pass; a product and its sum are two."""
        run, operations = self._computing[kind]
        return operations / _seconds(run)

    def peak_of(self, dtype_name: str) -> float:
        """`peak` of the products of a model of that dtype."""
        return self.peak(next(kind for kind, dtype in DTYPES.items() if dtype == getattr(torch, dtype_name)))

    def best(self) -> dict[str, float]:
        """Of several passes: read_gbs, bf16_gflops, int8_gops, fp32_gflops, each in 10**9 a second."""
        names: dict[str, Callable[[], float]] = {
            "read_gbs": self.read, "bf16_gflops": lambda: self.peak("bf16"),
            "int8_gops": lambda: self.peak("int8"), "fp32_gflops": lambda: self.peak("fp32")}
        return {name: max(one() for _ in range(_PASSES)) / 1e9 for name, one in names.items()}

    def _reader(self) -> Callable[[], object]:
        if not native.available():
            return self._memory.view(torch.int64).sum
        pieces = self.read_bytes // _PIECE
        found = torch.empty(pieces, dtype=torch.int32)
        return _program("read", torch.int8, [self._memory, found], [pieces, _PIECE])

    def _computer(self, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
        """What runs one pass, and its operations."""
        if not native.available():
            a, b = (torch.ones(_TORCH_SIZE, _TORCH_SIZE, dtype=dtype) for _ in "ab")
            product = torch._int_mm if dtype == torch.int8 else torch.mm
            return lambda: product(a, b), 2 * _TORCH_SIZE**3
        pieces, iterations = 16 * native.library().threads, 100
        while True:
            done = torch.zeros(pieces, dtype=torch.int64)
            run = _program("peak", dtype, [done], [pieces, iterations])
            if (taken := min(_seconds(run), _seconds(run))) >= _PASS_SECONDS / 2:
                return run, int(done.sum())
            iterations = int(iterations * min(10, _PASS_SECONDS / taken)) + 1


def ceilings(read_bytes: int = READ_BYTES) -> dict[str, float]:
    """`Ceilings.best` of now."""
    return Ceilings(read_bytes).best()


def _program(name: str, dtype: torch.dtype, tensors: list[torch.Tensor], sizes: list[int]) -> Callable[[], object]:
    def call() -> torch.Tensor:
        native.call(name, (name, dtype, tensors, sizes))
        return tensors[-1]

    program = native.record(call)
    return lambda: program.replay(sizes[0])


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
