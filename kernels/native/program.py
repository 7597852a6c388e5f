"""Programs: recorded calls of native kernels that run as one dispatch.

Inside `record`, the calls of the thread are recorded, not run. Their outputs are in memory that the program owns.
Running the program executes no Python per call and allocates nothing.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.native.arena import Arena
from npuserve.kernels.native.binding import CONSTANTS
from npuserve.kernels.native.shared_library import library

Call = (
    tuple[str, torch.dtype, Sequence[Tensor | None], Sequence[int]]
    | tuple[str, torch.dtype, Sequence[Tensor | None], Sequence[int], Sequence[float]])
"""An op: name in the library, dtype that completes the name, p, n and f.

p: tensors of its signature, None for null.
n: sizes; n[0] is the number of rows.
f: floats.
"""


@dataclass
class Program:
    """Recorded calls; see `record`."""

    _output: Tensor
    _calls: list[tuple[str, int]]
    _ops: bytes
    _keep: list[Any]
    _rows: int | None = None  # of `_view`
    _view: Tensor = field(init=False)
    _count: int = field(init=False)  # number of ops

    def __post_init__(self) -> None:
        self._count = len(self._ops) // CONSTANTS["OP_BYTES"]

    def replay(self, rows: int) -> Tensor:
        """Run the calls on the first `rows` rows of their recorded tensors; return the output's [rows, ...]."""
        library().run(self._ops, self._count, rows)
        return self._first(rows)

    def replay_timed(self, rows: int) -> tuple[Tensor, list[tuple[str, float]]]:
        """Run as `replay`; also return (kernel, seconds) of each call."""
        seconds = (ctypes.c_double * self._count)()
        library().run(self._ops, self._count, rows, seconds)
        each = iter(seconds)
        return self._first(rows), [(name, sum(islice(each, count))) for name, count in self._calls]

    def _first(self, rows: int) -> Tensor:
        """Return the output's first rows. The latest view is cached, since consecutive runs often have equal rows."""
        if self._rows != rows:
            self._rows, self._view = rows, self._output[:rows]
        return self._view


@dataclass
class _Recording:
    """Calls of a recording, and the memory of their outputs.

    A block returns to `free` when its tensor is garbage-collected, so that later outputs of the program reuse its
    memory.
    """

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
    """Recording of the calling thread; None if it records nothing."""

    recording: _Recording | None = None


_thread = _Thread()


def record(function: Callable[[], Tensor]) -> Program:
    """Return the native calls of `function` as a program. Calls of other threads run as usual.

    Tensors that `function` reads but does not create must outlive the program and keep their addresses. `function`
    should create no views of kernels' results; if it does, they must outlive the program too.
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
    """Return an uninitialized output of a kernel."""
    recording = _thread.recording
    return torch.empty(shape, dtype=dtype) if recording is None else recording.empty(shape, dtype)


def kept(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor that a recorded program shares with no other output, for data written before it
    runs."""
    made = torch.empty(shape, dtype=dtype)
    if _thread.recording is not None:
        _thread.recording.blocks.append(made)
    return made


def call(kernel: str, *ops: Call) -> None:
    """Run a kernel's ops in sequence, or record them.

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
