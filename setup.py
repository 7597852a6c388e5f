"""Build of the native CPU kernels, kernels/native/libnpuserve.so. pyproject.toml holds the rest of the configuration.

The library is loaded by ctypes, so one wheel serves every Python 3 of a platform. Without a working C++17 compiler the
package is installed as a pure wheel without the library, and plain torch computes.

NATIVE_ISAS selects the instruction sets: by default those that are fastest on this machine's processor (`fastest`),
`all` for a wheel or an image that other machines run, or names separated by commas. The set that every processor has is
built where no other is.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/npuserve/kernels/native")
ROOT = Path(__file__).resolve().parent
PROCESSOR = "runtime/processor.cpp"
"""Source that detects the processor's instruction sets; it needs none of the others."""
ONCE = ("lengths.cpp", "memory.cpp", "pool.cpp", "processor.cpp", "tables.cpp")
"""Sources that are compiled once. Others are compiled for each instruction set."""
SLOWEST = ("int4.cpp", "linear.cpp", "attention.cpp", "compact.cpp", "int4_int8.cpp", "rope.cpp", "nibbles.cpp")
"""Sources that compile longest, the longest first. They begin first, so that all processors end together."""
_ROWS = ("convolution.cpp", "delta.cpp", "experts.cpp", "ranks.cpp", "rope.cpp", "sample.cpp", "uniform.cpp",
         "vocabulary.cpp")
LEFT_OUT = {"avx512_amx": _ROWS, "avx2_vnni": (*_ROWS, "rowwise.cpp", "attention.cpp", "compact.cpp", "int4.cpp")}
"""Instruction set -> sources that are not compiled for it, since its table has the kernels of a narrower set
(runtime/isa.cpp)."""
NARROWER = {"avx512_amx": "avx512_bf16", "avx2_vnni": "avx2"}
"""Instruction set -> set whose kernels its table has, too. Where that set has no table, only those are compiled."""
IN_BOTH = {"avx512_amx": ("attention.cpp",)}
"""Instruction set -> sources of which its table has kernels that are compiled for it, and others for the narrower."""

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi",
         "-Wno-unknown-pragmas", "-pthread")
LINK_FLAGS = ("-Wl,-z,defs",) if sys.platform == "linux" else ()
"""Missing functions are link errors."""

# -mprfchw: a prefetch for writing also takes a line from other processors' caches. Not in avx2, which older processors
# run.
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mprfchw",
          "-mprefer-vector-width=512")
X86 = {
    "avx512_amx": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "avx512_vnni": AVX512,
    "avx2_vnni": ("-mavx2", "-mfma", "-mavxvnni"),
    "avx2": ("-mavx2", "-mfma"),
}
if sys.platform != "linux":
    del X86["avx512_amx"]  # the permission for its registers is requested from Linux
PORTABLE: dict[str, tuple[str, ...]] = {"portable": ()}
UNSCHEDULED = "-fno-schedule-insns"  # GCC otherwise loads a tile's words so early that accumulators are spilled
AARCH64: dict[str, tuple[str, ...]] = {
    "neon_bf16": (UNSCHEDULED, "-march=armv8.2-a+dotprod+i8mm+bf16"),
    "neon_dotprod": (UNSCHEDULED, "-march=armv8.2-a+dotprod"),
    "neon": (UNSCHEDULED,),
}


def isas_of(machine: str) -> dict[str, tuple[str, ...]]:
    """Return the instruction sets of a machine, the widest first, and the flags of each."""
    # On x86_64 hardly any processor has none of the others, and compiling for speed takes twice the time.
    return {"x86_64": X86 | {"portable": ("-O1",)}, "aarch64": AARCH64}.get(machine, PORTABLE)


MACHINE = sysconfig.get_platform().rpartition("-")[2]
"""Machine that the wheel is for: this one, unless _PYTHON_HOST_PLATFORM names another, as linux-aarch64."""
ISAS = isas_of(MACHINE)
"""Instruction sets of MACHINE. A compiler that does not know the flags of a set builds the others."""


class BuildError(Exception):
    """Reason why the library cannot be built, in one line."""


def sources(folder: Path, pattern: str) -> list[Path]:
    """Return the files in `folder` and its folders that match the pattern, sorted."""
    return sorted(folder.rglob(pattern))


def _add_file(digest: hashlib._Hash, file: Path, folder: Path) -> None:
    """Add the path in `folder` and the contents of a source to a digest."""
    digest.update(f"\0{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes())


def digest(folder: Path) -> str:
    """Return the digest of the sources, the flags and the machine that a library is built from."""
    made = hashlib.sha256(repr((MACHINE, FLAGS, LINK_FLAGS, ISAS)).encode())
    for file in [*sources(folder, "*.cpp"), *sources(folder, "*.h")]:
        _add_file(made, file, folder)
    return made.hexdigest()


def stamp(folder: Path, isas: Iterable[str]) -> str:
    """Return the text that identifies a library of these instruction sets to `is_current`."""
    return " ".join([digest(folder), *isas])


def is_current(library: Path, folder: Path) -> bool:
    """Return True if the library is built from these sources, for every wanted set that the compiler knows.

    The compiler runs only if the library lacks instruction sets. Without a compiler only the sources count.
    """
    if not library.exists():
        return False
    found = re.search(digest(folder).encode() + rb"((?: \w+)*)\0", library.read_bytes())
    if found is None:
        return False
    missing = ISAS.keys() - set(found[1].decode().split())
    if not missing:
        return True
    try:
        compiler = find_compiler()
    except BuildError:
        return True
    return not any(works(compiler, *ISAS[isa]) for isa in missing & wanted_isas(compiler))


def run(command: list[str], source: str | None = None) -> str:
    """Return the output of a command. source: for its stdin. Raises BuildError if the command fails."""
    english = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, input=source, env=english, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        lines = done.stderr.splitlines() or [f"{command[0]} failed"]
        raise BuildError(next((line for line in lines if re.search("error|undefined", line)), lines[0]).strip())
    return done.stdout


def works(compiler: list[str], *flags: str) -> bool:
    """Return True if the compiler builds a C++17 shared library with these flags."""
    try:
        run([*compiler, *FLAGS, *flags, "-x", "c++", "-shared", "-", "-o", os.devnull], "#include <thread>\n")
    except BuildError:
        return False
    return True


def find_compiler() -> list[str]:
    """Return $CXX as a list of words if it is set, else the first usual compiler that works.

    Raises BuildError if none works.
    """
    named = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["c++"], ["g++"], ["clang++"]]
    for command in named:
        if works(command):
            return command
    raise BuildError(f"{' or '.join(map(shlex.join, named))} is no working C++17 compiler")


def processor_isas(compiler: list[str]) -> set[str]:
    """Return the instruction sets of this machine's processor; all of them if the compiler builds for another machine.

    Raises BuildError.
    """
    with TemporaryDirectory() as temporary:
        library = Path(temporary, "processor.so")
        run([*compiler, "-shared", *FLAGS, f"-I{ROOT / SOURCES}", str(ROOT / SOURCES / PROCESSOR), "-o", str(library)])
        try:
            name_of = ctypes.CDLL(str(library)).npuserve_processor_isa
        except OSError:
            return set(ISAS)
        name_of.restype = ctypes.c_char_p
        names = itertools.takewhile(bool, map(name_of, itertools.count()))
        return {name.decode() for name in names}


def fastest(names: set[str]) -> set[str]:
    """Return the one that multiplies by tiles, or else those with the widest registers, of which each may be faster."""
    first = next(isa for isa in ISAS if isa in names)
    width = first.partition("_")[0]
    return {first} if first == "avx512_amx" else {isa for isa in names if isa.partition("_")[0] == width}


def wanted_isas(compiler: list[str]) -> set[str]:
    """Return the instruction sets that NATIVE_ISAS selects. Raises BuildError, or SystemExit for an unknown name."""
    setting = os.environ.get("NATIVE_ISAS", "")
    if setting == "all":
        return set(ISAS)
    names = set(setting.replace(",", " ").split()) or fastest(processor_isas(compiler))
    if unknown := sorted(names - ISAS.keys()):
        raise SystemExit(f"NATIVE_ISAS: {', '.join(unknown)}: not all, and not among {', '.join(ISAS)}")
    return names


def prerequisites(rule: str) -> list[Path]:
    """Return the files after the target of a make rule, in which spaces and "#" follow a backslash, and "$" is "$$"."""
    names = re.findall(r"(?:\\.|\S)+", rule.partition(": ")[2].replace("\\\n", " "))
    return [Path(re.sub(r"\\([ #])|\$(\$)", r"\1\2", name)) for name in names]


def compile_objects(
    compiler: list[str], folder: Path, isas: dict[str, tuple[str, ...]], into: str, extra: tuple[str, ...] = ()
) -> list[str]:
    """Compile the sources in `folder` for these instruction sets and return the object files.

    If NATIVE_OBJECTS names a folder, objects are kept there and reused for the same source, included headers and flags.

    into: folder of the object files without NATIVE_OBJECTS.
    extra: further flags of all sources.

    Raises BuildError.
    """
    defines = [f"-DHAS_{name}" for name in isas] + [f'-DNPUSERVE_SOURCE="{stamp(folder, isas)}"']
    slow_first = {name: place for place, name in enumerate(SLOWEST)}
    files = sorted(sources(folder, "*.cpp"),
                   key=lambda file: (slow_first.get(file.name, len(SLOWEST)), -file.stat().st_size))
    units: list[tuple[Path, list[str]]] = []
    for file in files:
        if file.name not in ONCE:
            units += [(file, [f"-DNPUSERVE_ISA={name}", *flags]) for name, flags in isas.items()
                      if file.name not in LEFT_OUT.get(name, ())]
            units += [(file, ["-DNPUSERVE_BORROWED", f"-DNPUSERVE_ISA={narrower}", *ISAS[narrower]])
                      for name, narrower in NARROWER.items() if name in isas and narrower not in isas
                      and file.name in (*LEFT_OUT[name], *IN_BOTH.get(name, ()))]
    units += [(file, defines) for file in files if file.name in ONCE]
    kept = os.environ.get("NATIVE_OBJECTS")
    version = run([*compiler, "--version"]) if kept else ""

    def compiled(number: int, file: Path, flags: Iterable[str]) -> str:
        """Return the path of the object of one source."""
        command = [*compiler, *FLAGS, *extra, *flags, f"-I{folder}"]
        target = Path(into, f"{number}-{file.stem}.o")
        if not kept:
            run([*command, "-c", str(file), "-o", str(target)])
            return str(target)
        # Without `folder`, so that every checkout of the same sources reuses the objects.
        key = hashlib.sha256(f"{version}\0{compiler, command[len(compiler):-1]}".encode())
        rule = run([*command, "-MM", str(file)])  # "linear.o: linear.cpp gemm/tile.h …"
        for included in prerequisites(rule):
            _add_file(key, included, folder)
        reused = Path(kept, f"{file.stem}-{key.hexdigest()}.o")
        if not reused.exists():
            run([*command, "-c", str(file), "-o", str(target)])
            reused.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, complete := reused.with_suffix(f".{os.getpid()}"))
            complete.replace(reused)
        return str(reused)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(compiled, range(len(units)), *zip(*units, strict=True)))


def build(library: Path, folder: Path) -> list[str]:
    """Build the library from the sources in `folder` and return its instruction sets. Raises BuildError."""
    compiler = find_compiler()
    wanted = wanted_isas(compiler)
    isas = {name: flags for name, flags in ISAS.items() if name in wanted and works(compiler, *flags)}
    if not isas:  # the compiler knows none of them
        *_, narrowest = ISAS
        isas = {narrowest: ISAS[narrowest]}
    with TemporaryDirectory() as temporary:
        objects = compile_objects(compiler, folder, isas, temporary)
        linked = Path(temporary, library.name)
        run([*compiler, "-shared", *FLAGS, *LINK_FLAGS, *objects, "-o", str(linked)])
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(linked, library)
    return list(isas)


class BuildNative(build_ext):
    """Build command that puts the library into the wheel, or into the tree for an editable install."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        folder, name = ROOT / SOURCES, self.get_ext_filename(ext.name)
        library, in_tree = Path(self.build_lib, name), folder / "libnpuserve.so"
        for made in (library, in_tree, *ROOT.glob(f"build/*/{name}")):
            if is_current(made, folder):
                if made != library:
                    library.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(made, library)
                return
        library.unlink(missing_ok=True)
        begun = time.monotonic()
        try:
            isas = build(library, folder)
        except BuildError as error:
            # Without an extension the distribution is pure.
            self.distribution.ext_modules, self.extensions = [], []
            if self.editable_mode:
                in_tree.unlink(missing_ok=True)
            self.announce(
                f"npuserve: the native CPU kernels are NOT built ({error}), so plain torch serves, much slower; "
                "install again with g++ or clang++, or CXX naming another", logging.WARNING)
        else:
            left_out = [isa for isa in ISAS if isa not in isas]
            others = f", not for {', '.join(left_out)} (NATIVE_ISAS=all)" if left_out else ""
            built = f"built in {time.monotonic() - begun:.0f} s for {', '.join(isas)}{others}"
            self.announce(f"npuserve: native CPU kernels {built}", logging.WARNING)


class Wheel(bdist_wheel):
    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("npuserve.kernels.native.libnpuserve", sources=[*map(str, sources(SOURCES, "*.cpp"))],
                               depends=[*map(str, sources(SOURCES, "*.h"))])],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
    )
