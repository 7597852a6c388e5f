"""The kernel decoder_layers compiled for a CPU (emulated.h), and calls of it."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from npuserve.kernels.cuda import launch_decoder_layers
from npuserve.kernels.cuda.compiled import FOLDER

HERE = Path(__file__).parent
BLOCKS, SHARED = 5, 200_000
"""Blocks of the grid, and bytes of shared memory of each: enough for a few stages."""


@cache
def library(folder: Path, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compile the kernel. Accesses that are not aligned end the process."""
    built = folder / f"{'_'.join(str(value) for _, value in constants)}.so"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-fsanitize=alignment", "-fno-sanitize-recover=alignment",
         "-U_FORTIFY_SOURCE",  # it refuses jumps between stacks
         "-Wno-unknown-pragmas", "-I", str(FOLDER), *(f"-D{name}={value}" for name, value in constants),
         str(HERE / "emulated.cpp"), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


def run(folder: Path, args: Sequence[Any], blocks: int = BLOCKS) -> Tensor:
    """Call the kernel with the golden function's arguments, and change the caches.

    folder: for the compiled library.
    """
    residual, layers, caches, eps, cos_sin, positions, slots, metadata, heads, scale = args
    constants = launch_decoder_layers.constants_of(
        len(residual), layers, caches[0][0], cos_sin.shape[1], heads, blocks, SHARED)
    assert constants is not None
    made = library(folder, tuple(constants.items()))
    assert (made.counters(), made.partial()) == launch_decoder_layers.sizes(constants)
    assert made.threads() == launch_decoder_layers.THREADS
    out = residual.clone()
    step, own = launch_decoder_layers.arguments(
        constants, out, layers, caches, eps, cos_sin, positions, slots, metadata, scale)
    assert made.size() == ctypes.sizeof(step)
    assert made.launch(ctypes.byref(step)) == 0, "the launch would never end"
    del own  # the kernel's own memory, in use until here
    return out
