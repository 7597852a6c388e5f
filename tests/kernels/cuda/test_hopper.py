"""The kernel decoder_layers compiled for Hopper by NVRTC at the shape of Qwen3-14B: registers, instructions, size."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("cuda.bindings", reason="cuda.bindings is not installed")

from npuserve.kernels.cuda import compiled, launch_decoder_layers  # noqa: E402  after the skips

SHAPE = {"BLOCKS": 132, "SHARED": 232_448, "LAYERS": 40, "HIDDEN": 5120, "INTERMEDIATE": 17408, "Q_HEADS": 40,
         "KV_HEADS": 8, "DIM": 128, "PAGE": 32}
FORMS = {"bfloat16": 0, "int8": 1, "float8": 2}
PRODUCTS = {"bfloat16": "HMMA.16816.F32.BF16", "int8": "IMMA.16832.S8.S8", "float8": "HMMA.16816.F32"}
INSTRUCTION_CACHE = 128 << 10
"""Bytes from which one-time code was fetched anew in every layer on an H200, which doubled the step."""

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@cache
def cubin(form: str, rows: int) -> bytes:
    constants = {"ROWS": rows, "FORM": FORMS[form], "COLUMNS": 1024 if FORMS[form] else 512, **SHAPE}
    return compiled.machine_code("decoder_layers", "sm_90a", tuple(constants.items()))


def dumped(code: bytes, what: str, folder: Path) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    return subprocess.run([CUOBJDUMP, f"--dump-{what}", file], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("rows", launch_decoder_layers.ROWS)
@pytest.mark.parametrize("form", FORMS)
def test_registers_hold_everything_and_code_fits_the_instruction_cache(form: str, rows: int, tmp_path: Path) -> None:
    code = cubin(form, rows)
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dumped(code, "resource-usage", tmp_path)))
    assert int(usage["STACK"]) + int(usage["LOCAL"]) <= 16
    # Three groups of four warps share 65,536 registers; two of them take more when they begin.
    assert int(usage["REG"]) == 168
    text = dumped(code, "sass", tmp_path)
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)
    assert 16 * len(instructions) < INSTRUCTION_CACHE
    assert sum(PRODUCTS[form] in each for each in instructions) >= 20
    assert sum("USETMAXREG" in each for each in instructions) == 2


def test_error_of_the_compiler_is_raised() -> None:
    with pytest.raises(RuntimeError, match=r"decoder_layers\.cu cannot be compiled: (?s:.)*SHARED is too small"):
        compiled.machine_code("decoder_layers", "sm_90a", tuple({
            "ROWS": 1, "FORM": 0, "COLUMNS": 512, **SHAPE, "SHARED": 60_000}.items()))
