"""Compilation of kernels for sm_90 down to machine code by the published Triton, without a device."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kernels.triton import CACHE

KERNELS = Path(__file__).parents[3] / "kernels" / "triton"
_COMPILE = """
import importlib.util, json, subprocess, sys, tempfile
from pathlib import Path

answers, sys.stdout = sys.stdout, sys.stderr

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(file, name, signature, constants, options):
    spec = importlib.util.spec_from_file_location("kernel", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, name)
    types = signature | dict.fromkeys(constants, "constexpr")
    # As when called: what is divisible by 16, which all pointers of torch are, is known to be.
    divisible = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
                 if types[n].startswith("*") or types[n].endswith("/16")}
    source = ASTSource(kernel, {n: types[n].removesuffix("/16") for n in kernel.arg_names}, constants, divisible)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True)
    return made.asm["ptx"], made.metadata.shared, usage.stdout


for line in sys.stdin:
    print(json.dumps([compiled(*launch) for launch in json.loads(line)]), file=answers, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Compiled kernel.

    registers: of a thread. local: bytes of a thread in local memory, which holds spilled registers. shared: bytes of a
    program."""

    ptx: str
    registers: int
    local: int
    shared: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Kernel to compile from `file`.py.

    signature: argument -> type; "i32/16" is a number divisible by 16, as pointers are assumed to be.
    constants: the other arguments. options: num_warps and so on."""

    file: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


class Compiler:
    """Process that compiles, since this one has TRITON_INTERPRET. It ends at the end of its input."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMPILE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, env=environment | {"TRITON_CACHE_DIR": str(CACHE)})

    def ask(self, requests: str) -> str:
        """Return a line of results; an empty one after an error."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(requests + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def errors(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        return self._errors.read()


@functools.cache
def compiler() -> Compiler:
    return Compiler()


def compiled(launches: list[Launch]) -> list[Compiled]:
    """Compile the launches; Triton keeps the results in CACHE. Raises AssertionError with the compiler's message."""
    requests = json.dumps([[str(KERNELS / f"{x.file}.py"), x.kernel, x.signature, x.constants, x.options]
                           for x in launches])
    if not (results := compiler().ask(requests)):
        errors = compiler().errors()
        compiler.cache_clear()
        raise AssertionError(errors)
    return [_read(*result) for result in json.loads(results)]


def _read(ptx: str, shared: int, usage: str) -> Compiled:
    """Parse the outputs. usage: " Function x:\\n  REG:32 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:600 ..."."""
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(ptx, found["REG"], found["STACK"] + found["LOCAL"], shared)
