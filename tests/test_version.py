"""The version stands in src/npuserve/__init__.py; `.ci/version` writes it into all files that name it."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import npuserve

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / ".ci/version"))
KEPT = {"CHANGELOG.md"}
"""Files that name the version and keep it."""


def naming(root: Path, version: str) -> set[str]:
    """Return the project's files outside of tests and benchmarks that name a version."""
    files = [file for folder in (".ci", ".github", "client", "docker", "docs", "helm", "src")
             for file in (root / folder).rglob("*")
             if file.is_file() and not re.search(r"__pycache__|\.egg-info", str(file))]
    names = set()
    for file in [*files, *root.glob("*.md"), *root.glob("*.toml"), *root.glob("*.py")]:
        if file.suffix not in (".lock", ".txt", ".png", ".so", ".pyc") and f"{version}" in file.read_text("latin-1"):
            names.add(str(file.relative_to(root)))
    return names


def test_version_is_written_into_every_file_that_names_it(tmp_path: Path) -> None:
    for name in naming(ROOT, npuserve.__version__):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / ".ci/version", tmp_path / ".ci/version")
    subprocess.run([sys.executable, tmp_path / ".ci/version", "7.8.9"], check=True, stdout=subprocess.PIPE)
    assert naming(tmp_path, npuserve.__version__) - {".ci/version"} == KEPT
    assert runpy.run_path(str(tmp_path / SCRIPT["SOURCE"]))["__version__"] == "7.8.9"
    assert '"npuserve-client==7.8.9"' in (tmp_path / "pyproject.toml").read_text()
    assert 'appVersion: "7.8.9"' in (tmp_path / "helm/npuserve/Chart.yaml").read_text()


def test_version_refuses_what_is_none() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci/version", "v1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "usage: .ci/version VERSION, such as 0.2.0\n")
