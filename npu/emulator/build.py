"""Builder of the emulated CANN libraries: compiles them once per pair of torch and torch_npu.

The cache is `$XDG_CACHE_HOME/npuserve/emulator` (default `~/.cache`). It holds object files by the digest of their
inputs. It has one folder of libraries per set of sources, compiler, torch and torch_npu. A file lock makes concurrent
processes build once.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from npuserve.npu.emulator.absent import lacking
from npuserve.npu.emulator.absent import source as absent_source

log = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
SHARED = (HERE / "runtime" / "emulator.h", HERE / "runtime" / "aclop.h")
"""Headers of the runtime that the operators include."""

STUBS = ("libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel", "libruntime", "libnnopbase",
         "libmsprofiler", "libascend_hal")
"""Empty libraries that torch_npu is linked against or opens by name; they depend on the two that are not empty, where
the loader finds their functions."""

TRANSFORMER = "aclnnFusedInferAttentionScore"
"""Beginning of the names of the operators in libopapi_transformer, as in CANN, where libopapi lacks them. torch_npu
finds the library in $ASCEND_HOME_PATH/lib64."""

PARTS = ("opp", "runtime", "compiler")
"""Empty folders of a CANN, whose presence torch_npu checks."""

TRANSFORMER_SOURCES = ("attention.cpp", "objects.cpp", "tensors.cpp")
"""Sources of libopapi_transformer in ops/: its operators, and handles of the aclnn interface."""

FLAGS = ("-std=c++20", "-O1", "-fPIC", "-DFUNC_VISIBILITY", "-fvisibility=hidden", "-Wno-deprecated-declarations",
         "-Wno-psabi", "-pthread")

MAX_AGE_SECONDS = 30 * 24 * 3600
"""Older build results are deleted after a build."""


class EmulatorError(RuntimeError):
    """The emulated NPU is not available; the message is one sentence that says how to fix it."""


@dataclass(frozen=True)
class Packages:
    """Folders and versions of the installed torch and torch_npu."""

    torch: Path
    torch_npu: Path
    versions: tuple[str, str]


def _package(name: str, advice: str) -> tuple[Path, str]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise EmulatorError(f"emulated NPU: {name} is not installed: {advice}")
    return Path(spec.origin).parent, importlib.metadata.version(name)


def find() -> Packages:
    """Locate the installed torch and torch_npu without importing them.

    Raises EmulatorError if one is missing, the versions do not match, or the emulator's sources are not installed.
    """
    if not (HERE / "runtime").is_dir():
        raise EmulatorError("emulated NPU: its C++ sources are not in the wheel: clone npuserve, and install it with "
                            "pip install -e .")
    if platform.system() != "Linux":
        raise EmulatorError(f"emulated NPU: torch_npu runs only on Linux, not on {platform.system()}")
    torch, torch_version = _package("torch", "pip install npuserve")
    torch_npu, version = _package("torch_npu", "pip install 'npuserve[npu]'")
    release = r"\d+\.\d+\.\d+"
    needed = re.match(release, version)
    installed = re.match(release, torch_version)
    if needed is None or installed is None or needed[0] != installed[0]:
        needs = needed[0] if needed else "another one"
        raise EmulatorError(f"emulated NPU: torch_npu {version} is made for torch {needs}, and torch {torch_version} "
                            f"is installed: pip install torch=={needs}")
    if not (torch_npu / "include" / "third_party" / "acl" / "inc").is_dir():
        raise EmulatorError(f"emulated NPU: torch_npu {version} came without its headers: install its published wheel")
    return Packages(torch, torch_npu, (torch_version, version))


def _run(command: list[str]) -> str:
    """Run a command and return its output. Raises EmulatorError with the first error line if it fails."""
    done = subprocess.run(command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = done.stderr.splitlines() or ["no message"]
        first = next((line for line in lines if re.search("error|undefined", line)), lines[0]).strip()
        raise EmulatorError(f"emulated NPU: {Path(command[0]).name} cannot build it: {first}")
    return done.stdout


def find_compiler() -> list[str]:
    """Return the words of $CXX if set, else g++ or clang++. Raises EmulatorError if there is no compiler."""
    named = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["g++"], ["clang++"]]
    for words in named:
        if shutil.which(words[0]):
            return words
    raise EmulatorError(f"emulated NPU: no C++ compiler ({' or '.join(words[0] for words in named)}): install g++, or "
                        "set CXX to another")


def cache() -> Path:
    """Return the folder of the build results."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "npuserve" / "emulator"


def _digest(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"\0" + (part.read_bytes() if isinstance(part, Path) else repr(part).encode()))
    return digest.hexdigest()[:24]


@dataclass(frozen=True)
class _Unit:
    source: Path
    flags: tuple[str, ...]
    digest: str


def _units(folder: str, headers: list[Path], flags: tuple[str, ...], salt: str) -> list[_Unit]:
    """Return the units of a folder's sources, largest first, since the largest takes longest to compile.

    salt: what else decides the objects, such as the versions of packages, whatever the folders that they are in.
    """
    sources = sorted((HERE / folder).glob("*.cpp"), key=lambda file: -file.stat().st_size)
    same = [flag for flag in flags if not flag.startswith("-I")]
    return [_Unit(source, flags, _digest(salt, same, *headers, source)) for source in sources]


def libraries(cann: str = "9.1.0", without: Sequence[str] = ()) -> Path:
    """Return the folder of the libraries, building them if necessary. Raises EmulatorError.

    cann: emulated version, of absent.VERSIONS.
    without: operators that it lacks besides.
    """
    place = find()
    compiler = find_compiler()
    acl = place.torch_npu / "include" / "third_party" / "acl" / "inc"
    torch = place.torch / "include"
    salt = repr((place.versions, platform.machine(), compiler, _run([*compiler, "--version"])))
    headers = [*sorted((HERE / "runtime").glob("*.h")), *sorted((HERE / "hccl").glob("*.h"))]
    runtime = [*_units("runtime", headers, (*FLAGS, f"-I{acl}"), salt),
               *_units("hccl", headers, (*FLAGS, f"-I{acl}", f"-I{place.torch_npu / 'include'}"), salt)]
    includes = tuple(f"-I{path}" for path in (acl, HERE / "runtime", torch, torch / "torch/csrc/api/include"))
    # The operators call ATen, which does the work: more optimization of the callers would only cost build time.
    ops = _units("ops", [*SHARED, *sorted((HERE / "ops").glob("*.h"))], (*FLAGS, "-O1", *includes), salt)
    home = cache()
    layout = (*STUBS, *PARTS, TRANSFORMER, *TRANSFORMER_SOURCES)
    hidden = [*lacking(cann), *without]
    folder = home / _digest(layout, hidden, HERE / "absent.py", *(unit.digest for unit in runtime + ops))
    if (folder / "built").exists():
        return folder
    try:
        (home / "objects").mkdir(parents=True, exist_ok=True)
        lock = (home / "lock").open("w")
    except OSError as error:
        raise EmulatorError(f"emulated NPU: cannot write {home} ({error.strerror}): set XDG_CACHE_HOME to a folder "
                            "that can be written") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            _build(place, compiler, runtime, ops, home, folder, hidden)
    return folder


@contextmanager
def _precompiled(compiler: list[str], flags: tuple[str, ...], files: int) -> Iterator[tuple[str, ...]]:
    """Yield flags that make g++ read ATen's headers, most of the work, once for `files` operator sources."""
    if files < 4 or "Free Software Foundation" not in _run([*compiler, "--version"]):
        yield ()  # too few files, or another compiler
        return
    with tempfile.TemporaryDirectory() as folder:
        _run([*compiler, *flags, "-x", "c++-header", str(HERE / "ops" / "op.h"), "-o", f"{folder}/op.h.gch"])
        yield ("-include", f"{folder}/op.h")


def _build(
    place: Packages, compiler: list[str], runtime: list[_Unit], ops: list[_Unit], home: Path, libraries: Path,
    hidden: list[str],
) -> None:
    """Build the libraries. hidden: operators that they do not export."""
    begun = time.monotonic()
    log.warning("building the emulated NPU, which is done once for torch_npu %s", place.versions[1])

    def compile(unit: _Unit) -> str:
        target = home / "objects" / f"{unit.digest}.o"
        if not target.exists():
            part = target.with_suffix(".part")
            _run([*compiler, *unit.flags, *(include if unit in ops else ()), "-c", str(unit.source), "-o", str(part)])
            part.rename(target)
        return str(target)

    part = libraries.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    (part / "absent.cpp").write_text(absent_source(place.torch_npu, without=TRANSFORMER))
    flags = (*runtime[0].flags, f"-I{HERE / 'runtime'}")
    others = [*runtime, _Unit(part / "absent.cpp", flags, f"absent-{libraries.name}")]
    ahead = sum(not (home / "objects" / f"{unit.digest}.o").exists() for unit in ops)
    with _precompiled(compiler, ops[0].flags, ahead) as include, ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = dict(zip(ops + others, threads.map(compile, ops + others), strict=True))

    def link(name: str, made_of: list[str], *flags: str) -> None:
        soname = f"-Wl,-soname,{Path(name).name}.so"
        _run([*compiler, "-shared", "-pthread", soname, "-Wl,-rpath,$ORIGIN", *made_of, *flags,
              "-o", str(part / f"{name}.so")])

    link("libascendcl", [objects[unit] for unit in runtime], "-Wl,-z,defs")
    torch = place.torch / "lib"
    for name in ("lib64", *PARTS):
        (part / name).mkdir()
    local = "".join(f" {name}; {name}GetWorkspaceSize;" for name in hidden)
    (part / "libopapi.map").write_text(f"{{ local:{local} }};\n" if local else "{ };\n")
    (part / "transformer.map").write_text(f"{{ global: {TRANSFORMER}*; emuOperators; local:{local} *; }};\n")
    aten = (f"-L{part}", "-lascendcl", f"-L{torch}", "-ltorch_cpu", "-lc10", "-Wl,-z,defs")
    attention = HERE / "ops" / TRANSFORMER_SOURCES[0]
    link("libopapi", [objects[unit] for unit in (*ops, others[-1]) if unit.source != attention],
         f"-Wl,--version-script={part / 'libopapi.map'}", *aten)
    link("lib64/libopapi_transformer", [objects[unit] for unit in ops if unit.source.name in TRANSFORMER_SOURCES],
         f"-Wl,--version-script={part / 'transformer.map'}", "-Wl,-rpath,$ORIGIN/..", *aten)
    for stub in STUBS:
        link(stub, [], f"-L{part}", "-Wl,--no-as-needed", "-lopapi", "-lascendcl", f"-Wl,-rpath-link,{torch}")
    (part / "built").touch()
    shutil.rmtree(libraries, ignore_errors=True)
    part.rename(libraries)
    for old in [*home.glob("*/built"), *home.glob("objects/*.o")]:
        if time.time() - old.stat().st_mtime > MAX_AGE_SECONDS:
            old.unlink(missing_ok=True)
            if old.name == "built":
                shutil.rmtree(old.parent, ignore_errors=True)
    log.warning("the emulated NPU is built, in %.0f s", time.monotonic() - begun)


def operator_library(name: str = "libopapi.so") -> ctypes.CDLL:
    """Return a library of operators. The emulated one, in a process where the emulator is active."""
    return ctypes.CDLL(name)
