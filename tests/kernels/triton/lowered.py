"""Stand-in for a Triton kernel that runs the result of Ascend's compilers on this processor.

The launching code calls it like the kernel, with every argument by name. New types of arguments are compiled first,
which fails if the unified buffer cannot hold the kernel. CACHE keeps the results, also errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.kernels.triton import CACHE

LOWERING = Path(__file__).with_name("lowering.py")

_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64",
             torch.int32: "*i32"}
_SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class LoweringError(Exception):
    """Error with a compiler's message."""


@dataclass(frozen=True)
class Built:
    """Result of lowering. used, limit: bits of the unified buffer. stopped: at hivmc, which only CANN has."""

    library: ctypes.CDLL
    used: int
    limit: int
    stopped: bool


class Lowered:
    """Stand-in for `kernel`, a `triton.jit` function at the top of its file.

    python: one that has triton-ascend and ascendnpu-ir. latest: result that ran last."""

    latest: Built

    def __init__(self, kernel: Any, python: str):
        self._function = kernel.fn
        self._python = python
        self._built: dict[str, Built] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        columns, rows = (*grid, 1)[:2]
        return lambda **arguments: self._run(columns, rows, arguments)

    def _run(self, columns: int, rows: int, arguments: dict[str, Any]) -> None:
        signature, constants = self._split(arguments)
        self.latest = built = self._build(signature, constants)
        # The lock and the workspace between cores, which these kernels do not use; the grid; the program's position.
        values = [None, None, *(arguments[name] for name in signature), columns, rows, 1, 0, 0, 0]
        types = ["*i8", "*i8", *signature.values(), *["i32"] * 6]
        flat = [x for value, kind in zip(values, types, strict=True) for x in _flat(value, kind)]
        function = getattr(built.library, self._function.__name__)
        for row, column in product(range(rows), range(columns)):
            function(*flat[:-3], ctypes.c_int32(column), ctypes.c_int32(row), flat[-1])
            built.library.end_program()

    def _split(self, arguments: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        """Return (signature, constants) in the order and with the annotations of the kernel's parameters."""
        code = self._function.__code__
        signature, constants = {}, {}
        for name in code.co_varnames[: code.co_argcount]:
            value, annotation = arguments[name], self._function.__annotations__.get(name, "")
            if value is None or "constexpr" in annotation:
                constants[name] = value
            elif isinstance(value, Tensor):
                signature[name] = _POINTERS[value.dtype]
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i64" if "int64" in annotation else "i32"
        assert arguments.keys() == signature.keys() | constants.keys()
        return signature, constants

    def _build(self, signature: dict[str, str], constants: dict[str, Any]) -> Built:
        """Lower and compile the kernel. Raises LoweringError."""
        request = json.dumps({"function": self._function.__name__, "signature": signature, "constants": constants})
        if request not in self._built:
            folder = CACHE / self._digest(request)
            if not folder.exists():
                self._lower({"file": self._function.__code__.co_filename, **json.loads(request)}, folder)
            answer = json.loads((folder / "answer.json").read_text())
            if "error" in answer:
                raise LoweringError(answer["error"])
            self._built[request] = Built(ctypes.CDLL(str(folder / "kernel.so")), **answer)
        return self._built[request]

    def _digest(self, request: str) -> str:
        """Return the digest of all that the result depends on. The file of a kernel imports only triton."""
        packages = sorted(path.name for path in Path(self._python).parents[1].glob("lib/*/site-packages/*.dist-info"))
        made = hashlib.sha256(json.dumps([request, packages, platform.machine(), os.environ.get("CXX")]).encode())
        for file in (self._function.__code__.co_filename, LOWERING, LOWERING.with_name("runtime.cpp")):
            made.update(b"\0" + Path(file).read_bytes())
        return made.hexdigest()

    def _lower(self, request: dict[str, Any], to: Path) -> None:
        """Write kernel.so, or nothing after a compiler's error, and answer.json to a new folder."""
        CACHE.mkdir(parents=True, exist_ok=True)
        clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
        with tempfile.TemporaryDirectory(prefix="making-", dir=CACHE) as name:
            done = subprocess.run([self._python, LOWERING, name], input=json.dumps(request), env=clean,
                                  capture_output=True, text=True)
            if done.returncode:
                raise LoweringError(done.stderr)
            made = Path(name) / "made"
            made.mkdir()
            (made / "answer.json").write_text(done.stdout)
            if (library := Path(name) / "kernel.so").exists():
                library.rename(made / "kernel.so")
            with contextlib.suppress(OSError):  # another process has made it
                made.rename(to)


def _flat(value: Any, kind: str) -> list[Any]:
    """Return the value as MLIR passes it: a memref as two pointers, offset, size and stride."""
    if not kind.startswith("*"):
        return [_SCALARS[kind](value)]
    pointer, size = (ctypes.c_void_p(None), 0) if value is None else (ctypes.c_void_p(value.data_ptr()), value.numel())
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(size), ctypes.c_int64(1)]
