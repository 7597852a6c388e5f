"""python -m tests.native MACHINE PROGRAM [LIBRARY]: build the golden test for x86_64 or aarch64.

The program holds every instruction set of the machine, or, with a library, links it: libnpuserve.so of a wheel. The
compiler is $CXX, as for the library. Warnings are errors. Without a library avx2_vnni is built with the instruction's
encoding of AVX-512, so that processors with either can run it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import setup

ROOT = Path(__file__).parents[2]
FLAGS = ("-DNPUSERVE_EVEX", "-Wall", "-Wextra", "-Werror",
         "-Wno-maybe-uninitialized")  # for GCC's headers


def main(machine: str, program: str, library: str = "") -> None:
    compiler, kernels = setup.find_compiler(), ROOT / setup.SOURCES
    with TemporaryDirectory() as temporary:
        if library:
            # The process sets LD_LIBRARY_PATH. A wheel's library has no soname, so that its name is the file's.
            objects = []
            link = ["-L", str(Path(library).parent), "-lnpuserve"]
        else:
            objects = setup.compile_objects(compiler, kernels, setup.isas_of(machine), temporary, FLAGS)
            link = ["-static"]  # so that an emulator needs no libraries of the machine
        for source in sorted(Path(__file__).parent.glob("*.cpp")):
            objects.append(f"{temporary}/{source.name}.o")
            setup.run([*compiler, *setup.FLAGS, *FLAGS, f"-I{kernels}", "-c", str(source), "-o", objects[-1]])
        setup.run([*compiler, *setup.FLAGS, *objects, *link, "-o", program])


if __name__ == "__main__":
    main(*sys.argv[1:])
