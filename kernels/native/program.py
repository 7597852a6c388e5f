"""Programs: recorded calls of native kernels that run as one dispatch.

Inside `record`, the calls of the thread are recorded, not run. Their outputs are in memory that the program owns.
Running the program executes no Python per call and allocates nothing. Torch operations cannot be recorded, so all that
compute are refused.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class NotRecordable(RuntimeError):
    """Torch operation in a recording that a replay would not repeat; the message names it, its file and line."""


class _OnlyViews(TorchDispatchMode):
    """Mode that refuses all torch operations but views and uninitialized allocations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports torch._dynamo, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _ALLOCATIONS:
            return func(*args, **(kwargs or {}))
        if func.is_view and isinstance(args[0], Tensor):
            result = func(*args, **(kwargs or {}))
            # In inference mode `contiguous`, `reshape` and `to` count as views also if they copy.
            address = args[0].untyped_storage().data_ptr()
            views = [result] if isinstance(result, Tensor) else result
            if all(view.untyped_storage().data_ptr() == address for view in views):
                return result
        raise NotRecordable(
            f"{func} at {_caller()}: a recorded program would not repeat this operation. Call a kernel in its place, "
            "or compute it before the recording")


_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


def _caller() -> str:
    """Return the file and line of the innermost call from outside torch and this file."""
    inside = f"{Path(torch.__file__).parent}/"
    frame = sys._getframe()
    while frame.f_back and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(inside)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass
class _Recording:
    """Calls of a recording, and the memory of their tensors.

    A block returns to `free` when no tensor over it is left, so that later outputs of the program reuse its memory.

    blocks: memory of outputs, by address.
    others: storages of all other tensors of the calls, by address.
    """

    arena: Arena = field(default_factory=Arena)
    ops: list[bytes] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    blocks: dict[int, Tensor] = field(default_factory=dict)
    others: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    free: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        nbytes = -(-count * dtype.itemsize // 64) * 64
        free = self.free[nbytes]
        if not free:
            block = self.arena.empty((nbytes,), torch.uint8)
            self.blocks[block.data_ptr()] = block
            free.append(block)
        block = free.pop()
        # The storage of the returned tensor holds `memory`, and so do all views of the tensor.
        memory = (ctypes.c_uint8 * nbytes).from_address(block.data_ptr())
        weakref.finalize(memory, free.append, block)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)

    def add(self, kernel: str, ops: Sequence[Call], packed: Sequence[bytes]) -> None:
        """Append a call, and keep the memory of its tensors that are not outputs of the program."""
        self.ops.extend(packed)
        self.calls.append((kernel, len(packed)))
        for op in ops:
            for tensor in op[2]:
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    address = storage.data_ptr()
                    if address not in self.blocks:
                        self.others[address] = storage


class _Thread(threading.local):
    """Recording of the calling thread; None if it records nothing."""

    recording: _Recording | None = None


_thread = _Thread()


def record(function: Callable[[], Tensor]) -> Program:
    """Return the native calls of `function` as a program. Calls of other threads run as usual.

    The program keeps all tensors of its calls, so they must not be resized. Values that `function` itself reads from
    tensors are those of the recording.

    Raises NotRecordable for a torch operation of `function` other than a view or an uninitialized allocation.
    """
    if _thread.recording is not None:
        raise RuntimeError("a program is being recorded already")
    _thread.recording = recording = _Recording()
    try:
        with _OnlyViews():  # type: ignore[no-untyped-call]
            output = function()
    finally:
        _thread.recording = None
    return Program(output, recording.calls, b"".join(recording.ops), [recording.blocks, recording.others, function])


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized output of a kernel. In a recorded program later outputs reuse its memory.

    Memory from `torch.empty` is shared with no output: a recorded program keeps it for data that outlives a call.
    """
    recording = _thread.recording
    return torch.empty(shape, dtype=dtype) if recording is None else recording.empty(shape, dtype)


def call(kernel: str, *ops: Call) -> None:
    """Run a kernel's ops in sequence, or record them.

    Raises TypeError or ValueError for a tensor that differs from its op's signature (signatures.py).
    """
    lib = library()
    packed = [lib.pack(*op) for op in ops]
    recording = _thread.recording
    if recording is None:
        lib.run(b"".join(packed), len(packed))
    else:
        recording.add(kernel, ops, packed)
