"""Installed files equal the tree's: wheels of server and client, sdist and editable install."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# At collection, since it cannot be imported after a library has searched for pip (spec_for_pip in _distutils_hack).
import setuptools

import npuserve
from npuserve.kernels import native

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Folders of packages; everything else (tests, bench, docs, helm) is not installed.
SERVER = {"cli": "npuserve.cli", "service": "npuserve.service", "npu": "npuserve.npu", "kernels": "npuserve.kernels"}
CLIENT = {"client": "npuserve.client", "common": "npuserve.common", "protos/npuserve/v1": "npuserve.v1"}
PROJECT_FILES = {"client/LICENSE", "client/README.md", "client/pyproject.toml", "client/setup.cfg"}
LIBRARY = "npuserve/kernels/native/libnpuserve.so"


def shipped(sources: dict[str, str]) -> dict[str, Path]:
    """Return path in the wheel -> file, of all package files except the native library and C++ sources."""
    files = {"npuserve/__init__.py": ROOT / "src" / "npuserve" / "__init__.py"} if sources is CLIENT else {}
    for folder, package in sources.items():
        for file in (ROOT / folder).rglob("*"):
            has_sources = any(file.is_relative_to(ROOT / path) for path in ("kernels/native", "npu/emulator"))
            is_source = has_sources and file.suffix in (".cpp", ".h", ".so")
            is_project_file = file.relative_to(ROOT).as_posix() in PROJECT_FILES
            if file.is_file() and "__pycache__" not in file.parts and not is_source and not is_project_file:
                files[f"{package.replace('.', '/')}/{file.relative_to(ROOT / folder).as_posix()}"] = file
    return files


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def packages() -> dict[str, Path]:
    """Return name -> folder of each package that setuptools finds in src."""
    found = setuptools.find_packages(str(ROOT / "src"))
    return {name: (ROOT / "src" / name.replace(".", "/")).resolve() for name in found}


def test_packages_found_are_the_folders_with_python_files():
    found = {"npuserve": ROOT / "src" / "npuserve"}
    for folder, package in (SERVER | CLIENT).items():
        for path in {file.parent for file in (ROOT / folder).rglob("*.py")}:
            assert (path / "__init__.py").exists(), f"{path.relative_to(ROOT)} has no __init__.py"
            found[".".join([package, *path.relative_to(ROOT / folder).parts])] = path
    assert packages() == found


def test_the_tests_run_on_this_tree():
    """The editable install maps every package to its folder here; otherwise another copy would be tested."""
    for package, folder in packages().items():
        file = importlib.import_module(package).__file__
        assert file is not None
        assert Path(file).resolve().parent == folder


def copy_tree(target: Path, *without: str) -> Path:
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "node_modules", *without)
    return shutil.copytree(ROOT, target, ignore=ignored, symlinks=True)


def build(tree: Path, kind: str, out: Path, **variables: str) -> tuple[Path, str]:
    """Build a wheel or sdist; return (file, output)."""
    out.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=tree, env={**os.environ, **variables},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1], done.stdout + done.stderr


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """Build an sdist, and a wheel of it without a compiler; yield (wheel, the sdist's folder, output of the wheel's
    build)."""
    folder = tmp_path_factory.mktemp("pure")
    sdist = build(copy_tree(folder / "tree", "*.so"), "sdist", folder)[0]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked")
    (tree,) = (folder / "unpacked").iterdir()
    wheel, said = build(tree, "wheel", folder, CXX="", PATH=str(folder))
    yield wheel, tree, said
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    """Module setup.py, which does nothing when imported."""
    spec = importlib.util.spec_from_file_location("npuserve_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(setup_py: ModuleType) -> Path:
    """Native library of the tree, built by the editable install."""
    file = ROOT / "kernels" / "native" / "libnpuserve.so"
    if not file.exists():
        pytest.skip("the native kernels are not built; with a C++17 compiler `pip install -e .` builds them")
    assert setup_py.is_current(file, file.parent), "the native kernels are of older sources: run `pip install -e .`"
    return file


@pytest.fixture(scope="module")
def built(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Wheel with the native kernels; a build reuses the tree's library if its sources are the same."""
    folder = tmp_path_factory.mktemp("built")
    yield build(copy_tree(folder / "tree"), "wheel", folder, CXX="no-compiler-is-needed")[0]
    shutil.rmtree(folder)


def contents(wheel: Path) -> dict[str, str]:
    """Return path -> digest of all files of a wheel except RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: digest(archive.read(name)) for name in archive.namelist() if not name.endswith("/RECORD")}


def check_contents(wheel: Path) -> None:
    """Check that the server's wheel has the files of the tree."""
    files = contents(wheel)
    info = {name for name in files if ".dist-info/" in name}
    expected = {name: digest(file.read_bytes()) for name, file in shipped(SERVER).items()}
    assert {name: files[name] for name in files.keys() - info - {LIBRARY}} == expected
    assert {name.split("/", 1)[1] for name in info} == {
        "METADATA", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE", "licenses/NOTICE"}
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert f"npuserve/npu/storyteller/model/{name}" in files, "the built-in model is not in the wheel"


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client")
    return build(copy_tree(folder / "tree") / "client", "wheel", folder)[0]


def pip(home: Path, *arguments: str | Path) -> None:
    """Run this environment's pip on the environment `home`."""
    pytest.importorskip("pip")
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python",
               str(home / "bin" / "python"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def install(home: Path, *wheels: Path) -> tuple[Path, Path]:
    """Install the wheels into a new environment that uses this one's dependencies; return (bin, site-packages)."""
    venv.create(home, with_pip=False)
    pip(home, "install", "--no-deps", "--no-index", "--no-compile", *wheels)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin", site


@pytest.fixture(scope="module")
def installed_pure(
    pure: tuple[Path, Path, str], client_wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder of the programs of an environment with the wheel without native kernels, and the client's."""
    return install(tmp_path_factory.mktemp("installed") / "venv", pure[0], client_wheel)[0]


def output(*command: Path | str, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_the_packages_and_the_native_kernels(built: Path, library: Path):
    check_contents(built)
    assert re.search(r"-py3-none-(linux|macosx)_\w+\.whl$", built.name), "one wheel for every Python of a platform"
    assert contents(built)[LIBRARY] == digest(library.read_bytes())


@pytest.mark.full
def test_without_a_compiler_the_wheel_is_pure_with_a_warning(pure: tuple[Path, Path, str]):
    wheel, _, said = pure
    check_contents(wheel)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in contents(wheel)
    (line,) = [line for line in said.splitlines() if "NOT built" in line]
    assert "c++ or g++ or clang++ is no working C++17 compiler" in line


def test_the_sdist_has_the_sources_and_makes_the_wheel_of_the_tree(
    pure: tuple[Path, Path, str], setup_py: ModuleType
):
    wheel, tree, _ = pure
    assert not [name for name in ("tests", "bench", ".ci") if (tree / name).exists()]
    assert not [*tree.rglob("*.so")]
    check_contents(wheel)
    assert LIBRARY not in contents(wheel)
    assert setup_py.digest(tree / setup_py.SOURCES) == setup_py.digest(ROOT / setup_py.SOURCES), "a source is missing"


def test_wheels_of_the_tree_and_of_the_sdist_have_the_same_metadata(built: Path, pure: tuple[Path, Path, str]):
    of_tree, of_sdist = ({name: value for name, value in contents(wheel).items()
                          if ".dist-info/" in name and not name.endswith("/WHEEL")} for wheel in (built, pure[0]))
    assert of_tree == of_sdist


def test_an_installed_wheel_runs_without_the_tree(
    built: Path, client_wheel: Path, library: Path, setup_py: ModuleType, tmp_path: Path
):
    programs, site = install(tmp_path / "venv", built, client_wheel)
    code = f"""if True:
        import importlib
        from npuserve.kernels import native
        for package in {[*packages()]!r}: print(importlib.import_module(package).__file__)
        print(native.library().source)"""
    *files, source = output(programs / "python", "-I", "-c", code, cwd=tmp_path).splitlines()
    assert len(files) == len(packages())
    assert all(Path(file).is_relative_to(site) for file in files)
    assert source.split()[0] == setup_py.digest(library.parent)
    version = output(programs / "npuserve", "--version", cwd=tmp_path)
    assert version == f"npuserve {npuserve.__version__}\n"


def test_the_clients_wheel_is_pure_and_holds_its_packages(client_wheel: Path):
    files = contents(client_wheel)
    info = {name for name in files if ".dist-info/" in name}
    assert client_wheel.name == f"npuserve_client-{npuserve.__version__}-py3-none-any.whl"
    assert {name: files[name] for name in files.keys() - info} == {
        name: digest(file.read_bytes()) for name, file in shipped(CLIENT).items()}
    assert {name.split("/", 1)[1] for name in info} == {"METADATA", "WHEEL", "top_level.txt", "licenses/LICENSE"}


def test_server_requires_the_client_of_its_version():
    assert f"npuserve-client=={npuserve.__version__}" in PROJECT["dependencies"]


WITHOUT_SERVER = """
import sys
import npuserve, npuserve.client, npuserve.v1.generate_pb2
for name in ("LLM", "EngineArgs"):
    try: getattr(npuserve, name)()
    except ImportError as error: print(error)
heavy = {"torch", "numpy", "tokenizers", "cryptography", "npuserve.service"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""


def test_client_alone_imports_nothing_heavy_and_llm_says_what_to_install(client_wheel: Path, tmp_path: Path):
    programs, _ = install(tmp_path / "venv", client_wheel)
    assert output(programs / "python", "-I", "-c", WITHOUT_SERVER, cwd=tmp_path) == "".join(
        f"{name} needs the server: `pip install ./client .` in a clone of npuserve "
        "(npuserve-client is the client alone)\n"
        for name in ("LLM", "EngineArgs"))


@pytest.mark.full
@pytest.mark.parametrize("is_client_first", [True, False], ids=["client first", "server first"])
def test_client_and_server_are_installed_and_removed_in_any_order(
    pure: tuple[Path, Path, str], client_wheel: Path, tmp_path: Path, is_client_first: bool
):
    wheels = [client_wheel, pure[0]] if is_client_first else [pure[0], client_wheel]
    home = tmp_path / "venv"
    programs, site = install(home, *wheels)
    assert output(programs / "npuserve", "--version", cwd=tmp_path).startswith("npuserve ")
    pip(home, "install", "--no-deps", "--no-index", "--force-reinstall", wheels[0])  # an upgrade
    assert output(programs / "npuserve", "--version", cwd=tmp_path).startswith("npuserve ")
    pip(home, "uninstall", "--yes", "npuserve")
    assert output(programs / "python", "-I", "-c", "import npuserve.client", cwd=tmp_path) == ""
    pip(home, "uninstall", "--yes", "npuserve-client")
    assert not [file for file in (site / "npuserve").rglob("*") if file.suffix != ".pyc" and file.is_file()]


@pytest.mark.full
def test_an_installed_pure_wheel_runs_on_the_golden_functions(installed_pure: Path, tmp_path: Path):
    code = """if True:
        from npuserve.cli.main import main
        assert main(["check", "--json"]) == 0
        sizes = ["--batch", "2", "--context", "8", "--prompt", "8", "--tokens", "1"]
        assert main(["bench", "step", *sizes, "--json"]) == 0"""
    check, step = map(json.loads, output(installed_pure / "python", "-I", "-c", code, cwd=tmp_path).splitlines())
    assert check["native"]["isa"] is None
    assert set(check["backends"]["cpu"]["kernels"].values()) == {"golden"}
    assert step["decode_tokens_per_second"] > 0


def test_an_installed_wheel_lacks_the_emulators_sources_and_says_so(
    pure: tuple[Path, Path, str], installed_pure: Path, tmp_path: Path
):
    assert not [name for name in contents(pure[0]) if "/emulator/" in name and not name.endswith(".py")]
    code = """if True:
        from npuserve.npu.emulator.build import EmulatorError, find
        try: find()
        except EmulatorError as error: print(error)"""
    said = output(installed_pure / "python", "-I", "-c", code, cwd=tmp_path)
    assert said == ("emulated NPU: its C++ sources are not in the wheel: clone npuserve, and install it with "
                    "pip install -e .\n")


def test_the_native_kernels_that_are_tested_are_those_of_the_tree(library: Path, setup_py: ModuleType):
    assert native.library().source.split()[0] == setup_py.digest(library.parent)


ISAS = ["avx512_amx", "avx512_bf16", "avx512_vnni", "avx2_vnni", "avx2", "neon_bf16", "neon_dotprod", "neon"]
PIECES = {
    "pool.cpp": "",
    "tables.cpp": """
        const char *isas[] = {
            ISAS
            "portable"};
        #pragma GCC visibility push(default)
        extern "C" const char *widest() { return isas[0]; }
        extern "C" const char *source() { return NPUSERVE_SOURCE; }""".replace(
            "ISAS", "".join(f'#ifdef HAS_{isa}\n"{isa}",\n#endif\n' for isa in ISAS)),
    "group.cpp": '#include "group.h"\nnamespace NPUSERVE_ISA { int number() { return NUMBER; } }',
    "group.h": "#define NUMBER 1",
    "apart.cpp": "namespace NPUSERVE_ISA { int apart() { return 1; } }",
}


@pytest.fixture
def compiler(setup_py: ModuleType) -> list[str]:
    try:
        found: list[str] = setup_py.find_compiler()
    except setup_py.BuildError as error:
        pytest.skip(str(error))
    return found


def old_compiler(folder: Path, compiler: list[str], option: str) -> str:
    """Return a command for $CXX that rejects options like `option`, a pattern of the shell."""
    program = folder / "old compiler"
    program.write_text(f"""#!/bin/sh
        for word; do case "$word" in
            {option}) echo "error: unrecognized command-line option" >&2; exit 1;; esac; done
        exec {shlex.join(compiler)} "$@"
        """)
    program.chmod(0o755)
    return shlex.quote(str(program))


@pytest.fixture
def pieces(setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of small sources, which compile fast, for the two narrowest instruction sets."""
    monkeypatch.setenv("NATIVE_ISAS", ",".join([*setup_py.ISAS][-2:]))
    folder = tmp_path / "pieces"
    folder.mkdir()
    for name, text in PIECES.items():
        (folder / name).write_text(text)
    return folder


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(
    setup_py: ModuleType, compiler: list[str], pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CXX", old_compiler(tmp_path, compiler, "-m*bf16*"))
    monkeypatch.setenv("NATIVE_ISAS", "all")
    expected = [isa for isa, flags in setup_py.ISAS.items() if "bf16" not in " ".join(flags)]
    assert setup_py.build(tmp_path / "lib.so", pieces) == expected
    library = ctypes.CDLL(str(tmp_path / "lib.so"))
    library.widest.restype = library.source.restype = ctypes.c_char_p
    assert library.widest().decode() == expected[0]
    assert library.source().decode() == setup_py.stamp(pieces, expected)


def test_build_by_a_compiler_that_knows_no_wanted_set_has_the_set_of_every_processor(
    setup_py: ModuleType, compiler: list[str], pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, *_, base = setup_py.ISAS
    monkeypatch.setenv("CXX", old_compiler(tmp_path, compiler, "-m*"))
    monkeypatch.setenv("NATIVE_ISAS", first)
    assert setup_py.build(tmp_path / "lib.so", pieces) == [base]
    assert setup_py.is_current(tmp_path / "lib.so", pieces)


def test_wanted_isas_are_the_fastest_of_the_processor_by_default(
    setup_py: ModuleType, compiler: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NATIVE_ISAS", raising=False)
    wanted = setup_py.wanted_isas(compiler)
    assert wanted <= setup_py.processor_isas(compiler)
    if native.available():
        lib = native.library()
        assert (lib.missing_isas or lib.isas)[0] in wanted <= {*lib.isas, *lib.missing_isas}
    monkeypatch.setenv("NATIVE_ISAS", "all")
    assert setup_py.wanted_isas(compiler) == setup_py.ISAS.keys()
    monkeypatch.setattr(setup_py, "ISAS", setup_py.isas_of("x86_64"))
    for processor, expected in {
        "avx512_amx avx512_bf16 avx512_vnni avx2_vnni avx2": {"avx512_amx"},
        "avx512_bf16 avx512_vnni avx2": {"avx512_bf16", "avx512_vnni"},
        "avx2_vnni avx2": {"avx2_vnni", "avx2"},
        "": {"portable"},
    }.items():
        monkeypatch.setenv("NATIVE_ISAS", "")
        monkeypatch.setattr(setup_py, "processor_isas", lambda compiler, names=processor: {*names.split(), "portable"})
        assert setup_py.wanted_isas(compiler) == expected
    for setting, expected in {
        "avx512_amx,avx2": {"avx512_amx", "avx2"},
        "avx2_vnni": {"avx2_vnni"},
        "portable": {"portable"},
    }.items():
        monkeypatch.setenv("NATIVE_ISAS", setting)
        assert setup_py.wanted_isas(compiler) == expected
    monkeypatch.setenv("NATIVE_ISAS", "avx2,sse9")
    with pytest.raises(SystemExit, match="NATIVE_ISAS: sse9: not all, and not among avx512_"):
        setup_py.wanted_isas(compiler)


def test_build_in_a_folder_with_a_space_keeps_objects(
    setup_py: ModuleType, compiler: list[str], pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = pieces.rename(tmp_path / "my $1 #pieces")
    monkeypatch.setenv("NATIVE_OBJECTS", str(tmp_path / "kept objects"))
    setup_py.build(tmp_path / "lib.so", folder)
    kept = {path.name for path in (tmp_path / "kept objects").iterdir()}
    (folder / "group.h").write_text("#define NUMBER 2")
    setup_py.build(tmp_path / "lib.so", folder)
    assert kept < {path.name for path in (tmp_path / "kept objects").iterdir()}


def test_build_for_another_processor_keeps_a_library_with_more_and_replaces_one_with_less(
    setup_py: ModuleType, compiler: list[str], pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    *others, base = setup_py.ISAS
    if not others:
        pytest.skip("this machine has one instruction set")
    library = tmp_path / "lib.so"
    monkeypatch.setenv("NATIVE_ISAS", "")
    monkeypatch.setattr(setup_py, "processor_isas", lambda compiler: {base})
    assert setup_py.build(library, pieces) == [base]
    assert setup_py.is_current(library, pieces)
    monkeypatch.setattr(setup_py, "processor_isas", lambda compiler: {others[0], base})
    assert not setup_py.is_current(library, pieces)
    assert others[0] in setup_py.build(library, pieces)
    monkeypatch.setattr(setup_py, "processor_isas", lambda compiler: {base})
    assert not setup_py.is_current(library, pieces), "it lacks what this processor has"
    monkeypatch.setenv("NATIVE_ISAS", f"{others[0]},{base}")
    assert {*setup_py.build(library, pieces)} == {others[0], base}
    monkeypatch.setenv("NATIVE_ISAS", "")
    assert setup_py.is_current(library, pieces)
    monkeypatch.setenv("NATIVE_ISAS", "all")
    assert not setup_py.is_current(library, pieces)


def test_is_current_after_a_compiler_upgrade_is_false(
    setup_py: ModuleType, compiler: list[str], pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(setup_py, "ISAS", {"avx512": ("-DWIDE",), "portable": ()})
    monkeypatch.setenv("NATIVE_ISAS", "all")
    library, new, old = tmp_path / "lib.so", shlex.join(compiler), old_compiler(tmp_path, compiler, "-DWIDE")
    monkeypatch.setenv("CXX", old)
    assert setup_py.build(library, pieces) == ["portable"]
    assert setup_py.is_current(library, pieces)
    monkeypatch.setenv("CXX", "no-compiler")
    assert setup_py.is_current(library, pieces), "no compiler can build more"
    monkeypatch.setenv("CXX", new)
    assert not setup_py.is_current(library, pieces)
    assert setup_py.build(library, pieces) == ["avx512", "portable"]
    for present in (new, old, "no-compiler"):
        monkeypatch.setenv("CXX", present)
        assert setup_py.is_current(library, pieces), "it has all that there is"


INSTALL = """
import sys
from pathlib import Path
from setuptools import Distribution, Extension

sys.path.insert(0, sys.argv[1])
import setup

setup.ISAS, setup.ROOT, setup.SOURCES = {"avx512": ("-DWIDE",), "portable": ()}, Path.cwd(), Path("pieces")
extension = Extension("native.libnpuserve", sources=["pieces/pool.cpp"])
command = setup.BuildNative(Distribution({"ext_modules": [extension]}))
command.build_lib, command.build_temp = "build/lib", "build/temp"
command.ensure_finalized()
command.run()
"""


def test_a_build_after_a_compiler_upgrade_replaces_the_library(compiler: list[str], pieces: Path, tmp_path: Path):
    def install(cxx: str) -> bytes:
        done = subprocess.run([sys.executable, "-c", INSTALL, str(ROOT)], cwd=pieces.parent,
                              env={**os.environ, "CXX": cxx, "NATIVE_ISAS": "all"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "build/lib/native/libnpuserve.so").read_bytes()

    old, new = old_compiler(tmp_path, compiler, "-DWIDE"), shlex.join(compiler)
    first = install(old)
    assert install(old) == first
    assert (second := install(new)) != first
    assert install(old) == install("no-compiler") == second


@pytest.mark.usefixtures("compiler")
def test_a_library_is_current_until_a_source_changes(setup_py: ModuleType, pieces: Path, tmp_path: Path):
    library = tmp_path / "lib.so"
    assert not setup_py.is_current(library, pieces)
    setup_py.build(library, pieces)
    assert setup_py.is_current(library, pieces)
    (pieces / "group.h").write_text("#define NUMBER 2")
    assert not setup_py.is_current(library, pieces)


@pytest.mark.usefixtures("compiler")
def test_build_with_kept_objects_compiles_only_changes(
    setup_py: ModuleType, pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NATIVE_OBJECTS", str(tmp_path / "objects"))
    compiled: list[str] = []
    run = setup_py.run
    monkeypatch.setattr(setup_py, "run", lambda command, source=None: (
        compiled.extend(Path(command[command.index("-c") + 1]).name for _ in range("-c" in command)),
        run(command, source))[1])

    def build() -> tuple[set[str], bytes]:
        compiled.clear()
        setup_py.build(tmp_path / "lib.so", pieces)
        return set(compiled), (tmp_path / "lib.so").read_bytes()

    names, first = build()
    assert names == {file.name for file in pieces.glob("*.cpp")}
    assert build() == (set(), first)
    (pieces / "group.cpp").write_text((pieces / "group.cpp").read_text() + "\n// changed")
    assert build()[0] - {"pool.cpp", "tables.cpp"} == {"group.cpp"}
    (pieces / "group.h").write_text("#define NUMBER 2")
    assert build()[0] - {"pool.cpp", "tables.cpp"} == {"group.cpp"}  # a digest of all sources is given to both


@pytest.mark.usefixtures("compiler")
def test_build_without_kept_objects_runs_the_compiler_once_a_unit(
    setup_py: ModuleType, pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NATIVE_OBJECTS", raising=False)
    commands: list[list[str]] = []
    run = setup_py.run
    monkeypatch.setattr(setup_py, "run", lambda command, source=None: (
        commands.extend([command]), run(command, source))[1])
    isas = setup_py.build(tmp_path / "lib.so", pieces)
    units = [Path(command[command.index("-c") + 1]).name for command in commands if "-c" in command]
    assert sorted(units) == sorted(["pool.cpp", "tables.cpp", *["apart.cpp", "group.cpp"] * len(isas)])
    assert not [command for command in commands if "-MM" in command]


def test_sources_that_compile_first_or_once_exist(setup_py: ModuleType):
    names = {file.name for file in setup_py.sources(ROOT / setup_py.SOURCES, "*.cpp")}
    assert {*setup_py.SLOWEST, *setup_py.ONCE} <= names


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("text", "said"), [
    ("int broken", "error: expected"),
    ("int missing(); namespace NPUSERVE_ISA { int number() { return missing(); } }", "undefined"),
], ids=["syntax", "link"])
def test_build_failure_is_reported(setup_py: ModuleType, pieces: Path, tmp_path: Path, text: str, said: str):
    (pieces / "group.cpp").write_text(text)
    with pytest.raises(setup_py.BuildError, match=said):
        setup_py.build(tmp_path / "lib.so", pieces)
    assert not (tmp_path / "lib.so").exists()
