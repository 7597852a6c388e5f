"""python -m tests.native MACHINE PROGRAM: build the golden test for x86_64 or aarch64.

The program holds every instruction set of the machine. The compiler is $CXX, as for the library. Warnings are errors.
avx2_vnni is built with the instruction's encoding of AVX-512, so that processors with either can run it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import setup

ROOT = Path(__file__).parents[2]
FLAGS = ("-DNPUSERVE_EVEX", "-Wall", "-Wextra", "-Werror",
         "-Wno-maybe-uninitialized")  # for GCC's headers


def main(machine: str, program: str) -> None:
    compiler, kernels = setup.find_compiler(), ROOT / setup.SOURCES
    with TemporaryDirectory() as temporary:
        objects = setup.compile_objects(compiler, kernels, setup.isas_of(machine), temporary, FLAGS)
        for source in sorted(Path(__file__).parent.glob("*.cpp")):
            objects.append(f"{temporary}/{source.name}.o")
            setup.run([*compiler, *setup.FLAGS, *FLAGS, f"-I{kernels}", "-c", str(source), "-o", objects[-1]])
        # Static, so that an emulator needs no libraries of the machine.
        setup.run([*compiler, "-static", *setup.FLAGS, *objects, "-o", program])


if __name__ == "__main__":
    main(*sys.argv[1:])
