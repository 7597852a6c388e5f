"""What is installed is what is in the tree: wheel, sdist and editable install."""

from __future__ import annotations

import hashlib
import importlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
# Where packages may be; everything else (tests, bench, docs, helm) is not installed.
SOURCES = {"service": "npuserve.service", "npu": "npuserve.npu", "kernels": "npuserve.kernels",
           "protos/npuserve/v1": "npuserve.v1"}


def shipped() -> dict[str, Path]:
    """Path in the wheel -> file, of every file in the package folders."""
    files = {}
    for folder, package in SOURCES.items():
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                files[f"{package.replace('.', '/')}/{file.relative_to(ROOT / folder).as_posix()}"] = file
    return files


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_list_of_packages_is_the_tree():
    found = {}
    for folder, package in SOURCES.items():
        for path in {file.parent for file in (ROOT / folder).rglob("*.py")}:
            assert (path / "__init__.py").exists(), f"{path.relative_to(ROOT)} has no __init__.py"
            name = ".".join([package, *path.relative_to(ROOT / folder).parts])
            found[name] = path.relative_to(ROOT).as_posix()
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)
    assert SETUPTOOLS["package-dir"] == found


def test_the_tests_run_on_this_tree():
    """The editable install maps every package to its folder here; a plain one would be tested in its place."""
    for package in SETUPTOOLS["packages"]:
        file = importlib.import_module(package).__file__
        assert file is not None
        assert Path(file).parent == ROOT / SETUPTOOLS["package-dir"][package]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """(wheel, sdist), built from a copy of the tree, so that neither an old build nor this one leaves a trace."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "node_modules")
    shutil.copytree(ROOT, tree, ignore=ignored)
    yield build(tree, "wheel", folder), build(tree, "sdist", folder)
    shutil.rmtree(folder)


def build(tree: Path, kind: str, out: Path) -> Path:
    out.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def contents(wheel: Path) -> dict[str, str]:
    """Path -> digest, of all but the list of the same."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: digest(archive.read(name)) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_the_wheel_holds_the_packages_whole_and_nothing_else(built: tuple[Path, Path]):
    wheel, _ = built
    assert wheel.name.endswith("-py3-none-any.whl"), "installing it needs no compiler"
    files = contents(wheel)
    info = {name for name in files if ".dist-info/" in name}
    assert {name: files[name] for name in files.keys() - info} == {
        name: digest(file.read_bytes()) for name, file in shipped().items()
    }
    assert {name.split("/", 1)[1] for name in info} == {
        "METADATA", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE", "licenses/NOTICE"}
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert f"npuserve/npu/storyteller/model/{name}" in files, "the built-in model is not in the wheel"


def test_the_sdist_makes_the_same_wheel(built: tuple[Path, Path], tmp_path: Path):
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
        archive.extractall(tmp_path)
    assert not {name for name in names if name.split("/")[0] in ("tests", "bench", ".ci")}
    (tree,) = tmp_path.iterdir()
    assert contents(build(tree, "wheel", tmp_path / "again")) == contents(wheel)


def test_an_installed_wheel_runs_without_the_tree(built: tuple[Path, Path], tmp_path: Path):
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("pip is not installed")
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run([*pip, "--disable-pip-version-check", str(built[0])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = f"import importlib; [print(importlib.import_module(p).__file__) for p in {SETUPTOOLS['packages']!r}]"
    done = subprocess.run([python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(site) for line in done.stdout.splitlines())
    done = subprocess.run([home / "bin" / "npuserve", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"npuserve {PROJECT['project']['version']}\n", done.stderr
